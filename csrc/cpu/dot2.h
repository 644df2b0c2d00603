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

// a and b rounded, lane by lane in one vector of pairs.
SK_INLINE PairV pair_vectors(Simd<float>::V a, Simd<float>::V b) {
#if defined(SK_DOT2) && defined(__AVX512BF16__)
    typedef uint16_t Words __attribute__((vector_size(SK_VEC_BYTES)));
    constexpr int L = Simd<float>::kLanes;
    Words lanes;
    SK_EACH(i, 2 * L) lanes[i] = static_cast<uint16_t>(i / 2 + i % 2 * L);
    return (PairV)_mm512_permutexvar_epi16((__m512i)lanes, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
    return __builtin_convertvector(rounded(a), PairV) | __builtin_convertvector(rounded(b), PairV) << 16;
#endif
}

// Lanes 0 and 1, 2 and 3, ... of a, and then of b, rounded.
SK_INLINE PairV pair_neighbours(Simd<float>::V a, Simd<float>::V b) {
#if defined(SK_DOT2) && defined(__AVX512BF16__)
    return (PairV)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    HalfV parts[2] = {rounded(a), rounded(b)};
    return load<PairV>(parts);
#endif
}

// The gradient g [count][PW] of a panel in the pairs that its products multiply, in one pass over it.  Either of them may
// be null.
//     by_labels [(count + 1) / 2][PW]    two labels
//     by_rows   [count][PW / 2]          two rows, times a scale per row
SK_INLINE void pair_gradient(const float* g, int64_t count, const float* scale, Pair* by_labels, Pair* by_rows) {
    using V = Simd<float>::V;
    constexpr int L = Simd<float>::kLanes, PW = 2 * L;
    const V scales[2] = {load<V>(scale), load<V>(scale + L)};
    for (int64_t t = 0; t < count; t += 2) {
        const bool two = t + 1 < count;
        V rows[2][2]{};
        SK_EACH(v, 2) rows[0][v] = load<V>(g + t * PW + v * L);
        if (two) SK_EACH(v, 2) rows[1][v] = load<V>(g + (t + 1) * PW + v * L);
        if (by_labels) SK_EACH(v, 2) store(by_labels + t / 2 * PW + v * L, pair_vectors(rows[0][v], rows[1][v]));
        if (!by_rows) continue;
        store(by_rows + t * L, pair_neighbours(rows[0][0] * scales[0], rows[0][1] * scales[1]));
        if (two) store(by_rows + (t + 1) * L, pair_neighbours(rows[1][0] * scales[0], rows[1][1] * scales[1]));
    }
}

}  // namespace
}  // namespace sk
