// Where everything of a call lies: one block of memory, laid out twice (once to count, once to point).
#pragma once

#include "cpu/layout.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sk {
namespace {

// Hands out consecutive parts of a block of memory; without one it only counts.  AddressSanitizer gets a forbidden zone
// behind each part: it would see only the block otherwise.
struct Bump {
    char* base;
    size_t used = 0;
    template <class T>
    SK_INLINE T* take(int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(T);
        T* p = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += (bytes + 127) / 128 * 128;
#if defined(__SANITIZE_ADDRESS__)
        used += 128;
        if (base) ASAN_POISON_MEMORY_REGION(reinterpret_cast<char*>(p) + bytes, (bytes + 127) / 128 * 128 + 128 - bytes);
#endif
        return p;
    }
};

// The input, transposed into panels; read by all threads.
template <class C>
struct Shared {
    Factor<C>* slack;  // [P][packed s][PW], or doubled panels
    C* even;     // [P][k+1][PW]  x_0 and the cosines
    C* odd;      // [P][k][PW]    the sines
    C* codes;    // [P][c][PW]    the code features, divided by sqrt(c)
    // x_s for grad_weight.  Numbers are multiplied by row_scale here, pairs are not (the gradient beside them is): they
    // would be rounded once more.
    Factor<C>* by_slack;  // slack columns in the lanes (Layout::by_slack_at)
    Factor<C>* by_rows;   // [P][tail][packed PW]: the last columns, rows in the lanes
    C* scale;    // [P][PW]       row_scale
    size_t bytes;

    Shared(const Job& job, const Layout<C>& layout) {
        constexpr int64_t PW = kPanel<C>;
        Bump bump{job.workspace};
        slack = bump.take<Factor<C>>(layout.panels * layout.slack_stride());
        even = bump.take<C>(layout.panels * layout.even * PW);
        odd = bump.take<C>(layout.panels * layout.odd * PW);
        codes = bump.take<C>(layout.panels * layout.codes * PW);
        by_slack = bump.take<Factor<C>>(job.needs_weight ? layout.by_slack_size() : 0);
        by_rows = bump.take<Factor<C>>(job.needs_weight ? layout.panels * layout.tail * packed(PW) : 0);
        scale = bump.take<C>(layout.panels * PW);
        bytes = bump.used;
    }
};

// What one thread works with.
template <class C>
struct Local {
    C* z;            // [P][T][PW]   logits, then their gradient; panels are panel_stride apart
    C* turned_even;  // [k+1][PW]    rotated coefficients
    C* turned_odd;   // [k][PW]
    C* low_even;     // [low_even_rows][PW]  what all tiles of a span depend on; turned_even where that is all
    C* low_odd;      // [low_odd_rows][PW]
    C* taken_even;   // [even_takers][PW]    what they take of it
    C* taken_odd;    // [odd_takers][PW]
    C* coef;         // [P][tiles_of_span][rank][PW]  what U multiplies, and then its gradient
    C* code_work;    // [T][PW]      a transform
    typename Format<C>::Int* code_signs;  // [c] for every transform of the tile
    int64_t* cursor; // [R]          where the next label of each row's set is
    int64_t* next;   // [R]          and which it is
    C* y;            // [T][PW]      dense targets of a panel; as z for losses of whole columns
    C* pos_z;        // [T*PW + PW]  logits of the positive labels of a panel
    C* pos_w;        // [T*PW + PW]  their weights
    int32_t* pos_at; // [T*PW]       where they are in the panel
    Factor<C>* weight;  // [T][copied_stride]
    Pair* weight_by_labels;  // [T/2][s]      pairs of labels
    Pair* g_by_labels;       // [T/2][PW]     pairs of labels, of a panel
    Pair* g_by_rows;         // [P][T][PW/2]  pairs of rows, times row_scale
    C* gweight;      // [kGroup][narrowed_stride]
    C* gbias;        // [T]          where an optimizer takes it
    C* bound;        // [P][PW]      topk: what a logit must exceed
    size_t bytes;

