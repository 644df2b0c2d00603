// The pass over label tiles.  For each tile and panel of rows:
//
//     logits   z = U coef + C_tile x_c + W_tile x_s + bias   [T][PW]; the coefficients of the DFT part come from a span of
//              tiles (dft_tile.h), the codes C from a fast transform (code_tile.h)
//     consume  the loss turns z into g = df/dz; other consumers read z
//     back     grad x_s += W_tile^T g;  grad x_c += C_tile^T g;  grad coef = U^T g, which the span takes on to grad x_dft
//
// and, once all panels of the tile are done, grad W_tile = g^T (x_s * row_scale).
#pragma once

#include "cpu/code_tile.h"
#include "cpu/confusion_tile.h"
#include "cpu/consumers.h"
#include "cpu/dft_tile.h"
#include "cpu/grad_weight.h"
#include "cpu/loss_panel.h"
#include "cpu/pack.h"
#include "cpu/update_tile.h"

namespace sk {
namespace {

template <class C>
struct Tiles {
    using V = typename Simd<C>::V;
    static constexpr int L = Simd<C>::kLanes, PW = kPanel<C>;
    static constexpr int64_t kLine = 64 / sizeof(C);    // elements of a cache line

    const Job& job;
    const Layout<C> layout;
    const Shared<C> shared;
    const Local<C> local;
    const int64_t share;
    const Sums<C> sums;
    const int thread;
    const int64_t panels;
    bool first_tile = false;  // of the share: it writes the gradients of x that the others add to
    // of the current tile
    const Factor<C>* weight = nullptr;
    int64_t weight_stride = 0;
    DftTile<C> dft{job, layout, shared, local, sums};
    CodeTile<C> codes{job, layout, shared, local, sums};
    GradWeight<C> grad_weight{job, layout, shared, local};

    Tiles(const Job& j, int64_t index, int t)
        : job(j), layout(j), shared(j, layout), local(local_of(j, layout, shared, t)), share(index),
          sums(sums_of(j, layout, shared, index)), thread(t), panels(layout.panels) {}

    void run() {
        const Share labels = share_of(job, share);
        begin(labels);
        int64_t tile = 0;
        for (int64_t at = labels.lo, end; at < labels.hi; at = end, ++tile) {
            end = labels.tile_end(at);
            first_tile = at == labels.lo;
            const int64_t count = end - at;
            if (job.k >= 0) dft.enter(labels, tile, labels.skipped(at));
            enter(at, count);
            if (layout.columns)
                whole_tile(at, count);
            else
                for (int64_t panel = 0; panel < panels; ++panel) one_panel(at, count, panel);
            if (job.k >= 0) dft.leave(end == labels.hi);
            if (job.needs_weight && job.slack) grad_weight.run(at, count);
            if (job.needs_bias) grad_bias(at, count);
        }
    }

    void one_panel(int64_t at, int64_t count, int64_t panel) {
        C* z = local.z + layout.panel_at(panel);
        forward(z, at, count, panel);
        if (!layout.loss) return Reader<C>{job, layout, local, z, count, at, panel, share, thread}.run();
        PanelLoss<C>{job, layout, local, z, local.y, count, at, panel, sums.loss + panel * PW}.run(layout.any_grad);
        clear_missing_rows(z, count, panel);
        if constexpr (kDot2)
            if (job.needs_x || job.needs_weight)
                pair_gradient(z, count, shared.scale + panel * PW, job.needs_x ? local.g_by_labels : nullptr,
                              job.needs_weight ? grad_weight.rows_in_pairs(panel) : nullptr);
        if (job.needs_x) back(z, count, panel);
    }

