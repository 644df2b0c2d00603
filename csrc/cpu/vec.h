// Vectors of SK_VEC_BYTES bytes with the compiler's vector extensions, and exp / log on them.
//
// The same source makes every instruction set: a translation unit sets SK_VEC_BYTES and SK_REGISTERS and is compiled
// with the flags of its ISA.  Everything is in an anonymous namespace, so that the linker can never take a function
// compiled for a newer ISA in place of the portable one.
#pragma once

#include <cstdint>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sk {
namespace {

#define SK_INLINE inline __attribute__((always_inline))

template <class C>
struct Format;

template <>
struct Format<float> {
    using Int = int32_t;
    static constexpr int kMantissa = 23, kBias = 127;
    static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    static constexpr float kExpMin = -87.33654f;  // exp(kExpMin) is about the least normal number
    static constexpr float kExpZero = -88.029694f;  // -127 ln 2
    static constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440e-4f;
};

template <>
struct Format<double> {
    using Int = int64_t;
    static constexpr int kMantissa = 52, kBias = 1023;
    static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr double kExpMin = -708.39641853226;
    static constexpr double kLn2Hi = 6.93145751953125e-1, kLn2Lo = 1.42860682030941723212e-6;
};

template <class C>
struct Simd {
    typedef C V __attribute__((vector_size(SK_VEC_BYTES)));
    typedef typename Format<C>::Int I __attribute__((vector_size(SK_VEC_BYTES)));
    static constexpr int kLanes = SK_VEC_BYTES / static_cast<int>(sizeof(C));
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

// a in every lane.  a - 0 is a for every a, also -0 and NaN, so nothing is computed; 0 + a would be an addition.
template <class V, class S>
SK_INLINE V broadcast(S a) {
    return a - V{};
}

// The lanes At of a, followed by b.
template <class V, class I, int... At>
SK_INLINE V shuffle(V a, V b, std::integer_sequence<int, At...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, At...);
#else
    return __builtin_shuffle(a, b, I{At...});
#endif
}

// f(i) for i = 0 ... N-1, written out
#define SK_EACH(i, N) _Pragma("GCC unroll 32") for (int i = 0; i < N; ++i)

// The greater of a and b, or b where one of them is NaN: one instruction, but not every compiler sees that.
template <class V>
SK_INLINE V greater(V a, V b) {
    return a > b ? a : b;
}
#if SK_VEC_BYTES == 64 && defined(__AVX512F__)
SK_INLINE Simd<float>::V greater(Simd<float>::V a, Simd<float>::V b) {
    return (Simd<float>::V)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
}
#elif SK_VEC_BYTES == 32 && defined(__AVX2__)
SK_INLINE Simd<float>::V greater(Simd<float>::V a, Simd<float>::V b) {
    return (Simd<float>::V)_mm256_max_ps((__m256)a, (__m256)b);
}
#endif

// table[index modulo lanes] in every lane, where that is one instruction: a table of as many floats as a vector has.
#if SK_VEC_BYTES == 64 && defined(__AVX512F__)
#define SK_LOOKUP 1
SK_INLINE Simd<float>::V lookup(Simd<float>::V table, Simd<float>::I index) {
    // With a mask, all ones: gcc takes what _mm512_permutexvar_ps is made of for uninitialised.
    return (Simd<float>::V)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)index, (__m512)table);
}
#elif SK_VEC_BYTES == 32 && defined(__AVX2__)
#define SK_LOOKUP 1
SK_INLINE Simd<float>::V lookup(Simd<float>::V table, Simd<float>::I index) {
    return (Simd<float>::V)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
}
#endif

template <class C>
struct VecMath : Simd<C> {
    using V = typename Simd<C>::V;
    using I = typename Simd<C>::I;
    using F = Format<C>;
    using Int = typename F::Int;

    static SK_INLINE V splat(double a) { return broadcast<V>(static_cast<C>(a)); }
    static SK_INLINE V lt_select(V a, V b, V yes, V no) { return a < b ? yes : no; }
    static SK_INLINE V abs(V a) {
        constexpr Int mask = static_cast<Int>(~(Int{1} << (sizeof(C) * 8 - 1)));
        return (V)((I)a & mask);
    }
    static SK_INLINE V minus_abs(V a) {
        constexpr Int sign = static_cast<Int>(Int{1} << (sizeof(C) * 8 - 1));
        return (V)((I)a | sign);
    }

