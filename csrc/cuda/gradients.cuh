// From ∂loss/∂z of a tile to the gradients of x, weight and bias: what every loss ends with.
//
// A tile's ∂loss/∂z [batch, TILE] is in shared memory where one group of rows is the whole batch, else in a scratch array
// of the block, which the L2 cache holds.  So a chunk of grad_weight sums all rows in registers and is written once.
#pragma once

#include "tile.cuh"

namespace sk {

// The tiles of this block, first ... last - 1; in shared memory, because registers are scarce.
struct Range {
    int first, last;
};

__device__ __forceinline__ void set_range(Range& range, int64_t tiles) {
    if (thread() == 0) {
        range.first = static_cast<int>(blockIdx.x * tiles / gridDim.x);
        range.last = static_cast<int>((blockIdx.x + int64_t(1)) * tiles / gridDim.x);
    }
    __syncthreads();
}

template <class K>
struct GradientArgs {
    const typename K::Acc* out_scale;  // [1] or null: multiplies grad_weight and grad_bias
    int need_x;                        // whether slabs are wanted
    typename K::Acc* slabs;            // [blocks, batch, columns + slack]: a private grad_x per block
    void* grad_weight;                 // [labels, slack] or null
    int grad_weight_narrow;            // grad_weight has the type Scalar; Acc otherwise
    typename K::Acc* grad_bias;        // [labels] or null
    int accumulate;                    // add to what grad_weight and grad_bias hold of the rows of earlier launches
    typename K::Operand* scratch;      // [blocks, groups of rows, ROWS, TILE]; unused for one group

