// sigkernels._C: operations on torch's tensors in, tensors out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "cpu/gradient_memory.h"
#include "fused_loss.h"
#include "tensors.h"

#ifndef SK_COMPILE_FLAGS
#define SK_COMPILE_FLAGS ""
#endif

namespace py = pybind11;

namespace {

sk::Dtype dtype_of(int dtype) {
    if (dtype < 0 || dtype > static_cast<int>(sk::Dtype::u8))
        throw py::value_error("dtype must be 0 (float32), 1 (float64), 2 (bfloat16), 3 (float16) or 4 (uint8)");
    return static_cast<sk::Dtype>(dtype);
}

std::shared_ptr<sk::Shape> shape_of(int dtype, int threads, int shares, int tile, int64_t chunk, int64_t rows,
                                    int64_t labels, int64_t slack, int64_t label_start, int k, int codes,
                                    const py::object& code_bits) {
    sk::Job job;
    job.dtype = dtype_of(dtype), job.threads = threads, job.shares = shares, job.tile = tile;
    job.rows = rows, job.labels = labels, job.slack = slack, job.label_start = label_start;
    job.k = k, job.codes = codes;
    return std::make_shared<sk::Shape>(job, chunk, code_bits);
}

std::unique_ptr<sk::Call> call_of(std::shared_ptr<const sk::Shape> shape, py::handle x, py::handle weight, py::handle bias) {
    sk::LayerArrays layer;
    if (!layer.hold(x, weight, bias))
        throw py::value_error(
            "x, weight and bias must be a layer: CPU tensors [R, D], [m, s] and [m] of one dtype, whose storage holds all "
            "their elements; where it was emptied or resized, as FSDP does between steps, fill it again before the call");
    return std::make_unique<sk::Call>(std::move(shape), std::move(layer));
}

void set_sparse_targets(sk::Call& call, py::handle indices, py::handle offsets, int64_t num_labels, py::handle unknown) {
    sk::SparseTargets targets;
    if (!targets.hold(indices, offsets))
        throw py::value_error(
            "indices and offsets must be vectors of int64 on the CPU, whose storage holds all their elements; build new "
            "LabelSets(indices, offsets, num_labels)");
    call.set_sparse_targets(std::move(targets), num_labels);
    call.set_unknown(unknown);
}

sk::ParameterUpdate update_of(int kind, int rounding, double lr, double weight_decay, double momentum, double beta1,
                              double beta2, double correction1, double correction2, double eps, uint64_t key,
                              py::handle parameter, py::handle first, py::handle second, py::handle compensation) {
    if (kind < 1 || kind > 4) throw py::value_error("kind must be 1 (SGD), 2 (with momentum), 3 (Adagrad) or 4 (AdamW)");
    if (rounding < 0 || rounding > 2) throw py::value_error("rounding must be 0 (nearest), 1 (stochastic) or 2 (Kahan)");
    sk::Update numbers{static_cast<sk::UpdateKind>(kind), static_cast<sk::Rounding>(rounding), lr, weight_decay, momentum,
                       beta1, beta2, correction1, correction2, eps, key};
    return {numbers, parameter, first, second, compensation};
}

sk::LossParams loss_params(int kind, double label_smoothing, double gamma_pos, double gamma_neg, double alpha_pos,
                           double alpha_neg, double clip, double eps, bool detach_focus) {
    if (kind < 0 || kind > 2) throw py::value_error("kind must be 0 (BCE), 1 (Focal) or 2 (Asymmetric)");
    return {static_cast<sk::LossKind>(kind), label_smoothing, gamma_pos, gamma_neg, alpha_pos, alpha_neg, clip, eps,
            detach_focus};
}

using Three = std::tuple<bool, bool, bool>;

sk::Needs needs_of(const Three& needs) { return {std::get<0>(needs), std::get<1>(needs), std::get<2>(needs)}; }

py::tuple fused_loss(sk::Call& call, const sk::LossParams& loss, const Three& needs, double scale, py::handle row_scale,
                     py::handle label_weight, py::handle pos_weight) {
    const sk::LossResult result = sk::fused_loss(call, loss, scale, {label_weight, pos_weight, row_scale}, needs_of(needs));
    const sk::Gradients& grads = result.gradients;
    return py::make_tuple(result.rows, grads.x, grads.weight, grads.bias, result.total);
}

// slopes: (on_y, on_all) of pooled sums, or None
py::tuple confusion_loss(sk::Call& call, const Three& needs, bool needs_beta, bool needs_eta, int form, bool mirrored,
                         double n_tp, double n_s, double n_p, double n_rows, double d_s, double d_p, double d_rows,
                         double tiny, double scale, double beta, double eta, py::handle betas, py::handle etas,
                         const std::optional<std::pair<double, double>>& slopes) {
    if (form < 0 || form > 2) throw py::value_error("form must be 0 (logits), 1 (probability) or 2 (unbounded)");
    sk::Job job = call.job;
    job.loss.kind = sk::LossKind::confusion;
    sk::ConfusionPass& pass = job.confusion;
    pass.params = {static_cast<sk::ConfusionForm>(form), mirrored, n_tp, n_s, n_p, n_rows, d_s, d_p, d_rows, tiny, scale,
                   beta, eta};
    pass.slopes_known = slopes.has_value();
    if (slopes) pass.on_y = slopes->first, pass.on_all = slopes->second;
    pass.betas = call.vector("betas", betas, call.real, job.labels);
    pass.etas = call.vector("etas", etas, call.real, job.labels);
    sk::Gradients grads = call.new_gradients(job, needs_of(needs));
    const auto zeros = [](sk::NewTensor made, int64_t count, double*& data) {
        data = static_cast<double*>(made.data);
        std::fill(data, data + count, 0.0);
        return made.object;
    };
    const py::object sums = zeros(sk::new_matrix(job.shares, 4, sk::Dtype::f64), 4 * int64_t{job.shares}, pass.sums);
    py::object grad_beta = py::none(), grad_eta = py::none();
    if (needs_beta) grad_beta = zeros(sk::new_vector(job.labels, sk::Dtype::f64), job.labels, pass.grad_beta);
    if (needs_eta) grad_eta = zeros(sk::new_vector(job.labels, sk::Dtype::f64), job.labels, pass.grad_eta);
    std::vector<double> row_loss(static_cast<size_t>(job.rows));
    job.row_loss = row_loss.data();
    call.run(job);
    grads.round_to(job.dtype);
    return py::make_tuple(sums, grads.x, grads.weight, grads.bias, grad_beta, grad_eta);
}

py::object logits(const sk::Call& call) {
    sk::Job job = call.job;
    sk::NewTensor out = sk::new_matrix(job.rows, job.labels, job.dtype);
    job.consumer = sk::Consumer::logits, job.out = out.data, job.out_stride = job.labels;
    call.run(job);
    return out.object;
}

py::tuple topk(const sk::Call& call, int64_t keep) {
    sk::Job job = call.job;
    if (keep < 1 || keep > job.labels) throw py::value_error("keep must be at least 1 and at most the number of labels");
    sk::NewTensor values = sk::new_matrix(job.rows, keep, call.real), labels = sk::new_int64_matrix(job.rows, keep);
    job.consumer = sk::Consumer::topk, job.keep = keep;
    sk::Outputs outputs;
    outputs.top_values = values.data, outputs.top_labels = static_cast<int64_t*>(labels.data);
    call.run(job, outputs);
    return py::make_tuple(values.object, labels.object);
}

py::tuple predict(sk::Call& call, double threshold, py::handle thresholds) {
    sk::Found found;
    sk::Job job = call.job;
    job.consumer = sk::Consumer::predict, job.threshold = threshold;
    job.thresholds = call.vector("thresholds", thresholds, call.real, job.labels);
    sk::Outputs outputs;
    outputs.found = &found;
    call.run(job, outputs);
    sk::NewTensor indices = sk::new_int64_vector(found.total), offsets = sk::new_int64_vector(job.rows + 1);
    {
        const py::gil_scoped_release release;
        found.write(job.rows, static_cast<int64_t*>(offsets.data), static_cast<int64_t*>(indices.data));
    }
    return py::make_tuple(indices.object, offsets.object);
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
    using sk::Call, sk::Shape;
    m.doc() = "Compiled core of sigkernels. Use it through sigkernels.functional.";

    py::class_<Shape, std::shared_ptr<Shape>>(m, "Shape", "Sizes of a call and how its labels are cut into tiles (csrc/cpu/job.h).")
        .def(py::init(&shape_of), py::kw_only(), arg("dtype"), arg("threads"), arg("shares"), arg("tile"), arg("chunk"),
             arg("rows"), arg("labels"), arg("slack"), arg("label_start"), arg("k"), arg("codes"), arg("code_bits"))
        .def_property_readonly("nbytes", &Shape::bytes, "Of the arrays that it holds.")
        .def_property_readonly("tiles_of_span", &Shape::tiles_of_span)
        .def("span_starts", &Shape::span_starts, "Where spans of tiles begin, counted from label_start: as many of every share, the last ones empty.")
        .def("set_plan", &Shape::set_plan, py::kw_only(), arg("rank"), arg("even_rank"), arg("low_even"), arg("low_odd"),
             arg("u"), arg("v_even"), arg("v_odd"), arg("even"), arg("odd"), arg("cos"), arg("sin"));

    py::class_<Call>(m, "Call", "A shape with the input and the layer, which it holds.")
        .def(py::init(&call_of), arg("shape"), arg("x"), arg("weight"), arg("bias"))
        .def("set_sparse_targets", &set_sparse_targets, arg("indices"), arg("offsets"), arg("num_labels"), arg("unknown"))
        .def("set_dense_targets", &Call::set_dense_targets, arg("targets"))
        .def("set_updates", &Call::set_updates, arg("weight").none(true), arg("bias").none(true),
             py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
             "The steps that take the place of the gradients of weight and bias.");

    py::class_<sk::ParameterUpdate>(m, "Update", "The step of an optimizer on a parameter with a row for each label (csrc/core/optim.h).")
        .def(py::init(&update_of), py::kw_only(), arg("kind"), arg("rounding"), arg("lr"), arg("weight_decay"),
             arg("momentum"), arg("beta1"), arg("beta2"), arg("correction1"), arg("correction2"), arg("eps"), arg("key"),
             arg("parameter"), arg("first"), arg("second"), arg("compensation"));

    py::class_<sk::LossParams>(m, "LossParams", "The numbers of an elementwise loss (csrc/core/losses.h).")
        .def(py::init(&loss_params), py::kw_only(), arg("kind"), arg("label_smoothing"), arg("gamma_pos"),
             arg("gamma_neg"), arg("alpha_pos"), arg("alpha_neg"), arg("clip"), arg("eps"), arg("detach_focus"));
    m.def("fused_loss", &fused_loss, arg("call"), arg("loss"), arg("needs"), py::kw_only(), arg("scale"), arg("row_scale"),
          arg("label_weight"), arg("pos_weight"),
          "(the loss of each row, the gradients of x, weight and bias, the sum of the rows)");
    py::class_<sk::PlainLoss>(m, "PlainLoss", "An ordinary step in one call (csrc/fused_loss.h).")
        .def(py::init<const sk::LossParams&, bool, int64_t, int64_t, int64_t, py::object>(), py::kw_only(), arg("loss"),
             arg("mean"), arg("num_labels"), arg("fixed_columns"), arg("slack"), arg("shape_of"))
        .def("__call__", &sk::PlainLoss::operator(), arg("x"), arg("weight"), arg("bias"), arg("indices"), arg("offsets"),
             arg("with_gradients"), "(the loss, (the gradients of x, weight and bias)), or None: it is no such step.");
    m.def("confusion_loss", &confusion_loss, arg("call"), arg("needs"), arg("needs_beta"), arg("needs_eta"), py::kw_only(),
          arg("form"), arg("mirrored"), arg("n_tp"), arg("n_s"), arg("n_p"), arg("n_rows"), arg("d_s"), arg("d_p"),
          arg("d_rows"), arg("tiny"), arg("scale"), arg("beta"), arg("eta"), arg("betas"), arg("etas"), arg("slopes"),
          "(sums [shares, 4] of a confusion-matrix loss, the gradients of x, weight, bias, beta and eta)");
    m.def("logits", &logits, arg("call"), "[R, m]");
    m.def("topk", &topk, arg("call"), arg("keep"), "(values, labels), [R, keep] each");
    m.def("predict", &predict, arg("call"), arg("threshold"), arg("thresholds"),
          "(indices, offsets) of the labels whose logit is above threshold, or above their own of `thresholds [m]`.");

    m.def("use_torch", &sk::use_torch, arg("torch"), "Takes the module, whose tensors are read and made here from then on.");
    m.def(
        "empty", [](int64_t rows, int64_t columns, int dtype) { return sk::new_matrix(rows, columns, dtype_of(dtype)).object; },
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
