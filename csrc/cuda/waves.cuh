// The gradient of the DFT features from those of the blocks' coefficients.
//
// Waves are complex numbers here: their cosines are the real parts, their sines the imaginary ones. Those of block p are
// factor[r, j] · turn[p, j], where turns differ from block to block and factors do not: so that
//
//     gradient[row, j] = Σ_r factor[r, j] · (Σ_p grad_coef[row, p, r] · turn[p, j])
//
// reads the 16 times smaller turns in the place of waves. The inner sum is a product [16, parts] · [parts, 32] on the tensor
// cores, of a row with 16 numbers r or of two with 8. The constant feature is no wave: its gradient is a column of the slabs.
//
// grad_coef and turns lie as operands do: a word holds PER neighbouring parts of a number (two of 16 bits).
#pragma once

#include "tile.cuh"

namespace sk {

constexpr int WAVE_COLUMNS = 32;  // of a group: 16 frequencies

template <class T>
struct WavesArgs {
    const T* grad_coef;    // [batch, words, 8 or 16, PER] or null
    const T* turns;        // [groups, words to a multiple of 8, 32, PER]: 0 beyond the parts; for the order see `run`
    const float* factors;  // [groups, 16 frequencies, 8 or 16, 2]
    int features;          // 2k + 1
    void* gradient;        // [batch, features] or null

    static constexpr int PER = 4 / int(sizeof(T));

    __host__ __device__ __forceinline__ int groups() const { return (features - 1 + WAVE_COLUMNS - 1) / WAVE_COLUMNS; }
    // Where number r, of so many, of a block's coefficients of a row is, of so many blocks.
    static __device__ __forceinline__ int64_t place(int64_t row, int parts, int part, int r, int numbers) {
        return ((row * ((parts + PER - 1) / PER) + part / PER) * numbers + r) * PER + part % PER;
    }
};

// Of a few rows and a group of columns, with so many NUMBERS r. SHARES warps share their rows: each has every so many steps of
// the product, and then some of its columns.
template <class T_, int NUMBERS, int SHARES>
struct WavesGradient {
    using T = T_;
    using Args = WavesArgs<T>;
    static constexpr int TOGETHER = 16 / NUMBERS, ROWS = WARPS / SHARES * TOGETHER;
    // At a time: as many as most devices have multiprocessors, or as a lane has registers for.
    static constexpr int STEPS = SHARES * Args::PER == 1 ? 17 : 20 / Args::PER / SHARES, WORDS = 8 * SHARES * STEPS;
    // Shared memory: factors and turns, and the sums of warps that share rows
    static constexpr int FACTORS_BYTES = 16 * NUMBERS * 2 * int(sizeof(float)), TURNS_BYTES = WORDS * WAVE_COLUMNS * 4;
    static constexpr int AT_TURNS = FACTORS_BYTES, AT_SUMS = AT_TURNS + TURNS_BYTES;
    static constexpr int BYTES = AT_SUMS + (SHARES > 1 ? WARPS * 4 * 32 * int(sizeof(float4)) : 0);

    static __host__ __device__ __forceinline__ int blocks(const Args& p, int batch) {
        return p.gradient ? p.groups() * ((batch + ROWS - 1) / ROWS) : 0;
    }