    __device__ __forceinline__ bool wanted() const { return need_x || grad_weight; }
};

// ∂loss/∂z of one group of rows between shared memory and this block's scratch, 16 bytes at a time.
template <class K, bool SAVE>
__device__ __forceinline__ void move_gradient(const GradientArgs<K>& p, const TileArgs<K>& t, const Shared<K>& shared,
                                              int row0) {
    using Vec = Pack<typename K::Operand>;
    constexpr int PER_ROW = TILE / Vec::size;
    const int64_t groups = (t.batch + K::ROWS - 1) / K::ROWS;
    if (groups == 1) return;
    auto* saved = p.scratch + (blockIdx.x * groups + row0 / K::ROWS) * K::ROWS * TILE;
    share<K::ROWS * PER_ROW>([&](int group) {
        auto* here = reinterpret_cast<Vec*>(shared.g() + group / PER_ROW * K::LD_G + group % PER_ROW * Vec::size);
        auto* there = reinterpret_cast<Vec*>(saved + group * Vec::size);
        if (SAVE) *there = *here;
        else *here = *there;
    });
}

// Column sums of ∂loss/∂z over a group of rows, added to parts [4, TILE] in shared memory; the last group writes them.
template <class K>
__device__ __forceinline__ void add_grad_bias(const GradientArgs<K>& p, const TileArgs<K>& t, const Shared<K>& shared,
                                              typename K::Acc* parts, int tile, int row0) {
    using Acc = typename K::Acc;
    const int column = thread() % TILE, part = thread() / TILE;
    Acc sum = 0;
#pragma unroll 4
    for (int i = 0; i < K::ROWS / 4; ++i) sum += widen(shared.g()[(part + 4 * i) * K::LD_G + column]);
    Acc* mine = parts + part * TILE + column;
    *mine = row0 == 0 ? sum : *mine + sum;
    if (row0 + K::ROWS < t.batch) return;  // the same for all threads
    __syncthreads();
    const int64_t label = int64_t(tile) * TILE + column;
    if (part == 0 && label < t.labels) {
        Acc total = (parts[column] + parts[TILE + column]) + (parts[2 * TILE + column] + parts[3 * TILE + column]);
        if (p.out_scale) total *= *p.out_scale;
        p.grad_bias[label] = p.accumulate ? p.grad_bias[label] + total : total;
    }
}

// The slack columns: ∂z S into this block's slab and ∂z^T x into grad_weight, chunk by chunk of columns.
template <class K>
__device__ __forceinline__ void add_slack_gradients(const GradientArgs<K>& p, const TileArgs<K>& t,
                                                    const Shared<K>& shared, int tile, bool first_tile) {
    using P = Products<K>;
    using Acc = typename K::Acc;
    using Scalar = typename K::Scalar;
    const int width = t.columns + t.slack;
    Acc* slab = p.slabs + blockIdx.x * t.batch * width + t.columns;
    for (int start = 0; start < t.slack; start += K::DEPTH) {
        if (p.grad_weight) {
            typename P::WeightSum sum;
            for (int row0 = 0; row0 < t.batch; row0 += K::ROWS) {
                __syncthreads();
                load_x(shared.x(), t, row0, start);
                move_gradient<K, false>(p, t, shared, row0);
                __syncthreads();
                P::weight_step(sum, shared.g(), shared.x());
            }
            P::weight_store(sum, shared.stage(), [&](int l, int c, Acc value) {
                const int64_t label = int64_t(tile) * TILE + l;
                if (label >= t.labels || start + c >= t.slack) return;
                const int64_t place = label * t.slack + start + c;
                if (p.out_scale) value *= *p.out_scale;
                if (p.grad_weight_narrow) {
                    Scalar* to = static_cast<Scalar*>(p.grad_weight) + place;
                    *to = Narrow<Scalar>::from(p.accumulate ? widen(*to) + value : value);
                } else {
                    Acc* to = static_cast<Acc*>(p.grad_weight) + place;
                    *to = p.accumulate ? *to + value : value;
                }
            });
        }
        for (int row0 = 0; p.need_x && row0 < t.batch; row0 += K::ROWS) {
            __syncthreads();
            if (row0 == 0) load_weight(shared.w(), t, tile, start);
            move_gradient<K, false>(p, t, shared, row0);
            __syncthreads();
            P::grad_x(shared.g(), K::LD_G, shared.w(), TILE, shared.stage(), [&](int r, int c, Acc value) {
                if (row0 + r >= t.batch || start + c >= t.slack) return;
                Acc* place = slab + int64_t(row0 + r) * width + start + c;
                *place = first_tile ? value : *place + value;
            });
        }
    }
}

// The DFT columns: (∂z U) M into this block's slab, RANK columns of the factors at a time.
template <class K>
__device__ __forceinline__ void add_dft_gradient(const GradientArgs<K>& p, const TileArgs<K>& t,
                                                 const Shared<K>& shared, const Factors<K>& factors, int tile,
                                                 int row0, bool first_tile) {
    using P = Products<K>;
    using Acc = typename K::Acc;
    const int width = t.columns + t.slack;
    Acc* slab = p.slabs + (blockIdx.x * t.batch + row0) * width;
    for (int rank0 = 0; rank0 < t.rank; rank0 += RANK) {
        __syncthreads();
        if (rank0 == 0) move_gradient<K, false>(p, t, shared, row0);
        share<TILE * RANK, 1>([&](int e) {  // U transposed: [parts, RANK, TILE]
            const int label = e / RANK, i = e % RANK;
            const Acc value = rank0 + i < t.rank ? factors.u()[label * t.rank + rank0 + i] : Acc(0);
#pragma unroll
            for (int part = 0; part < K::FACTOR_PARTS; ++part)
                shared.w()[(part * RANK + i) * K::LD_G + label] = dft_part<K, true>(value, part);
        });
        __syncthreads();
        typename P::Strip c;
        P::strip_step(c, shared.g(), shared.w(), K::LD_G, TILE, t.rank - rank0);
        P::strip_store(c, shared.stage(), [&](int r, int i, Acc value) {
#pragma unroll
            for (int part = 0; part < K::DFT_PARTS; ++part)
                shared.x()[r * K::LD_CHUNK + part * RANK + i] = dft_part<K, true>(value, part);
        });
        for (int start = 0; start < t.columns; start += K::DEPTH) {
            __syncthreads();
            load_turned<K, false, K::DFT_PARTS>(shared.w(), t, factors, tile, rank0, start);
            __syncthreads();
            P::grad_x(shared.x(), K::LD_CHUNK, shared.w(), K::DFT_PARTS * RANK, shared.stage(),
                      [&](int r, int c, Acc value) {
                          if (row0 + r >= t.batch || start + c >= t.columns) return;
                          Acc* place = slab + int64_t(r) * width + start + c;
                          *place = first_tile && rank0 == 0 ? value : *place + value;
                      });
        }
    }
}

// All of a tile's gradients but that of the bias; ∂loss/∂z of every group of rows has been made and saved.
template <class K>
__device__ __forceinline__ void add_gradients(const GradientArgs<K>& p, const TileArgs<K>& t, const Shared<K>& shared,
                                              const Factors<K>& factors, int tile, bool first_tile) {
    add_slack_gradients(p, t, shared, tile, first_tile);
    if (!p.need_x) return;
    for (int row0 = 0; row0 < t.batch; row0 += K::ROWS)
        add_dft_gradient(p, t, shared, factors, tile, row0, first_tile);
}

}  // namespace sk
