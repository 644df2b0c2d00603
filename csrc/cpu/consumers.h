// Consumers that only read the logits of a panel: write them out, keep the best of each row, list those above a
// threshold.
#pragma once

#include "cpu/memory.h"

namespace sk {
namespace {

template <class C>
struct Reader {
    using V = typename Simd<C>::V;
    using I = typename Simd<C>::I;
    static constexpr int L = Simd<C>::kLanes, PW = kPanel<C>;

    const Job& job;
    const Layout<C>& layout;
    const Local<C>& local;
    C* z;           // [count][PW]
    int64_t count;
    int64_t label;  // the first of them, counted from label_start
    int64_t panel;
    int64_t share;
    int thread;

    SK_INLINE int64_t rows() const { return layout.rows_of(panel); }

    void logits() const {
        with_storage<C>(job.dtype, job.out, [&](auto* out) {
            using E = std::remove_reference_t<decltype(*out)>;
            out += panel * PW * job.out_stride + label;
            for (int64_t row = 0; row < rows(); ++row)
                for (int64_t t = 0; t < count; ++t) out[row * job.out_stride + t] = Narrow<E, C>::from(z[t * PW + row]);
        });
    }

    // f(label in the tile, lane, logit) wherever not (z <= bound of the lane): NaN counts as above every bound.  `Next`
    // puts the bounds of the next label into place.
    template <class Next, class F>
    SK_INLINE void above(const C* bound, Next&& next, F&& f) const {
        const int64_t lanes = rows();
        for (int64_t t = 0; t < count; ++t) {
            next(t);
            I below = load<V>(z + t * PW) <= load<V>(bound);
            for (int v = L; v < PW; v += L) below &= load<V>(z + t * PW + v) <= load<V>(bound + v);
            if (all(below)) continue;
            for (int64_t lane = 0; lane < lanes; ++lane) {
                const C value = z[t * PW + lane];
                if (!(value <= bound[lane])) f(t, lane, value);
            }
        }
    }

    static SK_INLINE bool all(I mask) {
        typedef int64_t Words __attribute__((vector_size(SK_VEC_BYTES)));
        const Words words = (Words)mask;
        int64_t every = -1;
        for (int i = 0; i < SK_VEC_BYTES / 8; ++i) every &= words[i];
        return every == -1;
    }

    // torch's order: NaN is largest; equal logits go to the lower label.
    static SK_INLINE bool worse(C a, int64_t label_a, C b, int64_t label_b) {
        const bool nan_a = a != a, nan_b = b != b;
        if (nan_a != nan_b) return nan_b;
        return a < b || ((a == b || nan_a) && label_a > label_b);
    }

    // The heap has its worst entry at the root.
    static void push(C* values, int64_t* labels, int64_t& size, int64_t keep, C value, int64_t label) {
        int64_t i;
        if (size < keep) {
            for (i = size++; i > 0;) {
                const int64_t up = (i - 1) / 2;
                if (!worse(value, label, values[up], labels[up])) break;
                values[i] = values[up], labels[i] = labels[up];
                i = up;
            }
        } else {
            if (!worse(values[0], labels[0], value, label)) return;
            for (i = 0;;) {
                int64_t down = 2 * i + 1;
                if (down >= size) break;
                if (down + 1 < size && worse(values[down + 1], labels[down + 1], values[down], labels[down])) ++down;
                if (!worse(values[down], labels[down], value, label)) break;
                values[i] = values[down], labels[i] = labels[down];
                i = down;
            }
        }
        values[i] = value, labels[i] = label;
    }

    void topk() const {
        C* bound = local.bound + panel * PW;
        const int64_t slot = thread * job.rows + panel * PW, first = job.label_start + label;
        above(bound, [](int64_t) {}, [&](int64_t t, int64_t lane, C value) {
            C* values = static_cast<C*>(job.heap_values) + (slot + lane) * job.keep;
            int64_t* labels = job.heap_labels + (slot + lane) * job.keep;
            int64_t& size = job.heap_sizes[slot + lane];
            push(values, labels, size, job.keep, value, first + t);
            if (size == job.keep) bound[lane] = values[0];
        });
    }

    void predict() const {
        C bound[PW];
        const auto fill = [&](C value) {
            for (int i = 0; i < PW; ++i) bound[i] = value;
        };
        const C* thresholds = static_cast<const C*>(job.thresholds);
        fill(static_cast<C>(job.threshold));
        const auto next = [&](int64_t t) {
            if (thresholds) fill(thresholds[label + t]);
        };
        Hits& hits = job.hits[share];
        above(bound, next, [&](int64_t t, int64_t lane, C value) {
            if (value != value) return;  // NaN is not above
            if (hits.size == hits.room) hits.grow(&hits);
            hits.data[hits.size++] = {static_cast<int32_t>(panel * PW + lane), job.label_start + label + t};
        });
    }

    // 16-bit logits are compared as the caller would see them.
    void round() const {
        with_storage<C>(job.dtype, job.weight, [&](auto* typed) {
            using E = std::remove_cv_t<std::remove_reference_t<decltype(*typed)>>;
            if constexpr (sizeof(E) == 2)
                for (int64_t i = 0; i < count * PW; ++i) z[i] = widen<C>(Narrow<E, C>::from(z[i]));
        });
    }

    void run() const {
        if (job.consumer == Consumer::logits) return logits();
        round();
        if (job.consumer == Consumer::topk) return topk();
        predict();
    }
};

}  // namespace
}  // namespace sk
