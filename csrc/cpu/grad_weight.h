// grad_weight of a tile, once all panels of rows have the gradients of its logits: grad W_tile = g^T (x_s * row_scale).
#pragma once

#include "cpu/grad_tail.h"
#include "cpu/memory.h"
#include "cpu/update_tile.h"

namespace sk {
namespace {

template <class C>
struct GradWeight {
    using V = typename Simd<C>::V;
    static constexpr int L = Simd<C>::kLanes, PW = kPanel<C>;
    const Job& job;
    const Layout<C>& layout;
    const Shared<C>& shared;
    const Local<C>& local;
    uint16_t* narrowed = nullptr;  // the rows of the tile, where their type has 16 bits

    Pair* rows_in_pairs(int64_t panel) const { return local.g_by_rows + panel * layout.tile * (PW / 2); }

    // dloss/dz of a panel as grad_weight multiplies it
    SK_INLINE const Factor<C>* gradient(int64_t panel) const {
        if constexpr (kDot2)
            return rows_in_pairs(panel);
        else
            return local.z + panel * layout.panel_stride;
    }

    // One block of grad_weight: MR labels x NV vectors of slack columns from `vector` on, summed over the rows of panels
    // [panel, last) and added to what earlier panels have left in `out`, or not.
    template <int MR, int NV>
    SK_INLINE void block_of(int64_t t, int64_t vector, int64_t panel, int64_t last, C* out, int64_t stride, bool add) {
        const bool round = layout.rounds_grad_weight && last == layout.panels;
        Block<C, MR, NV> block;
        block.zero();
        const int64_t first = layout.slack_column(vector);
        // What is written next comes nearer: the next columns of these labels, or the first of the next labels.  Where a
        // buffer of this thread is written, which is near, what it will be copied to.
        const bool more = vector + NV < layout.slack_vectors;
        if (!layout.narrows_grad_weight) {
            const C* next = out + (more ? first + NV * L : kGroup * stride);
            SK_EACH(i, MR) SK_EACH(v, NV) __builtin_prefetch(next + i * stride + v * L, 1, 3);
        } else if (round) {
            const int64_t label = more ? t : t + kGroup, column = more ? first + NV * L : 0;
            const uint16_t* next = narrowed + label * job.grad_weight_stride + column;
            SK_EACH(i, MR) __builtin_prefetch(next + i * job.grad_weight_stride, 1, 3);
        } else if (narrowed) {
            SK_EACH(i, MR) __builtin_prefetch(narrowed + (t + i) * job.grad_weight_stride + first, 1, 3);
        }
        constexpr int64_t kTerms = PW / kPack, kStep = NV * L;  // of a whole panel; from one term of x to the next
        const auto* x = shared.by_slack + layout.by_slack_at(vector);
        for (; panel < last; ++panel) {
            const int64_t rows = job.rows - panel * PW;
            const auto* g = gradient(panel) + t * kTerms;
            if (rows >= PW)
                block.add(g, kTerms, 1, x + panel * kTerms * kStep, kStep, kTerms);
            else
                block.add(g, kTerms, 1, x + panel * kTerms * kStep, kStep, packed(rows));
        }
        if (layout.slack >= L) {
            SK_EACH(v, NV) {
                C* to = out + layout.slack_column(vector + v);
                if constexpr (kDot2)
                    if (round) {
                        uint16_t* rows = narrowed + t * job.grad_weight_stride + layout.slack_column(vector + v);
                        SK_EACH(i, MR) {
                            const V sum = add ? load<V>(to + i * stride) + block.acc[i][v] : block.acc[i][v];
                            store(rows + i * job.grad_weight_stride, rounded(sum));
                        }
                        continue;
                    }
                SK_EACH(i, MR) store(to + i * stride, add ? load<V>(to + i * stride) + block.acc[i][v] : block.acc[i][v]);
            }
            return;
        }
        C lanes[MR * NV * L];
        block.write(lanes, NV * L);
        for (int i = 0; i < MR; ++i)
            for (int64_t j = 0; j < layout.slack; ++j)
                out[i * stride + j] = lanes[i * NV * L + j] + (add ? out[i * stride + j] : C(0));
    }

