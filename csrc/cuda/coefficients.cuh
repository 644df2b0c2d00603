// Where the fused pass has the DFT's coefficients of its rows from: they are read, or, of few rows, made by every block,
//
//     coef = features · waves
//
// of the features just before x in its rows and the waves of its own labels, which lie as right operands do.
#pragma once

#include "fused_loss.cuh"

namespace sk {
namespace {

template <class S>
__device__ __forceinline__ void FusedLoss<S>::load_coef() {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int step = 0; step < S::RANK_STEPS; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = base + row0 + 16 * m + i % 2 * 8 + lane() / 4;
                const int column = S::DEPTH * step + (lane() % 4 + i / 2 * 4) * (4 / int(sizeof(T)));
                if (row >= p.batch) continue;
                const T* at = p.coef + (int64_t(row) * gridDim.x + blockIdx.x) * RANK + column;
                coef[m][step][i] = *reinterpret_cast<const uint32_t*>(at);
            }
}

// Begins to bring the DFT's features and their waves of this block; zeros behind both.
template <class S>
__device__ __forceinline__ void FusedLoss<S>::begin_coef() const {
    copy_raw<S::F_STRIDE, S::ROWS>(shared + S::AT_FEATURES, x_row(0) - p.features * int(sizeof(T)),
                                   p.x_stride * int64_t(sizeof(T)), rows, p.features * int(sizeof(T)));
    const auto* waves = reinterpret_cast<const unsigned char*>(p.waves) + int64_t(blockIdx.x) * p.wave_steps * 512;
#pragma unroll
    for (int at = 0; at < S::FEATURE_STEPS * 32; at += THREADS)
        if (at + thread() < S::FEATURE_STEPS * 32)
            copy_async<16>(shared + S::AT_WAVES + (at + thread()) * 16, waves + (at + thread()) * 16,
                           at + thread() < p.wave_steps * 32 ? 16 : 0);
}

// Numbers i and i + 1 of 16 bits, or number i as tf32, of a row of features.
template <class T>
__device__ __forceinline__ uint32_t feature(const unsigned char* row, int i) {
    if constexpr (sizeof(T) == 4) {
        return round_tf32(reinterpret_cast<const float*>(row)[i]);
    } else {
        const unsigned char* at = row + 2 * i;
        const auto* words = reinterpret_cast<const uint32_t*>(at - misaligned(at) % 4);
        return __funnelshift_r(words[0], words[1], misaligned(at) % 4 * 8);
    }
}

// coef = features · waves, once they have been brought: each label warp has its share of the steps, and adds up all shares.
template <class S>
__device__ __forceinline__ void FusedLoss<S>::make_coef() {
    Sum sums[M][2] = {};
    const unsigned char* from[M][2];
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
        const int row = row0 + 8 * r + lane() / 4;
        from[r / 2][r % 2] = shared + S::AT_FEATURES + row * S::F_STRIDE +
                             misaligned(x_row(min(row, rows - 1)) - p.features * int(sizeof(T)));
    }
#pragma unroll
    for (int i = 0; i < S::FEATURE_STEPS / S::LABEL_WARPS; ++i) {
        const int step = S::LABEL_WARPS * i + label_warp();
        const uint4 four = reinterpret_cast<const uint4*>(shared + S::AT_WAVES)[step * 32 + lane()];
        const Right right = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
        for (int m = 0; m < M; ++m) {
            Left left;
#pragma unroll
            for (int word = 0; word < 4; ++word)
                left[word] = feature<T>(from[m][word % 2], (8 * step + lane() % 4 + word / 2 * 4) * (4 / int(sizeof(T))));
#pragma unroll
            for (int j = 0; j < 2; ++j) multiply(sums[m][j], left, right[j], T{});
        }
    }
    __syncthreads();  // all features have been read
    if (S::LABEL_WARPS > 1) {
        auto* shares = reinterpret_cast<float4*>(g()) + thread() / 32 / S::LABEL_WARPS * S::LABEL_WARPS * M * 64 + lane();
#pragma unroll
        for (int i = 0; i < 2 * M; ++i) {
            Sum& sum = sums[i / 2][i % 2];
            shares[(label_warp() * 2 * M + i) * 32] = {sum[0], sum[1], sum[2], sum[3]};
        }
        __syncthreads();  // all shares are there
#pragma unroll
        for (int i = 0; i < 2 * M; ++i) {
            Sum& sum = sums[i / 2][i % 2];
            sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
            for (int warp = 0; warp < S::LABEL_WARPS; ++warp) {
                const float4 part = shares[(warp * 2 * M + i) * 32];
                sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int step = 0; step < S::RANK_STEPS; ++step) K::left_of_sums(coef[m][step], sums[m] + step);
    clear_next();  // where features lay
}

// The coefficients into the columns of x that slack leaves: in registers where x is held there, else in shared memory, which
// one of the warps with the same rows does.
template <class S>
__device__ __forceinline__ void FusedLoss<S>::pack_coef() {
    constexpr int BEFORE = S::STEPS - S::RANK_STEPS;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int step = 0; step < S::RANK_STEPS; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = S::DEPTH * (BEFORE + step) + (lane() % 4 + i / 2 * 4) * (4 / int(sizeof(T)));
                if (column < p.basis_at) continue;
                if (S::HOLDS_X) {
                    x[S::HOLDS_X ? m : 0][S::HOLDS_X ? BEFORE + step : 0][i] = coef[m][step][i];
                } else if (label_warp() == 0) {
                    unsigned char* at = shared + (row0 + 16 * m + i % 2 * 8 + lane() / 4) * S::X_STRIDE;
                    *reinterpret_cast<uint32_t*>(at + column * int(sizeof(T))) = coef[m][step][i];
                }
            }
}

}  // namespace
}  // namespace sk
