// The one inner loop: a block of MR x NV vectors kept in registers.
//
//     acc[i][v] += sum_j  a[i * a_row + j * a_col] * b[j * b_stride + v * lanes]
//
// `a` is read by broadcast from wherever it lies (row-major weights need no packing), `b` is a packed panel.
#pragma once

#include "cpu/dot2.h"

namespace sk {
namespace {

#ifndef SK_PANEL_VECTORS
#define SK_PANEL_VECTORS 2
#endif
constexpr int kVectors = SK_PANEL_VECTORS;  // of a panel
constexpr int kPanelBytes = kVectors * SK_VEC_BYTES;

template <class C>
constexpr int kPanel = kVectors * Simd<C>::kLanes;  // lanes of a panel

// Height of a block of two vectors: with 16 registers as many accumulators as they hold beside two of b and one
// broadcast.  With 32 registers 16 accumulators are enough to keep the multipliers busy, and above ten rows the addresses
// of the rows no longer fit into the general registers, which costs more than the loads that a taller block saves.
constexpr int kHeight = SK_REGISTERS >= 32 ? 8 : 6;
// ... of a block of three, which needs fewer loads for as many multiplications ...
constexpr int kHeightOfThree = SK_REGISTERS >= 32 ? 8 : 4;
// ... and of a block as wide as a panel: of one vector as many rows as have addresses.
constexpr int kPanelHeight = kVectors == 2 ? kHeight : 10;

// Where a panel is one vector every multiplication would need a broadcast of its own, and loads would set the pace.  So two
// columns of the weight, side by side in memory, are one broadcast: a row of the batch takes two lanes then, and a panel
// two vectors (a doubled panel).
template <class C>
constexpr bool kTwoColumns = kVectors == 1 && sizeof(C) == 4;

template <class C>
struct Two {
    C low, high;
};

typedef int64_t Twos __attribute__((vector_size(SK_VEC_BYTES)));

// low, high, low, high, ...
template <class V>
SK_INLINE V broadcast(Two<float> a) {
    int64_t both;
    __builtin_memcpy(&both, &a, sizeof(both));
    return (V)(both - Twos{});
}

// Lanes of a and b in turn, from the first or the second half of each 16 bytes ...
template <bool Second, class C, int... At>
SK_INLINE typename Simd<C>::V interleaved(typename Simd<C>::V a, typename Simd<C>::V b, std::integer_sequence<int, At...>) {
    constexpr int Q = 16 / sizeof(C), L = Simd<C>::kLanes;
    return shuffle<typename Simd<C>::V, typename Simd<C>::I>(
        a, b, std::integer_sequence<int, (At % 2 * L + At / Q * Q + At % Q / 2 + Second * Q / 2)...>{});
}
// ... and back: the even, or the odd, lanes of a and b.
template <bool Odd, class C, int... At>
SK_INLINE typename Simd<C>::V every_other(typename Simd<C>::V a, typename Simd<C>::V b, std::integer_sequence<int, At...>) {
    constexpr int Q = 16 / sizeof(C), L = Simd<C>::kLanes;
    return shuffle<typename Simd<C>::V, typename Simd<C>::I>(
        a, b, std::integer_sequence<int, (At % Q / (Q / 2) * L + At / Q * Q + At % (Q / 2) * 2 + Odd)...>{});
}

template <class C>
constexpr auto kAllLanes = std::make_integer_sequence<int, Simd<C>::kLanes>{};

// Where column j of a row of the batch lies in a doubled panel.
template <class C>
SK_INLINE int64_t doubled_at(int64_t j, int64_t lane) {
    constexpr int64_t Q = 16 / sizeof(C), L = Simd<C>::kLanes;
    return j / 2 * 2 * L + lane % Q / (Q / 2) * L + lane / Q * Q + lane % (Q / 2) * 2 + j % 2;
}

template <class C, int MR, int NV>
struct Block {
    using V = typename Simd<C>::V;
    static constexpr int L = Simd<C>::kLanes;
    V acc[MR][NV];

