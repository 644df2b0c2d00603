// The DFT part of the tiles.  A span is a few tiles in a row; its coefficients are turned to its centre and brought down to
// what all of its tiles depend on (sigkernels/dft_spans.py), once, for every panel of rows:
//
//     turned = Rot(span) x_dft        low = V turned        taken = M low        coef of each tile from sums of `taken`
//
// U, which makes logits of the coefficients, is the same for all tiles.  Going back U^T leaves a gradient in the place of the
// coefficients of each tile, and at the end of the span these take the same way back to x_dft.
#pragma once

#include "cpu/memory.h"

namespace sk {
namespace {

// out [rows][PW] = a [rows, depth] b [depth][PW]
template <class C>
SK_INLINE void multiply(const C* a, int64_t a_row, int64_t a_col, int64_t rows, const C* b, int64_t depth, C* out) {
    constexpr int64_t PW = kPanel<C>;
    for_row_blocks<kPanelHeight>(rows, [&](int64_t i, auto r) __attribute__((always_inline)) {
        Block<C, decltype(r)::value, kVectors> block;
        block.zero();
        block.add(a + i * a_row, a_row, a_col, b, PW, depth);
        block.write(out + i * PW, PW);
    });
}

template <class C>
struct DftTile {
    using V = typename Simd<C>::V;
    static constexpr int L = Simd<C>::kLanes, PW = kPanel<C>;

    const Job& job;
    const Layout<C>& layout;
    const Shared<C>& shared;
    const Local<C>& local;
    const Sums<C>& sums;
    const C* u = nullptr;  // of the current tile
    int64_t span = 0, tile = 0;  // the current span among all; the current tile in it

    // A tile begins, the first of all or the next of a share, whose first `skipped` labels are passed over.
    void enter(const Share& labels, int64_t index, int64_t skipped) {
        u = static_cast<const C*>(job.u) + skipped * job.rank;
        span = labels.first_span + index / tiles_of_span(job), tile = index % tiles_of_span(job);
        if (tile == 0)
            for (int64_t panel = 0; panel < layout.panels; ++panel) spread(panel);
    }

    // It ends; no other tile of the share follows the `last` one.
    void leave(bool last) {
        if (!job.needs_x || !(last || tile + 1 == tiles_of_span(job))) return;
        const bool first = span % most_spans(job) == 0;
        for (int64_t panel = 0; panel < layout.panels; ++panel) gather(panel, first);
    }

    C* coef(int64_t panel) const { return coef_of(panel, tile); }

    // The gradient of the coefficients from that of the logits.
    void back(const C* g, int64_t count, int64_t panel) const {
        C* out = coef(panel);
        if (!folds(count)) return multiply(u, 1, job.rank, job.rank, g, count, out);
        multiply_folded<false>(u, job.even_rank, g, count, out);
        multiply_folded<true>(u + job.even_rank, job.rank - job.even_rank, g, count, out + job.even_rank * PW);
    }

    // Labels on both sides of the centre of a tile share the products with U: only a whole tile has both.
    bool folds(int64_t count) const { return job.rank && count == job.tile && count % 2 == 0; }

  private:
    static void copy(C* to, const C* from, int64_t rows) {
        __builtin_memcpy(to, from, static_cast<size_t>(rows * PW) * sizeof(C));
    }

    C* coef_of(int64_t panel, int64_t t) const { return local.coef + (panel * tiles_of_span(job) + t) * job.rank * PW; }

    // out [rows][PW] = U^T g for columns of U that are even, or odd, around the centre of the tile
    template <bool Odd>
    SK_INLINE void multiply_folded(const C* from, int64_t rows, const C* g, int64_t count, C* out) const {
        for_row_blocks<kPanelHeight>(rows, [&](int64_t i, auto r) __attribute__((always_inline)) {
            Block<C, decltype(r)::value, kVectors> block;
            block.zero();
            block.template add_folded<Odd>(from + i, job.rank, g, g + (count - 1) * PW, PW, count / 2);
            block.write(out + i * PW, PW);
        });
    }

    // f(row of `taken`, row of an earlier tile, of the later tile that mirrors it, whether the row is even) for every row
    // that two tiles share; then f_middle(row of taken_even, row of taken_odd, coefficients) for the tile in the middle.
    template <class F, class G>
    SK_INLINE void for_mirrored(int64_t panel, F&& f, G&& f_middle) const {
        const int64_t tiles = tiles_of_span(job), pairs = tiles / 2;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t later = tiles - pairs + pair;
            C *near = coef_of(panel, tiles - 1 - later), *far = coef_of(panel, later);
            for (int64_t i = 0; i < job.rank * PW; i += L)
                f(pair * job.rank * PW + i, near + i, far + i, i < job.even_rank * PW);
        }
        if (tiles % 2) f_middle(pairs * job.rank * PW, coef_of(panel, pairs));
    }

