// The fused pass: loss of every row, and the gradients of x, weight and bias, without a [batch, labels] array.
//
// Block b owns a contiguous range of tiles.  Per tile and group of ROWS rows: logits, loss, ∂loss/∂z in shared memory, then its
// products with S (into this block's private slab of grad_x) and with x (into grad_weight, whose rows no other block
// touches).  No atomics: every sum has one owner and a fixed order.
#pragma once

#include "core/losses.h"
#include "tile.cuh"

namespace sk {

template <class K>
struct FusedLossArgs {
    TileArgs<K> tile;
    int sparse;                           // targets are indices and at; dense otherwise
    const int64_t* indices;               // [nnz] sorted labels of each row
    const int32_t* at;                    // [tiles + 1, batch]: where the positives of a row enter a tile
    int64_t label_start;                  // what to subtract from an index
    const typename K::Acc* dense;         // [batch, labels] with a row stride
    int64_t dense_stride;
    LossParams loss;
    const typename K::Acc* label_weight;  // [labels] or null
    const typename K::Acc* pos_weight;    // [labels] or null
    const typename K::Acc* row_factor;    // [batch]: multiplies ∂loss/∂z
    const typename K::Acc* out_scale;     // [1] or null: multiplies grad_weight and grad_bias
    double* row_sums;                     // [blocks, batch]
    int need_x;                           // whether slabs and grad_c are wanted
    typename K::Acc* slabs;               // [blocks, batch, slack]
    typename K::Acc* grad_c;              // [batch, tiles * rank]
    void* grad_weight;                    // [labels, slack] or null
    int grad_weight_narrow;               // grad_weight has the type Scalar; Acc otherwise
    int accumulate_weight;                // add to what grad_weight holds
    typename K::Acc* grad_bias;           // [labels] or null
    int accumulate_bias;
};

// The arithmetic of core/losses.h for one number.
template <class T>
struct DeviceMath {
    using V = T;
    static SK_HD T splat(double v) { return static_cast<T>(v); }
    static SK_HD T abs(T v) { return fabs(v); }
    static SK_HD T exp_neg(T v) { return exp(v); }
    static SK_HD T log(T v) { return ::log(v); }
    static SK_HD T log1p(T v) { return ::log1p(v); }
    static SK_HD T lt_select(T a, T b, T yes, T no) { return a < b ? yes : no; }
};

// Shared memory of this kernel: the tile, then the targets and the sums of a row group.
template <class K>
struct FusedShared {
    using Acc = typename K::Acc;
    static constexpr int at_bits = Shared<K>::bytes;                      // uint32 [ROWS, 2]
    static constexpr int at_rows = at_bits + K::ROWS * 2 * 4;             // Acc [ROWS]
    static constexpr int at_bias = at_rows + K::ROWS * sizeof(Acc);       // Acc [4, TILE]
    static constexpr int bytes = at_bias + 4 * TILE * sizeof(Acc);
};

// Loss and derivative of one element; y is 0 or 1 exactly where SOFT is false.
template <bool SOFT, class Loss, class Acc>
__device__ __forceinline__ void element(const Loss& loss, Acc z, Acc y, Acc pos_weight, Acc& f, Acc& g) {
    if (SOFT) {
        Acc fn, gn, fp, gp;
        loss.both(z, fn, gn, fp, gp);
        const Acc up = y * pos_weight, down = 1 - y;
        // a target at the end of its range must not see the other term: 0 * inf at an infinite logit
        f = (up == 0 ? Acc(0) : up * fp) + (down == 0 ? Acc(0) : down * fn);
        g = up * gp + down * gn;
    } else if (y == 0) {
        loss.neg(z, f, g);
    } else {
        loss.pos(z, f, g);
        f *= pos_weight, g *= pos_weight;
    }
}

// z -> the loss of each row of the group (rows, in shared memory) and ∂loss/∂z.  A warp takes every eighth row.
template <class K, class Loss, bool SOFT>
__device__ __forceinline__ void loss_of_tile(const FusedLossArgs<K>& p, const Loss& loss, const Shared<K>& shared,
                                             const uint32_t* bits, typename K::Acc* rows, int64_t tile, int64_t row0) {
    using Acc = typename K::Acc;
    const int lane = threadIdx.x % 32;
    Acc bias[2], weight[2], pos_weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t label = tile * TILE + lane + 32 * half;
        const bool real = label < p.tile.labels;
        bias[half] = bias_of(p.tile, label);
        weight[half] = real && p.label_weight ? p.label_weight[label] : Acc(1);
        pos_weight[half] = real && p.pos_weight ? p.pos_weight[label] : Acc(1);
    }
    const Acc smooth = static_cast<Acc>(p.loss.label_smoothing);
    for (int r = threadIdx.x / 32; r < K::ROWS; r += WARPS) {
        const int64_t row = row0 + r;
        const Acc factor = row < p.tile.batch ? p.row_factor[row] : Acc(0);
        Acc sum = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = lane + 32 * half;
            const int64_t label = tile * TILE + column;
            Acc f = 0, g = 0;
            if (row < p.tile.batch && label < p.tile.labels) {
                const Acc z = shared.z()[r * K::LD_Z + column] + bias[half];
                Acc y = p.sparse ? Acc(bits[2 * r + half] >> lane & 1u) : p.dense[row * p.dense_stride + label];
                if (SOFT) y = y * (1 - smooth) + smooth / 2;
                element<SOFT>(loss, z, y, pos_weight[half], f, g);
                f *= weight[half], g *= weight[half] * factor;
            }
            sum += f;
            shared.g()[r * K::LD_G + column] = Narrow<typename K::Operand>::from(g);
        }
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane == 0) rows[r] = sum;
    }
}

