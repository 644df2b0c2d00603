// Sizes, strides and predicates of one call, worked out once: what packs, multiplies and reserves memory takes them here.
//
// P = panels of rows, PW = lanes of a panel (kPanel), T = labels per tile, SP = pairs of vectors of slack columns.
#pragma once

#include "cpu/convert.h"
#include "cpu/job.h"
#include "cpu/microkernel.h"

namespace sk {
namespace {

// Products add up at most this many terms in one go: a long sum in one register loses digits, and as much of a panel
// fits in the first-level cache.
constexpr int64_t kDepth = 128;

// What the products over the slack columns multiply: numbers, or pairs of bfloat16 (dot2.h).
template <class C>
using Factor = std::conditional_t<kDot2, Pair, C>;
constexpr int64_t kPack = kDot2 ? 2 : 1;  // numbers in a Factor

SK_INLINE int64_t packed(int64_t count) { return (count + kPack - 1) / kPack; }

// grad_weight is made for so many labels at a time, over all slack columns: a panel of the packed x_s comes from the
// second-level cache and serves them all.
constexpr int64_t kGroup = 48;

constexpr int kMostTail = 8;  // columns that grad_tail.h takes

template <class C>
constexpr Dtype kReal = sizeof(C) == 8 ? Dtype::f64 : Dtype::f32;

template <class C>
struct Layout {
    static constexpr int64_t L = Simd<C>::kLanes, PW = kPanel<C>;

    const int64_t rows, panels, tile;
    const int64_t slack, slack_terms;  // columns; Factors of a row of them
    const int64_t even, odd;           // rows of the DFT part: x_0 and the cosines, the sines
    const int64_t codes, code_points;  // code columns; points of a transform: those of a block, or of a tile
    const int64_t width;               // columns of x
    const bool loss;                   // the consumer is a loss
    const bool columns;                // ... of whole columns
    const bool any_grad;               // dloss/dz is needed
    const bool keeps_panels;           // grad_weight, grad_bias and losses of whole columns see all panels of a tile
    // Elements from one panel of logits to the next: 13 cache lines more than its size, so that the rows which
    // grad_weight reads from all panels at once do not fall into the same cache sets.
    const int64_t panel_stride;
    // A tile of the weight is copied first, with copied_stride Factors from row to row.
    const bool copies_weight;
    const int64_t copied_stride;
    // grad_weight has another type in memory, or an optimizer takes it: a group of labels is made in C, with
    // narrowed_stride numbers from row to row.
    const bool narrows_grad_weight;
    const int64_t narrowed_stride;
    const bool adds_grad_weight;  // to what is there already, by the product itself
    const bool rounds_grad_weight;  // the product itself narrows its sums
    const int64_t tail;           // the last slack columns, where grad_tail.h makes their part of grad_weight
    const int64_t slack_vectors;  // of by_slack: the columns before them

    explicit Layout(const Job& job)
        : rows(job.rows), panels((job.rows + PW - 1) / PW), tile(job.tile), slack(job.slack),
          slack_terms(packed(job.slack)), even(job.k >= 0 ? job.k + 1 : 0), odd(job.k >= 0 ? job.k : 0),
          codes(job.codes), code_points(codes < tile ? codes : tile), width(x_columns(job)), loss(job.consumer == Consumer::loss), columns(whole_columns(job)),
          any_grad(job.needs_x || job.needs_weight || job.needs_bias),
          keeps_panels(job.needs_weight || job.needs_bias || columns),
          panel_stride(tile * PW + 13 * 64 / static_cast<int64_t>(sizeof(C))), copies_weight(must_copy_weight(job)),
          copied_stride(stride_of_copy(slack_terms)),
          narrows_grad_weight(job.needs_weight && (job.grad_weight_dtype != kReal<C> || updates(job.weight_update))),
          narrowed_stride(stride_of_copy(slack)), adds_grad_weight(job.accumulate && !narrows_grad_weight),
          rounds_grad_weight(kDot2 && narrows_grad_weight && job.grad_weight_dtype == Dtype::bf16 &&
                             !updates(job.weight_update) && !job.accumulate && slack >= L),
          tail(tail_of(slack, packed(rows))), slack_vectors((slack - tail + L - 1) / L) {}