    // What works on whole vectors of rows must not see what infinite weights have made of rows that do not exist.
    void clear_missing_rows(C* g, int64_t count, int64_t panel) {
        const int64_t rows = layout.rows_of(panel);
        if (rows == PW || !job.needs_weight || !(kDot2 || layout.tail)) return;
        C exists[PW];
        for (int64_t lane = 0; lane < PW; ++lane) exists[lane] = static_cast<C>(lane < rows);
        for (int v = 0; v < PW; v += L) {
            const auto missing = load<V>(exists + v) == V{};
            for (int64_t t = 0; t < count; ++t) store(g + t * PW + v, missing ? V{} : load<V>(g + t * PW + v));
        }
    }

    // A loss of whole columns: the logits of all rows first.
    void whole_tile(int64_t at, int64_t count) {
        const bool settings = job.confusion.grad_beta || job.confusion.grad_eta;
        for (int64_t panel = 0; panel < panels; ++panel) forward(local.z + layout.panel_at(panel), at, count, panel);
        ConfusionTile<C>{job, layout, local, count, at, share}.run(layout.any_grad || settings);
        clear_missing_rows(local.z + layout.panel_at(panels - 1), count, panels - 1);
        if (job.needs_x)
            for (int64_t panel = 0; panel < panels; ++panel) back(local.z + layout.panel_at(panel), count, panel);
    }

    void begin(const Share& labels) {
        auto clear = [](auto* p, int64_t count) { __builtin_memset(p, 0, static_cast<size_t>(count) * sizeof(*p)); };
        if (job.needs_x) {
            if (labels.lo == labels.hi) {
                clear(sums.slack, panels * layout.slack * PW);
                clear(sums.even, panels * layout.even * PW);
                clear(sums.odd, panels * layout.odd * PW);
            }
            clear(sums.codes, panels * layout.codes * PW);
        }
        if (layout.loss) clear(sums.loss, panels * PW);
        if (job.consumer == Consumer::topk)  // what this thread has found in earlier shares
            for (int64_t row = 0; row < panels * PW; ++row) {
                const int64_t slot = thread * job.rows + row;
                const bool full = row < job.rows && job.heap_sizes[slot] == job.keep;
                local.bound[row] = full ? static_cast<const C*>(job.heap_values)[slot * job.keep] : static_cast<C>(__builtin_nan(""));
            }
        // The first positive label of each row that is not left of this share: a search whose steps depend on the number of
        // labels alone, so that those of many rows overlap.
        if (job.indices)
            for (int64_t row = 0; row < job.rows; ++row) {
                const int64_t *at = job.indices + job.offsets[row], *end = job.indices + job.offsets[row + 1];
                for (int64_t count = end - at; count > 0; count /= 2) {
                    const int64_t half = (count + 1) / 2;
                    at = at[half - 1] < job.label_start + labels.lo ? at + half : at;
                }
                local.cursor[row] = at - job.indices;
                local.next[row] = at < end ? *at : INT64_MAX;
            }
    }

    void enter(int64_t at, int64_t count) {
        if (layout.codes) codes.enter(at, count);
        if (!layout.slack) return;
        if (kDot2 && job.needs_x) pair_labels(as_bf16(at), count);
        if (!layout.copies_weight) {
            weight_stride = job.weight_stride / kPack;
            weight = static_cast<const Factor<C>*>(job.weight) + at * weight_stride;
            return;
        }
        weight_stride = layout.copied_stride;
        weight = local.weight;
        if constexpr (kDot2) return pair_columns(as_bf16(at), count);
        with_storage<C>(job.dtype, job.weight, [&](auto* from) {
            for (int64_t t = 0; t < count; ++t) {
                const auto* row = from + (at + t) * job.weight_stride;
                auto* out = local.weight + t * weight_stride;
                for (int64_t j = 0; j < layout.slack; ++j) out[j] = widen<C>(row[j]);
            }
        });
    }

    const Bf16* as_bf16(int64_t at) const { return static_cast<const Bf16*>(job.weight) + at * job.weight_stride; }