    SK_INLINE void zero() {
#pragma GCC unroll 32
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) acc[i][v] = V{};
    }
    SK_INLINE void start_at(const C* rows) {
#pragma GCC unroll 32
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) acc[i][v] = broadcast<V>(rows[i]);
    }
    SK_INLINE void add_rows(const C* rows) {
#pragma GCC unroll 32
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) acc[i][v] += broadcast<V>(rows[i]);
    }
    SK_INLINE void start_from(const C* at, int64_t stride) {
#pragma GCC unroll 32
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) acc[i][v] = load<V>(at + i * stride + v * L);
    }
    // One term: acc[i][v] += a(i) * b[v] for Rows rows from First on, a number or a pair of bfloat16 each.
    template <int First = 0, int Rows = MR, class A>
    SK_INLINE void step(A&& a, const C* b) {
        V bv[NV];
        SK_EACH(v, NV) bv[v] = load<V>(b + v * L);
        step<First, Rows>(a, bv);
    }
    template <int First, int Rows, class A>
    SK_INLINE void step(A&& a, const V (&bv)[NV]) {
        SK_EACH(i, Rows) {
            const V av = broadcast<V>(a(i));
            SK_EACH(v, NV) acc[First + i][v] += av * bv[v];
        }
    }
    template <int First = 0, int Rows = MR, class A>
    SK_INLINE void step(A&& a, const Pair* b) {
        PairV bv[NV];
        SK_EACH(v, NV) bv[v] = load<PairV>(b + v * L);
        SK_EACH(i, Rows) {
            const PairV av = a(i) - PairV{};
            SK_EACH(v, NV) acc[First + i][v] = dot2(acc[First + i][v], av, bv[v]);
        }
    }
    // a_row and a_col are literals where the caller knows them
    template <class E>
    SK_INLINE void add(const E* a, int64_t a_row, int64_t a_col, const E* b, int64_t b_stride, int64_t depth) {
        // Not unrolled: a step is long enough, and the compiler spills accumulators when it sees several.
#pragma GCC unroll 1
        for (int64_t j = 0; j < depth; ++j, a += a_col, b += b_stride)
            step([&](int i) __attribute__((always_inline)) { return a[i * a_row]; }, b);
    }
    // The same where the second half of the rows lies elsewhere, and backwards: `high` is the last of them.
    template <class E>
    SK_INLINE void add_mirrored(const E* low, const E* high, int64_t row, const E* b, int64_t b_stride, int64_t depth) {
#pragma GCC unroll 1
        for (int64_t j = 0; j < depth; ++j, ++low, ++high, b += b_stride)
            step([&](int i) __attribute__((always_inline)) { return i < MR / 2 ? low[i * row] : high[(MR - 1 - i) * row]; }, b);
    }

    // A block of one vector with each lane in the first of two, ...
    SK_INLINE void start_doubled(const Block<C, MR, 1>& one) {
        SK_EACH(i, MR) {
            acc[i][0] = interleaved<false, C>(one.acc[i][0], V{}, kAllLanes<C>);
            acc[i][1] = interleaved<true, C>(one.acc[i][0], V{}, kAllLanes<C>);
        }
    }
    // ... to which `columns` columns of rows of a are added, times doubled panels (row(i) is where row i begins), ...
    template <class Row>
    SK_INLINE void add_two_columns(Row&& row, const C* b, int64_t columns) {
        int64_t j = 0;
#pragma GCC unroll 1
        for (; j + 1 < columns; j += 2, b += 2 * L)
            step([&](int i) __attribute__((always_inline)) { return load<Two<C>>(row(i) + j); }, b);
        if (j < columns) step([&](int i) __attribute__((always_inline)) { return Two<C>{row(i)[j], 0}; }, b);
    }
    // ... and back.
    SK_INLINE void end_doubled(Block<C, MR, 1>& one) const {
        SK_EACH(i, MR)
            one.acc[i][0] = every_other<false, C>(acc[i][0], acc[i][1], kAllLanes<C>) +
                            every_other<true, C>(acc[i][0], acc[i][1], kAllLanes<C>);
    }

    // Rows i and i + MR/2 mirror each other: what is even there and what is odd, times their parts of b, each in one half
    // of the block ...
    SK_INLINE void add_halves(const C* a, int64_t a_row, int64_t even, int64_t odd, const C* b, int64_t b_stride) {
        const C *at = a, *odd_at = a + even, *odd_b = b + even * b_stride;
        const auto even_step = [&] { step<0, MR / 2>([&](int i) __attribute__((always_inline)) { return at[i * a_row]; }, b); };
        const auto odd_step = [&] {
            step<MR / 2, MR / 2>([&](int i) __attribute__((always_inline)) { return odd_at[i * a_row]; }, odd_b);
        };
        int64_t left_even = even, left_odd = odd;
#pragma GCC unroll 1
        for (; left_even && left_odd; --left_even, --left_odd, ++at, ++odd_at, b += b_stride, odd_b += b_stride)
            even_step(), odd_step();
#pragma GCC unroll 1
        for (; left_even; --left_even, ++at, b += b_stride) even_step();
#pragma GCC unroll 1
        for (; left_odd; --left_odd, ++odd_at, odd_b += b_stride) odd_step();
    }
    // ... and their sum and difference.
    SK_INLINE void unfold() {
        SK_EACH(i, MR / 2) SK_EACH(v, NV) {
            const V even = acc[i][v], odd = acc[MR / 2 + i][v];
            acc[i][v] = even + odd, acc[MR / 2 + i][v] = even - odd;
        }
    }
    // Rows of b that mirror each other, added up or subtracted, times columns of `a`.
    template <bool Odd>
    SK_INLINE void add_folded(const C* a, int64_t a_col, const C* low, const C* high, int64_t b_stride, int64_t depth) {
#pragma GCC unroll 1
        for (int64_t j = 0; j < depth; ++j, a += a_col, low += b_stride, high -= b_stride) {
            V bv[NV];
            SK_EACH(v, NV) {
                const V one = load<V>(low + v * L), other = load<V>(high + v * L);
                bv[v] = Odd ? one - other : one + other;
            }
            step<0, MR>([&](int i) __attribute__((always_inline)) { return a[i]; }, bv);
        }
    }
    SK_INLINE void write(C* out, int64_t stride) const {
#pragma GCC unroll 32
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) store(out + i * stride + v * L, acc[i][v]);
    }
    SK_INLINE void add_to(C* out, int64_t stride) const {
#pragma GCC unroll 32
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) {
                C* p = out + i * stride + v * L;
                store(p, load<V>(p) + acc[i][v]);
            }
    }
};

template <int N>
struct Count {
    static constexpr int value = N;
};

template <int N, class F>
SK_INLINE void call_with_rows(int64_t rows, F&& f) {
    if constexpr (N > 1) {
        if (rows < N) return call_with_rows<N - 1>(rows, f);
    }
    f(Count<N>{});
}

// Calls f(first row, Count<MR>) over `count` rows in blocks of nearly equal height <= Max: a block of one or two rows
// waits for its own results, so 13 rows are 5 + 4 + 4 and not 6 + 6 + 1.
template <int Max, class F>
SK_INLINE void for_row_blocks(int64_t count, F&& f) {
    if (count <= 0) return;
    const int64_t blocks = (count + Max - 1) / Max, small = count / blocks, larger = count % blocks;
    int64_t at = 0;
    for (int64_t i = 0; i < blocks; ++i) {
        const int64_t rows = small + (i < larger);
        call_with_rows<Max>(rows, [&](auto r) __attribute__((always_inline)) { f(at, r); });
        at += rows;
    }
}

}  // namespace
}  // namespace sk