    // Rows of a panel that exist.
    SK_INLINE int64_t rows_of(int64_t panel) const { return rows - panel * PW < PW ? rows - panel * PW : PW; }

    // Factors from one panel of the packed x_s to the next.
    SK_INLINE int64_t slack_stride() const { return (kTwoColumns<C> ? slack_terms + slack_terms % 2 : slack_terms) * PW; }

    // Panels of logits that a thread keeps at a time, and where one of them lies.
    SK_INLINE int64_t kept_panels() const { return keeps_panels ? panels : 1; }
    SK_INLINE int64_t panel_at(int64_t panel) const { return keeps_panels ? panel * panel_stride : 0; }

    // The first slack column of a vector of by_slack: the last one ends with the last column before the tail and may
    // overlap the one before it, so that gradients are written in whole vectors.
    SK_INLINE int64_t slack_column(int64_t vector) const {
        if (slack - tail <= L || vector + 1 < slack_vectors) return vector * L;
        return slack - tail - L;
    }
    // The first column that a vector of by_slack has to itself: a column that two vectors hold is written twice, but
    // added once.  Where the last sums are narrowed, what they are added to is not.
    SK_INLINE int64_t own_column(int64_t vector, int64_t row) const {
        if (rounds_grad_weight && row >= (rows - 1) / kDepth * kDepth) return 0;
        return adds_grad_weight || row >= kDepth ? vector * L : 0;
    }
    // grad_weight is made for two vectors of columns at a time, or for the last three of an odd number: the first of
    // those that `vector` is among, and how many they are.
    SK_INLINE int64_t first_together(int64_t vector) const {
        const int64_t odd = slack_vectors % 2 && slack_vectors > 1 ? 3 : 0;
        return vector >= slack_vectors - odd ? slack_vectors - odd : vector / 2 * 2;
    }
    SK_INLINE int64_t vectors_together(int64_t first) const {
        const int64_t left = slack_vectors - first;
        return left <= 3 ? left : 2;
    }
    // Where a vector of by_slack begins: those that are used together lie together, row by row.
    SK_INLINE int64_t by_slack_at(int64_t vector, int64_t row = 0) const {
        const int64_t first = first_together(vector);
        return first * packed(rows) * L + row / kPack * vectors_together(first) * L + (vector - first) * L;
    }
    SK_INLINE int64_t by_slack_size() const { return slack_vectors * packed(rows) * L; }

    // Signs of the code features for every transform of a tile.
    SK_INLINE int64_t code_signs() const { return codes < tile ? (codes ? tile : 0) : codes; }

  private:
    // A vector takes a multiplication per row and label however few of its columns exist; the other way takes one per
    // vector of rows and column, and about three to add up its lanes.
    static int64_t tail_of(int64_t slack, int64_t terms) {
        const int64_t columns = slack % L;
        return columns <= kMostTail && columns * (terms / L + 3) < terms ? columns : 0;
    }
    // The memory does not hold what the arithmetic multiplies, or a row stride near a power of two would map a whole
    // column of the tile onto a few cache sets.  Rows of bfloat16 are rows of pairs where none begins or ends in the
    // middle of one.
    static bool must_copy_weight(const Job& job) {
        const int64_t bytes = job.weight_stride * static_cast<int64_t>(kDot2 ? 2 : sizeof(C));
        if (bytes >= 1024 && bytes % 1024 == 0) return true;
        if constexpr (kDot2) return job.slack % 2 || bytes % 4 || reinterpret_cast<uintptr_t>(job.weight) % 4;
        return job.dtype != kReal<C>;
    }
    static int64_t stride_of_copy(int64_t terms) {
        const int64_t stride = (terms + 15) / 16 * 16;
        return stride * static_cast<int64_t>(sizeof(C)) % 1024 == 0 ? stride + 16 : stride;
    }
};

}  // namespace
}  // namespace sk
