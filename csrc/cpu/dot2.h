// bfloat16 products without widening: 32 bits hold a pair of numbers, and one instruction adds both products of a pair
// to a float (vdpbf16ps of AVX512-BF16).  A translation unit that sets SK_DOT2 does the three products over the slack
// columns that way; U, V, the logits and the loss stay float.
//
//     logits       pairs along the slack columns     weight [T][s/2]    x [P][s/2][PW]
//     grad x       pairs along the labels            weight [T/2][s]    g [T/2][PW]
//     grad weight  pairs along the rows              g [P][T][PW/2]     x [SP][P*PW/2][PW]
#pragma once

#include "cpu/convert.h"
#if defined(SK_DOT2) && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace sk {
namespace {

using Pair = uint32_t;

typedef Pair PairV __attribute__((vector_size(SK_VEC_BYTES)));
typedef uint16_t HalfV __attribute__((vector_size(SK_VEC_BYTES / 2)));

#if defined(SK_DOT2)
constexpr bool kDot2 = true;
#else
constexpr bool kDot2 = false;
#endif

SK_INLINE Pair pair_of(Bf16 low, Bf16 high) { return low.bits | static_cast<Pair>(high.bits) << 16; }

// acc + low(a) low(b) + high(a) high(b), in every lane
SK_INLINE Simd<float>::V dot2(Simd<float>::V acc, PairV a, PairV b) {
    using V = Simd<float>::V;
#if defined(SK_DOT2) && defined(__AVX512BF16__)
    return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (V)(a << 16) * (V)(b << 16);
    return acc + (V)(a & 0xffff0000u) * (V)(b & 0xffff0000u);
#endif
}

// x rounded to bfloat16, to nearest even; NaN stays NaN.
SK_INLINE HalfV rounded(Simd<float>::V x) {
#if defined(SK_DOT2) && defined(__AVX512BF16__)
    return (HalfV)_mm512_cvtneps_pbh((__m512)x);
#else
    const PairV u = (PairV)x;
    const PairV up = u + 0x7fffu + ((u >> 16) & 1u);
    const PairV nan = (PairV)(x != x);
    return __builtin_convertvector(((nan & (u | 0x400000u)) | (~nan & up)) >> 16, HalfV);
#endif
}

// Pairs of two rows: [count][PW] floats → [(count + 1) / 2][PW]
SK_INLINE void pair_rows(const float* g, int64_t count, Pair* out) {
    using V = Simd<float>::V;
    constexpr int L = Simd<float>::kLanes, PW = 2 * L;
    for (int64_t t = 0; t < count; t += 2)
        for (int v = 0; v < PW; v += L) {
            const V first = load<V>(g + t * PW + v), second = t + 1 < count ? load<V>(g + (t + 1) * PW + v) : V{};
            const PairV low = __builtin_convertvector(rounded(first), PairV);
            store(out + t / 2 * PW + v, low | __builtin_convertvector(rounded(second), PairV) << 16);
        }
}

// Pairs of two lanes, times a scale per lane: [count][PW] floats → [count][PW / 2].
SK_INLINE void pair_lanes(const float* g, int64_t count, const float* scale, Pair* out) {
    using V = Simd<float>::V;
    constexpr int L = Simd<float>::kLanes, PW = 2 * L;
    uint16_t* to = reinterpret_cast<uint16_t*>(out);
    for (int64_t t = 0; t < count; ++t)
        for (int v = 0; v < PW; v += L) store(to + t * PW + v, rounded(load<V>(g + t * PW + v) * load<V>(scale + v)));
}

}  // namespace
}  // namespace sk