    // exp(x) for x <= 0, relative error about 1 ulp; below kExpMin 0 or anything less than exp(kExpMin); NaN stays NaN
    static SK_INLINE V exp_neg(V x) {
        V one[1] = {x};
        exp_neg(one);
        return one[0];
    }

    // The same for N vectors in place, step by step: one exp is a chain of some fifteen operations that wait for each
    // other, and the processor does not look far enough ahead to find the next chain by itself.
    template <int N>
    static SK_INLINE void exp_neg(V (&x)[N]) {
        V steps[N];
        exp_begin(x, steps);
        exp_end(x, steps);
    }

    // The same in two halves, so that the first half of the next N vectors stands between them: the processor does not look
    // far enough ahead to begin those by itself.
    template <int N>
    static SK_INLINE void exp_begin([[maybe_unused]] V (&x)[N], [[maybe_unused]] V (&steps)[N]) {
#if defined(SK_LOOKUP)
        if constexpr (sizeof(C) == 4) reduce_by_table(x, steps);
#endif
    }
    template <int N>
    static SK_INLINE void exp_end(V (&x)[N], [[maybe_unused]] const V (&steps)[N]) {
#if defined(SK_LOOKUP)
        if constexpr (sizeof(C) == 4) return exp_by_table(x, steps);
#endif
        const V low = splat(F::kExpMin);
        I below[N];
        SK_EACH(i, N) below[i] = x[i] < low;
        SK_EACH(i, N) x[i] = below[i] ? low : x[i];
        exp_by_polynomial(x);
        SK_EACH(i, N) x[i] = below[i] ? V{} : x[i];
    }

    // log(x) for normal x > 0 (and x = 0: -inf, NaN stays NaN, inf stays inf)
    static SK_INLINE V log(V x) {
        V m;
        const V e = split(x, m);
        const V out = log_mantissa(m - static_cast<C>(1), e);
        const V odd = x == static_cast<C>(0) ? splat(-__builtin_inf()) : x;
        return ((x > static_cast<C>(0)) & (x < static_cast<C>(__builtin_inf()))) ? out : odd;
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
        constexpr Int mantissa = (Int{1} << F::kMantissa) - 1;
        // sqrt(1/2) as an integer offset: the carry decides which side of sqrt(2) m falls on
        constexpr Int half = sizeof(C) == 4 ? Int{0x3f3504f3} : static_cast<Int>(0x3fe6a09e667f3bcdLL);
        const I shifted = (I)x - half;
        const I e = shifted >> F::kMantissa;
        m = (V)((shifted & mantissa) + half);
        return __builtin_convertvector(e, V);
    }

    // (...(c[0] x + c[1]) x + ...) x + c[Terms-1]
    template <int N, int Terms>
    static SK_INLINE void horner(const V (&x)[N], const C (&c)[Terms], V (&p)[N]) {
        SK_EACH(i, N) p[i] = x[i] * c[0] + c[1];
        SK_EACH(term, Terms - 2)
            SK_EACH(i, N) p[i] = p[i] * x[i] + c[term + 2];
    }

#if defined(SK_LOOKUP)
    // 2^(steps / L) from a table leaves so small an r that a cubic is right to 3e-8: half of what the polynomial costs.
    // x becomes r; the lowest bits of `steps` as an integer are the whole number of steps.
    // ln 2 in one number is right to 3e-9, a tenth of what x itself may be off by.
    template <int N>
    static SK_INLINE void reduce_by_table(V (&x)[N], V (&steps)[N]) {
        constexpr int L = Simd<C>::kLanes;
        V whole[N];
        SK_EACH(i, N) x[i] = greater(splat(F::kExpZero), x[i]);
        SK_EACH(i, N) steps[i] = x[i] * static_cast<C>(1.4426950408889634074 * L) + F::kRound;
        SK_EACH(i, N) whole[i] = steps[i] - F::kRound;
        SK_EACH(i, N) x[i] = x[i] - whole[i] * static_cast<C>(0.69314718055994530942 / L);
    }