template <class K, template <class> class Loss>
__device__ __forceinline__ void loss_of_tile_as(const FusedLossArgs<K>& p, const Shared<K>& shared,
                                                const uint32_t* bits, typename K::Acc* rows, int64_t tile,
                                                int64_t row0) {
    const Loss<DeviceMath<typename K::Acc>> loss(p.loss);
    if (p.sparse && p.loss.label_smoothing == 0)
        loss_of_tile<K, decltype(loss), false>(p, loss, shared, bits, rows, tile, row0);
    else
        loss_of_tile<K, decltype(loss), true>(p, loss, shared, bits, rows, tile, row0);
}

// The positives of each row of the group that fall into the tile, as 64 bits per row: one thread per row.
template <class K>
__device__ __forceinline__ void mark_positives(const FusedLossArgs<K>& p, uint32_t* bits, int64_t tile, int64_t row0) {
    const int r = threadIdx.x;
    if (!p.sparse || r >= K::ROWS) return;
    uint32_t word[2] = {0, 0};
    if (row0 + r < p.tile.batch) {
        const int32_t end = p.at[(tile + 1) * p.tile.batch + row0 + r];
        for (int32_t i = p.at[tile * p.tile.batch + row0 + r]; i < end; ++i) {
            const int column = static_cast<int>(p.indices[i] - p.label_start - tile * TILE);
            if (column < 32) word[0] |= 1u << column;
            else word[1] |= 1u << (column - 32);
        }
    }
    bits[2 * r] = word[0];
    bits[2 * r + 1] = word[1];
}

template <class K>
__device__ __forceinline__ void add_grad_bias(const FusedLossArgs<K>& p, const Shared<K>& shared,
                                              typename K::Acc* parts, int64_t tile, bool first) {
    using Acc = typename K::Acc;
    const int column = threadIdx.x % TILE, part = threadIdx.x / TILE;
    Acc sum = 0;
    for (int r = part; r < K::ROWS; r += THREADS / TILE) sum += widen(shared.g()[r * K::LD_G + column]);
    parts[part * TILE + column] = sum;
    __syncthreads();
    const int64_t label = tile * TILE + column;
    if (part == 0 && label < p.tile.labels) {
        Acc total = (parts[column] + parts[TILE + column]) + (parts[2 * TILE + column] + parts[3 * TILE + column]);
        if (p.out_scale) total *= *p.out_scale;
        p.grad_bias[label] = first ? total : p.grad_bias[label] + total;
    }
}

