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

// Of a few rows and GROUPS groups of columns. SHARES warps share a row: each has every so many steps of the product.
template <class T_, int SHARES, int GROUPS>
struct WavesGradient {
    using T = T_;
    using Args = WavesArgs<T>;
    static constexpr int ROWS = WARPS / SHARES;
    // At a time: as many as most devices have multiprocessors, or as a lane has registers for.
    static constexpr int STEPS = SHARES * Args::PER == 1 ? 15 : 20 / Args::PER / SHARES, WORDS = 8 * SHARES * STEPS;
    // Shared memory: factors and turns of the groups, and what the warps of a row leave to the first of them
    static constexpr int FACTORS_BYTES = 16 * 16 * 2 * int(sizeof(float)), TURNS_BYTES = WORDS * WAVE_COLUMNS * 4;
    static constexpr int AT_TURNS = GROUPS * FACTORS_BYTES, AT_SUMS = AT_TURNS + GROUPS * TURNS_BYTES;
    static constexpr int BYTES = AT_SUMS + (SHARES - 1) * ROWS * GROUPS * 32 * int(sizeof(float));

    static __host__ __device__ __forceinline__ int blocks(const Args& p, int batch) {
        return p.gradient ? across(p) * ((batch + ROWS - 1) / ROWS) : 0;
    }

    // put(row, feature, sum), by block `block` of those.
    template <class Put>
    static __device__ __forceinline__ void run(const Args& p, unsigned char* memory, int parts, int batch, int block, Put put) {
        const int words = (parts + Args::PER - 1) / Args::PER, all_steps = (words + 7) / 8;
        const int warp = thread() / 32, share = warp % SHARES;
        const int row = block / across(p) * ROWS + warp / SHARES, group = block % across(p) * GROUPS;
        const int groups = min(GROUPS, p.groups() - group);  // what is made of others goes nowhere
        const auto* numbers = reinterpret_cast<const unsigned char*>(p.grad_coef);
        const uint32_t first = uint32_t(min(row, batch - 1) * words) * 64 + lane() / 4 * 8;  // what slabs leave is less than 4 GB
        const auto* turns = reinterpret_cast<const uint4*>(p.turns) + int64_t(group) * all_steps * 64 + thread();
#pragma unroll
        for (int at = 0; at < GROUPS * FACTORS_BYTES / 16; at += THREADS)
            if (at + thread() < groups * (FACTORS_BYTES / 16))
                copy_async<16>(memory + (at + thread()) * 16, reinterpret_cast<const uint4*>(p.factors) + group * (FACTORS_BYTES / 16) + at + thread());
        const uint32_t last = parts % Args::PER ? 0xffffu : ~0u;  // of the last word
        Sum sums[GROUPS][4] = {};
#pragma unroll 1
        for (int step0 = 0; step0 < all_steps; step0 += SHARES * STEPS) {
            if (step0) __syncthreads();  // those before have been read
            const int steps = min(SHARES * STEPS, all_steps - step0), even = (steps + SHARES - 1) / SHARES * SHARES;
#pragma unroll
            for (int at = 0; at < TURNS_BYTES / 16; at += THREADS)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    if (at + thread() < even * 64 && g < groups)
                        copy_async<16>(memory + AT_TURNS + g * TURNS_BYTES + (at + thread()) * 16,
                                       turns + (g * all_steps + step0) * 64 + at, at + thread() < steps * 64 ? 16 : 0);
            // Of the numbers of a word the first left rows have the even ones, the others the odd ones: a lane reads two.
            // Where there is no word it reads the last one again, whose product is with 0.
            Left left[STEPS];
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                if (SHARES * i >= steps) break;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int word = min((step0 + SHARES * i + share) * 8 + 4 * half + lane() % 4, words - 1);
                    const uint2 pair = *reinterpret_cast<const uint2*>(numbers + (first + uint32_t(word) * 64));
                    left[i][2 * half] = pair.x, left[i][2 * half + 1] = pair.y;
                }
            }
            wait_for_copies();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (SHARES * step >= steps) break;
                if (Args::PER == 2 && step0 + SHARES * (step + 1) >= all_steps) {  // nobody may have written half of the last word
#pragma unroll
                    for (int at = 0; at < 4; ++at)
                        if ((step0 + SHARES * step + share) * 8 + at / 2 * 4 + lane() % 4 >= words - 1) left[step][at] &= last;
                }
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    // Column n of tile t is number 4 n + t of a word's 32.
                    const auto* turn = reinterpret_cast<const uint4*>(memory + AT_TURNS + g * TURNS_BYTES) +
                                       (SHARES * step + share) * 64 + lane() % 4 * 8 + lane() / 4;
                    const uint4 low = turn[0], high = turn[32];
                    const uint32_t rights[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
                    for (int t = 0; t < 4; ++t) multiply(sums[g][t], left[step], rights[t], T{});
                }
            }
        }
        float made[GROUPS];  // of a column each
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            made[g] = over_lanes(sums[g], reinterpret_cast<const float4*>(memory + g * FACTORS_BYTES));
        if (SHARES > 1) {
            auto* left_there = reinterpret_cast<float*>(memory + AT_SUMS) + warp / SHARES * (SHARES - 1) * GROUPS * 32 + lane();
            if (share)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) left_there[((share - 1) * GROUPS + g) * 32] = made[g];
            __syncthreads();
            if (share) return;
#pragma unroll
            for (int i = 0; i < (SHARES - 1) * GROUPS; ++i) made[i % GROUPS] += left_there[i * 32];
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int feature = (group + g) * WAVE_COLUMNS + lane() / 8 * 8 + lane() % 4 * 2 + lane() / 4 % 2 - 1;
            if (row < batch && feature >= 0 && feature < p.features) put(row, feature, made[g]);
        }
    }

  private:
    static __host__ __device__ __forceinline__ int across(const Args& p) { return (p.groups() + GROUPS - 1) / GROUPS; }

    // A lane has frequency 4 t + lane % 4 of every tile, both parts, and two numbers r of it. Sums over r; lane l returns part
    // l / 4 % 2 of frequency 4 (l / 8) + l % 4.
    static __device__ __forceinline__ float over_lanes(const Sum (&sums)[4], const float4* factors) {
        float all[8];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float4 f = factors[(4 * t + lane() % 4) * 8 + lane() / 4];
            const Sum& s = sums[t];
            all[2 * t] = f.x * s[0] - f.y * s[1] + f.z * s[2] - f.w * s[3];
            all[2 * t + 1] = f.x * s[1] + f.y * s[0] + f.z * s[3] + f.w * s[2];
        }
        // Of two lanes each keeps the half of the sums that it is to have, and gives the other away.
#pragma unroll
        for (int half = 4; half; half /= 2) {
            const bool upper = lane() & 4 * half;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float given = upper ? all[i] : all[i + half], kept = upper ? all[i + half] : all[i];
                all[i] = kept + __shfl_xor_sync(0xffffffffu, given, 4 * half);
            }
        }
        return all[0];
    }
};

}  // namespace sk
