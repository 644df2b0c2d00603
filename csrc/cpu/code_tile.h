// The code columns of a tile (sigkernels/codes.py has the definition): label a c + b has the row
//
//     (-1)^(Q_a(t) + <b, t>) / sqrt(c),    t = 0 ... c - 1
//
// so a block of c labels is one fast Walsh-Hadamard transform of the features, signs flipped by Q_a.  A tile is a power of
// two of labels and begins at a multiple of it, so it is either some whole blocks, or T labels of one block that share the
// high bits of b: with t = t_high T + t_low their logits are the T-point transform of
//
//     sum over t_high of (-1)^(Q_a(t) + <b_high, t_high>) x(t)
//
// and what the gradient adds to the features is the transpose, which is the same transform.  1/sqrt(c), a power of two, is
// applied to the features when they are packed and to their gradient when it is added up.
#pragma once

#include "cpu/memory.h"

namespace sk {
namespace {

// The unscaled transform of R values, each a vector of lanes.
template <int R, int Half = 1, class V>
SK_INLINE void butterflies(V (&a)[R]) {
    SK_EACH(i, R / 2) {
        const int low = i % Half + i / Half * 2 * Half;
        const V x = a[low], y = a[low + Half];
        a[low] = x + y, a[low + Half] = x - y;
    }
    if constexpr (2 * Half < R) butterflies<R, 2 * Half>(a);
}

template <class C>
struct CodeTile {
    using V = typename Simd<C>::V;
    using I = typename Simd<C>::I;
    using Int = typename Format<C>::Int;
    static constexpr int L = Simd<C>::kLanes, PW = kPanel<C>;

    const Job& job;
    const Layout<C>& layout;
    const Shared<C>& shared;
    const Local<C>& local;
    const Sums<C>& sums;
    // of the current tile
    int64_t skipped = 0;  // labels between the multiple of T and the tile's first label
    int64_t first = 0, last = 0;  // transforms of the tile that have a label

    void enter(int64_t at, int64_t count) {
        const int64_t label = job.label_start + at, size = layout.code_points, c = layout.codes;
        skipped = label % layout.tile;
        first = skipped / size, last = (skipped + count + size - 1) / size;
        for (int64_t i = first; i < last; ++i) set_signs(label - skipped + i * size, local.code_signs + i * c);
    }

    // The sign of each feature for the labels from `label` on, as the bit that flips it.
    void set_signs(int64_t label, Int* signs) const {
        constexpr int kTop = sizeof(C) * 8 - 1;
        constexpr Int kSign = static_cast<Int>(Int{1} << (kTop - 1)) * -2;
        const int64_t c = layout.codes, size = layout.code_points, high = label % c / size;
        const uint8_t* bits = job.code_bits + (label / c - job.label_start / c) * (c / 8);
        for (int64_t t = 0; t < c; t += 8) {  // 8 divides the size, so that these share t_high
            const bool odd = __builtin_parityll(static_cast<uint64_t>(high & (t / size)));
            const auto flips = static_cast<std::make_unsigned_t<Int>>(bits[t / 8] ^ (odd ? 255 : 0));
            for (int j = 0; j < 8; ++j) signs[t + j] = static_cast<Int>(flips << (kTop - j)) & kSign;
        }
    }

    static SK_INLINE V flipped(V x, Int sign) { return (V)((I)x ^ (sign - I{})); }

    // A pointer of which the compiler knows nothing: what lies at fixed distances from it is addressed by them, and not by
    // a pointer of its own for every row, for which there are not enough registers.
    template <class T>
    static SK_INLINE T* anchored(T* p) {
        asm("" : "+r"(p));
        return p;
    }

    // N values, `Step` apart, from value t on
    template <int N, int Step, class Load, class Store>
    SK_INLINE void pass(int t, int v, Load&& load_values, Store&& store_values) const {
        V a[N];
        load_values(a, t, v, Count<Step>{});
        butterflies(a);
        store_values(a, t, v, Count<Step>{});
    }

    // From and to rows of PW numbers
    template <class T>
    SK_INLINE auto load_from(T* rows) const {
        return [rows](auto& a, int t, int v, auto step) __attribute__((always_inline)) {
            const C* at = anchored(rows + t * PW + v * L);
            SK_EACH(i, kCount<decltype(a)>) a[i] = load<V>(at + i * decltype(step)::value * PW);
        };
    }
    SK_INLINE auto store_to(C* rows) const {
        return [rows](auto& a, int t, int v, auto step) __attribute__((always_inline)) {
            C* at = anchored(rows + t * PW + v * L);
            SK_EACH(i, kCount<decltype(a)>) store(at + i * decltype(step)::value * PW, a[i]);
        };
    }
    template <class A>
    static constexpr int kCount = static_cast<int>(sizeof(std::remove_reference_t<A>) / sizeof(V));