    // A few labels x all slack columns, for the rows of panels [panel, last)
    void columns(int64_t t, int64_t labels, int64_t panel, int64_t last, C* out, int64_t stride, bool add) {
        const auto blocks = [&](int64_t vector, auto height, auto width) __attribute__((always_inline)) {
            for_row_blocks<decltype(height)::value>(labels, [&](int64_t i, auto r) __attribute__((always_inline)) {
                block_of<decltype(r)::value, decltype(width)::value>(t + i, vector, panel, last, out + i * stride, stride,
                                                                    add);
            });
        };
        for (int64_t vector = 0, width; vector < layout.slack_vectors; vector += width) {
            width = layout.vectors_together(vector);
            if (width == 2)
                blocks(vector, Count<kHeight>{}, Count<2>{});
            else if (width == 3)
                blocks(vector, Count<kHeightOfThree>{}, Count<3>{});
            else
                blocks(vector, Count<2 * kHeight>{}, Count<1>{});
        }
    }

    // The last columns of some labels.
    void tail(int64_t t, int64_t labels, C* out, int64_t stride) {
        const int64_t panel = kDot2 ? layout.tile * packed(PW) : layout.panel_stride, first = layout.slack - layout.tail;
        const auto* g = gradient(0) + t * packed(PW);
        if constexpr (kDot2)
            if (layout.rounds_grad_weight) {
                auto* rows = reinterpret_cast<Bf16*>(narrowed) + t * job.grad_weight_stride + first;
                return GradTail<C, Bf16>{layout, g, panel, shared.by_rows, rows, job.grad_weight_stride, false}.run(labels);
            }
        GradTail<C>{layout, g, panel, shared.by_rows, out + first, stride, layout.adds_grad_weight}.run(labels);
    }

    void run(int64_t at, int64_t count) {
        const bool narrow = layout.narrows_grad_weight, update = updates(job.weight_update);
        C* out = narrow ? local.gweight : static_cast<C*>(job.grad_weight) + at * job.grad_weight_stride;
        const int64_t stride = narrow ? layout.narrowed_stride : job.grad_weight_stride;
        if (narrow && !update) narrowed = static_cast<uint16_t*>(job.grad_weight) + at * job.grad_weight_stride;
        for (int64_t group = 0; group < count; group += kGroup) {
            const int64_t rows = count - group < kGroup ? count - group : kGroup;
            C* to = narrow ? out : out + group * stride;  // what is used up at once stays near
            for (int64_t panel = 0; panel < layout.panels; panel += kDepth / PW) {
                const int64_t last = panel + kDepth / PW < layout.panels ? panel + kDepth / PW : layout.panels;
                columns(group, rows, panel, last, to, stride, layout.adds_grad_weight || panel);
            }
            if (layout.tail) tail(group, rows, to, stride);
            if (update)
                update_rows(job.weight_update, job.dtype, to, stride, rows, layout.slack, at + group, job.label_start + at + group);
            else if (narrow && !layout.rounds_grad_weight)
                write_narrowed(at + group, rows, to, stride);
        }
    }

    // Rows of grad_weight in the type that it has in memory.
    void write_narrowed(int64_t at, int64_t rows, const C* source, int64_t stride) const {
        with_storage<C>(job.grad_weight_dtype, job.grad_weight, [&](auto* to) {
            using E = std::remove_reference_t<decltype(*to)>;
            const int64_t s = layout.slack;
            for (int64_t t = 0; t < rows; ++t) {
                E* __restrict row = to + (at + t) * job.grad_weight_stride;
                const C* __restrict from = source + t * stride;
                if (job.accumulate)
                    for (int64_t j = 0; j < s; ++j) row[j] = Narrow<E, C>::from(from[j] + widen<C>(row[j]));
                else
                    for (int64_t j = 0; j < s; ++j) row[j] = Narrow<E, C>::from(from[j]);
            }
        });
    }
};

}  // namespace
}  // namespace sk
