// Vectors of SK_VEC_BYTES bytes with the compiler's vector extensions, and exp / log on them.
//
// The same source makes every instruction set: a translation unit sets SK_VEC_BYTES and SK_REGISTERS and is compiled
// with the flags of its ISA.  Everything is in an anonymous namespace, so that the linker can never take a function
// compiled for a newer ISA in place of the portable one.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sk {
namespace {

typedef float F32V __attribute__((vector_size(SK_VEC_BYTES)));
typedef double F64V __attribute__((vector_size(SK_VEC_BYTES)));
typedef int32_t I32V __attribute__((vector_size(SK_VEC_BYTES)));
typedef int64_t I64V __attribute__((vector_size(SK_VEC_BYTES)));

#define SK_INLINE inline __attribute__((always_inline))

template <class C>
struct Simd;

template <>
struct Simd<float> {
    using S = float;
    using V = F32V;
    using I = I32V;
    using Int = int32_t;
    static constexpr int kLanes = SK_VEC_BYTES / 4;
    static constexpr int kMantissa = 23, kBias = 127;
    static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    static constexpr float kExpMin = -87.0f;      // exp(kExpMin) is still a normal number
    static constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440e-4f;
};

template <>
struct Simd<double> {
    using S = double;
    using V = F64V;
    using I = I64V;
    using Int = int64_t;
    static constexpr int kLanes = SK_VEC_BYTES / 8;
    static constexpr int kMantissa = 52, kBias = 1023;
    static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double kExpMin = -708.0;
    static constexpr double kLn2Hi = 6.93145751953125e-1, kLn2Lo = 1.42860682030941723212e-6;
};

template <class V, class S>
SK_INLINE V load(const S* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}

template <class V, class S>
SK_INLINE void store(S* p, V v) {
    __builtin_memcpy(p, &v, sizeof(V));
}

// Copies `count` elements past the caches where the CPU can; stream_done() before anybody reads them.
template <class S>
SK_INLINE void stream(S* to, const S* from, int64_t count) {
#if defined(__SSE2__)
    constexpr int64_t kStep = 16 / sizeof(S);
    while (count > 0 && reinterpret_cast<uintptr_t>(to) % 16) *to++ = *from++, --count;
#if defined(__AVX__)
    if (count >= kStep && reinterpret_cast<uintptr_t>(to) % 32) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        to += kStep, from += kStep, count -= kStep;
    }
    for (; count >= 2 * kStep; to += 2 * kStep, from += 2 * kStep, count -= 2 * kStep)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
    for (; count >= kStep; to += kStep, from += kStep, count -= kStep)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
    for (; count > 0; --count) *to++ = *from++;
}

SK_INLINE void stream_done() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// a in every lane.  a - 0 is a for every a, also -0 and NaN, so nothing is computed; 0 + a would be an addition.
template <class V, class S>
SK_INLINE V broadcast(S a) {
    return a - V{};
}

template <class C>
struct VecMath : Simd<C> {
    using V = typename Simd<C>::V;
    using I = typename Simd<C>::I;
    using Int = typename Simd<C>::Int;
    using Simd<C>::kMantissa;
    using Simd<C>::kBias;

    static SK_INLINE V splat(double a) { return broadcast<V>(static_cast<C>(a)); }
    static SK_INLINE V lt_select(V a, V b, V yes, V no) { return a < b ? yes : no; }
    static SK_INLINE V abs(V a) {
        constexpr Int mask = static_cast<Int>(~(Int{1} << (sizeof(C) * 8 - 1)));
        return (V)((I)a & mask);
    }

    // exp(x) for x <= 0, relative error about 1 ulp; 0 below kExpMin; NaN stays NaN
    static SK_INLINE V exp_neg(V x) {
        const V low = splat(Simd<C>::kExpMin);
        const V c = x < low ? low : x;
        const V shifted = c * static_cast<C>(1.4426950408889634074) + Simd<C>::kRound;
        const V n = shifted - Simd<C>::kRound;
        V r = c - n * Simd<C>::kLn2Hi;
        r = r - n * Simd<C>::kLn2Lo;
        // The whole number n sits in the low bits of `shifted`: move it into the exponent of 2^n.
        const V scale = (V)(((I)shifted + kBias) << kMantissa);
        return x < low ? V{} : exp_poly(r) * scale;
    }

