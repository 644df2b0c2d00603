// The fused pass: loss of every row, and the gradients of x, weight and bias, without a [batch, labels] array.
//
// Block b owns a contiguous range of tiles.  Per tile: logits, loss and ∂loss/∂z of every group of ROWS rows, then the
// products of ∂loss/∂z with S, U and V (into this block's private slab of grad_x) and with x (into grad_weight, whose
// rows no other block touches).  No atomics: every sum has one owner and a fixed order.
#pragma once

#include "core/losses.h"
#include "device_math.cuh"
#include "gradients.cuh"
#include "targets.cuh"

namespace sk {

template <class K>
struct FusedLossArgs {
    TileArgs<K> tile;
    TargetArgs<K> targets;
    GradientArgs<K> gradients;
    LossParams loss;
    const typename K::Acc* label_weight;  // [labels] or null
    const typename K::Acc* pos_weight;    // [labels] or null
    const typename K::Acc* row_factor;    // [batch]: multiplies ∂loss/∂z
    double* row_sums;                     // [blocks, batch]
};

// Shared memory of this kernel: the tile, then the targets and the sums of a row group.
template <class K>
struct FusedShared {
    using Acc = typename K::Acc;
    static constexpr int at_bits = Shared<K>::bytes;                      // uint32 [ROWS, 2]
    static constexpr int at_rows = at_bits + K::ROWS * 2 * 4;             // Acc [ROWS]
    static constexpr int at_bias = at_rows + K::ROWS * sizeof(Acc);       // Acc [4, TILE]
    static constexpr int at_loss = at_bias + 4 * TILE * sizeof(Acc);      // LossParams
    static constexpr int at_labels = at_loss + (sizeof(LossParams) + 15) / 16 * 16;  // Acc [3, TILE]
    static constexpr int at_range = at_labels + 3 * TILE * sizeof(Acc);  // Range
    static constexpr int bytes = at_range + 16;
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

// What belongs to the labels of a tile, as [3, TILE] in shared memory: bias, weight, pos_weight.
template <class K>
__device__ __forceinline__ void load_labels(const FusedLossArgs<K>& p, typename K::Acc* to, int tile) {
    const int column = thread();
    const int64_t label = int64_t(tile) * TILE + column;
    if (column >= TILE) return;
    const bool real = label < p.tile.labels;
    to[column] = bias_of(p.tile, label);
    to[TILE + column] = real && p.label_weight ? p.label_weight[label] : 1;
    to[2 * TILE + column] = real && p.pos_weight ? p.pos_weight[label] : 1;
}

// z -> the loss of each row of the group (rows, in shared memory) and ∂loss/∂z.  A warp takes every eighth row.
template <class K, class Loss, bool SOFT>
__device__ __forceinline__ void loss_of_tile(const FusedLossArgs<K>& p, const Loss& loss, const Shared<K>& shared,
                                             const typename K::Acc* labels, const uint32_t* bits,
                                             typename K::Acc* rows, int tile, int row0) {
    using Acc = typename K::Acc;
    const int lane = thread() % 32, warp = thread() / 32;
    Acc bias[2], weight[2], pos_weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Acc* at = labels + lane + 32 * half;
        bias[half] = at[0], weight[half] = at[TILE], pos_weight[half] = at[2 * TILE];
    }
    const Acc smooth = static_cast<Acc>(p.loss.label_smoothing);
#pragma unroll 1  // several rows at a time would need more registers than there are
    for (int i = 0; i < K::ROWS / WARPS; ++i) {
        const int r = warp + WARPS * i, row = row0 + r;
        const Acc factor = row < p.tile.batch ? p.row_factor[row] : Acc(0);
        Acc sum = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = lane + 32 * half;
            const int64_t label = int64_t(tile) * TILE + column;
            Acc f = 0, g = 0;
            if (row < p.tile.batch && label < p.tile.labels) {
                const Acc z = shared.z()[r * K::LD_Z + column] + bias[half];
                Acc y = p.targets.of(bits, r, column, row, label);
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
                                                const LossParams& settings, const typename K::Acc* labels,
                                                const uint32_t* bits, typename K::Acc* rows, int tile,
                                                int row0) {
    const Loss<DeviceMath<typename K::Acc>> loss(settings);
    if (p.targets.sparse && p.loss.label_smoothing == 0)
        loss_of_tile<K, decltype(loss), false>(p, loss, shared, labels, bits, rows, tile, row0);
    else
        loss_of_tile<K, decltype(loss), true>(p, loss, shared, labels, bits, rows, tile, row0);
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
    // In shared memory, or the compiler would convert every setting once and hold it in a register for good.
    auto& settings = *reinterpret_cast<LossParams*>(memory + FusedShared<K>::at_loss);
    if (thread() == 0) settings = p.loss;
    auto* labels = reinterpret_cast<Acc*>(memory + FusedShared<K>::at_labels);
    const Factors<K> factors = load_factors(memory + FusedShared<K>::bytes, p.tile);
    auto& range = *reinterpret_cast<Range*>(memory + FusedShared<K>::at_range);
    set_range(range, p.tile.tiles);
    for (int tile = range.first; tile < range.last; ++tile) {
        for (int row0 = 0; row0 < p.tile.batch; row0 += K::ROWS) {
            __syncthreads();  // bits, rows and g of the group before have been read
            if (row0 == 0) load_labels(p, labels, tile);
            mark_positives(p.targets, p.tile.batch, bits, tile, row0);
            logits_tile(shared, p.tile, factors, tile, row0);
            if (p.loss.kind == LossKind::bce)
                loss_of_tile_as<K, Bce>(p, shared, settings, labels, bits, rows, tile, row0);
            else if (p.loss.kind == LossKind::focal)
                loss_of_tile_as<K, Focal>(p, shared, settings, labels, bits, rows, tile, row0);
            else
                loss_of_tile_as<K, Asymmetric>(p, shared, settings, labels, bits, rows, tile, row0);
            __syncthreads();
            const int r = thread();
            if (r < K::ROWS && row0 + r < p.tile.batch) {
                double* sum = p.row_sums + blockIdx.x * p.tile.batch + row0 + r;
                *sum = tile == range.first ? double(rows[r]) : *sum + double(rows[r]);
            }
            if (p.gradients.grad_bias) add_grad_bias(p.gradients, p.tile, shared, parts, tile, row0);
            if (p.gradients.wanted()) move_gradient<K, true>(p.gradients, p.tile, shared, row0);
        }
        if (p.gradients.wanted()) add_gradients(p.gradients, p.tile, shared, factors, tile, tile == range.first);
    }
}

}  // namespace sk
