#include "call.h"

#include <string>
#include <utility>

namespace py = pybind11;

namespace sk {
namespace {

constexpr int64_t kMostLabels = int64_t{1} << 48;  // sums of label numbers must not overflow

[[noreturn]] void refuse(const std::string& what) { throw py::value_error(what); }

void must(bool fits, const char* name, const char* what) {
    if (!fits) refuse(std::string(name) + " must be " + what);
}

}  // namespace

// ---- the shape ----

Shape::Shape(const Job& sizes, int64_t chunk, const py::object& code_bits) : job_(sizes), chunk_(chunk) {
    const Job& job = job_;
    if (job.threads < 1 || job.shares < 1 || job.tile < 1 || chunk < 1 || job.rows < 0 || job.labels < 0 ||
        job.slack < 0 || job.label_start < 0 || job.k < -1 || job.labels > kMostLabels || job.label_start > kMostLabels)
        refuse("threads, shares, tile, chunk, rows, labels, slack, label_start and k must be sizes");
    if (job.shares & (job.shares - 1)) refuse("shares must be a power of two");
    job_.threads = std::min(job.threads, job.shares);
    if (!job.codes) return;
    const int codes = job.codes;
    if (codes < 16 || codes > 4096 || (codes & (codes - 1)) || !(codes & 0x1550))
        refuse("codes must be 0, 16, 64, 256, 1024 or 4096");
    if (job.tile != 64 && job.tile != 128 && job.tile != 256) refuse("with codes a tile is 64, 128 or 256");
    const int64_t blocks = (job.label_start + job.labels + codes - 1) / codes - job.label_start / codes;
    job_.code_bits = static_cast<const uint8_t*>(keep("code_bits", code_bits, 1, blocks * (codes / 8)));
}

const void* Shape::keep(const char* name, const py::buffer& array, int64_t itemsize, int64_t count) {
    const py::buffer_info info = array.request();
    int64_t stride = itemsize;
    bool dense = info.itemsize == itemsize;
    for (size_t i = info.shape.size(); i-- > 0; stride *= info.shape[i])
        dense = dense && (info.shape[i] <= 1 || info.strides[i] == stride);
    if (!dense || info.size < count) refuse(std::string(name) + " is too small for these sizes, or of another type");
    kept_.push_back(array);
    bytes_ += info.size * itemsize;
    return info.ptr;
}

void Shape::set_plan(int rank, int even_rank, int low_even, int low_odd, const py::buffer& u, const py::buffer& v_even,
                     const py::buffer& v_odd, const py::buffer& even, const py::buffer& odd, const py::buffer& cos,
                     const py::buffer& sin) {
    if (job_.k < 0 || even_rank < 0 || even_rank > rank || low_even < 0 || low_odd < 0 || (low_odd && !low_even))
        refuse("a plan is for a layer with a DFT part");
    const int64_t real = job_.dtype == Dtype::f64 ? 8 : 4, k = job_.k, spans = job_.shares * most_spans(job_);
    job_.rank = rank, job_.even_rank = even_rank, job_.low_even = low_even, job_.low_odd = low_odd;
    job_.v_even = keep("v_even", v_even, real, low_even * (k + 1));
    job_.v_odd = keep("v_odd", v_odd, real, low_odd * k);
    job_.even = keep("even", even, real, even_takers(job_) * low_even_rows(job_));
    job_.odd = keep("odd", odd, real, odd_takers(job_) * low_odd_rows(job_));
    job_.cos = keep("cos", cos, real, spans * k);
    job_.sin = keep("sin", sin, real, spans * k);
    job_.u = keep("u", u, real, int64_t{job_.tile} * rank);
}

std::vector<int64_t> Shape::span_starts() const {
    std::vector<int64_t> starts;
    for (int i = 0; i < job_.shares; ++i) {
        const Share share = share_of(job_, i);
        for (int64_t span = 0; span < most_spans(job_); ++span)
            starts.push_back(share.lo - share.skipped(share.lo) + span * tiles_of_span() * job_.tile);
    }
    return starts;
}

// ---- the call ----

bool SparseTargets::hold(py::handle indices_, py::handle offsets_) {
    return indices.hold_vector(indices_) && indices.is_int64() && offsets.hold_vector(offsets_) && offsets.is_int64();
}

void Gradients::round_to(Dtype dtype) {
    if (dtype != Dtype::bf16) return;
    for (py::object* gradient : {&x, &weight, &bias})
        if (!gradient->is_none()) *gradient = cast(*gradient, dtype);
}

bool LayerArrays::hold(py::handle x_, py::handle weight_, py::handle bias_) {
    if (!x.hold_matrix(x_) || !weight.hold_matrix(weight_) || !x.is_number() || x.is(Dtype::u8) || !weight.is(x.dtype()))
        return false;
    has_bias = !bias_.is_none();
    if (!has_bias) return true;
    return bias.hold_vector(bias_) && bias.is(x.dtype()) && bias.size(0) == weight.size(0) && bias.convert(real());
}

Call::Call(std::shared_ptr<const Shape> shape, LayerArrays layer)
    : job(shape->job()), real(layer.real()), shape_(std::move(shape)), layer_(std::move(layer)) {
    const Array &x = layer_.x, &weight = layer_.weight;
    if (job.k >= 0 && !job.u) refuse("the shape has no plan yet");
    must(x.is(job.dtype) && x.size(0) == job.rows && x.size(1) == x_columns(job), "x", "a matrix of the sizes of the shape");
    must(weight.size(0) == job.labels && weight.size(1) == job.slack, "weight", "a matrix of the sizes of the shape");
    job.x = x.data(), job.x_stride = x.stride(0);
    job.weight = weight.data(), job.weight_stride = weight.stride(0);
    if (layer_.has_bias) job.bias = layer_.bias.data();
}

void* Call::vector_of(const char* name, py::handle tensor, Dtype dtype, int64_t count) {
    if (tensor.is_none()) return nullptr;
    Array array;
    must(array.hold_vector(tensor) && array.is(dtype) && array.size(0) == count, name, "a vector of the sizes of the call");
    held_.push_back(std::move(array));
    return held_.back().data();
}

void Call::set_sparse_targets(SparseTargets targets, int64_t num_labels) {
    const Array &indices = targets.indices, &offsets = targets.offsets;
    if (offsets.size(0) != job.rows + 1)
        refuse_targets("there are " + std::to_string(offsets.size(0)) + " offsets for " + std::to_string(job.rows) +
                       " rows; there must be one more than rows");
    job.num_indices = indices.size(0), job.num_labels = num_labels;
    job.offsets = offsets.data<const int64_t>();
    // Without a single label there is nothing to read, but "sparse" must not look like "none".
    job.indices = indices.data() ? indices.data<const int64_t>() : job.offsets;
    held_.push_back(std::move(targets.indices));
    held_.push_back(std::move(targets.offsets));
}

void Call::set_unknown(py::handle unknown) {
    job.unknown = vector<const uint8_t>("unknown", unknown, Dtype::u8, job.num_indices);
}

void Call::set_dense_targets(py::handle dense) {
    Array y;
    must(y.hold(dense) && y.is_number() && y.ndim() == 2 && y.size(0) == job.rows && y.size(1) == job.labels, "targets",
         "a matrix of the sizes of the call");
    job.dense = y.data(), job.dense_dtype = y.dtype();
    job.dense_stride = y.stride(0), job.dense_step = y.stride(1);
    held_.push_back(std::move(y));
}

Gradients Call::new_gradients(Job& now, Needs needs) const {
    Gradients made;
    const auto take = [](NewTensor tensor, py::object& object) {
        object = std::move(tensor.object);
        return tensor.data;
    };
    if (needs.x) {
        now.grad_x = take(new_matrix(now.rows, x_columns(job), real), made.x);
        now.needs_x = x_columns(job) > 0;
    }
    if (needs.weight) {
        const bool own = now.dtype == Dtype::bf16 && now.rows <= shape_->chunk();
        now.grad_weight_dtype = own ? now.dtype : real, now.grad_weight_stride = now.slack;
        now.grad_weight = take(new_matrix(now.labels, now.slack, now.grad_weight_dtype), made.weight);
        now.needs_weight = now.slack > 0;
    }
    if (needs.bias) {
        now.grad_bias = take(new_vector(now.labels, real), made.bias);
        now.needs_bias = true;
    }
    return made;
}

void Call::run(const Job& now, const Outputs& outputs) const {
    if (now.consumer == Consumer::loss && !now.indices && !now.dense) refuse("a loss needs targets");
    const Kernels& kernels = kernels_for(forced_isa(), now);
    const py::gil_scoped_release release;
    run_job(kernels, now, shape_->chunk(), outputs);
}

// ---- updates ----

ParameterUpdate::ParameterUpdate(const Update& numbers, py::handle parameter, py::handle first, py::handle second,
                                 py::handle compensation)
    : update_(numbers) {
    Update& u = update_;
    must(parameter_.hold(parameter) && parameter_.is_of(parameter), "parameter", "a tensor that can be changed in place");
    must(parameter_.ndim() == 1 || parameter_.ndim() == 2, "parameter", "a vector or a matrix");
    must(parameter_.is(Dtype::f32) || parameter_.is(Dtype::f64) || parameter_.is(Dtype::bf16), "parameter",
         "of float32, float64 or bfloat16");
    const bool matrix = parameter_.ndim() == 2;
    must(!matrix || parameter_.stride(1) == 1 || parameter_.size(1) <= 1, "parameter", "contiguous in its rows");
    u.parameter = parameter_.data(), u.stride = parameter_.stride(0);
    const Dtype real = parameter_.is(Dtype::f64) ? Dtype::f64 : Dtype::f32;
    const auto state = [&](const char* name, py::handle tensor, Array& array, Dtype dtype, bool whole) -> void* {
        const int ndim = matrix && whole ? 2 : 1;
        const int64_t columns = ndim == 2 ? parameter_.size(1) : 1;
        must(array.hold(tensor) && array.is_of(tensor) && array.is(dtype) && array.ndim() == ndim, name, "like its parameter");
        must(array.size(0) == parameter_.size(0) && (ndim == 1 || array.size(1) == columns), name, "like its parameter");
        must((array.size(0) <= 1 || array.stride(0) == columns) && (columns <= 1 || array.stride(1) == 1), name,
             "contiguous");
        return array.data();
    };
    if (u.kind != UpdateKind::sgd)
        u.first = state("first", first, first_, real, u.kind != UpdateKind::adagrad);
    if (u.kind == UpdateKind::adamw) u.second = state("second", second, second_, real, true);
    if (u.rounding == Rounding::kahan) u.compensation = state("compensation", compensation, compensation_, Dtype::bf16, true);
}

bool ParameterUpdate::fits(Dtype dtype, int64_t labels, int64_t columns) const {
    return parameter_.is(dtype) && parameter_.size(0) == labels && (parameter_.ndim() == 2 ? parameter_.size(1) : 1) == columns;
}

void Call::set_updates(const ParameterUpdate* weight, const ParameterUpdate* bias) {
    const auto take = [&](const ParameterUpdate* given, int64_t columns, const char* name, Update& update, bool& needed) {
        if (!given) return;
        must(given->fits(job.dtype, job.labels, columns), name, "like the one that is stepped");
        update = given->update();
        needed = true;
    };
    take(weight, job.slack, "weight", job.weight_update, job.needs_weight);
    take(bias, 1, "bias", job.bias_update, job.needs_bias);
}

}  // namespace sk