    void spread(int64_t panel) const {
        rotate(panel);
        if (job.low_even) {
            const int64_t k = job.k;
            multiply(v_even(), k + 1, 1, job.low_even, local.turned_even, k + 1, local.low_even);
            multiply(v_odd(), k, 1, job.low_odd, local.turned_odd, k, local.low_odd);
        }
        const int64_t even = low_even_rows(job), odd = low_odd_rows(job);
        multiply(static_cast<const C*>(job.even), even, 1, even_takers(job), local.low_even, even, local.taken_even);
        multiply(static_cast<const C*>(job.odd), odd, 1, odd_takers(job), local.low_odd, odd, local.taken_odd);
        for_mirrored(
            panel,
            [&](int64_t at, C* earlier, C* later, bool is_even) {
                const V e = load<V>(local.taken_even + at), o = load<V>(local.taken_odd + at);
                store(later, e + o);
                store(earlier, is_even ? e - o : o - e);
            },
            [&](int64_t at, C* middle) {
                copy(middle, local.taken_even + at, job.even_rank);
                copy(middle + job.even_rank * PW, local.taken_odd + at, job.rank - job.even_rank);
            });
    }

    // The way back: gradients of the coefficients of all tiles of a span become gradients of x.
    void gather(int64_t panel, bool first) const {
        // tiles that the share does not have
        for (int64_t t = tile + 1; t < tiles_of_span(job); ++t)
            __builtin_memset(coef_of(panel, t), 0, static_cast<size_t>(job.rank * PW) * sizeof(C));
        for_mirrored(
            panel,
            [&](int64_t at, const C* earlier, const C* later, bool is_even) {
                const V one = load<V>(later), other = load<V>(earlier), sum = one + other, rest = one - other;
                store(local.taken_even + at, is_even ? sum : rest);
                store(local.taken_odd + at, is_even ? rest : sum);
            },
            [&](int64_t at, const C* middle) {
                copy(local.taken_even + at, middle, job.even_rank);
                copy(local.taken_odd + at, middle + job.even_rank * PW, job.rank - job.even_rank);
            });
        const int64_t even = low_even_rows(job), odd = low_odd_rows(job);
        multiply(static_cast<const C*>(job.even), 1, even, even, local.taken_even, even_takers(job), local.low_even);
        multiply(static_cast<const C*>(job.odd), 1, odd, odd, local.taken_odd, odd_takers(job), local.low_odd);
        if (job.low_even) {
            const int64_t k = job.k;
            multiply(v_even(), 1, k + 1, k + 1, local.low_even, job.low_even, local.turned_even);
            multiply(v_odd(), 1, k, k, local.low_odd, job.low_odd, local.turned_odd);
        }
        rotate_back(panel, first);
    }

    const C* v_even() const { return static_cast<const C*>(job.v_even); }
    const C* v_odd() const { return static_cast<const C*>(job.v_odd); }
    const C* table(const void* angles) const { return static_cast<const C*>(angles) + span * job.k; }

    void rotate(int64_t panel) const {
        const C *even = shared.even + panel * layout.even * PW, *odd = shared.odd + panel * layout.odd * PW;
        const C *cos = table(job.cos), *sin = table(job.sin);
        for (int v = 0; v < PW; v += L) store(local.turned_even + v, load<V>(even + v));
        for (int64_t j = 0; j < job.k; ++j)
            for (int v = 0; v < PW; v += L) {
                const V e = load<V>(even + (j + 1) * PW + v), o = load<V>(odd + j * PW + v);
                store(local.turned_even + (j + 1) * PW + v, cos[j] * e + sin[j] * o);
                store(local.turned_odd + j * PW + v, cos[j] * o - sin[j] * e);
            }
    }

    void rotate_back(int64_t panel, bool first) const {
        C *geven = sums.even + panel * layout.even * PW, *godd = sums.odd + panel * layout.odd * PW;
        const C *cos = table(job.cos), *sin = table(job.sin);
        const auto add = [&](C* to, V more) { store(to, first ? more : load<V>(to) + more); };
        for (int v = 0; v < PW; v += L) add(geven + v, load<V>(local.turned_even + v));
        for (int64_t j = 0; j < job.k; ++j)
            for (int v = 0; v < PW; v += L) {
                const V e = load<V>(local.turned_even + (j + 1) * PW + v), o = load<V>(local.turned_odd + j * PW + v);
                add(geven + (j + 1) * PW + v, cos[j] * e - sin[j] * o);
                add(godd + j * PW + v, sin[j] * e + cos[j] * o);
            }
    }
};

}  // namespace
}  // namespace sk
