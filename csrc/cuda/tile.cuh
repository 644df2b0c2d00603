// The logits of ROWS rows and one tile of labels, in shared memory: what every kernel starts from.
//
//     z = x_dft M^T U^T + x_slack S_tile^T + bias,      M = V Rot(tile)
//
// U [TILE, rank] and V are shared by all tiles and lie in shared memory where they fit.  Turning V once per tile and
// chunk is cheaper than turning the coefficients of every row.  A row of V belongs to the cosines or to the sines, so
// it is stored with one number per frequency, and M = V(row, frequency) * turn(tile, parity of the row, column).
#pragma once

#include "simt.cuh"
#include "tensor.cuh"

namespace sk {

template <class K>
struct TileArgs {
    const typename K::Scalar* x;       // [batch, slack]
    const typename K::Scalar* dft;     // [batch, dft_stride]: the DFT features, zero beyond the last column
    const typename K::Scalar* weight;  // [labels, slack]
    const typename K::Scalar* bias;    // [labels] or null
    const typename K::Acc* u;          // [TILE, rank]
    const typename K::Acc* v;          // [rank, columns / 2 + 1]
    const typename K::Acc* turn;       // [tiles, 2, columns]
    int64_t batch, labels, tiles;  // fit 31 bits: rows and tiles are counted in int, places in int64
    int slack, rank, even, columns;  // the first `even` rows of V belong to the cosines; columns = 2k+1, or 0
    int dft_stride;                  // a multiple of DEPTH
    int aligned;                     // rows of x and weight start at multiples of 16 bytes
    int resident_u, resident_v;      // whether a block keeps U, V in its shared memory

    __host__ __device__ __forceinline__ int u_bytes() const { return TILE * rank * int(sizeof(typename K::Acc)); }
    __host__ __device__ __forceinline__ int v_bytes() const {
        return rank * (columns / 2 + 1) * int(sizeof(typename K::Acc));
    }
    __host__ __device__ __forceinline__ int resident_bytes() const {
        return (resident_u ? u_bytes() : 0) + (resident_v ? v_bytes() : 0);
    }
};

// Where the range of tiles of a block of a scan begins; the range before it ends there.
template <class K>
__device__ __forceinline__ int64_t first_tile(const TileArgs<K>& t, int64_t block) {
    return block * t.tiles / gridDim.x;
}

template <class K, Engine E = K::engine>
struct Products : SimtProducts<K> {};
template <class K>
struct Products<K, Engine::tensor> : TensorProducts<K> {};

// Shared memory of a block.  16-bit kinds put z (float) where the chunks lay, and ∂loss/∂z beside it; the others
// replace z by ∂loss/∂z in place.
template <class K>
struct Shared {
    using Acc = typename K::Acc;
    using Operand = typename K::Operand;
    static constexpr bool in_place = sizeof(Operand) == sizeof(Acc);
    static constexpr int bytes_x = K::ROWS * K::LD_CHUNK * sizeof(Operand);
    static constexpr int bytes_w = TILE * K::LD_CHUNK * sizeof(Operand);
    static constexpr int bytes_z = K::ROWS * K::LD_Z * sizeof(Acc);
    static constexpr int bytes_g = in_place ? 0 : K::ROWS * K::LD_G * sizeof(Operand);
    static constexpr int bytes_stage = K::engine == Engine::tensor ? WARPS * 16 * 20 * sizeof(float) : 0;
    static constexpr int chunks = bytes_x + bytes_w;
    static constexpr int at_z = in_place ? chunks : 0;
    static constexpr int at_stage = in_place ? at_z + bytes_z : (bytes_z > chunks ? bytes_z : chunks);
    static constexpr int at_g = in_place ? at_z : at_stage + bytes_stage;
    static constexpr int bytes = at_stage + bytes_stage + bytes_g;
    static constexpr int bytes_scan = in_place ? at_stage : at_stage + bytes_stage;  // of kernels that need z only

    // A chunk of w also holds a strip's factor: RANK rows per part, as long as a chunk or as a tile.
    static_assert(K::DFT_PARTS * RANK <= TILE && K::FACTOR_PARTS * RANK * K::LD_G <= TILE * K::LD_CHUNK, "U, V in w");
    static_assert(K::DFT_PARTS * RANK <= K::DEPTH, "the coefficients of RANK columns are one chunk of x");

