// Confusion-matrix losses of whole columns, one value per label from all rows (sigkernels/losses/confusion.py has the
// formulas), and their gradients, without a [batch, labels] array.
//
// core/confusion.h has the arithmetic of a label.  Per tile: logits of every group of rows and their column sums, the two
// slopes of each label, then ∂loss/∂z of every group, and its products as in the fused pass.  Where a batch has more than one group
// of rows, a tile's logits wait in a scratch array of the block.
#pragma once

#include "device_math.cuh"
#include "gradients.cuh"
#include "launch.h"
#include "targets.cuh"

namespace sk {

template <class K>
struct ConfusionLossArgs {
    TileArgs<K> tile;
    TargetArgs<K> targets;
    GradientArgs<K> gradients;
    ConfusionParams loss;
    const typename K::Acc *beta, *eta;  // [labels] or null: the numbers of `loss`
    typename K::Acc* logits;            // [blocks, groups of rows, ROWS, TILE]; unused for one group
    double* values;                     // [blocks]: the sum of 1 - value over a block's labels
    double *grad_beta, *grad_eta;       // [labels] or null
};

template <class K>
struct ConfusionShared {
    using Acc = typename K::Acc;
    static constexpr int at_bits = Shared<K>::bytes;                        // uint32 [ROWS, 2]
    static constexpr int at_slopes = at_bits + K::ROWS * 2 * 4;             // Acc [2, TILE]
    static constexpr int at_bias = at_slopes + 2 * TILE * sizeof(Acc);      // Acc [4, TILE]
    static constexpr int at_sums = at_bias + 4 * TILE * sizeof(Acc);        // double [3, 4, TILE]
    static constexpr int at_loss = at_sums + 3 * 4 * TILE * 8;              // double [TILE]
    static constexpr int at_settings = at_loss + TILE * 8;                  // ConfusionParams
    static constexpr int at_labels = at_settings + (sizeof(ConfusionParams) + 15) / 16 * 16;  // Acc [3, TILE]
    static constexpr int at_range = at_labels + 3 * TILE * sizeof(Acc);  // Range
    static constexpr int bytes = at_range + 16;
};

// Sums per column: four threads have a slot each, in shared memory because registers are scarce, and the slots of a
// column are added in order.
struct ColumnSums {
    double* slots;  // [sums, 4, TILE]
    __device__ __forceinline__ double& mine(int i) const { return slots[i * 4 * TILE + thread()]; }
    __device__ __forceinline__ void add(int i, bool first, double value) const {
        mine(i) = first ? value : mine(i) + value;
    }
    __device__ __forceinline__ double total(int i) const {
        const double* at = slots + i * 4 * TILE + thread() % TILE;
        return (at[0] + at[TILE]) + (at[2 * TILE] + at[3 * TILE]);
    }
};

// What belongs to the labels of a tile, as [3, TILE] in shared memory: bias, beta, eta.
template <class K>
__device__ __forceinline__ void load_labels(const ConfusionLossArgs<K>& p, typename K::Acc* to, int tile) {
    using Acc = typename K::Acc;
    const int column = thread();
    const int64_t label = int64_t(tile) * TILE + column;
    if (column >= TILE) return;
    const bool real = label < p.tile.labels;
    to[column] = bias_of(p.tile, label);
    to[TILE + column] = real && p.beta ? p.beta[label] : static_cast<Acc>(p.loss.beta);
    to[2 * TILE + column] = real && p.eta ? p.eta[label] : static_cast<Acc>(p.loss.eta);
}

// What the passes over the rows of a tile share; a thread has one column and every fourth row of a group.
template <class K>
struct Column {
    using Acc = typename K::Acc;
    const ConfusionLossArgs<K>& p;
    const ConfusionParams& loss;
    const Shared<K>& shared;
    const uint32_t* bits;
    int64_t label;
    int column, part;
    Acc bias, beta, eta;

    __device__ __forceinline__ Column(const ConfusionLossArgs<K>& p_, const ConfusionParams& loss_,
                                      const Acc* labels, const Shared<K>& shared_, const uint32_t* bits_,
                                      int tile)
        : p(p_), loss(loss_), shared(shared_), bits(bits_), column(thread() % TILE), part(thread() / TILE) {
        label = int64_t(tile) * TILE + column;
        bias = labels[column], beta = labels[TILE + column], eta = labels[2 * TILE + column];
    }
    __device__ __forceinline__ bool real() const { return label < p.tile.labels; }

    __device__ __forceinline__ Acc target(int r, int64_t row) const {
        const Acc y = p.targets.of(bits, r, column, row, label);
        return loss.mirrored ? 1 - y : y;
    }

    __device__ __forceinline__ Acc* saved(int row0) const {
        const int64_t groups = (p.tile.batch + K::ROWS - 1) / K::ROWS;
        return p.logits + (blockIdx.x * groups + row0 / K::ROWS) * K::ROWS * TILE;
    }

    // Sums of one group of rows: tp, s, p.  Leaves the logits, bias included, where `differentiate` finds them.
    __device__ __forceinline__ void add(int row0, const ColumnSums& sums) const {
        const bool several = p.tile.batch > K::ROWS;
        Acc tp = 0, s = 0, positives = 0;
#pragma unroll 1
        for (int i = 0; i < K::ROWS / 4; ++i) {
            const int r = part + 4 * i, row = row0 + r;
            if (row >= p.tile.batch || !real()) continue;
            const Acc z = shared.z()[r * K::LD_Z + column] + bias, y = target(r, row);
            if (several) saved(row0)[r * TILE + column] = z;
            const ConfusionScore<DeviceMath<Acc>> score(loss.form, loss.mirrored, z, beta, eta);
            tp += score.s * y, s += score.s, positives += y;
        }
        sums.add(0, row0 == 0, double(tp));
        sums.add(1, row0 == 0, double(s));
        sums.add(2, row0 == 0, double(positives));
    }

