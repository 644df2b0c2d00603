// Before and after the tiles: transpose the input into panels, add up and transpose back its gradient.
#pragma once

#include "cpu/memory.h"

namespace sk {
namespace {

// 1 / sqrt(c): c is a power of 4
template <class C>
SK_INLINE C code_scale_of(int64_t codes) {
    C scale = 1;
    for (; codes >= 4; codes /= 4) scale /= 2;
    return scale;
}

// One row of x_s: its column of the panel, a row of by_slack and a column of by_rows.
template <class C, class E>
SK_INLINE void pack_numbers(const Job& job, const Layout<C>& layout, const Shared<C>& shared, int64_t row, const E* x,
                            C scale, C* slack) {
    constexpr int PW = kPanel<C>, L = Simd<C>::kLanes;
    const int64_t s = layout.slack, lane = row % PW;
    for (int64_t j = 0; j < s; ++j) slack[kTwoColumns<C> ? doubled_at<C>(j, lane) : j * PW + lane] = widen<C>(x[j]);
    if (kTwoColumns<C> && s % 2) slack[doubled_at<C>(s, lane)] = 0;
    for (int64_t v = 0; job.needs_weight && v < layout.slack_vectors; ++v) {
        C* out = shared.by_slack + layout.by_slack_at(v, row);
        const int64_t first = layout.slack_column(v), from = layout.own_column(v, row);
        for (int64_t j = first; j < first + L; ++j)
            out[j - first] = j < from || j >= s ? C(0) : widen<C>(x[j]) * scale;
    }
    for (int64_t j = 0; job.needs_weight && j < layout.tail; ++j)
        shared.by_rows[row / PW * layout.tail * PW + j * PW + row % PW] = widen<C>(x[s - layout.tail + j]) * scale;
}

// One row of x_s as pairs: of its own columns, and of this row and its neighbour.
template <class C, class E>
SK_INLINE void pack_pairs(const Job& job, const Layout<C>& layout, const Shared<C>& shared, int64_t row, const E* x,
                          Pair* slack) {
    if constexpr (std::is_same<std::remove_cv_t<E>, Bf16>::value) {
        constexpr int PW = kPanel<C>, L = Simd<C>::kLanes;
        const int64_t s = layout.slack;
        for (int64_t j = 0; j < s; j += 2) slack[j / 2 * PW] = pair_of(x[j], j + 1 < s ? x[j + 1] : Bf16{0});
        for (int64_t v = 0; job.needs_weight && v < layout.slack_vectors; ++v) {
            Pair* out = shared.by_slack + layout.by_slack_at(v, row);
            const int64_t first = layout.slack_column(v), from = layout.own_column(v, row);
            for (int64_t j = first; j < first + L; ++j) {
                const Bf16 value = j < from || j >= s ? Bf16{0} : x[j];
                // Rows come in order, the even one of a pair first.
                out[j - first] = row % 2 ? pair_of(Bf16{static_cast<uint16_t>(out[j - first])}, value)
                                         : pair_of(value, Bf16{0});
            }
        }
        auto* by_rows = reinterpret_cast<Bf16*>(shared.by_rows) + row / PW * layout.tail * PW + row % PW;
        for (int64_t j = 0; job.needs_weight && j < layout.tail; ++j) by_rows[j * PW] = x[s - layout.tail + j];
    }
}

template <class C>
void pack_panel(const Job& job, const Layout<C>& layout, const Shared<C>& shared, int64_t panel) {
    constexpr int PW = kPanel<C>;
    auto* slack = shared.slack + panel * layout.slack_stride();
    if (kTwoColumns<C> && layout.rows_of(panel) < PW)
        __builtin_memset(slack, 0, static_cast<size_t>(layout.slack_stride()) * sizeof(Factor<C>));
    C* even = shared.even + panel * layout.even * PW;
    C* odd = shared.odd + panel * layout.odd * PW;
    C* codes = shared.codes + panel * layout.codes * PW;
    const C code_scale = code_scale_of<C>(layout.codes);
    C* scale = shared.scale + panel * PW;
    const C* row_scale = static_cast<const C*>(job.row_scale);
    if (job.needs_weight && layout.rows_of(panel) < PW) {
        const int64_t size = layout.tail * packed(PW);
        __builtin_memset(shared.by_rows + panel * size, 0, static_cast<size_t>(size) * sizeof(Factor<C>));
    }

    for (int lane = 0; lane < PW; ++lane) {
        const int64_t row = panel * PW + lane;
        if (row >= job.rows) {
            scale[lane] = 0;
            for (int64_t j = 0; !kTwoColumns<C> && j < layout.slack_terms; ++j) slack[j * PW + lane] = 0;
            for (int64_t j = 0; j < layout.even; ++j) even[j * PW + lane] = 0;
            for (int64_t j = 0; j < layout.odd; ++j) odd[j * PW + lane] = 0;
            for (int64_t j = 0; j < layout.codes; ++j) codes[j * PW + lane] = 0;
            continue;
        }
        const C sc = row_scale ? row_scale[row] : static_cast<C>(job.scale_of_all);
        scale[lane] = sc;
        with_storage<C>(job.dtype, job.x, [&](auto* x) {
            x += row * job.x_stride;
            if (layout.even) even[lane] = widen<C>(x[0]);
            for (int64_t j = 0; j < layout.odd; ++j) {
                even[(j + 1) * PW + lane] = widen<C>(x[2 * j + 1]);
                odd[j * PW + lane] = widen<C>(x[2 * j + 2]);
            }
            x += layout.even + layout.odd;
            for (int64_t j = 0; j < layout.codes; ++j) codes[j * PW + lane] = widen<C>(x[j]) * code_scale;
            x += layout.codes;
            if constexpr (kDot2)
                pack_pairs(job, layout, shared, row, x, slack + lane);
            else
                pack_numbers(job, layout, shared, row, x, sc, slack);
        });
    }
}

// Adds the sums of one share to another's.
template <class C>
void merge_sums(const Job& job, int64_t into, int64_t from) {
    const Layout<C> layout(job);
    const Shared<C> shared(job, layout);
    const Sums<C> to = sums_of(job, layout, shared, into), more = sums_of(job, layout, shared, from);
    const auto add = [](auto* __restrict a, const auto* __restrict b, int64_t count) {
        for (int64_t i = 0; i < count; ++i) a[i] += b[i];
    };
    const int64_t lanes = layout.panels * kPanel<C>;
    if (job.needs_x) {
        add(to.slack, more.slack, lanes * layout.slack);
        add(to.even, more.even, lanes * layout.even);
        add(to.odd, more.odd, lanes * layout.odd);
        add(to.codes, more.codes, lanes * layout.codes);
    }
    add(to.loss, more.loss, lanes);
}

// Adds up what the roots have of the gradients and writes rows of grad_x, scaled.
template <class C>
void reduce_panel(const Job& job, const Layout<C>& layout, const Shared<C>& shared, int64_t panel) {
    using V = typename Simd<C>::V;
    constexpr int PW = kPanel<C>, L = Simd<C>::kLanes;
    const int64_t dft = layout.even + layout.odd, width = layout.width, rows = layout.rows_of(panel);
    const C* scale = shared.scale + panel * PW;
    const Sums<C> first = sums_of(job, layout, shared, 0);
    const size_t next = sums_bytes(job, layout) * static_cast<size_t>(job.shares / share_roots(job));

    // column_of(j): which column of x row j of the part belongs to
    auto add_up = [&](const C* part, int64_t columns, C factor, auto column_of) {
        C* out = static_cast<C*>(job.grad_x) + panel * PW * width;
        for (int64_t j = 0; j < columns; ++j) {
            const char* at = reinterpret_cast<const char*>(part + (panel * columns + j) * PW);
            V sums[kVectors]{};
            for (int64_t root = 0; root < share_roots(job); ++root, at += next)
                SK_EACH(v, kVectors) sums[v] += load<V>(reinterpret_cast<const C*>(at) + v * L);
            C lanes[PW];
            SK_EACH(v, kVectors) store(lanes + v * L, sums[v] * (factor * load<V>(scale + v * L)));
            const int64_t column = column_of(j);
            for (int64_t row = 0; row < rows; ++row) out[row * width + column] = lanes[row];
        }
    };
    if (job.needs_x) {
        const int64_t slack = dft + layout.codes;
        add_up(first.even, layout.even, 1, [](int64_t j) { return j ? 2 * j - 1 : 0; });
        add_up(first.odd, layout.odd, 1, [](int64_t j) { return 2 * j + 2; });
        add_up(first.codes, layout.codes, code_scale_of<C>(layout.codes), [dft](int64_t j) { return dft + j; });
        add_up(first.slack, layout.slack, 1, [slack](int64_t j) { return slack + j; });
    }
    for (int64_t row = 0; row < rows; ++row) {
        double sum = 0;
        const char* at = reinterpret_cast<const char*>(first.loss + panel * PW + row);
        for (int64_t root = 0; root < share_roots(job); ++root, at += next) sum += *reinterpret_cast<const double*>(at);
        job.row_loss[panel * PW + row] = sum;
    }
}

}  // namespace
}  // namespace sk