    // The tile's weight in pairs of columns ...
    void pair_columns(const Bf16* from, int64_t count) {
        const int64_t s = layout.slack, stride = job.weight_stride;
        for (int64_t t = 0; t < count; ++t) {
            auto* out = local.weight + t * weight_stride;
            __builtin_memcpy(out, from + t * stride, static_cast<size_t>(s / 2) * sizeof(Pair));  // as they lie
            if (s % 2) out[s / 2] = pair_of(from[t * stride + s - 1], Bf16{0});
        }
    }

    // ... and in pairs of labels.
    void pair_labels(const Bf16* from, int64_t count) {
        const int64_t s = layout.slack, stride = job.weight_stride;
        for (int64_t t = 0; t < count; t += 2) {
            const Bf16* __restrict low = from + t * stride;
            const Bf16* __restrict high = low + stride;
            Pair* __restrict out = local.weight_by_labels + t / 2 * s;
            if (t + 1 < count)
                for (int64_t j = 0; j < s; ++j) out[j] = pair_of(low[j], high[j]);
            else
                for (int64_t j = 0; j < s; ++j) out[j] = pair_of(low[j], Bf16{0});
        }
    }

    // f(columns done, columns to do) for `depth` columns of `rows` labels.  With `fetch` the same part of the next tile
    // comes nearer, one line of each label at a time: many at once would fill the buffers of the cache, and the block would
    // wait.
    template <int Rows, class F>
    SK_INLINE void with_next(const Factor<C>* rows, int64_t depth, bool fetch, F&& f) {
        if (!fetch) return f(0, depth);
        const auto* next = rows + job.tile * weight_stride;
        for (int64_t j = 0; j < depth; j += kLine) {
            SK_EACH(i, Rows) __builtin_prefetch(next + i * weight_stride + j, 0, 3);
            f(j, depth - j < kLine ? depth - j : kLine);
        }
    }

    // f(block) adds products over the slack columns to it, or to a block of doubled lanes in its place.
    template <int MR, class F>
    static SK_INLINE void with_lanes(Block<C, MR, kVectors>& block, F&& f) {
        if constexpr (kTwoColumns<C>) {
            Block<C, MR, 2> doubled;
            doubled.start_doubled(block);
            f(doubled);
            doubled.end_doubled(block);
        } else {
            f(block);
        }
    }

    // `depth` columns from `first` of the labels of a block, times x_s.
    template <class B, class R>
    SK_INLINE void add_weight(B& block, R, int64_t t, int64_t first, const Factor<C>* xs, int64_t depth, bool fetch) {
        const auto* from = weight + t * weight_stride + first;
        with_lanes(block, [&](auto& sums) __attribute__((always_inline)) {
            with_next<R::value>(from, depth, fetch, [&](int64_t j, int64_t columns) __attribute__((always_inline)) {
                if constexpr (kTwoColumns<C>)
                    sums.add_two_columns([&](int i) __attribute__((always_inline)) { return from + j + i * weight_stride; },
                                         xs + j * PW, columns);
                else
                    sums.add(from + j, weight_stride, 1, xs + j * PW, PW, columns);
            });
        });
    }

