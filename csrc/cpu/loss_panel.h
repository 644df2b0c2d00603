// The loss of one panel: logits z [count][PW] become their gradients in place, each lane's loss is added to `loss`.
//
// Sparse targets: almost all labels are negative.  The positive logits are taken out of the panel first (kNeutral in
// their place has value 0 and gradient 0 under every N), the panel is done as if all were negative, and the positives are
// done as a short list of their own.  A label that says nothing stays kNeutral.  Dense targets, and smoothed ones, go label
// by label with y beside z; a target of NaN says nothing there.
#pragma once

#include "core/losses.h"
#include "cpu/memory.h"

namespace sk {
namespace {

constexpr double kNeutral = -1e30;

template <class C>
struct PanelLoss {
    using M = VecMath<C>;
    using V = typename Simd<C>::V;
    static constexpr int L = Simd<C>::kLanes, PW = kPanel<C>;

    const Job& job;
    const Layout<C>& layout;
    const Local<C>& local;
    C* z;            // [count][PW]
    C* y;            // [count][PW], room for the targets
    int64_t count;   // labels
    int64_t label;   // the first of them, counted from label_start
    int64_t panel;
    double* loss;    // [PW]

    SK_INLINE void add_loss(const V* sums) const {
        C lanes[PW];
        SK_EACH(v, kVectors) store(lanes + v * L, sums[v]);
        for (int lane = 0; lane < PW; ++lane) loss[lane] += static_cast<double>(lanes[lane]);
    }

    // f(label in the tile, lane, whether it says nothing) for every label of the panel that its row lists
    template <class F>
    SK_INLINE void for_listed(F&& f) const {
        const int64_t first = job.label_start + label, stop = first + count, rows = layout.rows_of(panel);
        // Most rows list none.  Which of them do is found without a branch for each.
        const int64_t* next = local.next + panel * PW;
        uint64_t listed = 0;
        for (int64_t lane = 0; lane < rows; ++lane) listed |= static_cast<uint64_t>(next[lane] < stop) << lane;
        for (; listed; listed &= listed - 1) {
            const int lane = __builtin_ctzll(listed);
            const int64_t row = panel * PW + lane, end = job.offsets[row + 1];
            int64_t at = local.cursor[row];
            for (; at < end && job.indices[at] < stop; ++at)
                f(job.indices[at] - first, lane, job.unknown && job.unknown[at]);
            local.cursor[row] = at;
            local.next[row] = at < end ? job.indices[at] : INT64_MAX;
        }
    }

    int64_t take_positives() const {
        const C* w = static_cast<const C*>(job.label_weight);
        const C* pw = static_cast<const C*>(job.pos_weight);
        int64_t found = 0;
        for_listed([&](int64_t t, int lane, bool unknown) {
            const int64_t at = t * PW + lane;
            const C logit = z[at];
            z[at] = static_cast<C>(kNeutral);
            if (unknown) return;
            local.pos_at[found] = static_cast<int32_t>(at);
            local.pos_z[found] = logit;
            local.pos_w[found] = (w ? w[label + t] : C(1)) * (pw ? pw[label + t] : C(1));
            ++found;
        });
        return found;
    }

    template <class Loss>
    void put_positives(const Loss& f_of, int64_t found) const {
        for (int64_t i = 0; i < found; i += L) {
            V f, g;  // lanes behind the last one hold anything, and are passed over
            f_of.pos(load<V>(local.pos_z + i), f, g);
            C fs[L], gs[L];
            store(fs, f * load<V>(local.pos_w + i));
            store(gs, g * load<V>(local.pos_w + i));
            for (int64_t j = 0; j < L && i + j < found; ++j) {
                const int32_t at = local.pos_at[i + j];
                loss[at % PW] += static_cast<double>(fs[j]);
                z[at] = gs[j];
            }
        }
    }

    // The first half of N vectors of logits: what exp(-|z|) is made of.
    template <int N>
    static SK_INLINE void begin_negative(const C* at, V (&e)[N], V (&steps)[N]) {
        SK_EACH(i, N) e[i] = M::minus_abs(load<V>(at + i * L));
        M::exp_begin(e, steps);
    }

    // The rest, from e = exp(-|z|): q is two running products of (1 + e), less 1, one of the even vectors and one of the odd
    // ones; linear the same of max(z, 0).  Two, so that a multiplication need not wait for the one before it.
    template <int N, bool Grad>
    static SK_INLINE void end_negative(C* at, const V (&e)[N], V (&q)[2], V (&linear)[2]) {
        const V zero{}, one = M::splat(1);
        SK_EACH(i, N) q[i % 2] = (q[i % 2] + e[i]) + q[i % 2] * e[i];
        SK_EACH(i, N) {
            const V x = load<V>(at + i * L);
            linear[i % 2] += greater(zero, x);
            if (Grad) store(at + i * L, (x < zero ? e[i] : one) / (e[i] + one));
        }
    }

