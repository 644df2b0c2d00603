// Python module sigkernels._cuda: raw pointers, sizes and the stream in, nothing out.  No torch, no numpy.
#include <pybind11/pybind11.h>

#include "launch.h"

#ifndef SK_CUDA_ARCHS
#define SK_CUDA_ARCHS ""  // "8.0;9.0+PTX": what setup.py compiles for; empty where nobody says
#endif

namespace py = pybind11;
using Address = uintptr_t;  // of device memory; 0 for what is not there

namespace {

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

sk::DType dtype_of(const std::string& name) {
    if (name == "float32") return sk::DType::f32;
    if (name == "tf32") return sk::DType::tf32;
    if (name == "float16") return sk::DType::f16;
    if (name == "bfloat16") return sk::DType::bf16;
    if (name == "float64") return sk::DType::f64;
    throw py::value_error("dtype must be float32, tf32, float16, bfloat16 or float64, got '" + name + "'");
}

sk::LossParams loss_of(const py::dict& settings) {
    sk::LossParams loss;
    loss.kind = static_cast<sk::LossKind>(settings["kind"].cast<int>());
    if (loss.kind != sk::LossKind::bce && loss.kind != sk::LossKind::focal && loss.kind != sk::LossKind::asymmetric)
        throw py::value_error("loss kind must be 0 (BCE), 1 (focal) or 2 (asymmetric)");
    loss.label_smoothing = settings["label_smoothing"].cast<double>();
    loss.gamma_pos = settings["gamma_pos"].cast<double>(), loss.gamma_neg = settings["gamma_neg"].cast<double>();
    loss.alpha_pos = settings["alpha_pos"].cast<double>(), loss.alpha_neg = settings["alpha_neg"].cast<double>();
    loss.clip = settings["clip"].cast<double>(), loss.eps = settings["eps"].cast<double>();
    loss.detach_focus = settings["detach_focus"].cast<bool>();
    return loss;
}

sk::ConfusionParams confusion_of(const py::dict& settings) {
    sk::ConfusionParams loss;
    const int form = settings["form"].cast<int>();
    if (form < 0 || form > 2) throw py::value_error("form must be 0 (logits), 1 (probability) or 2 (unbounded)");
    loss.form = static_cast<sk::ConfusionForm>(form), loss.mirrored = settings["mirrored"].cast<bool>();
    const auto number = [&](const char* name) { return settings[name].cast<double>(); };
    loss.n_tp = number("n_tp"), loss.n_s = number("n_s"), loss.n_p = number("n_p"), loss.n_rows = number("n_rows");
    loss.d_s = number("d_s"), loss.d_p = number("d_p"), loss.d_rows = number("d_rows");
    loss.tiny = number("tiny"), loss.scale = number("scale"), loss.beta = number("beta"), loss.eta = number("eta");
    return loss;
}

struct Launch {  // what every operation starts with
    sk::LaunchOn on;
    sk::Problem problem;
};

Launch launch_of(int device, Address stream, const std::string& dtype, Address x, Address dft, Address weight,
                 Address bias, Address u, Address v, Address turn, int64_t batch, int64_t labels, int64_t slack,
                 int64_t rank, int64_t even, int64_t columns, int64_t dft_stride) {
    if (batch < 0 || labels < 0 || slack < 0 || rank < 0 || columns < 0 || slack > INT32_MAX / 2 ||
        columns > INT32_MAX / 4 || rank > 2 * sk::tile_labels() || even < 0 || even > rank || (rank > 0) != (columns > 0))
        throw py::value_error("batch, labels, slack, rank, even and columns must be sizes that belong together");
    if (dft_stride < columns || dft_stride % sk::tile_labels())
        throw py::value_error("dft_stride must be a multiple of TILE and hold all columns");
    return {{device, at<void>(stream)},
            {dtype_of(dtype), at<void>(x), at<void>(dft), at<void>(weight), at<void>(bias), at<void>(u), at<void>(v),
             at<void>(turn), batch, labels, slack, rank, even, columns, dft_stride}};
}

sk::Targets targets_of(bool sparse, Address indices, Address positions, int64_t label_start, Address dense,
                       int64_t dense_stride) {
    return {sparse, at<int64_t>(indices), at<int32_t>(positions), label_start, at<void>(dense), dense_stride};
}

sk::Gradients gradients_of(Address out_scale, bool need_x, Address slabs, Address grad_weight, bool grad_weight_narrow,
                           Address grad_bias, bool accumulate, Address scratch) {
    return {at<void>(out_scale), need_x,     at<void>(slabs),  at<void>(grad_weight), grad_weight_narrow,
            at<void>(grad_bias), accumulate, at<void>(scratch)};
}

}  // namespace

