#include "fused_loss.cuh"

#include "launch.cuh"
#include "shapes.h"

namespace sk {

namespace {

Dense dense_type(const Flash& f) {
    if (!f.dense) return Dense::none;
    static const std::map<std::string, Dense> types = {
        {"float64", Dense::f64}, {"float32", Dense::f32}, {"float16", Dense::f16}, {"bfloat16", Dense::bf16},
        {"int64", Dense::i64},   {"int32", Dense::i32},   {"int16", Dense::i16},   {"int8", Dense::i8},
        {"uint8", Dense::u8},    {"bool", Dense::u8}};
    const auto found = types.find(f.dense_type);
    if (found == types.end()) throw CudaError("fused_loss: dense targets of type " + f.dense_type + " are not supported");
    return found->second;
}

// The longest of the copies that all these numbers are multiples of.
int piece_of(const void* start, int64_t stride, int64_t row) {
    const uint64_t all = reinterpret_cast<uintptr_t>(start) | uint64_t(stride) | uint64_t(row);
    return all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 2;
}

LossArgs loss_args(const Flash& f) {
    LossArgs a{};
    a.kind = f.loss.kind, a.label_smoothing = static_cast<float>(f.loss.label_smoothing);
    a.focal = Focal<DeviceMath>(f.loss), a.asymmetric = Asymmetric<DeviceMath>(f.loss);
    a.targets = {f.indices, f.offsets, f.label_start, f.dense, f.dense_stride, dense_type(f)};
    a.label_weight = f.label_weight, a.pos_weight = f.pos_weight;
    a.plain = f.loss.kind == LossKind::bce && !f.dense && !f.label_weight && !f.pos_weight && f.loss.label_smoothing == 0;
    return a;
}

// FusedLossArgs::basis_at: the columns of slack leave room in the last 16 of `columns` for what is not blank, or do not.
int place_of_basis(const Flash& f, int columns) {
    const int at = std::max(columns - RANK, int(f.slack + 3) / 4 * 4);
    return f.basis && at - (columns - RANK) <= f.blank ? at : columns;
}

template <class S, class T = typename S::Scalar>
FusedLossArgs<T> args_of(const Flash& f) {
    FusedLossArgs<T> a{};
    a.x = static_cast<const T*>(f.x), a.weight = static_cast<const T*>(f.weight);
    a.bias = static_cast<const T*>(f.bias), a.basis = static_cast<const T*>(f.basis);
    a.coef = static_cast<const T*>(f.coef), a.waves = static_cast<const T*>(f.waves);
    a.features = int(f.features), a.wave_steps = int(f.wave_steps);
    a.x_stride = f.x_stride, a.batch = int(f.batch), a.labels = int(f.labels), a.slack = int(f.slack);
    a.block_labels = int(f.block_labels), a.basis_at = place_of_basis(f, S::COLUMNS);
    const int64_t row = f.slack * int64_t(sizeof(T));
    a.x_moves = piece_of(f.x, f.x_stride * int64_t(sizeof(T)), 0) < 16, a.weight_piece = piece_of(f.weight, row, row);
    a.loss = loss_args(f);
    a.row_factor = f.row_factor, a.out_scale = f.out_scale, a.scale = float(f.scale);
    a.wide = f.wide, a.accumulate = f.accumulate, a.pairs = f.slack % 2 == 0;
    a.grad_weight = f.grad_weight, a.grad_bias = f.grad_bias, a.grad_coef = static_cast<T*>(f.grad_coef), a.numbers = int(f.numbers);
    a.weight_sums = f.weight_sums, a.bias_sums = f.bias_sums;
    a.slabs = f.slabs, a.row_sums = f.row_sums, a.totals = f.totals;
    return a;
}

}  // namespace

void fused_loss(const LaunchOn& on, const Flash& f) {
    with_shape(f.dtype, f.batch, f.slack, shared_limit(on.device), [&](auto shape) {
        using S = decltype(shape);
        launch(on, "fused_loss", fused_loss_kernel<S>, f.blocks, S::BYTES, args_of<S>(f));
    });
}

int64_t tile_labels() { return 32; }
int64_t widest_slack() { return WIDEST; }

std::pair<int64_t, int64_t> sizes_of_block(DType dtype, int64_t batch, int64_t slack, int device) {
    std::pair<int64_t, int64_t> sizes;
    with_shape(dtype, batch, slack, shared_limit(device), [&](auto shape) {
        using S = decltype(shape);
        sizes = {S::ROWS, S::FEATURES};
    });
    return sizes;
}

}  // namespace sk
