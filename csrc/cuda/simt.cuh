// The products of a tile on the FMA units: float32 without tf32, and float64.
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
    static constexpr int PER_ROW = THREADS / K::ROWS;  // threads that share a row of a strip

    struct Sum {
        Acc at[RM][RN];
    };

    static __device__ __forceinline__ void clear(Sum& sum) {
#pragma unroll
        for (int i = 0; i < RM; ++i)
#pragma unroll
            for (int j = 0; j < RN; ++j) sum.at[i][j] = 0;
    }

    // sum += x [ROWS, depth] w [TILE, depth]^T
    static __device__ __forceinline__ void logits_step(Sum& sum, const Operand* x, const Operand* w, int depth) {
        const int ty = thread() / 16, tx = thread() % 16;
#pragma unroll 1
        for (int k = 0; k < depth; k += V) {
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
        const int ty = thread() / 16, tx = thread() % 16;
#pragma unroll
        for (int i = 0; i < RM; ++i)
#pragma unroll
            for (int j = 0; j < RN; ++j) z[(ty + 16 * i) * K::LD_Z + tx + 16 * j] = sum.at[i][j];
    }

    // g [ROWS, inner] w [inner, DEPTH] -> store(row, column, value)
    template <class Store>
    static __device__ __forceinline__ void grad_x(const Operand* g, int ld, const Operand* w, int inner, Acc*,
                                                  Store store) {
        const int ty = thread() / 16, tx = thread() % 16;
        Acc sum[RM][RK] = {};
#pragma unroll 1
        for (int t = 0; t < inner; t += V) {
            Vec a[RM];
#pragma unroll
            for (int i = 0; i < RM; ++i) a[i] = *reinterpret_cast<const Vec*>(g + (ty + 16 * i) * ld + t);
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

    struct WeightSum {
        Acc at[RN][RK] = {};
    };

    // sum += g [ROWS, TILE]^T x [ROWS, DEPTH]
    static __device__ __forceinline__ void weight_step(WeightSum& sum, const Operand* g, const Operand* x) {
        const int ty = thread() / 16, tx = thread() % 16;
#pragma unroll 2
        for (int row = 0; row < K::ROWS; ++row) {
            Vec a[RN / V];
#pragma unroll
            for (int i = 0; i < RN / V; ++i) a[i] = *reinterpret_cast<const Vec*>(g + row * K::LD_G + RN * ty + V * i);
#pragma unroll
            for (int j = 0; j < RK; ++j) {
                const Acc b = x[row * K::LD_CHUNK + tx + 16 * j];
#pragma unroll
                for (int i = 0; i < RN; ++i) sum.at[i][j] += a[i / V].at[i % V] * b;
            }
        }
    }

    // Every element to store(label, column, value).
    template <class Store>
    static __device__ __forceinline__ void weight_store(WeightSum& sum, Acc*, Store store) {
        const int ty = thread() / 16, tx = thread() % 16;
#pragma unroll
        for (int i = 0; i < RN; ++i)
#pragma unroll
            for (int j = 0; j < RK; ++j) store(RN * ty + i, tx + 16 * j, sum.at[i][j]);
    }

    // A strip is a [ROWS, RANK] result: a thread owns every PER_ROW-th column of one row.
    struct Strip {
        Acc at[RANK / PER_ROW] = {};
    };

    // strip += left [ROWS, depth] right [RANK, depth]^T, of which `used` rows are not zero.  From the last column to the
    // first: column 0 carries the prior of all labels, and what comes after a large number is rounded with it.
    static __device__ __forceinline__ void strip_step(Strip& strip, const Operand* left, const Operand* right, int ld,
                                                      int depth, int used) {
        const int row = thread() % K::ROWS, first = thread() / K::ROWS;
#pragma unroll 1
        for (int k = depth - V; k >= 0; k -= V) {
            const Vec a = *reinterpret_cast<const Vec*>(left + row * ld + k);
#pragma unroll
            for (int i = 0; i < RANK / PER_ROW; ++i) {
                if (first + PER_ROW * i < used) {  // the same for the whole warp
                    const Vec b = *reinterpret_cast<const Vec*>(right + (first + PER_ROW * i) * ld + k);
#pragma unroll
                    for (int v = V - 1; v >= 0; --v) strip.at[i] += a.at[v] * b.at[v];
                }
            }
        }
    }

    // Every element to store(row, column, value).
    template <class Store>
    static __device__ __forceinline__ void strip_store(const Strip& strip, Acc*, Store store) {
        const int row = thread() % K::ROWS, first = thread() / K::ROWS;
#pragma unroll
        for (int i = 0; i < RANK / PER_ROW; ++i) store(row, first + PER_ROW * i, strip.at[i]);
    }
};

}  // namespace sk
