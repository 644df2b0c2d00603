// Where everything of a call lies: one block of memory, laid out twice (once to count, once to point).
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

struct Bump {
    char* at;
    template <class T>
    SK_INLINE T* take(int64_t count) {
        T* p = reinterpret_cast<T*>(at);
        at += (static_cast<size_t>(count) * sizeof(T) + 127) / 128 * 128;
        return p;
    }
};

template <class C>
SK_INLINE int64_t panels_of(int64_t count) {
    return (count + kPanel<C> - 1) / kPanel<C>;
}

// What the products over the slack columns multiply: numbers, or pairs of bfloat16 (dot2.h).
template <class C>
using Factor = std::conditional_t<kDot2, Pair, C>;
constexpr int64_t kPack = kDot2 ? 2 : 1;  // numbers in a Factor

SK_INLINE int64_t packed(int64_t count) { return (count + kPack - 1) / kPack; }

// The memory does not hold what the arithmetic multiplies, or a row stride near a power of two would map a whole column
// of the tile onto a few cache sets: then a tile of the weight is copied first.  Rows of bfloat16 are rows of pairs where
// none begins or ends in the middle of one.
template <class C>
SK_INLINE bool copies_weight(const Job& job) {
    const int64_t bytes = job.weight_stride * static_cast<int64_t>(kDot2 ? 2 : sizeof(C));
    if (bytes >= 1024 && bytes % 1024 == 0) return true;
    if constexpr (kDot2) return job.slack % 2 || bytes % 4 || reinterpret_cast<uintptr_t>(job.weight) % 4;
    return job.dtype != (sizeof(C) == 8 ? Dtype::f64 : Dtype::f32);
}

// ... with so many elements from row to row, and so is a tile of its gradient.
template <class C>
SK_INLINE int64_t copied_stride(int64_t columns) {
    const int64_t stride = (columns + 15) / 16 * 16;
    return stride * sizeof(C) % 1024 == 0 ? stride + 16 : stride;
}

template <class C>
SK_INLINE bool narrows_grad_weight(const Job& job) {
    return job.needs_weight && job.grad_weight_dtype != (sizeof(C) == 8 ? Dtype::f64 : Dtype::f32);
}

// Vectors of by_slack
template <class C>
SK_INLINE int64_t slack_vectors(const Job& job) {
    return (job.slack + Simd<C>::kLanes - 1) / Simd<C>::kLanes;
}

// The last vector of by_slack needs no more than half of its lanes, and the processor has such vectors.
template <class C>
SK_INLINE bool half_tail(const Job& job) {
    constexpr int64_t L = Simd<C>::kLanes;
    return SK_VEC_BYTES > 16 && job.slack > L && job.slack % L && job.slack % L <= L / 2;
}

// The first slack column of a vector of by_slack: the last one ends with the last column and may overlap the one before
// it, so that gradients are written in whole vectors.
template <class C>
SK_INLINE int64_t slack_column(const Job& job, int64_t vector) {
    constexpr int64_t L = Simd<C>::kLanes;
    if (job.slack <= L || vector + 1 < slack_vectors<C>(job)) return vector * L;
    return job.slack - (half_tail<C>(job) ? L / 2 : L);
}

// The gradient is added to what is there already, by the kernel itself.
template <class C>
SK_INLINE bool adds_grad_weight(const Job& job) {
    return job.accumulate && !narrows_grad_weight<C>(job);
}

// Where a vector of by_slack begins: they lie in pairs, row by row.
template <class C>
SK_INLINE int64_t by_slack_vector(const Job& job, int64_t vector, int64_t row = 0) {
    constexpr int64_t L = Simd<C>::kLanes;
    return (vector / 2 * packed(job.rows) + row / kPack) * 2 * L + vector % 2 * L;
}

// The input, transposed into panels; read by all threads.
template <class C>
struct Shared {
    Factor<C>* slack;  // [P][packed s][PW]
    C* even;     // [P][k+1][PW]  x_0 and the cosines
    C* odd;      // [P][k][PW]    the sines
    // [SP][packed R][2 L]: x_s, slack columns in the lanes (slack_column).  Numbers are multiplied by row_scale here,
    // pairs are not (the gradient beside them is): they would be rounded once more.
    Factor<C>* by_slack;
    C* scale;    // [P][PW]       row_scale
    char* end;

    explicit Shared(const Job& job) {
        Bump bump{job.workspace};
        const int64_t panels = panels_of<C>(job.rows), width = kPanel<C>;
        slack = bump.take<Factor<C>>(panels * packed(job.slack) * width);
        even = bump.take<C>(job.k >= 0 ? panels * (job.k + 1) * width : 0);
        odd = bump.take<C>(job.k >= 0 ? panels * job.k * width : 0);
        by_slack = bump.take<Factor<C>>(job.needs_weight ? by_slack_vector<C>(job, slack_vectors<C>(job) + 1) : 0);
        scale = bump.take<C>(panels * width);
        end = bump.at;
    }
};

