#include "fused_loss.h"

#include <utility>
#include <vector>

namespace py = pybind11;

namespace sk {
namespace {

double run_loss(const Call& call, Job& job, const LossParams& loss, double scale, double* row_loss) {
    job.loss = loss, job.scale_of_all = scale, job.row_loss = row_loss;
    call.run(job);
    double total = 0;
    for (int64_t row = 0; row < job.rows; ++row) total += row_loss[row];
    return total;
}

}  // namespace

LossResult fused_loss(Call& call, const LossParams& loss, double scale, const LossVectors& vectors, Needs needs) {
    Job job = call.job;
    job.label_weight = call.vector("label_weight", vectors.label_weight, call.real, job.labels);
    job.pos_weight = call.vector("pos_weight", vectors.pos_weight, call.real, job.labels);
    job.row_scale = call.vector("row_scale", vectors.row_scale, call.real, job.rows);
    LossResult result;
    result.gradients = call.new_gradients(job, needs);
    NewTensor rows = new_vector(job.rows, Dtype::f64);
    result.total = run_loss(call, job, loss, scale, static_cast<double*>(rows.data));
    result.rows = std::move(rows.object);
    result.gradients.round_to(job.dtype);
    return result;
}

PlainLoss::PlainLoss(const LossParams& loss, bool mean, int64_t num_labels, int64_t fixed_columns, int64_t slack,
                     py::object shape_of)
    : loss_(loss), mean_(mean), num_labels_(num_labels), fixed_columns_(fixed_columns), slack_(slack),
      shape_of_(std::move(shape_of)) {}

std::shared_ptr<const Shape> PlainLoss::shape_for(Dtype dtype, int64_t rows, int64_t slack) {
    const int threads = torch_threads();
    {
        const std::lock_guard<std::mutex> guard(lock_);
        if (last_ && threads == last_threads_ && last_->job().dtype == dtype && last_->job().rows == rows &&
            last_->job().slack == slack)
            return last_;
    }
    auto shape = shape_of_(static_cast<int>(dtype), rows, slack).cast<std::shared_ptr<Shape>>();
    const std::lock_guard<std::mutex> guard(lock_);
    last_ = shape, last_threads_ = threads;
    return shape;
}

py::object PlainLoss::operator()(py::handle x, py::handle weight, py::handle bias, py::handle indices, py::handle offsets,
                                 bool with_gradients) {
    for (const py::handle tensor : {x, weight, bias, indices, offsets})
        if (!is_plain_tensor(tensor) && !(tensor.is(bias) && bias.is_none())) return py::none();
    LayerArrays layer;
    if (!layer.hold(x, weight, bias)) return py::none();
    const int64_t rows = layer.x.size(0), slack = layer.weight.size(1);
    if (!rows || layer.weight.size(0) != num_labels_ || layer.x.size(1) != fixed_columns_ + slack ||
        (slack_ >= 0 && slack != slack_))
        return py::none();
    SparseTargets targets;
    if (!targets.hold(indices, offsets) || targets.offsets.size(0) != rows + 1) return py::none();

    Needs needs{};
    if (with_gradients) needs = {requires_grad(x), requires_grad(weight), layer.has_bias && requires_grad(bias)};
    const Dtype dtype = layer.x.dtype();
    Call call(shape_for(dtype, rows, slack), std::move(layer));
    call.set_sparse_targets(std::move(targets), num_labels_);
    const double terms = mean_ ? static_cast<double>(rows * num_labels_) : 1.0;
    Job job = call.job;
    Gradients made = call.new_gradients(job, needs);
    std::vector<double> row_loss(static_cast<size_t>(rows));
    const double total = run_loss(call, job, loss_, 1.0 / terms, row_loss.data());
    made.round_to(dtype);
    return py::make_tuple(new_number(total / terms, call.real), py::make_tuple(made.x, made.weight, made.bias));
}

}  // namespace sk
