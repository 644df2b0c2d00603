// sigkernels._C: raw pointers in, nothing out.  The Python side owns all memory and has checked all arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/driver.h"

#ifndef SK_COMPILE_FLAGS
#define SK_COMPILE_FLAGS ""
#endif

namespace py = pybind11;

namespace {

struct Call {
    sk::Job job;
    sk::Outputs outputs;
    int64_t chunk = 256;
};

// A pointer member as an integer property (tensor.data_ptr()).
template <class T>
void pointer(py::class_<Call>& cls, const char* name, T* sk::Job::*member) {
    cls.def_property(
        name, [member](const Call& c) { return reinterpret_cast<uintptr_t>(c.job.*member); },
        [member](Call& c, uintptr_t p) { c.job.*member = reinterpret_cast<T*>(p); });
}

template <class T>
void value(py::class_<Call>& cls, const char* name, T sk::Job::*member) {
    cls.def_property(
        name, [member](const Call& c) { return c.job.*member; }, [member](Call& c, T v) { c.job.*member = v; });
}

template <class T>
void loss_value(py::class_<Call>& cls, const char* name, T sk::LossParams::*member) {
    cls.def_property(
        name, [member](const Call& c) { return c.job.loss.*member; },
        [member](Call& c, T v) { c.job.loss.*member = v; });
}

void dtype(py::class_<Call>& cls, const char* name, sk::Dtype sk::Job::*member) {
    cls.def_property(
        name, [member](const Call& c) { return static_cast<int>(c.job.*member); },
        [member](Call& c, int v) { c.job.*member = static_cast<sk::Dtype>(v); });
}

py::dict build_info() {
    py::dict info;
    info["compiler"] =
#if defined(__clang__)
        "clang " __clang_version__;
#else
        "gcc " __VERSION__;
#endif
    info["flags"] = SK_COMPILE_FLAGS;
    py::list compiled, usable;
    for (const sk::Isa& isa : sk::isas()) {
        compiled.append(isa.name);
        if (isa.usable) usable.append(isa.name);
    }
    info["bfloat16"] = sk::choose_isa("").pairs ? "multiplied in pairs" : "widened to float";
    info["isas_compiled"] = compiled;
    info["isas_usable"] = usable;
#if defined(_OPENMP)
    info["has_openmp"] = true;
#else
    info["has_openmp"] = false;
#endif
    info["has_cuda"] = false;
    return info;
}

}  // namespace

namespace sk {
void bind_lml(py::module_& m);  // cpu/lml.cpp
}