    // r becomes exp(x).  At kExpZero the exponent that `steps` makes and the table's entry cancel: exactly 0.
    template <int N>
    static SK_INLINE void exp_by_table(V (&r)[N], const V (&steps)[N]) {
        constexpr int L = Simd<C>::kLanes, shift = L == 16 ? 19 : 20;
        // 2^(i / 16), less what shifting i into the exponent leaves in the mantissa
        constexpr Int sixteenths[] = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                                      0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                                      0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
        constexpr C square = L == 16 ? 0.50001619f : 0.50006475f, cube = L == 16 ? 0.16666872f : 0.16667570f;
        I entries;
        SK_EACH(i, L) entries[i] = sixteenths[i * 16 / L];
        V p[N], power[N];
        SK_EACH(i, N) p[i] = r[i] * cube + square;
        SK_EACH(i, N) p[i] = p[i] * (r[i] * r[i]) + r[i];
        SK_EACH(i, N) power[i] = (V)((I)lookup((V)entries, (I)steps[i]) + ((I)steps[i] << shift));
        SK_EACH(i, N) r[i] = power[i] * p[i] + power[i];
    }
#endif

    template <int N>
    static SK_INLINE void exp_by_polynomial(V (&x)[N]) {
        // x = whole ln 2 + r with |r| <= ln(2) / 2: x becomes r, and the lowest bits of `shifted` as an integer are `whole`.
        V shifted[N], p[N];
        SK_EACH(i, N) shifted[i] = x[i] * static_cast<C>(1.4426950408889634074) + F::kRound;
        SK_EACH(i, N) p[i] = shifted[i] - F::kRound;
        SK_EACH(i, N) x[i] = x[i] - p[i] * F::kLn2Hi;
        SK_EACH(i, N) x[i] = x[i] - p[i] * F::kLn2Lo;
        exp_poly(x, p);
        // The whole number sits in the low bits of `shifted`: move it into the exponent of a power of two.
        SK_EACH(i, N) x[i] = p[i] * (V)(((I)shifted[i] + F::kBias) << F::kMantissa);
    }

    // exp(r) on |r| <= ln(2)/2
    template <int N>
    static SK_INLINE void exp_poly(const V (&r)[N], V (&p)[N]) {
        if constexpr (sizeof(C) == 4) {
            constexpr C c[] = {1.98756896e-4f, 1.39819994e-3f, 8.33345205e-3f, 4.16657962e-2f, 1.66666657e-1f, 0.5f};
            horner(r, c, p);
        } else {
            // Taylor to r^13: 4e-18 at ln(2)/2
            constexpr C c[] = {1.6059043836821614599e-10, 2.0876756987868098979e-9, 2.5052108385441718775e-8,
                               2.7557319223985890653e-7,  2.7557319223985892511e-6, 2.4801587301587301566e-5,
                               1.9841269841269841253e-4,  1.3888888888888889419e-3, 8.3333333333333332177e-3,
                               4.1666666666666664354e-2,  1.6666666666666665741e-1, 0.5};
            horner(r, c, p);
        }
        SK_EACH(i, N) p[i] = (p[i] * (r[i] * r[i]) + r[i]) + static_cast<C>(1);
    }

    // log((1 + f) 2^e) by the atanh series: s = f/(2+f), log(1+f) = 2s + 2s^3/3 + 2s^5/5 + ...; |s| <= 0.1716
    static SK_INLINE V log_mantissa(V f, V e) {
        const V s = f / (f + static_cast<C>(2));
        const V z[1] = {s * s};
        V p[1];
        if constexpr (sizeof(C) == 4) {
            constexpr C c[] = {0.2222222222f, 0.2857142857f, 0.4f, 0.6666666667f};
            horner(z, c, p);
        } else {
            constexpr C c[] = {0.10526315789473684, 0.11764705882352941, 0.13333333333333333,
                               0.15384615384615385, 0.18181818181818182, 0.22222222222222222,
                               0.28571428571428571, 0.4,                 0.66666666666666667};
            horner(z, c, p);
        }
        // 2s = f - s f keeps the leading term exact
        const V h = static_cast<C>(0.5) * f * f;
        const V tail = s * (h + z[0] * p[0]) - h;
        return e * F::kLn2Hi + (f + (tail + e * F::kLn2Lo));
    }
};

}  // namespace
}  // namespace sk