// Elements from one panel of logits to the next: 13 cache lines more than its size, so that the rows which grad_weight
// reads from all panels at once do not fall into the same cache sets.
template <class C>
SK_INLINE int64_t panel_stride(const Job& job) {
    return job.tile * kPanel<C> + 13 * 64 / static_cast<int64_t>(sizeof(C));
}

// What one thread works with.
template <class C>
struct Local {
    C* z;            // [P][T][PW]   logits, then their gradient; panels are panel_stride apart
    C* turned_even;  // [k+1][PW]    rotated coefficients
    C* turned_odd;   // [k][PW]
    C* coef;         // [rank][PW]   what U multiplies
    C* gslack;       // [P][s][PW]   gradients of the input, transposed
    C* geven;        // [P][k+1][PW]
    C* godd;         // [P][k][PW]
    double* loss;    // [P][PW]
    int64_t* cursor; // [R]          next positive label of each row
    C* y;            // [T][PW]      dense targets of a panel; [P][T][PW] for losses of whole columns
    C* pos_z;        // [T*PW + L]   logits of the positive labels of a panel
    C* pos_w;        // [T*PW + L]   their weights
    int32_t* pos_at; // [T*PW]       where they are in the panel
    Factor<C>* weight;  // [T][copied_stride of packed s]
    Pair* weight_by_labels;  // [T/2][s]      pairs of labels
    Pair* g_by_labels;       // [T/2][PW]     pairs of labels, of a panel
    Pair* g_by_rows;         // [P][T][PW/2]  pairs of rows, times row_scale
    C* gweight;      // [T][copied_stride of s]
    C* bound;        // [P][PW]      topk: what a logit must exceed
    char* end;

    Local(const Job& job, char* base) {
        Bump bump{base};
        const int64_t panels = panels_of<C>(job.rows), width = kPanel<C>, tile = job.tile;
        const int64_t even = job.k >= 0 ? job.k + 1 : 0, odd = job.k >= 0 ? job.k : 0;
        const bool loss_pass = job.consumer == Consumer::loss;
        // Only grad_weight, and losses of whole columns, look at all panels of a tile together.
        const bool columns = whole_columns(job);
        z = bump.take<C>((job.needs_weight || job.needs_bias || columns ? panels : 1) * panel_stride<C>(job));
        turned_even = bump.take<C>(even * width);
        turned_odd = bump.take<C>(odd * width);
        coef = bump.take<C>(job.rank * width);
        gslack = bump.take<C>(job.needs_x ? panels * job.slack * width : 0);
        geven = bump.take<C>(job.needs_x ? panels * even * width : 0);
        godd = bump.take<C>(job.needs_x ? panels * odd * width : 0);
        loss = bump.take<double>(loss_pass ? panels * width : 0);
        cursor = bump.take<int64_t>(job.indices ? job.rows : 0);
        y = bump.take<C>(!loss_pass ? 0 : columns ? panels * panel_stride<C>(job) : tile * width);
        const int64_t positives = loss_pass ? tile * width : 0;
        pos_z = bump.take<C>(positives + width);
        pos_w = bump.take<C>(positives + width);
        pos_at = bump.take<int32_t>(positives);
        weight = bump.take<Factor<C>>(copies_weight<C>(job) ? tile * copied_stride<C>(packed(job.slack)) : 0);
        weight_by_labels = bump.take<Pair>(kDot2 && job.needs_x ? packed(tile) * job.slack : 0);
        g_by_labels = bump.take<Pair>(kDot2 && job.needs_x ? packed(tile) * width : 0);
        g_by_rows = bump.take<Pair>(kDot2 && job.needs_weight ? panels * tile * packed(width) : 0);
        gweight = bump.take<C>(narrows_grad_weight<C>(job) ? tile * copied_stride<C>(job.slack) : 0);
        bound = bump.take<C>(job.consumer == Consumer::topk ? panels * width : 0);
        end = bump.at;
    }
};

template <class C>
SK_INLINE size_t local_bytes(const Job& job) {
    // Threads' buffers lie far apart.  A processor fetches ahead beyond the end of what it reads, here by up to 64 KiB,
    // and another that writes there has to wait for each line; pages that nobody touches cost nothing.  The odd multiple
    // of a cache line keeps two threads' buffers out of the same cache sets.
    constexpr size_t kPage = 4096, kApart = (128 << 10) + 192;
    const auto bytes = static_cast<size_t>(Local<C>(job, nullptr).end - static_cast<char*>(nullptr));
    return (bytes + kPage - 1) / kPage * kPage + kApart;
}

template <class C>
SK_INLINE Local<C> local_of(const Job& job, const Shared<C>& shared, int thread) {
    return Local<C>(job, shared.end + thread * local_bytes<C>(job));
}

template <class C>
size_t workspace_bytes_for(Job job) {
    job.workspace = nullptr;
    const Shared<C> shared(job);
    return static_cast<size_t>(shared.end - static_cast<char*>(nullptr)) + job.threads * local_bytes<C>(job);
}

}  // namespace
}  // namespace sk