    // R1 R2 points in two passes.  Forward the low bits come first and back they come last: so the features and their
    // gradient, which are farther away than the tile, are walked through in order.
    template <int R1, int R2, bool Forward, class Load, class Store>
    SK_INLINE void two_passes(C* work, Load&& load_values, Store&& store_values) const {
        const auto low = [&](auto&& from, auto&& to) __attribute__((always_inline)) {
            for (int i = 0; i < R1; ++i)
                for (int v = 0; v < kVectors; ++v) pass<R2, 1>(i * R2, v, from, to);
        };
        const auto high = [&](auto&& from, auto&& to) __attribute__((always_inline)) {
            for (int j = 0; j < R2; ++j)
                for (int v = 0; v < kVectors; ++v) pass<R1, R2>(j, v, from, to);
        };
        if constexpr (Forward) {
            low(load_values, store_to(work));
            high(load_from(work), store_values);
        } else {
            high(load_values, store_to(work));
            low(load_from(work), store_values);
        }
    }

    template <bool Forward, class Load, class Store>
    SK_INLINE void transform(C* work, Load&& load_values, Store&& store_values) const {
        if (layout.code_points == 256) return two_passes<16, 16, Forward>(work, load_values, store_values);
        if (layout.code_points == 128) return two_passes<16, 8, Forward>(work, load_values, store_values);
        if (layout.code_points == 64) return two_passes<8, 8, Forward>(work, load_values, store_values);
        for (int v = 0; v < kVectors; ++v) pass<16, 1>(0, v, load_values, store_values);
    }

    // The codes' part of the logits of a panel, [count][PW]: in z itself, or where the tile does not begin at a multiple
    // of T in a buffer of this thread.
    const C* forward(C* z, int64_t panel) const {
        const int64_t size = layout.code_points, parts = layout.codes / size;
        const C* x = shared.codes + panel * layout.codes * PW;
        C* out = skipped ? local.code_work : z;
        for (int64_t i = first; i < last; ++i) {
            const Int* signs = local.code_signs + i * layout.codes;
            C* to = out + i * size * PW;
            const auto load_flipped = [&](auto& a, int t, int v, auto step) __attribute__((always_inline)) {
                constexpr int kStep = decltype(step)::value;
                const C* at = anchored(x + t * PW + v * L);
                const Int* sign = anchored(signs + t);
                SK_EACH(j, kCount<decltype(a)>) a[j] = flipped(load<V>(at + j * kStep * PW), sign[j * kStep]);
                for (int64_t part = 1; part < parts; ++part) {
                    at = anchored(at + size * PW), sign = anchored(sign + size);
                    SK_EACH(j, kCount<decltype(a)>) a[j] += flipped(load<V>(at + j * kStep * PW), sign[j * kStep]);
                }
            };
            transform<true>(to, load_flipped, store_to(to));
        }
        return out + skipped * PW;
    }

    // Adds to the gradient of the features what g [count][PW] of a panel gives.
    void back(const C* g, int64_t count, int64_t panel) const {
        const int64_t size = layout.code_points, parts = layout.codes / size;
        C* work = local.code_work;
        C* out = sums.codes + panel * layout.codes * PW;
        const bool whole = skipped == first * size && skipped + count == last * size;
        if (!whole) {  // labels outside of the tile have no gradient
            const auto bytes = [](int64_t labels) { return static_cast<size_t>(labels * PW) * sizeof(C); };
            __builtin_memset(work + first * size * PW, 0, bytes(skipped - first * size));
            __builtin_memcpy(work + skipped * PW, g, bytes(count));
            __builtin_memset(work + (skipped + count) * PW, 0, bytes(last * size - skipped - count));
        }
        for (int64_t i = first; i < last; ++i) {
            const Int* signs = local.code_signs + i * layout.codes;
            C* here = work + i * size * PW;
            const C* from = whole ? g + (i - first) * size * PW : here;
            const auto add_flipped = [&](auto& a, int t, int v, auto step) __attribute__((always_inline)) {
                constexpr int kStep = decltype(step)::value;
                C* to = anchored(out + t * PW + v * L);
                const Int* sign = anchored(signs + t);
                for (int64_t part = 0; part < parts; ++part, to = anchored(to + size * PW), sign = anchored(sign + size))
                    SK_EACH(i, kCount<decltype(a)>) {
                        C* row = to + i * kStep * PW;
                        store(row, load<V>(row) + flipped(a[i], sign[i * kStep]));
                    }
            };
            transform<false>(here, load_from(from), add_flipped);
        }
    }
};

}  // namespace
}  // namespace sk