    // ∂loss/∂z of one group of rows, and the sums for beta and eta.
    __device__ __forceinline__ void differentiate(int row0, const Acc* slopes, const ColumnSums& sums) const {
        const bool several = p.tile.batch > K::ROWS;
        const Acc on_y = slopes[column], on_all = slopes[TILE + column];
        Acc by_beta = 0, by_eta = 0;
#pragma unroll 1
        for (int i = 0; i < K::ROWS / 4; ++i) {
            const int r = part + 4 * i, row = row0 + r;
            Acc g = 0;
            if (row < p.tile.batch && real()) {
                const Acc z = several ? saved(row0)[r * TILE + column] : shared.z()[r * K::LD_Z + column] + bias;
                const ConfusionScore<DeviceMath<Acc>> score(loss.form, loss.mirrored, z, beta, eta);
                const Acc by_score = on_y * target(r, row) + on_all;
                g = by_score * score.slope;
                by_eta += by_score * score.steep;
                by_beta += by_score * score.steep * score.t;
            }
            shared.g()[r * K::LD_G + column] = Narrow<typename K::Operand>::from(g);
        }
        sums.add(0, row0 == 0, double(by_beta));
        sums.add(1, row0 == 0, double(by_eta));
    }
};

// From the sums of a tile to its value and slopes: one thread per label.
template <class K>
__device__ __forceinline__ void evaluate(const ConfusionLossArgs<K>& p, const ConfusionParams& c,
                                         const ColumnSums& sums,
                                         typename K::Acc* slopes,  // [2, TILE]
                                         double* loss,             // [TILE]
                                         int tile, bool first) {
    using Acc = typename K::Acc;
    const int column = thread();
    if (column >= TILE) return;
    const double rows = static_cast<double>(p.tile.batch), tp = sums.total(0), s = sums.total(1), y = sums.total(2);
    const ConfusionValue of_label(c, tp, s, y, rows, 0);
    const double here = int64_t(tile) * TILE + column < p.tile.labels ? 1 - of_label.value : 0;
    loss[column] = first ? here : loss[column] + here;
    slopes[column] = static_cast<Acc>(of_label.on_y);
    slopes[TILE + column] = static_cast<Acc>(of_label.on_all);
}

template <class K>
__global__ void __launch_bounds__(THREADS, sizeof(typename K::Acc) == 8 ? 1 : 2)
    confusion_loss_kernel(const ConfusionLossArgs<K> p) {
    using Acc = typename K::Acc;
    using At = ConfusionShared<K>;
    SK_DYNAMIC_SHARED(memory);
    const Shared<K> shared{memory};
    auto* bits = reinterpret_cast<uint32_t*>(memory + At::at_bits);
    auto* slopes = reinterpret_cast<Acc*>(memory + At::at_slopes);
    auto* bias_parts = reinterpret_cast<Acc*>(memory + At::at_bias);
    const ColumnSums sums{reinterpret_cast<double*>(memory + At::at_sums)};
    auto* loss = reinterpret_cast<double*>(memory + At::at_loss);
    // In shared memory, or the compiler would convert every setting once and hold it in a register for good.
    auto& settings = *reinterpret_cast<ConfusionParams*>(memory + At::at_settings);
    if (thread() == 0) settings = p.loss;
    auto* labels = reinterpret_cast<Acc*>(memory + At::at_labels);
    const Factors<K> factors = load_factors(memory + At::bytes, p.tile);
    const bool differentiate = p.gradients.wanted() || p.gradients.grad_bias || p.grad_beta || p.grad_eta;
    auto& range = *reinterpret_cast<Range*>(memory + At::at_range);
    set_range(range, p.tile.tiles);
    for (int tile = range.first; tile < range.last; ++tile) {
        for (int row0 = 0; row0 < p.tile.batch; row0 += K::ROWS) {
            __syncthreads();  // bits and z of the group before have been read
            if (row0 == 0) load_labels(p, labels, tile);
            mark_positives(p.targets, p.tile.batch, bits, tile, row0);
            logits_tile(shared, p.tile, factors, tile, row0);
            Column<K>(p, settings, labels, shared, bits, tile).add(row0, sums);
        }
        __syncthreads();
        evaluate(p, settings, sums, slopes, loss, tile, tile == range.first);
        if (!differentiate) continue;
        __syncthreads();
        for (int row0 = 0; row0 < p.tile.batch; row0 += K::ROWS) {
            if (p.tile.batch > K::ROWS) {
                __syncthreads();
                mark_positives(p.targets, p.tile.batch, bits, tile, row0);
                __syncthreads();
            }
            Column<K>(p, settings, labels, shared, bits, tile).differentiate(row0, slopes, sums);
            __syncthreads();
            if (p.gradients.grad_bias) add_grad_bias(p.gradients, p.tile, shared, bias_parts, tile, row0);
            if (p.gradients.wanted()) move_gradient<K, true>(p.gradients, p.tile, shared, row0);
        }
        const Column<K> column(p, settings, labels, shared, bits, tile);
        if (column.part == 0 && column.real()) {
            if (p.grad_beta) p.grad_beta[column.label] = sums.total(0);
            if (p.grad_eta) p.grad_eta[column.label] = times_beta(sums.total(1), double(column.beta));
        }
        if (p.gradients.wanted()) add_gradients(p.gradients, p.tile, shared, factors, tile, tile == range.first);
    }
    __syncthreads();
    if (thread() == 0) {
        double total = 0;
        for (int i = 0; i < TILE; ++i) total += loss[i];
        p.values[blockIdx.x] = total;
    }
}

}  // namespace sk