// ∂loss/∂z (in shared memory) times S and U, and times x: chunk by chunk of columns.
template <class K>
__device__ __forceinline__ void add_gradients(const FusedLossArgs<K>& p, const Shared<K>& shared, int64_t tile,
                                              int64_t row0, bool first_tile) {
    using Acc = typename K::Acc;
    using Scalar = typename K::Scalar;
    const TileArgs<K>& t = p.tile;
    Acc* slab = p.slabs + blockIdx.x * t.batch * t.slack;
    const Acc scale = p.out_scale ? *p.out_scale : Acc(1);
    const bool add_weight = row0 > 0 || p.accumulate_weight;
    const int columns = p.need_x ? t.slack + t.rank : t.slack;
    for (int start = 0; start < columns; start += K::DEPTH) {
        __syncthreads();
        if (p.grad_weight) load_x(shared.x(), t, tile, row0, start);
        if (p.need_x) load_weight(shared.w(), t, tile, start);
        __syncthreads();
        if (p.need_x)
            Products<K>::grad_x(shared.g(), shared.w(), shared.stage(), [&](int r, int c, Acc value) {
                const int64_t row = row0 + r;
                const int column = start + c;
                if (row >= t.batch) return;
                if (column < t.slack) {
                    Acc* place = slab + row * t.slack + column;
                    *place = first_tile ? value : *place + value;
                } else if (column < t.slack + t.rank) {
                    p.grad_c[(row * t.tiles + tile) * t.rank + column - t.slack] = value;
                }
            });
        if (p.grad_weight)
            Products<K>::grad_weight(shared.g(), shared.x(), shared.stage(), [&](int l, int c, Acc value) {
                const int64_t label = tile * TILE + l;
                const int column = start + c;
                if (label >= t.labels || column >= t.slack) return;
                const int64_t place = label * t.slack + column;
                value *= scale;
                if (p.grad_weight_narrow) {
                    Scalar* to = static_cast<Scalar*>(p.grad_weight) + place;
                    *to = Narrow<Scalar>::from(add_weight ? widen(*to) + value : value);
                } else {
                    Acc* to = static_cast<Acc*>(p.grad_weight) + place;
                    *to = add_weight ? *to + value : value;
                }
            });
    }
}

// Two blocks per multiprocessor hide each other's latency; float64 sums need the registers of one.
template <class K>
__global__ void __launch_bounds__(THREADS, sizeof(typename K::Acc) == 8 ? 1 : 2)
    fused_loss_kernel(const FusedLossArgs<K> p) {
    using Acc = typename K::Acc;
    SK_DYNAMIC_SHARED(memory);
    const Shared<K> shared{memory};
    auto* bits = reinterpret_cast<uint32_t*>(memory + FusedShared<K>::at_bits);
    auto* rows = reinterpret_cast<Acc*>(memory + FusedShared<K>::at_rows);
    auto* parts = reinterpret_cast<Acc*>(memory + FusedShared<K>::at_bias);
    const int64_t first = blockIdx.x * p.tile.tiles / gridDim.x;
    const int64_t last = (blockIdx.x + int64_t(1)) * p.tile.tiles / gridDim.x;
    for (int64_t tile = first; tile < last; ++tile) {
        for (int64_t row0 = 0; row0 < p.tile.batch; row0 += K::ROWS) {
            __syncthreads();  // bits, rows and g of the group before have been read
            mark_positives(p, bits, tile, row0);
            logits_tile(shared, p.tile, tile, row0);
            switch (p.loss.kind) {
                case LossKind::bce: loss_of_tile_as<K, Bce>(p, shared, bits, rows, tile, row0); break;
                case LossKind::focal: loss_of_tile_as<K, Focal>(p, shared, bits, rows, tile, row0); break;
                case LossKind::asymmetric: loss_of_tile_as<K, Asymmetric>(p, shared, bits, rows, tile, row0); break;
            }
            __syncthreads();
            const int64_t row = row0 + threadIdx.x;
            if (threadIdx.x < K::ROWS && row < p.tile.batch) {
                double* sum = p.row_sums + blockIdx.x * p.tile.batch + row;
                *sum = tile == first ? double(rows[threadIdx.x]) : *sum + double(rows[threadIdx.x]);
            }
            if (p.grad_bias) add_grad_bias(p, shared, parts, tile, row0 == 0 && !p.accumulate_bias);
            if (p.need_x || p.grad_weight) add_gradients(p, shared, tile, row0, tile == first);
        }
    }
}

}  // namespace sk