    void forward(C* z, int64_t at, int64_t count, int64_t panel) {
        const C *u = dft.u, *coef = dft.coef(panel);
        const C* bias = job.bias ? static_cast<const C*>(job.bias) + at : nullptr;
        const C* start = layout.codes ? codes.forward(z, panel) : nullptr;
        const auto* xs = shared.slack + panel * layout.slack_stride();
        // While the first panel is done, the weight of the next tile comes nearer.
        const bool fetch = panel == 0 && !layout.copies_weight && at + 2 * job.tile <= job.labels;
        const int64_t terms = layout.slack_terms, depth = terms < kDepth ? terms : kDepth;
        const auto mirrored = [&](int64_t t, auto r) __attribute__((always_inline)) {
            constexpr int Half = decltype(r)::value;
            const int64_t high = count - Half - t;  // the first of the labels that mirror t ... t + Half - 1
            Block<C, 2 * Half, kVectors> block;
            block.zero();
            block.add_halves(u + t * job.rank, job.rank, job.even_rank, job.rank - job.even_rank, coef, PW);
            block.unfold();
            SK_EACH(i, 2 * Half) {
                const int64_t label = i < Half ? t + i : count - 1 - t - (i - Half);
                SK_EACH(v, kVectors) {
                    if (start) block.acc[i][v] += load<V>(start + label * PW + v * L);
                    if (bias) block.acc[i][v] += broadcast<V>(bias[label]);
                }
            }
            const auto *low_rows = weight + t * weight_stride, *high_rows = weight + high * weight_stride;
            const auto row = [&](int i) __attribute__((always_inline)) {
                return i < Half ? low_rows + i * weight_stride : high_rows + (2 * Half - 1 - i) * weight_stride;
            };
            with_lanes(block, [&](auto& sums) __attribute__((always_inline)) {
                with_next<Half>(low_rows, depth, fetch, [&](int64_t j, int64_t columns) __attribute__((always_inline)) {
                    if (fetch) SK_EACH(i, Half) __builtin_prefetch(high_rows + (job.tile + i) * weight_stride + j, 0, 3);
                    if constexpr (kTwoColumns<C>)
                        sums.add_two_columns([&](int i) __attribute__((always_inline)) { return row(i) + j; }, xs + j * PW,
                                             columns);
                    else
                        sums.add_mirrored(low_rows + j, high_rows + j, weight_stride, xs + j * PW, PW, columns);
                });
            });
            SK_EACH(i, Half) SK_EACH(v, kVectors) {
                store(z + (t + i) * PW + v * L, block.acc[i][v]);
                store(z + (count - 1 - t - i) * PW + v * L, block.acc[Half + i][v]);
            }
        };
        const auto plain = [&](int64_t t, auto r) __attribute__((always_inline)) {
            Block<C, decltype(r)::value, kVectors> block;
            if (start)
                block.start_from(start + t * PW, PW);
            else if (bias)
                block.start_at(bias + t);
            else
                block.zero();
            if (start && bias) block.add_rows(bias + t);
            block.add(u + t * job.rank, job.rank, 1, coef, PW, job.rank);
            add_weight(block, r, t, 0, xs, depth, fetch);
            block.write(z + t * PW, PW);
        };
        if (dft.folds(count))
            for_row_blocks<kPanelHeight / 2>(count / 2, mirrored);
        else
            for_row_blocks<kPanelHeight>(count, plain);
        for (int64_t done = depth; done < terms; done += kDepth) {
            const int64_t more = terms - done < kDepth ? terms - done : kDepth;
            for_row_blocks<kPanelHeight>(count, [&](int64_t t, auto r) __attribute__((always_inline)) {
                Block<C, decltype(r)::value, kVectors> block;
                block.zero();
                add_weight(block, r, t, done, xs + done * PW, more, fetch);
                block.add_to(z + t * PW, PW);
            });
        }
    }

    // Two columns of the weight for one broadcast, and each row of g in two lanes.  Of an odd number of columns the last few
    // are left; returns how many are not.
    int64_t back_by_two(const C* g, int64_t count, C* gslack) {
        const int64_t left = layout.slack % 2 ? kPanelHeight - 1 : 0, columns = layout.slack > left ? layout.slack - left : 0;
        for_row_blocks<kPanelHeight>(columns / 2, [&](int64_t pair, auto r) __attribute__((always_inline)) {
            constexpr int MR = decltype(r)::value;
            Block<C, MR, 2> block;
            block.zero();
            const C *from = weight + 2 * pair, *row = g;
#pragma GCC unroll 1
            for (int64_t t = 0; t < count; ++t, from += weight_stride, row += PW) {
                const V both = load<V>(row), twice[2] = {interleaved<false, C>(both, both, kAllLanes<C>),
                                                         interleaved<true, C>(both, both, kAllLanes<C>)};
                block.template step<0, MR>(
                    [&](int i) __attribute__((always_inline)) { return load<Two<C>>(from + 2 * i); }, twice);
            }
            SK_EACH(i, MR) {
                C* to = gslack + 2 * (pair + i) * PW;
                const V low = every_other<false, C>(block.acc[i][0], block.acc[i][1], kAllLanes<C>);
                const V high = every_other<true, C>(block.acc[i][0], block.acc[i][1], kAllLanes<C>);
                store(to, first_tile ? low : load<V>(to) + low);
                store(to + PW, first_tile ? high : load<V>(to + PW) + high);
            }
        });
        return columns;
    }

