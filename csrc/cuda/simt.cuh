// The three products of a tile on the FMA units: float32 without tf32, and float64.
//
// Threads form a 16 x 16 grid (ty, tx).  A thread owns rows ty + 16 i and columns tx + 16 j of a result (labels
// 4 ty + i of the weight gradient), so that neighbouring threads write neighbouring columns.
#pragma once

#include "types.cuh"

namespace sk {

template <class K>
struct SimtProducts {
    using Acc = typename K::Acc;
    using Operand = typename K::Operand;
    using Vec = Pack<Operand>;
    static constexpr int V = Vec::size;
    static constexpr int RM = K::ROWS / 16, RN = TILE / 16, RK = K::DEPTH / 16;

    struct Sum {
        Acc at[RM][RN];
    };

    static __device__ __forceinline__ void clear(Sum& sum) {
#pragma unroll
        for (int i = 0; i < RM; ++i)
#pragma unroll
            for (int j = 0; j < RN; ++j) sum.at[i][j] = 0;
    }

    // sum += x [ROWS, DEPTH] w [TILE, DEPTH]^T
    static __device__ __forceinline__ void logits_step(Sum& sum, const Operand* x, const Operand* w) {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll 1
        for (int k = 0; k < K::DEPTH; k += V) {
            Vec a[RM], b[RN];
#pragma unroll
            for (int i = 0; i < RM; ++i) a[i] = *reinterpret_cast<const Vec*>(x + (ty + 16 * i) * K::LD_CHUNK + k);
#pragma unroll
            for (int j = 0; j < RN; ++j) b[j] = *reinterpret_cast<const Vec*>(w + (tx + 16 * j) * K::LD_CHUNK + k);
#pragma unroll
            for (int v = 0; v < V; ++v)
#pragma unroll
                for (int i = 0; i < RM; ++i)
#pragma unroll
                    for (int j = 0; j < RN; ++j) sum.at[i][j] += a[i].at[v] * b[j].at[v];
        }
    }

    static __device__ __forceinline__ void logits_store(const Sum& sum, Acc* z) {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < RM; ++i)
#pragma unroll
            for (int j = 0; j < RN; ++j) z[(ty + 16 * i) * K::LD_Z + tx + 16 * j] = sum.at[i][j];
    }

    // g [ROWS, TILE] w [TILE, DEPTH] -> store(row, column, value)
    template <class Store>
    static __device__ __forceinline__ void grad_x(const Operand* g, const Operand* w, Acc*, Store store) {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
        Acc sum[RM][RK] = {};
#pragma unroll 1
        for (int t = 0; t < TILE; t += V) {
            Vec a[RM];
#pragma unroll
            for (int i = 0; i < RM; ++i) a[i] = *reinterpret_cast<const Vec*>(g + (ty + 16 * i) * K::LD_G + t);
#pragma unroll
            for (int v = 0; v < V; ++v)
#pragma unroll
                for (int j = 0; j < RK; ++j) {
                    const Acc b = w[(t + v) * K::LD_CHUNK + tx + 16 * j];
#pragma unroll
                    for (int i = 0; i < RM; ++i) sum[i][j] += a[i].at[v] * b;
                }
        }
#pragma unroll
        for (int i = 0; i < RM; ++i)
#pragma unroll
            for (int j = 0; j < RK; ++j) store(ty + 16 * i, tx + 16 * j, sum[i][j]);
    }

    // g [ROWS, TILE]^T x [ROWS, DEPTH] -> store(label, column, value)
    template <class Store>
    static __device__ __forceinline__ void grad_weight(const Operand* g, const Operand* x, Acc*, Store store) {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
        Acc sum[RN][RK] = {};
#pragma unroll 2
        for (int row = 0; row < K::ROWS; ++row) {
            Vec a[RN / V];
#pragma unroll
            for (int i = 0; i < RN / V; ++i) a[i] = *reinterpret_cast<const Vec*>(g + row * K::LD_G + RN * ty + V * i);
#pragma unroll
            for (int j = 0; j < RK; ++j) {
                const Acc b = x[row * K::LD_CHUNK + tx + 16 * j];
#pragma unroll
                for (int i = 0; i < RN; ++i) sum[i][j] += a[i / V].at[i % V] * b;
            }
        }
#pragma unroll
        for (int i = 0; i < RN; ++i)
#pragma unroll
            for (int j = 0; j < RK; ++j) store(RN * ty + i, tx + 16 * j, sum[i][j]);
    }
};

}  // namespace sk