    Local(const Job& job, const Layout<C>& layout, char* base) {
        constexpr int64_t PW = kPanel<C>;
        Bump bump{base};
        const int64_t panels = layout.panels, tile = layout.tile;
        z = bump.take<C>(layout.kept_panels() * layout.panel_stride);
        turned_even = bump.take<C>(layout.even * PW);
        turned_odd = bump.take<C>(layout.odd * PW);
        const bool dft = job.k >= 0;
        low_even = job.low_even ? bump.take<C>(job.low_even * PW) : turned_even;
        low_odd = job.low_even ? bump.take<C>(job.low_odd * PW) : turned_odd;
        taken_even = bump.take<C>(dft ? even_takers(job) * PW : 0);
        taken_odd = bump.take<C>(dft ? odd_takers(job) * PW : 0);
        coef = bump.take<C>(dft ? panels * tiles_of_span(job) * job.rank * PW : 0);
        code_work = bump.take<C>(layout.codes ? tile * PW : 0);
        code_signs = bump.take<typename Format<C>::Int>(layout.code_signs());
        cursor = bump.take<int64_t>(job.indices ? layout.rows : 0);
        next = bump.take<int64_t>(job.indices ? layout.rows : 0);
        y = bump.take<C>(!layout.loss ? 0 : layout.columns ? panels * layout.panel_stride : tile * PW);
        const int64_t positives = layout.loss ? tile * PW : 0;
        pos_z = bump.take<C>(positives + PW);
        pos_w = bump.take<C>(positives + PW);
        pos_at = bump.take<int32_t>(positives);
        weight = bump.take<Factor<C>>(layout.copies_weight ? tile * layout.copied_stride : 0);
        weight_by_labels = bump.take<Pair>(kDot2 && job.needs_x ? packed(tile) * layout.slack : 0);
        g_by_labels = bump.take<Pair>(kDot2 && job.needs_x ? packed(tile) * PW : 0);
        g_by_rows = bump.take<Pair>(kDot2 && job.needs_weight ? panels * tile * packed(PW) : 0);
        gweight = bump.take<C>(layout.narrows_grad_weight ? kGroup * layout.narrowed_stride : 0);
        gbias = bump.take<C>(updates(job.bias_update) ? tile : 0);
        bound = bump.take<C>(job.consumer == Consumer::topk ? panels * PW : 0);
        bytes = bump.used;
    }
};

// What a share adds up over its labels.
template <class C>
struct Sums {
    C* slack;      // [P][s][PW]   gradients of the input, transposed
    C* even;       // [P][k+1][PW]
    C* odd;        // [P][k][PW]
    C* codes;      // [P][c][PW]
    double* loss;  // [P][PW]
    size_t bytes;

    Sums(const Job& job, const Layout<C>& layout, char* base) {
        constexpr int64_t PW = kPanel<C>;
        Bump bump{base};
        const int64_t back = job.needs_x ? layout.panels * PW : 0;
        slack = bump.take<C>(back * layout.slack);
        even = bump.take<C>(back * layout.even);
        odd = bump.take<C>(back * layout.odd);
        codes = bump.take<C>(back * layout.codes);
        loss = bump.take<double>(layout.loss ? layout.panels * PW : 0);
        bytes = bump.used;
    }
};

// Bytes from the buffers of one thread, or the sums of one share, to the next.  They lie far apart: a processor fetches
// ahead beyond the end of what it reads, here by up to 64 KiB, and another that writes there has to wait for each line;
// pages that nobody touches cost nothing.  The odd multiple of a cache line keeps them out of the same cache sets.
SK_INLINE size_t apart(size_t bytes) {
    constexpr size_t kPage = 4096, kApart = (128 << 10) + 192;
    return bytes ? (bytes + kPage - 1) / kPage * kPage + kApart : 0;
}

template <class C>
SK_INLINE size_t local_bytes(const Job& job, const Layout<C>& layout) {
    return apart(Local<C>(job, layout, nullptr).bytes);
}

template <class C>
SK_INLINE size_t sums_bytes(const Job& job, const Layout<C>& layout) {
    return apart(Sums<C>(job, layout, nullptr).bytes);
}

template <class C>
SK_INLINE Local<C> local_of(const Job& job, const Layout<C>& layout, const Shared<C>& shared, int thread) {
    const size_t first = shared.bytes + static_cast<size_t>(thread) * local_bytes(job, layout);
    return Local<C>(job, layout, job.workspace + first);
}

template <class C>
SK_INLINE Sums<C> sums_of(const Job& job, const Layout<C>& layout, const Shared<C>& shared, int64_t share) {
    const size_t first = shared.bytes + static_cast<size_t>(job.threads) * local_bytes(job, layout);
    return Sums<C>(job, layout, job.workspace + first + static_cast<size_t>(share) * sums_bytes(job, layout));
}

template <class C>
size_t workspace_bytes_for(Job job) {
    job.workspace = nullptr;
    const Layout<C> layout(job);
    return Shared<C>(job, layout).bytes + static_cast<size_t>(job.threads) * local_bytes(job, layout) +
           static_cast<size_t>(job.shares) * sums_bytes(job, layout);
}

}  // namespace
}  // namespace sk
