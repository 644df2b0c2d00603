// The logits of ROWS rows and one tile of labels, in shared memory: what every kernel starts from.
//
//     z = x_slack S_tile^T + c_tile U^T + bias
//
// The shared dimension runs over the slack columns first and the DFT columns after them, so that rows of x and S are
// read as they lie, 16 bytes at a time where s allows.
#pragma once

#include "simt.cuh"
#include "tensor.cuh"

namespace sk {

template <class K>
struct TileArgs {
    const typename K::Scalar* x;       // [batch, slack]
    const typename K::Scalar* weight;  // [labels, slack]
    const typename K::Acc* c;          // [batch, tiles * rank]
    const typename K::Acc* u;          // [TILE, rank]
    const typename K::Scalar* bias;    // [labels] or null
    int64_t batch, labels, tiles;
    int slack, rank;
    int aligned;  // rows of x and weight start at multiples of 16 bytes

    __device__ __forceinline__ int depth() const { return slack + rank * K::DFT_PARTS; }
};

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
    static constexpr int at_g = in_place ? chunks : (bytes_z > chunks ? bytes_z : chunks);
    static constexpr int at_stage = in_place ? at_z + bytes_z : at_g + bytes_g;
    static constexpr int bytes = at_stage + bytes_stage;
    static constexpr int bytes_scan = in_place ? at_z + bytes_z : at_g;  // of kernels that need z only

    unsigned char* base;
    __device__ __forceinline__ Operand* x() const { return reinterpret_cast<Operand*>(base); }
    __device__ __forceinline__ Operand* w() const { return reinterpret_cast<Operand*>(base + bytes_x); }
    __device__ __forceinline__ Acc* z() const { return reinterpret_cast<Acc*>(base + at_z); }
    __device__ __forceinline__ Operand* g() const { return reinterpret_cast<Operand*>(base + at_g); }
    __device__ __forceinline__ Acc* stage() const { return reinterpret_cast<Acc*>(base + at_stage); }
};

// A DFT factor as the p-th of its parts: 16-bit kinds multiply (high, low, high) of c with (high, high, low) of U.
template <class K, bool COEFFICIENT>
__device__ __forceinline__ typename K::Operand dft_part(typename K::Acc value, int part) {
    const auto high = Narrow<typename K::Operand>::from(value);
    if (part == (COEFFICIENT ? 1 : 2)) return Narrow<typename K::Operand>::from(value - widen(high));
    return high;
}

// COUNT rows of [main | DFT factor], columns start ... start + DEPTH - 1, into shared memory; zero outside.
template <class K, int COUNT, bool COEFFICIENT>
__device__ __forceinline__ void load_chunk(typename K::Operand* to, const TileArgs<K>& p,
                                           const typename K::Scalar* main,  // [rows, slack]
                                           const typename K::Acc* factor,   // [rows, rank] with a row stride
                                           int64_t factor_stride, int64_t rows, int start) {
    using Vec = Pack<typename K::Operand>;
    constexpr int PER_ROW = K::DEPTH / Vec::size;
    for (int group = threadIdx.x; group < COUNT * PER_ROW; group += THREADS) {
        const int row = group / PER_ROW, offset = group % PER_ROW * Vec::size, column = start + offset;
        Vec loaded;
        const auto* from = main + static_cast<int64_t>(row) * p.slack + column;
        if (row < rows && p.aligned && column + Vec::size <= p.slack) {
            loaded = *reinterpret_cast<const Vec*>(from);
        } else {
#pragma unroll
            for (int v = 0; v < Vec::size; ++v) {
                loaded.at[v] = Narrow<typename K::Operand>::from(0);
                const int extra = column + v - p.slack;
                if (row < rows && extra < 0) loaded.at[v] = from[v];
                if (row < rows && extra >= 0 && extra < p.rank * K::DFT_PARTS)
                    loaded.at[v] =
                        dft_part<K, COEFFICIENT>(factor[row * factor_stride + extra % p.rank], extra / p.rank);
            }
        }
        *reinterpret_cast<Vec*>(to + row * K::LD_CHUNK + offset) = loaded;
    }
}

template <class K>
__device__ __forceinline__ void load_x(typename K::Operand* to, const TileArgs<K>& p, int64_t tile, int64_t row,
                                       int start) {
    const int64_t stride = p.tiles * p.rank;
    load_chunk<K, K::ROWS, true>(to, p, p.x + row * p.slack, p.c + row * stride + tile * p.rank, stride,
                                 p.batch - row, start);
}

template <class K>
__device__ __forceinline__ void load_weight(typename K::Operand* to, const TileArgs<K>& p, int64_t tile, int start) {
    load_chunk<K, TILE, false>(to, p, p.weight + tile * TILE * p.slack, p.u, p.rank, p.labels - tile * TILE, start);
}

// Leaves z [ROWS, TILE] without bias in shared memory; begins and ends with a barrier.
template <class K>
__device__ __forceinline__ void logits_tile(const Shared<K>& shared, const TileArgs<K>& p, int64_t tile, int64_t row) {
    using P = Products<K>;
    typename P::Sum sum;
    P::clear(sum);
    const int depth = p.depth();
    for (int start = 0; start < depth; start += K::DEPTH) {
        __syncthreads();
        load_x(shared.x(), p, tile, row, start);
        load_weight(shared.w(), p, tile, start);
        __syncthreads();
        P::logits_step(sum, shared.x(), shared.w());
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