PYBIND11_MODULE(_cuda, m, py::mod_gil_not_used()) {
    m.doc() = "CUDA kernels on raw device pointers; see sigkernels/backends/cuda.py for their use with torch";
    static py::exception<sk::CudaError> error(m, "CudaError", PyExc_RuntimeError);
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) std::rethrow_exception(p);
        } catch (const sk::CudaError& e) {
            py::set_error(error, e.what());
        }
    });

    py::class_<Launch>(m, "Launch")
        .def(py::init(&launch_of), py::kw_only(), py::arg("device"), py::arg("stream"), py::arg("dtype"), py::arg("x"),
             py::arg("dft"), py::arg("weight"), py::arg("bias"), py::arg("u"), py::arg("v"), py::arg("turn"),
             py::arg("batch"), py::arg("labels"), py::arg("slack"), py::arg("rank"), py::arg("even"),
             py::arg("columns"), py::arg("dft_stride"));
    py::class_<sk::Targets>(m, "Targets")
        .def(py::init(&targets_of), py::kw_only(), py::arg("sparse"), py::arg("indices"), py::arg("positions"),
             py::arg("label_start"), py::arg("dense"), py::arg("dense_stride"));
    py::class_<sk::Gradients>(m, "Gradients")
        .def(py::init(&gradients_of), py::kw_only(), py::arg("out_scale"), py::arg("need_x"), py::arg("slabs"),
             py::arg("grad_weight"), py::arg("grad_weight_narrow"), py::arg("grad_bias"), py::arg("accumulate"),
             py::arg("scratch"));

    m.def(
        "logits",
        [](const Launch& l, Address out, int64_t out_stride) {
            const py::gil_scoped_release release;
            sk::logits(l.on, l.problem, at<void>(out), out_stride);
        },
        py::arg("launch"), py::kw_only(), py::arg("out"), py::arg("out_stride"));

    m.def(
        "fused_loss",
        [](const Launch& l, const sk::Targets& targets, const sk::Gradients& gradients, const py::dict& loss,
           Address label_weight, Address pos_weight, Address row_factor, Address row_sums, int64_t blocks) {
            const sk::FusedLoss f{loss_of(loss), at<void>(label_weight), at<void>(pos_weight), at<void>(row_factor),
                                  at<double>(row_sums)};
            const py::gil_scoped_release release;
            sk::fused_loss(l.on, l.problem, targets, gradients, f, blocks);
        },
        py::arg("launch"), py::arg("targets"), py::arg("gradients"), py::kw_only(), py::arg("loss"),
        py::arg("label_weight"), py::arg("pos_weight"), py::arg("row_factor"), py::arg("row_sums"),
        py::arg("blocks"));

    m.def(
        "confusion_loss",
        [](const Launch& l, const sk::Targets& targets, const sk::Gradients& gradients, const py::dict& loss,
           Address beta, Address eta, Address logits, Address values, Address grad_beta, Address grad_eta,
           int64_t blocks) {
            const sk::ConfusionLoss f{confusion_of(loss), at<void>(beta),        at<void>(eta),      at<void>(logits),
                                      at<double>(values), at<double>(grad_beta), at<double>(grad_eta)};
            const py::gil_scoped_release release;
            sk::confusion_loss(l.on, l.problem, targets, gradients, f, blocks);
        },
        py::arg("launch"), py::arg("targets"), py::arg("gradients"), py::kw_only(), py::arg("loss"), py::arg("beta"),
        py::arg("eta"), py::arg("logits"), py::arg("values"), py::arg("grad_beta"), py::arg("grad_eta"),
        py::arg("blocks"));

    m.def(
        "add_slabs",
        [](int device, Address stream, Address slabs, Address out, Address scale, int64_t count, int64_t size,
           bool wide, bool accumulate) {
            if (count < 0 || size < 0) throw py::value_error("count and size must not be negative");
            const sk::AddSlabs a{at<void>(slabs), at<void>(out), at<void>(scale), count, size, wide, accumulate};
            const py::gil_scoped_release release;
            sk::add_slabs({device, at<void>(stream)}, a);
        },
        py::kw_only(), py::arg("device"), py::arg("stream"), py::arg("slabs"), py::arg("out"), py::arg("scale"),
        py::arg("count"), py::arg("size"), py::arg("wide"), py::arg("accumulate"));

    m.def(
        "topk",
        [](const Launch& l, int64_t ranges, int64_t m, Address keys, Address labels) {
            if (m < 1 || m > sk::longest_list()) throw py::value_error("m must lie in 1 ... longest_list()");
            const py::gil_scoped_release release;
            sk::topk(l.on, l.problem, ranges, m, at<void>(keys), at<int32_t>(labels));
        },
        py::arg("launch"), py::kw_only(), py::arg("ranges"), py::arg("m"), py::arg("keys"), py::arg("labels"));

    m.def(
        "predict_count",
        [](const Launch& l, int64_t ranges, double threshold, Address counts) {
            const py::gil_scoped_release release;
            sk::predict_count(l.on, l.problem, ranges, threshold, at<int32_t>(counts));
        },
        py::arg("launch"), py::kw_only(), py::arg("ranges"), py::arg("threshold"), py::arg("counts"));

    m.def(
        "predict_fill",
        [](const Launch& l, int64_t ranges, double threshold, Address starts, int64_t label_start, Address indices) {
            const py::gil_scoped_release release;
            sk::predict_fill(l.on, l.problem, ranges, threshold, at<int64_t>(starts), label_start,
                             at<int64_t>(indices));
        },
        py::arg("launch"), py::kw_only(), py::arg("ranges"), py::arg("threshold"), py::arg("starts"),
        py::arg("label_start"), py::arg("indices"));

    m.def("rows_per_group", [](const std::string& dtype) { return sk::rows_per_group(dtype_of(dtype)); });
    m.def("resident_blocks",
          [](const std::string& dtype, int device) { return sk::resident_blocks(dtype_of(dtype), device); });
    m.def("block_shared_memory", [](const std::string& dtype) { return sk::block_shared_bytes(dtype_of(dtype)); });
    m.def("shared_memory", [](const std::string& name) {  // bytes per block of each kernel, without U and V
        const sk::DType dtype = dtype_of(name);
        py::dict bytes;
        bytes["logits"] = sk::logits_shared_bytes(dtype);
        bytes["fused_loss"] = sk::fused_loss_shared_bytes(dtype);
        bytes["confusion_loss"] = sk::confusion_loss_shared_bytes(dtype);
        bytes["topk"] = sk::topk_shared_bytes(dtype);
        bytes["predict"] = sk::predict_shared_bytes(dtype);
        return bytes;
    });
    m.def("device_count", &sk::device_count);
    m.def("devices", &sk::devices);
    m.def("versions", &sk::versions);
    m.def("capability", &sk::capability);
    m.attr("TILE") = sk::tile_labels();
    m.attr("LONGEST_LIST") = sk::longest_list();
    m.attr("ARCHITECTURES") = SK_CUDA_ARCHS;
}