    unsigned char* base;
    __device__ __forceinline__ Operand* x() const { return reinterpret_cast<Operand*>(base); }
    __device__ __forceinline__ Operand* w() const { return reinterpret_cast<Operand*>(base + bytes_x); }
    __device__ __forceinline__ Acc* z() const { return reinterpret_cast<Acc*>(base + at_z); }
    __device__ __forceinline__ Operand* g() const { return reinterpret_cast<Operand*>(base + at_g); }
    __device__ __forceinline__ Acc* stage() const { return reinterpret_cast<Acc*>(base + at_stage); }
    // While logits are summed up z is free, where it has a place of its own.
    __device__ __forceinline__ Acc* early_stage() const { return in_place ? z() : stage(); }
};

// Where a block finds U and V: its own copy at `base`, or memory.  Worked out at every use: registers are scarce.
template <class K>
struct Factors {
    using Acc = typename K::Acc;
    unsigned char* base;
    const TileArgs<K>& p;
    __device__ __forceinline__ const Acc* u() const { return p.resident_u ? reinterpret_cast<Acc*>(base) : p.u; }
    __device__ __forceinline__ const Acc* v() const {
        return p.resident_v ? reinterpret_cast<Acc*>(base + p.u_bytes()) : p.v;
    }
};

// Copies what is to be resident; a barrier follows before anybody reads it (logits_tile begins with one).
template <class K>
__device__ __forceinline__ Factors<K> load_factors(unsigned char* base, const TileArgs<K>& p) {
    using Acc = typename K::Acc;
    Acc* to = reinterpret_cast<Acc*>(base);
    for (int i = thread(); p.resident_u && i < TILE * p.rank; i += THREADS) to[i] = p.u[i];
    to += TILE * p.rank;
    for (int i = thread(); p.resident_v && i < p.rank * (p.columns / 2 + 1); i += THREADS) to[i] = p.v[i];
    return {base, p};
}

// A DFT factor as the p-th of its parts: 16-bit kinds multiply (high, low, high) of c with (high, high, low) of U or V.
template <class K, bool COEFFICIENT>
__device__ __forceinline__ typename K::Operand dft_part(typename K::Acc value, int part) {
    const auto high = Narrow<typename K::Operand>::from(value);
    if (part == (COEFFICIENT ? 1 : 2)) return Narrow<typename K::Operand>::from(value - widen(high));
    return high;
}

// COUNT rows of a matrix, columns start ... start + DEPTH - 1, into shared memory; zero outside.
template <class K, int COUNT>
__device__ __forceinline__ void load_chunk(typename K::Operand* to, const typename K::Scalar* from, int64_t stride,
                                           int columns, bool aligned, int64_t rows, int start) {
    using Vec = Pack<typename K::Operand>;
    constexpr int PER_ROW = K::DEPTH / Vec::size;
    share<COUNT * PER_ROW>([&](int group) {
        const int row = group / PER_ROW, offset = group % PER_ROW * Vec::size, column = start + offset;
        Vec loaded;
        const auto* at = from + row * stride + column;
        if (row < rows && aligned && column + Vec::size <= columns) {
            loaded = *reinterpret_cast<const Vec*>(at);
        } else {
#pragma unroll
            for (int v = 0; v < Vec::size; ++v) {
                loaded.at[v] = Narrow<typename K::Operand>::from(0);
                if (row < rows && column + v < columns) loaded.at[v] = at[v];
            }
        }
        *reinterpret_cast<Vec*>(to + row * K::LD_CHUNK + offset) = loaded;
    });
}

template <class K>
__device__ __forceinline__ void load_x(typename K::Operand* to, const TileArgs<K>& p, int row, int start) {
    load_chunk<K, K::ROWS>(to, p.x + int64_t(row) * p.slack, p.slack, p.slack, p.aligned, p.batch - row, start);
}

template <class K>
__device__ __forceinline__ void load_weight(typename K::Operand* to, const TileArgs<K>& p, int tile, int start) {
    const int64_t label = int64_t(tile) * TILE;
    load_chunk<K, TILE>(to, p.weight + label * p.slack, p.slack, p.slack, p.aligned, p.labels - label, start);
}

// Rows rank0 ... rank0 + RANK - 1 of M, columns start ... start + DEPTH - 1, as [PARTS, RANK, DEPTH]; zero outside.
template <class K, bool COEFFICIENT, int PARTS>
__device__ __forceinline__ void load_turned(typename K::Operand* to, const TileArgs<K>& p, const Factors<K>& factors,
                                            int tile, int rank0, int start) {
    const int per_row = p.columns / 2 + 1;
    share<RANK * K::DEPTH>([&](int e) {
        const int i = e / K::DEPTH, c = e % K::DEPTH, row = rank0 + i, column = start + c;
        typename K::Acc value = 0;
        if (row < p.rank && column < p.columns)
            value = factors.v()[row * per_row + (column + 1) / 2] *
                    p.turn[(2 * int64_t(tile) + (row < p.even ? 0 : 1)) * p.columns + column];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            to[(part * RANK + i) * K::LD_CHUNK + c] = dft_part<K, COEFFICIENT>(value, part);
    });
}

// Adds the DFT part of a tile to the sums of the logits, RANK columns of the factors at a time.
template <class K>
__device__ __forceinline__ void add_dft(typename Products<K>::Sum& sum, const Shared<K>& shared, const TileArgs<K>& p,
                                        const Factors<K>& factors, int tile, int row) {
    using P = Products<K>;
    using Acc = typename K::Acc;
    for (int rank0 = 0; rank0 < p.rank; rank0 += RANK) {
        typename P::Strip c;
        for (int start = (p.columns - 1) / K::DEPTH * K::DEPTH; start >= 0; start -= K::DEPTH) {  // as in strip_step
            __syncthreads();
            load_chunk<K, K::ROWS>(shared.x(), p.dft + int64_t(row) * p.dft_stride, p.dft_stride, p.dft_stride, true,
                                   p.batch - row, start);
            load_turned<K, true, K::FACTOR_PARTS>(shared.w(), p, factors, tile, rank0, start);
            __syncthreads();
            P::strip_step(c, shared.x(), shared.w(), K::LD_CHUNK, K::DEPTH, p.rank - rank0);
        }
        __syncthreads();
        P::strip_store(c, shared.early_stage(), [&](int r, int i, Acc value) {
#pragma unroll
            for (int part = 0; part < K::DFT_PARTS; ++part)
                shared.x()[r * K::LD_CHUNK + part * RANK + i] = dft_part<K, true>(value, part);
        });
        share<TILE * RANK, 1>([&](int e) {
            const int label = e / RANK, i = e % RANK;
            const Acc value = rank0 + i < p.rank ? factors.u()[label * p.rank + rank0 + i] : Acc(0);
#pragma unroll
            for (int part = 0; part < K::DFT_PARTS; ++part)
                shared.w()[label * K::LD_CHUNK + part * RANK + i] = dft_part<K, false>(value, part);
        });
        __syncthreads();
        P::logits_step(sum, shared.x(), shared.w(), K::DFT_PARTS * RANK);
    }
}

// Leaves z [ROWS, TILE] without bias in shared memory; begins and ends with a barrier.
template <class K>
__device__ __forceinline__ void logits_tile(const Shared<K>& shared, const TileArgs<K>& p, const Factors<K>& factors,
                                            int tile, int row) {
    using P = Products<K>;
    typename P::Sum sum;
    P::clear(sum);
    add_dft(sum, shared, p, factors, tile, row);
    for (int start = 0; start < p.slack; start += K::DEPTH) {
        __syncthreads();
        load_x(shared.x(), p, row, start);
        load_weight(shared.w(), p, tile, start);
        __syncthreads();
        P::logits_step(sum, shared.x(), shared.w(), K::DEPTH);
    }
    __syncthreads();  // z may lie where the chunks are still being read
    P::logits_store(sum, shared.z());
    __syncthreads();
}

template <class K>
__device__ __forceinline__ typename K::Acc bias_of(const TileArgs<K>& p, int64_t label) {
    return p.bias && label < p.labels ? widen(p.bias[label]) : typename K::Acc(0);
}

}  // namespace sk
