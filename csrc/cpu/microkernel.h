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
    SK_INLINE void step(const C* a, int64_t a_row, const C* b) {
        V bv[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) bv[v] = load<V>(b + v * L);
#pragma GCC unroll 32
        for (int i = 0; i < MR; ++i) {
            const V av = broadcast<V>(a[i * a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) acc[i][v] += av * bv[v];
        }
    }
    // a_row and a_col are literals where the caller knows them
    SK_INLINE void add(const C* a, int64_t a_row, int64_t a_col, const C* b, int64_t b_stride, int64_t depth) {
        // Not unrolled: a step is long enough, and the compiler spills accumulators when it sees several.
#pragma GCC unroll 1
        for (int64_t j = 0; j < depth; ++j, a += a_col, b += b_stride) step(a, a_row, b);
    }
    // The same with pairs of bfloat16 for elements.
    SK_INLINE void add(const Pair* a, int64_t a_row, int64_t a_col, const Pair* b, int64_t b_stride, int64_t depth) {
#pragma GCC unroll 1
        for (int64_t j = 0; j < depth; ++j, a += a_col, b += b_stride) {
            PairV bv[NV];
            SK_EACH(v, NV) bv[v] = load<PairV>(b + v * L);
            SK_EACH(i, MR) {
                const PairV av = a[i * a_row] - PairV{};
                SK_EACH(v, NV) acc[i][v] = dot2(acc[i][v], av, bv[v]);
            }
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