    void back(const C* g, int64_t count, int64_t panel) {
        C* gslack = sums.slack + panel * layout.slack * PW;
        int64_t done = 0;
        if constexpr (kTwoColumns<C>) done = back_by_two(g, count, gslack);
        for_row_blocks<kPanelHeight>(layout.slack - done, [&](int64_t i, auto r) __attribute__((always_inline)) {
            const int64_t j = done + i;
            Block<C, decltype(r)::value, kVectors> block;
            block.zero();
            if constexpr (kDot2)
                block.add(local.weight_by_labels + j, 1, layout.slack, local.g_by_labels, PW, packed(count));
            else
                block.add(weight + j, 1, weight_stride, g, PW, count);
            if (first_tile) return block.write(gslack + j * PW, PW);
            block.add_to(gslack + j * PW, PW);
        });
        if (layout.codes) codes.back(g, count, panel);
        if (job.k >= 0) dft.back(g, count, panel);
    }

    void grad_bias(int64_t at, int64_t count) {
        const bool update = updates(job.bias_update);
        C* out = update ? local.gbias : static_cast<C*>(job.grad_bias) + at;
        for (int64_t t = 0; t < count; ++t) {
            V total{};
            C lanes[L], sum = job.accumulate ? out[t] : C(0);
            for (int64_t panel = 0; panel < panels; ++panel) {
                const C* g = local.z + panel * layout.panel_stride + t * PW;
                const C* scale = shared.scale + panel * PW;
                if (layout.rows_of(panel) == PW) {
                    SK_EACH(v, kVectors) total += load<V>(g + v * L) * load<V>(scale + v * L);
                } else {  // lanes without a row hold what infinite weights have made of a zero
                    for (int64_t i = 0; i < layout.rows_of(panel); ++i) sum += g[i] * scale[i];
                }
            }
            store(lanes, total);
            for (int i = 0; i < L; ++i) sum += lanes[i];
            out[t] = sum;
        }
        if (update) update_rows(job.bias_update, job.dtype, out, 1, count, 1, at, job.label_start + at);
    }
};

template <class C>
void run_task(const Job& job, Phase phase, int64_t task, int thread) {
    if (phase == Phase::tiles) return Tiles<C>(job, task, thread).run();
    const Layout<C> layout(job);
    const Shared<C> shared(job, layout);
    phase == Phase::pack ? pack_panel(job, layout, shared, task) : reduce_panel(job, layout, shared, task);
}

void run(const Job& job, Phase phase, int64_t task, int thread) {
    if constexpr (kDot2)
        run_task<float>(job, phase, task, thread);
    else
        job.dtype == Dtype::f64 ? run_task<double>(job, phase, task, thread) : run_task<float>(job, phase, task, thread);
}

void merge(const Job& job, int64_t into, int64_t from) {
    if constexpr (kDot2)
        merge_sums<float>(job, into, from);
    else
        job.dtype == Dtype::f64 ? merge_sums<double>(job, into, from) : merge_sums<float>(job, into, from);
}

size_t workspace_bytes(const Job& job) {
    if constexpr (kDot2)
        return workspace_bytes_for<float>(job);
    else
        return job.dtype == Dtype::f64 ? workspace_bytes_for<double>(job) : workspace_bytes_for<float>(job);
}

}  // namespace
}  // namespace sk