    // put(row, feature, sum), by block `block` of those.
    template <class Put>
    static __device__ __forceinline__ void run(const Args& p, unsigned char* memory, int parts, int batch, int block, Put put) {
        const int words = (parts + Args::PER - 1) / Args::PER, all_steps = (words + 7) / 8;
        const int warp = thread() / 32, share = warp % SHARES;
        const int row = block / p.groups() * ROWS + warp / SHARES * TOGETHER, group = block % p.groups();
        const unsigned char* from[TOGETHER];  // a lane's first number of the rows
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            from[i] = reinterpret_cast<const unsigned char*>(p.grad_coef) +
                      int64_t(min(row + i, batch - 1)) * words * (NUMBERS * 4) + lane() / 4 * (NUMBERS / 2);
        const auto* turns = reinterpret_cast<const uint4*>(p.turns) + int64_t(group) * all_steps * 64 + thread();
        const auto* factors = reinterpret_cast<const uint4*>(p.factors) + group * (FACTORS_BYTES / 16) + thread();
        if (thread() < FACTORS_BYTES / 16) copy_async<16>(memory + thread() * 16, factors);
        const uint32_t last = parts % Args::PER ? 0xffffu : ~0u;  // of the last word
        Sum sums[4] = {};
#pragma unroll 1
        for (int step0 = 0; step0 < all_steps; step0 += SHARES * STEPS) {
            if (step0) __syncthreads();  // those before have been read
            const int steps = min(SHARES * STEPS, all_steps - step0), even = (steps + SHARES - 1) / SHARES * SHARES;
#pragma unroll
            for (int at = 0; at < TURNS_BYTES / 16; at += THREADS)
                if (at + thread() < even * 64)
                    copy_async<16>(memory + AT_TURNS + (at + thread()) * 16, turns + step0 * 64 + at,
                                   at + thread() < steps * 64 ? 16 : 0);
            // Left rows: of the 16 numbers of a row first the even ones, then the odd ones, so that a lane reads two at once;
            // or the 8 of one row, then those of the other. Where there is no word it reads the last one again, whose product is
            // with 0.
            Left left[STEPS];
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                if (SHARES * i >= steps) break;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t word = min((step0 + SHARES * i + share) * 8 + 4 * half + lane() % 4, words - 1);
                    if constexpr (TOGETHER == 1) {
                        const uint2 pair = *reinterpret_cast<const uint2*>(from[0] + word * (NUMBERS * 4));
                        left[i][2 * half] = pair.x, left[i][2 * half + 1] = pair.y;
                    } else {
                        left[i][2 * half] = *reinterpret_cast<const uint32_t*>(from[0] + word * (NUMBERS * 4));
                        left[i][2 * half + 1] = *reinterpret_cast<const uint32_t*>(from[1] + word * (NUMBERS * 4));
                    }
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
                // Column n of tile t is number 4 n + t of a word's 32.
                const auto* turn = reinterpret_cast<const uint4*>(memory + AT_TURNS) + (SHARES * step + share) * 64 +
                                   lane() % 4 * 8 + lane() / 4;
                const uint4 low = turn[0], high = turn[32];
                const uint32_t rights[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
                for (int t = 0; t < 4; ++t) multiply(sums[t], left[step], rights[t], T{});
            }
        }
        Sum mine[TILES];
        meet(sums, mine, reinterpret_cast<float4*>(memory + AT_SUMS));
        float made[VALUES];
#pragma unroll
        for (int t = 0; t < TILES; ++t) turn_back(mine[t], made, 2 * TOGETHER * t, memory, share * TILES + t);
        add_over_lanes<VALUES / 2>(made, 16), add_over_lanes<VALUES / 4>(made, 8), add_over_lanes<VALUES / 8>(made, 4);
        if (VALUES < 8 && lane() & 4) return;  // it has what the lane before it has
#pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const int at = VALUES < 8 ? lane() / 8 : lane() / 4 * KEPT + i, part = at / TOGETHER;
            const int feature = group * WAVE_COLUMNS + (share * TILES + part / 2) * 8 + lane() % 4 * 2 + part % 2 + 1;
            if (feature < p.features && row + at % TOGETHER < batch) put(row + at % TOGETHER, feature, made[i]);
        }
    }

  private:
    // Of a warp in the end: tiles of 8 columns, numbers of a lane before it adds over lanes, and after.
    static constexpr int TILES = 4 / SHARES, VALUES = 2 * TILES * TOGETHER, KEPT = VALUES < 8 ? 1 : VALUES / 8;

    // Adds the sums of the warps with the same rows, in their order: those of a warp's own tiles.
    static __device__ __forceinline__ void meet(const Sum (&sums)[4], Sum (&mine)[TILES], float4* memory) {
        const int share = thread() / 32 % SHARES;
        memory += (thread() / 32 - share) * 128 + lane();
        if constexpr (SHARES > 1) {
#pragma unroll
            for (int t = 0; t < 4; ++t) memory[(share * 4 + t) * 32] = {sums[t][0], sums[t][1], sums[t][2], sums[t][3]};
            __syncthreads();  // all sums are there
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int warp = 0; warp < SHARES; ++warp) {
                float4 part = {sums[t][0], sums[t][1], sums[t][2], sums[t][3]};
                if (SHARES > 1) part = memory[(warp * 4 + share * TILES + t) * 32];
                Sum& sum = mine[t];
                if (warp == 0) sum[0] = part.x, sum[1] = part.y, sum[2] = part.z, sum[3] = part.w;
                else sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
            }
    }

    // factor · sum of a tile: the lane has frequency 4 tile + lane % 4, both parts, and two numbers r of a row, or one of two rows.
    static __device__ __forceinline__ void turn_back(const Sum& s, float (&to)[VALUES], int first, const unsigned char* factors, int tile) {
        const int at = (4 * tile + lane() % 4) * 8 + lane() / 4;
        if constexpr (TOGETHER == 1) {
            const float4 f = reinterpret_cast<const float4*>(factors)[at];
            to[first] = f.x * s[0] - f.y * s[1] + f.z * s[2] - f.w * s[3];
            to[first + 1] = f.x * s[1] + f.y * s[0] + f.z * s[3] + f.w * s[2];
        } else {
            const float2 f = reinterpret_cast<const float2*>(factors)[at];
            to[first] = f.x * s[0] - f.y * s[1], to[first + 1] = f.x * s[2] - f.y * s[3];
            to[first + 2] = f.x * s[1] + f.y * s[0], to[first + 3] = f.x * s[3] + f.y * s[2];
        }
    }

    // Of two lanes that differ in a bit each keeps the HALF of the numbers that it is to have, and gives the other away; a single
    // number they add up both.
    template <int HALF>
    static __device__ __forceinline__ void add_over_lanes(float (&all)[VALUES], int bit) {
        const bool upper = lane() & bit;
        if (HALF == 0) all[0] += __shfl_xor_sync(0xffffffffu, all[0], bit);
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const float low = all[i], high = all[i + HALF];
            all[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
        }
    }
};

}  // namespace sk