PYBIND11_MODULE(_C, m) {
    m.doc() = "Compiled core of sigkernels. Use it through sigkernels.functional.";

    py::class_<Call> call(m, "Call", "One call of the tile loop: sizes, strides and pointers (csrc/cpu/job.h).");
    call.def(py::init<>());
    call.def_property_readonly("threads", [](const Call& c) { return c.job.threads; });
    // What every call sets, together: one crossing from Python and not twenty.
    call.def("shape", [](Call& c, int consumer, int dtype, int threads, int tile, int64_t chunk, int64_t rows,
                         int64_t labels, int64_t slack, int64_t label_start, int k) {
        c.job.consumer = static_cast<sk::Consumer>(consumer), c.job.dtype = static_cast<sk::Dtype>(dtype);
        c.job.threads = threads, c.job.tile = tile, c.chunk = chunk;
        c.job.rows = rows, c.job.labels = labels, c.job.slack = slack, c.job.label_start = label_start, c.job.k = k;
    });
    // A call of the same shape and plan on other tensors: what Python keeps between calls is the shape.
    call.def("with_inputs", [](const Call& c, uintptr_t x, int64_t x_stride, uintptr_t weight, int64_t weight_stride) {
        Call made = c;
        made.job.x = reinterpret_cast<const void*>(x), made.job.x_stride = x_stride;
        made.job.weight = reinterpret_cast<const void*>(weight), made.job.weight_stride = weight_stride;
        return made;
    });
    call.def("sparse_targets", [](Call& c, uintptr_t indices, int64_t num_indices, uintptr_t offsets,
                                  int64_t num_offsets, int64_t num_labels) {
        if (num_offsets != c.job.rows + 1) sk::refuse_targets("there are " + std::to_string(num_offsets) +
            " offsets for " + std::to_string(c.job.rows) + " rows; there must be one more than rows");
        c.job.num_indices = num_indices, c.job.num_labels = num_labels;
        // Without a single label there is nothing to read, but "sparse" must not look like "none".
        c.job.indices = reinterpret_cast<const int64_t*>(indices ? indices : offsets);
        c.job.offsets = reinterpret_cast<const int64_t*>(offsets);
    });
    // Where the loss of each row and the gradients go; 0: nobody needs it.
    call.def("results", [](Call& c, uintptr_t row_loss, uintptr_t grad_x, uintptr_t grad_bias, uintptr_t grad_weight,
                           int64_t grad_weight_stride, int grad_weight_dtype, bool accumulate) {
        c.job.row_loss = reinterpret_cast<double*>(row_loss);
        c.job.grad_x = reinterpret_cast<void*>(grad_x), c.job.needs_x = grad_x;
        c.job.grad_bias = reinterpret_cast<void*>(grad_bias), c.job.needs_bias = grad_bias;
        c.job.grad_weight = reinterpret_cast<void*>(grad_weight), c.job.needs_weight = grad_weight;
        c.job.grad_weight_stride = grad_weight_stride, c.job.accumulate = accumulate;
        c.job.grad_weight_dtype = static_cast<sk::Dtype>(grad_weight_dtype);
    });
    call.def("plan", [](Call& c, int rank, int even_rank, uintptr_t u, uintptr_t v_even, uintptr_t v_odd,
                        uintptr_t cos, uintptr_t sin) {
        c.job.rank = rank, c.job.even_rank = even_rank, c.job.u = reinterpret_cast<const void*>(u);
        c.job.v_even = reinterpret_cast<const void*>(v_even), c.job.v_odd = reinterpret_cast<const void*>(v_odd);
        c.job.cos = reinterpret_cast<const void*>(cos), c.job.sin = reinterpret_cast<const void*>(sin);
    });
    call.def_property(
        "top_values", [](const Call& c) { return reinterpret_cast<uintptr_t>(c.outputs.top_values); },
        [](Call& c, uintptr_t p) { c.outputs.top_values = reinterpret_cast<void*>(p); });
    call.def_property(
        "top_labels", [](const Call& c) { return reinterpret_cast<uintptr_t>(c.outputs.top_labels); },
        [](Call& c, uintptr_t p) { c.outputs.top_labels = reinterpret_cast<int64_t*>(p); });
    dtype(call, "dense_dtype", &sk::Job::dense_dtype);
#define SK_VALUE(name) value(call, #name, &sk::Job::name)
#define SK_POINTER(name) pointer(call, #name, &sk::Job::name)
#define SK_LOSS(name) loss_value(call, #name, &sk::LossParams::name)
    SK_VALUE(scale_of_all), SK_VALUE(dense_stride), SK_VALUE(dense_step), SK_VALUE(out_stride), SK_VALUE(keep);
    SK_VALUE(threshold);
    SK_POINTER(bias), SK_POINTER(label_weight), SK_POINTER(pos_weight), SK_POINTER(row_scale);
    SK_POINTER(dense), SK_POINTER(out);
    SK_LOSS(label_smoothing), SK_LOSS(gamma_pos), SK_LOSS(gamma_neg), SK_LOSS(alpha_pos), SK_LOSS(alpha_neg);
    SK_LOSS(clip), SK_LOSS(eps), SK_LOSS(detach_focus);
#undef SK_VALUE
#undef SK_POINTER
#undef SK_LOSS
#define SK_CONFUSION(name)                                                                                     \
    call.def_property(                                                                                         \
        #name, [](const Call& c) { return c.job.confusion.params.name; },                                      \
        [](Call& c, decltype(sk::ConfusionParams::name) v) { c.job.confusion.params.name = v; })
#define SK_CONFUSION_PASS(name)                                                                                \
    call.def_property(                                                                                         \
        #name, [](const Call& c) { return c.job.confusion.name; },                                             \
        [](Call& c, decltype(sk::ConfusionPass::name) v) { c.job.confusion.name = v; })
#define SK_CONFUSION_POINTER(name)                                                                             \
    call.def_property(                                                                                         \
        #name, [](const Call& c) { return reinterpret_cast<uintptr_t>(c.job.confusion.name); },                \
        [](Call& c, uintptr_t p) { c.job.confusion.name = reinterpret_cast<decltype(sk::ConfusionPass::name)>(p); })
    SK_CONFUSION(mirrored), SK_CONFUSION(n_tp), SK_CONFUSION(n_s), SK_CONFUSION(n_p), SK_CONFUSION(n_rows);
    SK_CONFUSION(d_s), SK_CONFUSION(d_p), SK_CONFUSION(d_rows), SK_CONFUSION(scale), SK_CONFUSION(tiny);
    SK_CONFUSION(beta), SK_CONFUSION(eta);
    SK_CONFUSION_PASS(slopes_known), SK_CONFUSION_PASS(on_y), SK_CONFUSION_PASS(on_all);
    SK_CONFUSION_POINTER(betas), SK_CONFUSION_POINTER(etas), SK_CONFUSION_POINTER(sums);
    SK_CONFUSION_POINTER(grad_beta), SK_CONFUSION_POINTER(grad_eta);
#undef SK_CONFUSION
#undef SK_CONFUSION_PASS
#undef SK_CONFUSION_POINTER
    call.def_property(
        "confusion_form", [](const Call& c) { return static_cast<int>(c.job.confusion.params.form); },
        [](Call& c, int v) { c.job.confusion.params.form = static_cast<sk::ConfusionForm>(v); });
    call.def_property(
        "loss_kind", [](const Call& c) { return static_cast<int>(c.job.loss.kind); },
        [](Call& c, int v) { c.job.loss.kind = static_cast<sk::LossKind>(v); });

    py::class_<sk::Found>(m, "Found", "The labels that predict found.")
        .def_readonly("total", &sk::Found::total)
        .def("write", [](const sk::Found& found, int64_t rows, uintptr_t offsets, uintptr_t indices) {
            py::gil_scoped_release release;
            found.write(rows, reinterpret_cast<int64_t*>(offsets), reinterpret_cast<int64_t*>(indices));
        });

    m.def(
        "run",
        [](const Call& c) {
            const sk::Kernels& kernels = sk::kernels_for(sk::forced_isa(), c.job);
            py::gil_scoped_release release;
            sk::run_job(kernels, c.job, c.chunk, c.outputs);
            double total = 0;
            for (int64_t row = 0; c.job.row_loss && row < c.job.rows; ++row) total += c.job.row_loss[row];
            return total;
        },
        py::arg("call"), "Runs the call; returns the sum of the rows' losses, 0 without a loss.");
    m.def(
        "predict",
        [](const Call& c) {
            const sk::Kernels& kernels = sk::kernels_for(sk::forced_isa(), c.job);
            auto found = std::make_unique<sk::Found>();
            sk::Outputs outputs = c.outputs;
            outputs.found = found.get();
            {
                py::gil_scoped_release release;
                sk::run_job(kernels, c.job, c.chunk, outputs);
            }
            return found;
        },
        py::arg("call"));
    m.def("isa", [] { return sk::choose_isa(sk::forced_isa()).name; }, "The instruction set that a call uses now.");
    sk::bind_lml(m);
    m.def("build_info", &build_info, "Compiler, flags, instruction sets, OpenMP and CUDA of this build.");
}
