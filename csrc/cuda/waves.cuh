// The gradient of the DFT features from those of the blocks' coefficients.
//
// Waves are complex numbers here: their cosines are the real parts, their sines the imaginary ones. Those of block p are
// factor[r, j] · turn[p, j], where turns differ from block to block and factors do not: so that
//
//     gradient[row, j] = Σ_r factor[r, j] · (Σ_p grad_coef[row, p, r] · turn[p, j])
//
// reads the 16 times smaller turns in the place of waves. The inner sum is a product [16, parts] · [parts, 32] of every row
// on the tensor cores. Frequency 0 has the constant as its imaginary part, so that its real part is before feature 0.
//
// grad_coef and turns lie as operands do: a word holds PER neighbouring parts of a number (two of 16 bits).
#pragma once

#include "tile.cuh"

namespace sk {

constexpr int WAVE_ROWS = 4;      // of a block
constexpr int WAVE_COLUMNS = 32;  // of a group: 16 frequencies

template <class T>
struct WavesArgs {
    const T* grad_coef;    // [batch, words, 16, PER]
    const T* turns;        // [groups, words to a multiple of 8, 32, PER]: 0 beyond the parts; for the order see `run`
    const float* factors;  // [groups, 16 frequencies, 16, 2]
    int features;          // 2k + 1
    void* gradient;        // [batch, features] or null

    static constexpr int PER = 4 / int(sizeof(T));

    __host__ __device__ __forceinline__ int groups() const { return (features + WAVE_COLUMNS) / WAVE_COLUMNS; }
    // Where number r of a block's coefficients of a row is, of so many blocks.
    static __device__ __forceinline__ int64_t place(int64_t row, int parts, int part, int r) {
        return ((row * ((parts + PER - 1) / PER) + part / PER) * 16 + r) * PER + part % PER;
    }
};

// Of a few rows and a group of columns. Two warps share a row: each has every other step of the product.
template <class T>
class WavesGradient {
    using Args = WavesArgs<T>;
    static constexpr int SHARES = WARPS / WAVE_ROWS;
    static constexpr int WORDS = 160 / Args::PER;  // at a time: as many as most devices have multiprocessors
    static constexpr int STEPS = WORDS / 8 / SHARES;
    static constexpr int AT_FACTORS = WORDS * WAVE_COLUMNS * 4;
    static constexpr int SUM_STRIDE = WAVE_COLUMNS + 8;  // eight lanes' pairs of numbers lie in different banks

  public:
    static constexpr int FACTORS_BYTES = 16 * 16 * 2 * int(sizeof(float));
    static constexpr int SUMS_BYTES = WARPS * 8 * SUM_STRIDE * int(sizeof(float));
    static constexpr int BYTES = (AT_FACTORS > SUMS_BYTES ? AT_FACTORS : SUMS_BYTES) + FACTORS_BYTES;

    // put(row, feature, sum) for the rows from `first` on.
    template <class Put>
    static __device__ __forceinline__ void run(const Args& p, unsigned char* memory, int parts, int first, int rows, int group,
                                               Put put) {
        const int words = (parts + Args::PER - 1) / Args::PER, all_steps = (words + 7) / 8;
        const int warp = thread() / 32, share = warp % SHARES, row = min(warp / SHARES, rows - 1);
        const auto* numbers = reinterpret_cast<const unsigned char*>(p.grad_coef) + int64_t(first + row) * words * 64 + lane() / 4 * 8;
        const auto* turns = reinterpret_cast<const uint4*>(p.turns) + int64_t(group) * all_steps * 64 + thread();
        if (thread() < FACTORS_BYTES / 16)
            copy_async<16>(memory + BYTES - FACTORS_BYTES + thread() * 16, reinterpret_cast<const uint4*>(p.factors) + group * 128 + thread());
        Sum sums[4] = {};
#pragma unroll 1
        for (int step0 = 0; step0 < all_steps; step0 += SHARES * STEPS) {
            if (step0) __syncthreads();  // those before have been read
            const int steps = min(SHARES * STEPS, all_steps - step0);
#pragma unroll
            for (int at = 0; at < AT_FACTORS / 16; at += THREADS)
                if (at + thread() < steps * 64) copy_async<16>(memory + (at + thread()) * 16, turns + step0 * 64 + at);
            // Of the numbers of a word the first left rows have the even ones, the others the odd ones: a lane reads two.
            // Where there is no word it reads the last one again, whose product is with 0.
            Left left[STEPS];
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const int step = step0 + SHARES * i + share;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint2 pair{0, 0};
                    const auto word = uint32_t(min(step * 8 + 4 * half + lane() % 4, words - 1));
                    if (step < all_steps) pair = *reinterpret_cast<const uint2*>(numbers + word * 64);
                    left[i][2 * half] = pair.x, left[i][2 * half + 1] = pair.y;
                }
                if (Args::PER == 2 && step == all_steps - 1 && parts % 2) {  // nobody wrote the other half of the last word
#pragma unroll
                    for (int at = 0; at < 4; ++at)
                        if (step * 8 + at / 2 * 4 + lane() % 4 >= words - 1) left[i][at] &= 0xffffu;
                }
            }
            wait_for_copies();
            __syncthreads();
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                if (SHARES * i + share >= steps) break;
                // Column n of tile t is number 4 n + t of a word's 32.
                const auto* turn = reinterpret_cast<const uint4*>(memory) + (SHARES * i + share) * 64 + lane() % 4 * 8 + lane() / 4;
                const uint4 low = turn[0], high = turn[32];
                const uint32_t rights[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
                for (int t = 0; t < 4; ++t) multiply(sums[t], left[i], rights[t], T{});
            }
        }
        __syncthreads();  // the turns have been read: sums lie in their place
        auto* parts_of_sums = reinterpret_cast<float*>(memory);
        const auto* factors = reinterpret_cast<const float4*>(memory + BYTES - FACTORS_BYTES);
#pragma unroll
        for (int t = 0; t < 4; ++t) {  // a lane has frequency 4 t + lane % 4, both parts, and two numbers r of it
            const float4 f = factors[(4 * t + lane() % 4) * 8 + lane() / 4];
            const Sum& s = sums[t];
            *reinterpret_cast<float2*>(parts_of_sums + (warp * 8 + lane() / 4) * SUM_STRIDE + 8 * t + lane() % 4 * 2) = {
                f.x * s[0] - f.y * s[1] + f.z * s[2] - f.w * s[3], f.x * s[1] + f.y * s[0] + f.z * s[3] + f.w * s[2]};
        }
        __syncthreads();
        const int of = thread() / WAVE_COLUMNS, column = thread() % WAVE_COLUMNS;
        const int feature = group * WAVE_COLUMNS + column - 1;
        if (of >= min(WAVE_ROWS, rows) || feature < 0 || feature >= p.features) return;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < SHARES * 8; ++i) sum += parts_of_sums[(of * SHARES * 8 + i) * SUM_STRIDE + column];
        put(first + of, feature, sum);
    }
};

}  // namespace sk
