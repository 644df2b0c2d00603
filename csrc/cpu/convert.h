// Storage types: bfloat16 and float16 in memory, float in the arithmetic.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/job.h"
#include "cpu/vec.h"

namespace sk {
namespace {

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

template <class To, class From>
SK_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

// One function for each storage type, so that no number is converted to another of them on its way.
template <class C>
SK_INLINE C widen(float a) {
    return static_cast<C>(a);
}
template <class C>
SK_INLINE C widen(double a) {
    return static_cast<C>(a);
}
template <class C>
SK_INLINE C widen(uint8_t a) {
    return a ? C(1) : C(0);
}
template <class C>
SK_INLINE C widen(Bf16 a) {
    return bit_cast<float>(static_cast<uint32_t>(a.bits) << 16);
}
template <class C>
SK_INLINE C widen(F16 a) {
    const uint32_t h = a.bits;
    // Exponent and mantissa moved into place, then 2^(127-15): this also normalises subnormal numbers.
    const uint32_t scaled = bit_cast<uint32_t>(bit_cast<float>((h & 0x7fffu) << 13) * 0x1p112f);
    const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return bit_cast<float>(scaled | special | (h & 0x8000u) << 16);
}

template <class E, class C>
struct Narrow {
    static SK_INLINE E from(C a) { return static_cast<E>(a); }
};
template <class C>
struct Narrow<Bf16, C> {
    static SK_INLINE Bf16 from(C a) {
        const uint32_t u = bit_cast<uint32_t>(static_cast<float>(a));
        // To nearest even; NaN stays NaN.  A choice of two numbers and not of two ways, so that loops become vectors.
        const uint32_t nan = (u >> 16) | 0x40u, rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        return {static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
    }
};
template <class C>
struct Narrow<F16, C> {
    static SK_INLINE F16 from(C a) {
        const uint32_t u = bit_cast<uint32_t>(static_cast<float>(a));
        const uint32_t sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
        uint32_t h;
        if (mag > 0x7f800000u) {
            h = 0x7e00u;
        } else if (mag >= 0x477ff000u) {  // rounds to 65536 or more
            h = 0x7c00u;
        } else if (mag < 0x38800000u) {  // below 2^-14: adding 0.5 lets the adder round at 2^-24
            h = bit_cast<uint32_t>(bit_cast<float>(mag) + 0.5f) - 0x3f000000u;
        } else {
            h = (mag + 0xfffu + ((mag >> 13) & 1u) - 0x38000000u) >> 13;
        }
        return {static_cast<uint16_t>(sign | h)};
    }
};

// Calls f(pointer of the storage type) for data of `dtype`.  C is double exactly when dtype is f64, except for dense
// targets, which may be of any type: `Any` adds those.
template <class C, bool Any = false, class Pointer, class F>
SK_INLINE void with_storage(Dtype dtype, Pointer* data, F&& f) {
    constexpr bool is_const = std::is_const<Pointer>::value;
    using std::conditional_t;
    if constexpr (Any || sizeof(C) == 4) {
        if (dtype == Dtype::f32) return f(reinterpret_cast<conditional_t<is_const, const float, float>*>(data));
        if (dtype == Dtype::bf16) return f(reinterpret_cast<conditional_t<is_const, const Bf16, Bf16>*>(data));
        if (dtype == Dtype::f16) return f(reinterpret_cast<conditional_t<is_const, const F16, F16>*>(data));
    }
    if constexpr (Any || sizeof(C) == 8)
        if (dtype == Dtype::f64) return f(reinterpret_cast<conditional_t<is_const, const double, double>*>(data));
    if constexpr (Any)
        if (dtype == Dtype::u8) return f(reinterpret_cast<conditional_t<is_const, const uint8_t, uint8_t>*>(data));
}

}  // namespace
}  // namespace sk
