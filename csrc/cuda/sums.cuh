// How a block of the fused pass ends: warps with the same rows add up their sums, and write the slab, the losses, and the
// gradients of the coefficients.
#pragma once

#include "fused_loss.cuh"

namespace sk {
namespace {

// What a lane writes of the 16 columns of coefficients. Waves are those of columns first … 11, of which the middle `numbers`
// are kept, zeros where there is no wave. Columns 12 to 14 are the digits of the constant.
template <class T>
struct CoefSums {
    T* to;  // of row lane / 4 and column 2 (lane % 4)
    float* constant;  // of that row
    int64_t next;     // 8 rows further
    int columns;      // from a row's constant to the next
    bool waves[2], kept[2];  // of that column, and of the one 8 further

    __device__ __forceinline__ CoefSums(const FusedLossArgs<T>& p, int row0, int first, float* constants, int columns_)
        : next(8 * WavesArgs<T>::place(1, int(gridDim.x), 0, 0, p.numbers)), columns(columns_) {
        const int column = lane() % 4 * 2, before = (RANK - p.numbers) / 2, row = row0 + lane() / 4;
        to = p.grad_coef + WavesArgs<T>::place(row, int(gridDim.x), int(blockIdx.x), column - before, p.numbers);
        constant = constants + lane() / 4 * columns;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = column + 8 * half;
            waves[half] = at >= first && at < 12, kept[half] = at >= before && at < before + p.numbers;
        }
    }

    // Column 2 (lane % 4) + 8 half, and the next, of row 8 r + lane / 4, where that is there.
    __device__ __forceinline__ void put(int r, int half, bool there, const float* pair) const {
        if (half) {
            const float two = pair[0] + pair[1], digits = two + __shfl_xor_sync(0xffffffffu, two, 1);
            if (there && lane() % 4 == 2) constant[8 * r * columns] = digits;
        }
        if (!there || !kept[half]) return;
        T* at = to + r * next + 8 * half * WavesArgs<T>::PER;
        at[0] = operand<T>(waves[half] ? pair[0] : 0.0f);
        at[WavesArgs<T>::PER] = operand<T>(waves[half] ? pair[1] : 0.0f);
    }
};

template <class S>
__device__ __forceinline__ void FusedLoss<S>::write_sums() {
    losses.take_logarithms();
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
        float& sum = losses.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    }
    constexpr int BLOCKS = S::COLUMNS / 16;  // of slack columns; one more is the basis, where it is apart
    const Meeting<S> meeting(shared, label_warp());
    auto* row_sums = reinterpret_cast<float*>(shared + S::AT_ROW_SUMS);  // [LABEL_WARPS, ROWS]
    __syncthreads();  // all that lay there has been read
    if (lane() % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2 * M; ++r) row_sums[label_warp() * S::ROWS + row0 + 8 * r + lane() / 4] = losses.sum[r];
    }
    if (p.slabs) {
#pragma unroll
        for (int c = 0; c < BLOCKS; ++c) meeting.leave(c, grad_x, 2 * c);
        if (p.grad_coef && apart()) meeting.leave(BLOCKS, grad_coef, 0);
    }
    __syncthreads();
    if (thread() >= THREADS - 32)  // a warp that owns no more columns than others
        finish_rows<S>(row_sums, rows, p.row_sums + int64_t(blockIdx.x) * p.batch + base, p.totals + blockIdx.x, base);
    if (!p.slabs) return;
    const int columns = p.slack + int(p.grad_coef != nullptr);
    float* slab = p.slabs + (int64_t(blockIdx.x) * p.batch + base + row0) * columns;
    const CoefSums<T> coefs(p, base + row0, packed() ? p.basis_at - (S::COLUMNS - RANK) : 0, slab + p.slack, columns);
    const auto there = [&](int r) { return row0 + 8 * r + lane() / 4 < rows; };
#pragma unroll
    for (int c = 0; c < BLOCKS; ++c)
        meeting.take(c, grad_x, 2 * c, [&](int r, int half, const float* pair) {
            const int column = 16 * c + 8 * half + lane() % 4 * 2;
            float* to = slab + (8 * r + lane() / 4) * columns + column;
            if (there(r) && column < p.slack) to[0] = pair[0];
            if (there(r) && column + 1 < p.slack) to[1] = pair[1];
            if (c == BLOCKS - 1 && packed() && p.grad_coef) coefs.put(r, half, there(r), pair);
        });
    if (p.grad_coef && apart())
        meeting.take(BLOCKS, grad_coef, 0, [&](int r, int half, const float* pair) { coefs.put(r, half, there(r), pair); });
}

}  // namespace
}  // namespace sk
