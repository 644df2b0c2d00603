// sigkernels._C: addresses, sizes and strides in, nothing out.  The Python side owns all memory and has checked all
// arguments; what is checked here is what would lead the kernels outside of it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/driver.h"
#include "cpu/gradient_memory.h"
#include "tensors.h"

#ifndef SK_COMPILE_FLAGS
#define SK_COMPILE_FLAGS ""
#endif

namespace py = pybind11;

namespace {

using Address = uintptr_t;  // tensor.data_ptr(); 0 for none

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

sk::Dtype dtype_of(int dtype) {
    if (dtype < 0 || dtype > static_cast<int>(sk::Dtype::u8))
        throw py::value_error("dtype must be 0 (float32), 1 (float64), 2 (bfloat16), 3 (float16) or 4 (uint8)");
    return static_cast<sk::Dtype>(dtype);
}

// What calls of one shape share; Python keeps it between calls, and with it the arrays of the plan.
struct Shape {
    sk::Job job;
    int64_t chunk = 256;

    std::vector<int64_t> tile_starts() const {
        std::vector<int64_t> starts;
        for (int i = 0; i < job.shares; ++i) {
            const sk::Share share = sk::share_of(job, i);
            int64_t label = share.lo;
            for (int64_t tile = sk::most_tiles(job); tile > 0; --tile, label = share.tile_end(label)) starts.push_back(label);
        }
        return starts;
    }
};

Shape shape_of(int dtype, int threads, int shares, int tile, int64_t chunk, int64_t rows, int64_t labels, int64_t slack,
               int64_t label_start, int k, int codes, Address code_bits) {
    if (threads < 1 || shares < 1 || tile < 1 || chunk < 1 || rows < 0 || labels < 0 || slack < 0 || label_start < 0 || k < -1)
        throw py::value_error("threads, shares, tile, chunk, rows, labels, slack, label_start and k must be sizes");
    if (shares & (shares - 1)) throw py::value_error("shares must be a power of two");
    const bool power = codes >= 16 && codes <= 4096 && (codes & (codes - 1)) == 0 && (codes & 0x1550);
    if (codes && !(power && code_bits && (tile == 64 || tile == 128 || tile == 256)))
        throw py::value_error("codes must be 0 or 16, 64, 256, 1024, 4096 with code_bits and a tile of 64, 128 or 256");
    Shape shape;
    sk::Job& job = shape.job;
    job.dtype = dtype_of(dtype), job.threads = std::min(threads, shares), job.shares = shares, job.tile = tile;
    shape.chunk = chunk;
    job.rows = rows, job.labels = labels, job.slack = slack, job.label_start = label_start;
    job.k = k, job.codes = codes, job.code_bits = at<const uint8_t>(code_bits);
    return shape;
}

void set_plan(Shape& shape, int rank, int even_rank, Address u, Address v_even, Address v_odd, Address cos, Address sin) {
    sk::Job& job = shape.job;
    if (job.k < 0 || even_rank < 0 || even_rank > rank) throw py::value_error("a plan is for a layer with a DFT part");
    job.rank = rank, job.even_rank = even_rank, job.u = at<void>(u);
    job.v_even = at<void>(v_even), job.v_odd = at<void>(v_odd), job.cos = at<void>(cos), job.sin = at<void>(sin);
}

// A call on tensors of that shape.
struct Call {
    sk::Job job;
    int64_t chunk;
};

Call call_of(const Shape& shape, Address x, int64_t x_stride, Address weight, int64_t weight_stride, Address bias) {
    if (shape.job.k >= 0 && !shape.job.u) throw py::value_error("the shape has no plan yet");
    Call call{shape.job, shape.chunk};
    call.job.x = at<void>(x), call.job.x_stride = x_stride;
    call.job.weight = at<void>(weight), call.job.weight_stride = weight_stride;
    call.job.bias = at<void>(bias);
    return call;
}

void set_sparse_targets(Call& call, Address indices, int64_t num_indices, Address offsets, int64_t num_offsets,
                        int64_t num_labels, Address unknown) {
    if (num_offsets != call.job.rows + 1)
        sk::refuse_targets("there are " + std::to_string(num_offsets) + " offsets for " +
                           std::to_string(call.job.rows) + " rows; there must be one more than rows");
    // Without a single label there is nothing to read, but "sparse" must not look like "none".
    call.job.indices = at<const int64_t>(indices ? indices : offsets), call.job.num_indices = num_indices;
    call.job.offsets = at<const int64_t>(offsets), call.job.num_labels = num_labels;
    call.job.unknown = at<const uint8_t>(unknown);
}

void set_dense_targets(Call& call, Address data, int dtype, int64_t stride, int64_t step) {
    call.job.dense = at<void>(data), call.job.dense_dtype = dtype_of(dtype);
    call.job.dense_stride = stride, call.job.dense_step = step;
}

void set_gradients(Call& call, Address grad_x, Address grad_bias, Address grad_weight, int64_t grad_weight_stride,
                   int grad_weight_dtype) {
    sk::Job& job = call.job;
    job.grad_x = at<void>(grad_x), job.needs_x = grad_x;
    job.grad_bias = at<void>(grad_bias), job.needs_bias = grad_bias;
    job.grad_weight = at<void>(grad_weight), job.needs_weight = grad_weight;
    job.grad_weight_stride = grad_weight_stride, job.grad_weight_dtype = dtype_of(grad_weight_dtype);
}

sk::Update update_of(int kind, int rounding, double lr, double weight_decay, double momentum, double beta1, double beta2,
                     double correction1, double correction2, double eps, uint64_t key, Address parameter, int64_t stride,
                     Address first, Address second, Address compensation) {
    if (kind < 1 || kind > 4) throw py::value_error("kind must be 1 (SGD), 2 (with momentum), 3 (Adagrad) or 4 (AdamW)");
    if (rounding < 0 || rounding > 2) throw py::value_error("rounding must be 0 (nearest), 1 (stochastic) or 2 (Kahan)");
    const bool states = (kind < 2 || first) && (kind < 4 || second) && (rounding < 2 || compensation);
    if (!parameter || !states) throw py::value_error("an update needs its parameter and the state of its kind");
    return {static_cast<sk::UpdateKind>(kind), static_cast<sk::Rounding>(rounding), lr, weight_decay, momentum, beta1, beta2,
            correction1, correction2, eps, key, at<void>(parameter), stride, at<void>(first), at<void>(second),
            at<void>(compensation)};
}

// In place of gradients that are written.
void set_updates(Call& call, const sk::Update* weight, const sk::Update* bias) {
    sk::Job& job = call.job;
    if (weight) job.weight_update = *weight, job.needs_weight = true;
    if (bias) job.bias_update = *bias, job.needs_bias = true;
}

void run(const Call& call, const sk::Job& job, const sk::Outputs& outputs) {
    const sk::Kernels& kernels = sk::kernels_for(sk::forced_isa(), job);
    const py::gil_scoped_release release;
    sk::run_job(kernels, job, call.chunk, outputs);
}

sk::LossParams loss_params(int kind, double label_smoothing, double gamma_pos, double gamma_neg, double alpha_pos,
                           double alpha_neg, double clip, double eps, bool detach_focus) {
    if (kind < 0 || kind > 2) throw py::value_error("kind must be 0 (BCE), 1 (Focal) or 2 (Asymmetric)");
    return {static_cast<sk::LossKind>(kind), label_smoothing, gamma_pos, gamma_neg, alpha_pos, alpha_neg, clip, eps,
            detach_focus};
}

double fused_loss(const Call& call, const sk::LossParams& loss, Address label_weight, Address pos_weight, double scale,
                  Address row_scale, Address row_loss) {
    sk::Job job = call.job;
    job.loss = loss;
    job.label_weight = at<void>(label_weight), job.pos_weight = at<void>(pos_weight);
    job.scale_of_all = scale, job.row_scale = at<void>(row_scale), job.row_loss = at<double>(row_loss);
    run(call, job, {});
    double total = 0;
    for (int64_t row = 0; row < job.rows; ++row) total += job.row_loss[row];
    return total;
}

// slopes: (on_y, on_all) of pooled sums, or None
void confusion_loss(const Call& call, int form, bool mirrored, double n_tp, double n_s, double n_p, double n_rows,
                    double d_s, double d_p, double d_rows, double tiny, double scale, double beta, double eta,
                    Address betas, Address etas, std::optional<std::pair<double, double>> slopes, Address row_loss,
                    Address sums, Address grad_beta, Address grad_eta) {
    if (form < 0 || form > 2) throw py::value_error("form must be 0 (logits), 1 (probability) or 2 (unbounded)");
    sk::Job job = call.job;
    job.loss.kind = sk::LossKind::confusion;
    job.row_loss = at<double>(row_loss);
    sk::ConfusionPass& pass = job.confusion;
    pass.params = {static_cast<sk::ConfusionForm>(form), mirrored, n_tp, n_s, n_p, n_rows, d_s, d_p, d_rows, tiny, scale,
                   beta, eta};
    pass.slopes_known = slopes.has_value();
    if (slopes) pass.on_y = slopes->first, pass.on_all = slopes->second;
    pass.betas = at<void>(betas), pass.etas = at<void>(etas), pass.sums = at<double>(sums);
    pass.grad_beta = at<double>(grad_beta), pass.grad_eta = at<double>(grad_eta);
    run(call, job, {});
}

void logits(const Call& call, Address out, int64_t out_stride) {
    sk::Job job = call.job;
    job.consumer = sk::Consumer::logits, job.out = at<void>(out), job.out_stride = out_stride;
    run(call, job, {});
}

void topk(const Call& call, int64_t keep, Address values, Address labels) {
    if (keep < 0 || keep > call.job.labels) throw py::value_error("keep must be at most the number of labels");
    sk::Job job = call.job;
    job.consumer = sk::Consumer::topk, job.keep = keep;
    sk::Outputs outputs;
    outputs.top_values = at<void>(values), outputs.top_labels = at<int64_t>(labels);
    run(call, job, outputs);
}

std::unique_ptr<sk::Found> predict(const Call& call, double threshold, Address thresholds) {
    auto found = std::make_unique<sk::Found>();
    sk::Job job = call.job;
    job.consumer = sk::Consumer::predict, job.threshold = threshold;
    job.thresholds = at<void>(thresholds);
    sk::Outputs outputs;
    outputs.found = found.get();
    run(call, job, outputs);
    return found;
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

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
    using py::arg;
    m.doc() = "Compiled core of sigkernels. Use it through sigkernels.functional.";

    py::class_<Shape>(m, "Shape", "Sizes of a call and how its labels are cut into tiles (csrc/cpu/job.h).")
        .def(py::init(&shape_of), py::kw_only(), arg("dtype"), arg("threads"), arg("shares"), arg("tile"), arg("chunk"),
             arg("rows"), arg("labels"), arg("slack"), arg("label_start"), arg("k"), arg("codes") = 0, arg("code_bits") = 0)
        .def_property_readonly("shares", [](const Shape& shape) { return shape.job.shares; })
        .def("tile_starts", &Shape::tile_starts, "Where tiles begin, counted from label_start: as many of every share, the last ones empty.")
        .def("set_plan", &set_plan, py::kw_only(), arg("rank"), arg("even_rank"), arg("u"), arg("v_even"),
             arg("v_odd"), arg("cos"), arg("sin"));

    py::class_<Call>(m, "Call", "A shape with the input and the layer.")
        .def(py::init(&call_of), arg("shape"), py::kw_only(), arg("x"), arg("x_stride"), arg("weight"),
             arg("weight_stride"), arg("bias") = 0)
        .def("set_sparse_targets", &set_sparse_targets, py::kw_only(), arg("indices"), arg("num_indices"),
             arg("offsets"), arg("num_offsets"), arg("num_labels"), arg("unknown") = 0)
        .def("set_dense_targets", &set_dense_targets, py::kw_only(), arg("data"), arg("dtype"), arg("stride"),
             arg("step"))
        .def("set_gradients", &set_gradients, py::kw_only(), arg("grad_x") = 0, arg("grad_bias") = 0,
             arg("grad_weight") = 0, arg("grad_weight_stride") = 0, arg("grad_weight_dtype") = 0, "Where the gradients go; 0: nobody needs it.")
        .def("set_updates", &set_updates, arg("weight").none(true), arg("bias").none(true),
             "The steps that take the place of the gradients of weight and bias; call it after set_gradients.");

    py::class_<sk::Update>(m, "Update", "The step of an optimizer on a parameter with a row for each label (csrc/core/optim.h).")
        .def(py::init(&update_of), py::kw_only(), arg("kind"), arg("rounding"), arg("lr"), arg("weight_decay"),
             arg("momentum"), arg("beta1"), arg("beta2"), arg("correction1"), arg("correction2"), arg("eps"), arg("key"),
             arg("parameter"), arg("stride"), arg("first") = 0, arg("second") = 0, arg("compensation") = 0);

    py::class_<sk::LossParams>(m, "LossParams", "The numbers of an elementwise loss (csrc/core/losses.h).")
        .def(py::init(&loss_params), py::kw_only(), arg("kind"), arg("label_smoothing"), arg("gamma_pos"),
             arg("gamma_neg"), arg("alpha_pos"), arg("alpha_neg"), arg("clip"), arg("eps"), arg("detach_focus"));
    m.def("fused_loss", &fused_loss, arg("call"), arg("loss"), py::kw_only(), arg("label_weight") = 0,
          arg("pos_weight") = 0, arg("scale") = 1.0, arg("row_scale") = 0, arg("row_loss"),
          "The loss of each row and the gradients; returns the sum of the rows.");
    m.def("confusion_loss", &confusion_loss, arg("call"), py::kw_only(), arg("form"), arg("mirrored"), arg("n_tp"),
          arg("n_s"), arg("n_p"), arg("n_rows"), arg("d_s"), arg("d_p"), arg("d_rows"), arg("tiny"), arg("scale"),
          arg("beta"), arg("eta"), arg("betas"), arg("etas"), arg("slopes"), arg("row_loss"), arg("sums"),
          arg("grad_beta"), arg("grad_eta"), "The sums of a confusion-matrix loss and the gradients.");
    m.def("logits", &logits, arg("call"), py::kw_only(), arg("out"), arg("out_stride"));
    m.def("topk", &topk, arg("call"), py::kw_only(), arg("keep"), arg("values"), arg("labels"));
    m.def("predict", &predict, arg("call"), py::kw_only(), arg("threshold"), arg("thresholds") = 0,
          "The labels whose logit is above threshold, or above their own of `thresholds [m]`.");
    py::class_<sk::Found>(m, "Found", "The labels that predict found.")
        .def_readonly("total", &sk::Found::total)
        .def(
            "write",
            [](const sk::Found& found, int64_t rows, Address offsets, Address indices) {
                const py::gil_scoped_release release;
                found.write(rows, at<int64_t>(offsets), at<int64_t>(indices));
            },
            py::kw_only(), arg("rows"), arg("offsets"), arg("indices"));

    m.def("use_tensors", &sk::use_tensors, arg("type"), "Takes torch.Tensor, whose tensors are made here from then on.");
    m.def(
        "empty", [](int64_t rows, int64_t columns, int dtype) { return sk::new_tensor(rows, columns, dtype_of(dtype)); },
        arg("rows"), arg("columns"), arg("dtype"), "An uninitialised tensor, on memory that an earlier one has left behind.");
    using Memory = sk::GradientMemory;
    py::class_<Memory, std::unique_ptr<Memory, py::nodelete>>(m, "GradientMemory", "Memory of gradients that waits for its next use.")
        .def_property_readonly("waiting_bytes", &Memory::waiting_bytes)
        .def_property("least_bytes", &Memory::least_bytes, &Memory::set_least_bytes, "Of memory that is kept.")
        .def_property("most_bytes", &Memory::most_bytes, &Memory::set_most_bytes, "That wait.")
        .def("forget", &Memory::forget, "Lets everything that waits go.");
    m.attr("gradient_memory") = py::cast(&sk::gradient_memory(), py::return_value_policy::reference);

    m.attr("SHARE_UNIT") = sk::kShareUnit;
    m.def("isa", [] { return sk::choose_isa(sk::forced_isa()).name; }, "The instruction set that a call uses now.");
    sk::bind_lml(m);
    m.def("build_info", &build_info, "Compiler, flags, instruction sets, OpenMP and CUDA of this build.");
}