    // log(x) for normal x > 0 (and x = 0: -inf, NaN stays NaN, inf stays inf)
    static SK_INLINE V log(V x) {
        V m;
        const V e = split(x, m);
        const V out = log_mantissa(m - static_cast<C>(1), e);
        const V odd = x == static_cast<C>(0) ? splat(-__builtin_inf()) : x;
        return (x > static_cast<C>(0)) & (x < static_cast<C>(__builtin_inf())) ? out : odd;
    }

    // log(1 + x) for x > -1, precise near 0; inf and NaN stay
    static SK_INLINE V log1p(V x) {
        const V u = x + static_cast<C>(1);
        V m;
        const V e = split(u, m);
        // What was lost in rounding 1 + x, on the scale of the mantissa: 2^-e = m / u
        const V lost = x - (u - static_cast<C>(1));
        const V out = log_mantissa((m - static_cast<C>(1)) + lost * (m / u), e);
        return u < static_cast<C>(__builtin_inf()) ? out : x;
    }

  private:
    // x = m 2^e with m in [sqrt(1/2), sqrt(2))
    static SK_INLINE V split(V x, V& m) {
        constexpr Int mantissa = (Int{1} << kMantissa) - 1;
        // sqrt(1/2) as an integer offset: the carry decides which side of sqrt(2) m falls on
        constexpr Int half = sizeof(C) == 4 ? Int{0x3f3504f3} : static_cast<Int>(0x3fe6a09e667f3bcdLL);
        const I shifted = (I)x - half;
        const I e = shifted >> kMantissa;
        m = (V)((shifted & mantissa) + half);
        return __builtin_convertvector(e, V);
    }
    static SK_INLINE V exp_poly(V r);
    static SK_INLINE V log_mantissa(V f, V e);
};

// exp(r) on |r| <= ln(2)/2
template <>
SK_INLINE F32V VecMath<float>::exp_poly(F32V r) {
    F32V p = r * 1.98756896e-4f + 1.39819994e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 0.5f;
    return (p * (r * r) + r) + 1.0f;
}

template <>
SK_INLINE F64V VecMath<double>::exp_poly(F64V r) {
    // Taylor to r^13: 4e-18 at ln(2)/2
    F64V p = r * 1.6059043836821614599e-10 + 2.0876756987868098979e-9;
    p = p * r + 2.5052108385441718775e-8;
    p = p * r + 2.7557319223985890653e-7;
    p = p * r + 2.7557319223985892511e-6;
    p = p * r + 2.4801587301587301566e-5;
    p = p * r + 1.9841269841269841253e-4;
    p = p * r + 1.3888888888888889419e-3;
    p = p * r + 8.3333333333333332177e-3;
    p = p * r + 4.1666666666666664354e-2;
    p = p * r + 1.6666666666666665741e-1;
    p = p * r + 0.5;
    return (p * (r * r) + r) + 1.0;
}

// log((1 + f) 2^e) by the atanh series: s = f/(2+f), log(1+f) = 2s + 2s^3/3 + 2s^5/5 + ...; |s| <= 0.1716
template <>
SK_INLINE F32V VecMath<float>::log_mantissa(F32V f, F32V e) {
    const F32V s = f / (f + 2.0f);
    const F32V z = s * s;
    F32V p = z * 0.2222222222f + 0.2857142857f;
    p = p * z + 0.4f;
    p = p * z + 0.6666666667f;
    // 2s = f - s f keeps the leading term exact
    const F32V h = 0.5f * f * f;
    const F32V tail = s * (h + z * p) - h;
    return e * Simd<float>::kLn2Hi + (f + (tail + e * Simd<float>::kLn2Lo));
}

template <>
SK_INLINE F64V VecMath<double>::log_mantissa(F64V f, F64V e) {
    const F64V s = f / (f + 2.0);
    const F64V z = s * s;
    F64V p = z * 0.10526315789473684 + 0.11764705882352941;
    p = p * z + 0.13333333333333333;
    p = p * z + 0.15384615384615385;
    p = p * z + 0.18181818181818182;
    p = p * z + 0.22222222222222222;
    p = p * z + 0.28571428571428571;
    p = p * z + 0.4;
    p = p * z + 0.66666666666666667;
    const F64V h = 0.5 * f * f;
    const F64V tail = s * (h + z * p) - h;
    return e * Simd<double>::kLn2Hi + (f + (tail + e * Simd<double>::kLn2Lo));
}

}  // namespace
}  // namespace sk