    // All labels negative, no weights: softplus(z) = max(z, 0) + log(1 + e), and the logs of many labels are one log of
    // the product of their (1 + e), carried as q = product - 1 so that small e are not lost.
    template <bool Grad>
    void bce_negatives() const {
        constexpr int kRun = 2 * 80 / kVectors;  // labels; 80 factors to a product: 2^80 is far from overflow
        // Labels of so many vectors at a time as keep the processor busy and the constants in registers.
        constexpr int kMost = SK_REGISTERS >= 32 ? 4 : 2, kAtOnce = kMost / kVectors;
        const V zero{};
        V sums[kVectors]{}, next[kMost]{}, steps[kMost]{};
        if (count >= kAtOnce) begin_negative(z, next, steps);
        for (int64_t start = 0; start < count; start += kRun) {
            const int64_t stop = start + kRun < count ? start + kRun : count;
            V q[2] = {zero, zero}, linear[2] = {zero, zero};
            int64_t t = start;
            for (; t + kAtOnce <= stop; t += kAtOnce) {
                V e[kMost];
                SK_EACH(i, kMost) e[i] = next[i];
                M::exp_end(e, steps);
                const int64_t after = t + kAtOnce <= count - kAtOnce ? t + kAtOnce : t;  // at the end anything
                begin_negative(z + after * PW, next, steps);
                end_negative<kMost, Grad>(z + t * PW, e, q, linear);
            }
            for (; t < stop; ++t) {
                V e[kVectors], single[kVectors];
                begin_negative(z + t * PW, e, single);
                M::exp_end(e, single);
                end_negative<kVectors, Grad>(z + t * PW, e, q, linear);
            }
            SK_EACH(v, 2) sums[v % kVectors] += linear[v] + M::log1p(q[v]);
        }
        add_loss(sums);
    }

    template <bool Grad, class Loss>
    void negatives(const Loss& f_of) const {
        const C* w = static_cast<const C*>(job.label_weight);
        V sums[kVectors]{};
        for (int64_t t = 0; t < count; ++t) {
            const V weight = w ? broadcast<V>(w[label + t]) : M::splat(1);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                C* at = z + t * PW + v * L;
                V f, g;
                f_of.neg(load<V>(at), f, g);
                sums[v] += weight * f;
                if (Grad) store(at, weight * g);
            }
        }
        add_loss(sums);
    }

    // y [count][PW] of this panel
    void fill_targets() const {
        const int64_t rows = layout.rows_of(panel);
        if (job.indices || rows < PW)
            for (int64_t i = 0; i < count * PW; ++i) y[i] = 0;
        if (job.indices)
            return for_listed([&](int64_t t, int lane, bool unknown) {
                y[t * PW + lane] = unknown ? static_cast<C>(__builtin_nan("")) : C(1);
            });
        with_storage<C, true>(job.dense_dtype, job.dense, [&](auto* from) {
            for (int64_t lane = 0; lane < rows; ++lane) {
                const auto* row = from + (panel * PW + lane) * job.dense_stride + label * job.dense_step;
                for (int64_t t = 0; t < count; ++t) y[t * PW + lane] = widen<C>(row[t * job.dense_step]);
            }
        });
    }

    template <bool Grad, class Loss>
    void soft(const Loss& f_of) const {
        fill_targets();
        const C* w = static_cast<const C*>(job.label_weight);
        const C* pw = static_cast<const C*>(job.pos_weight);
        const C keep = static_cast<C>(1 - job.loss.label_smoothing), lift = static_cast<C>(job.loss.label_smoothing / 2);
        V sums[kVectors]{};
        for (int64_t t = 0; t < count; ++t) {
            const C wt = w ? w[label + t] : C(1);
            const C up = pw ? wt * pw[label + t] : wt;
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                C* at = z + t * PW + v * L;
                const V given = load<V>(y + t * PW + v * L), target = given * keep + lift;
                V fn, gn, fp, gp;
                const V logit = load<V>(at);
                f_of.both(logit, fn, gn, fp, gp);
                const V positive = up * target, negative = wt * (M::splat(1) - target);
                // A target of exactly 0 or 1 must not multiply the other side's infinite value by zero; a NaN stays one
                // whatever its weights.
                const V lost = logit == logit ? V{} : logit;
                const V f = (positive == V{} ? lost : positive * fp) + (negative == V{} ? V{} : negative * fn);
                sums[v] += given == given ? f : V{};
                if (Grad) store(at, given == given ? positive * gp + negative * gn : V{});
            }
        }
        add_loss(sums);
    }

    template <bool Grad, class Loss>
    SK_INLINE void run_as(const Loss& f_of) const {
        if (job.dense || job.loss.label_smoothing != 0) return soft<Grad>(f_of);
        const int64_t found = take_positives();
        if constexpr (std::is_same<Loss, Bce<M>>::value) {
            if (!job.label_weight)
                bce_negatives<Grad>();
            else
                negatives<Grad>(f_of);
        } else {
            negatives<Grad>(f_of);
        }
        put_positives(f_of, found);
    }

    template <bool Grad>
    void run_with() const {
        if (job.loss.kind == LossKind::focal) return run_as<Grad>(Focal<M>(job.loss));
        if (job.loss.kind == LossKind::asymmetric) return run_as<Grad>(Asymmetric<M>(job.loss));
        run_as<Grad>(Bce<M>(job.loss));
    }

    void run(bool grad) const { grad ? run_with<true>() : run_with<false>(); }
};

}  // namespace
}  // namespace sk
