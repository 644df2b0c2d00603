// z -> ∂loss/∂z in the registers of a warp, and the loss of its rows.
//
// A warp has ROW_TILES times 16 rows and 8 SUMS labels. Its lane has of tile m, sum n, number i: row 16 m + 8 (i / 2) + lane
// / 4, label 8 n + 2 (lane % 4) + i % 2. Lane r has the positives of row r as bits.
#pragma once

#include "core/losses.h"
#include "device_math.cuh"
#include "targets.cuh"

namespace sk {
namespace {  // as what it has of core/losses.h

constexpr float NEUTRAL = -1e30f;  // a logit with value 0 and gradient 0 where the target is 0

struct LossArgs {
    LossKind kind;
    int plain;  // BCE of label sets, without weights and smoothing
    float label_smoothing;
    Focal<DeviceMath> focal{LossParams{}};
    Asymmetric<DeviceMath> asymmetric{LossParams{}};
    TargetArgs targets;
    const float* label_weight;  // [labels] or null
    const float* pos_weight;    // [labels] or null
};

// The rows of a lane: its part of their losses.
template <int ROW_TILES>
struct RowLosses {
    static constexpr int ROWS = 2 * ROW_TILES;
    float sum[ROWS] = {};
    float product[ROWS] = {};  // Π(1 + e) - 1 of the logarithms that are still to be taken: small e are not lost
    int factors = 0;

    __device__ __forceinline__ void take_logarithms() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] += log1pf(product[r]), product[r] = 0;
        factors = 0;
    }
};

// BCE of label sets: softplus(z) = max(z, 0) + log(1 + e) with e = exp(-|z|), one logarithm for many labels. At a positive
// label it is that of -z, and so is the gradient but for its sign.
template <int ROW_TILES, int SUMS>
__device__ __forceinline__ void plain_bce(Sum (&z)[ROW_TILES][SUMS], uint32_t bits, RowLosses<ROW_TILES>& losses) {
    const bool any = __any_sync(0xffffffffu, bits != 0);
    const auto turn = [&] {  // the sign of every positive
#pragma unroll
        for (int r = 0; r < 2 * ROW_TILES; ++r) {
            const uint32_t word = __shfl_sync(0xffffffffu, bits, 8 * r + lane() / 4) >> lane() % 4 * 2;
#pragma unroll
            for (int j = 0; j < 2 * SUMS; ++j) {
                float& v = z[r / 2][j / 2][r % 2 * 2 + j % 2];
                v = __int_as_float(__float_as_int(v) ^ (word << (31 - j / 2 * 8 - j % 2) & 0x80000000u));
            }
        }
    };
    if (any) turn();
#pragma unroll
    for (int r = 0; r < 2 * ROW_TILES; ++r) {
#pragma unroll
        for (int j = 0; j < 2 * SUMS; ++j) {
            float& v = z[r / 2][j / 2][r % 2 * 2 + j % 2];
            const float e = exp2_fast(-LOG2E * fabsf(v));
            losses.sum[r] += fmaxf(v, 0.0f);
            losses.product[r] = fmaf(losses.product[r], e, losses.product[r] + e);
            v = (v < 0 ? e : 1.0f) * reciprocal_fast(1 + e);
        }
    }
    if (any) turn();
    losses.factors += 2 * SUMS;
    if (losses.factors > 96) losses.take_logarithms();  // each factor is at most 2
}

// Loss and derivative of one element.
template <class Loss>
__device__ __forceinline__ void element(const Loss& loss, float z, float y, float pos_weight, float& f, float& g) {
    float fn, gn, fp, gp;
    loss.both(z, fn, gn, fp, gp);
    const float up = y * pos_weight, down = 1 - y;
    // a target at the end of its range must not see the other term: 0 * inf at an infinite logit
    f = (up == 0 ? 0.0f : up * fp) + (down == 0 ? 0.0f : down * fn);
    g = up * gp + down * gn;
}

// Every loss, any target. The sums take turns in the same registers: one copy of the code serves all.
template <int ROW_TILES, int SUMS>
__device__ __forceinline__ void any_loss(const LossArgs& p, Sum (&z)[ROW_TILES][SUMS], uint32_t bits, int row0,
                                         int first, int batch, int labels, RowLosses<ROW_TILES>& losses) {
#pragma unroll 1
    for (int at = 0; at < ROW_TILES * SUMS; ++at) {
        const int m = at / SUMS, column = at % SUMS * 8 + lane() % 4 * 2;
        Sum now;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = 16 * m + i / 2 * 8 + lane() / 4, row = row0 + r, label = first + column + i % 2;
            const uint32_t word = __shfl_sync(0xffffffffu, bits, r);
            float y = static_cast<float>(word >> (column + i % 2) & 1u), f = 0, g = 0;
            if (row < batch && label < labels) {
                if (p.targets.dense) y = p.targets.number(row * p.targets.dense_stride + label);
                y = y * (1 - p.label_smoothing) + p.label_smoothing / 2;
                const float up = p.pos_weight ? p.pos_weight[label] : 1.0f;
                const float logit = z[0][0][i];
                if (p.kind == LossKind::bce) element(Bce<DeviceMath>(LossParams{}), logit, y, up, f, g);
                else if (p.kind == LossKind::focal) element(p.focal, logit, y, up, f, g);
                else element(p.asymmetric, logit, y, up, f, g);
                const float weight = p.label_weight ? p.label_weight[label] : 1.0f;
                f *= weight, g *= weight;
            }
            now[i] = g;
#pragma unroll
            for (int to = 0; to < ROW_TILES; ++to) losses.sum[2 * to + i / 2] += to == m ? f : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < ROW_TILES * SUMS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                constexpr int last = ROW_TILES * SUMS - 1;
                z[j / SUMS][j % SUMS][i] = j == last ? now[i] : z[(j + 1) / SUMS % ROW_TILES][(j + 1) % SUMS][i];
            }
    }
}

}  // namespace
}  // namespace sk
