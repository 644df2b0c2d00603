// Confusion-matrix losses of one tile of labels, all rows of the batch at once (sigkernels/losses/confusion.py has the
// formulas).  Logits z [P][T][PW] become their gradients in place; targets y lie as z does.
//
// A label's value is N / D, both linear in tp = sum S y, s = sum S, p = sum y and the number of rows, so dvalue/dS is
// on_y * y + on_all: two numbers per label.  S is made twice, once for the sums and once for the gradient, because that
// is cheaper than a second array.
#pragma once

#include "cpu/loss_panel.h"

namespace sk {
namespace {

template <class C>
struct ConfusionTile {
    using M = VecMath<C>;
    using V = typename Simd<C>::V;
    static constexpr int L = Simd<C>::kLanes, PW = kPanel<C>;
    static constexpr int kRun = 8;  // panels that are added up in C before they go into a double
    static constexpr double kTiny = sizeof(C) == 4 ? 1.17549435e-38 : 2.2250738585072014e-308;

    const Job& job;
    const Shared<C>& shared;
    const Local<C>& local;
    int64_t count;  // labels
    int64_t label;  // the first of them, counted from label_start
    int64_t panels;
    int thread;

    struct Score {
        V s;      // S, or 1 - S for a mirrored metric
        V slope;  // ds/dz
        V steep;  // ds/d(beta (u + eta))
        V t;      // u + eta
    };

    // sigma(x) and sigma(x) sigma(-x) without the cancellation of 1 - sigma
    static SK_INLINE void sigma(V x, V& s, V& bell) {
        const V e = M::exp_neg(-M::abs(x));
        const V big = M::splat(1) / (M::splat(1) + e), small = e * big;
        s = x < V{} ? small : big;
        bell = small * big;
    }

    template <ConfusionForm Form>
    static SK_INLINE Score score(V z, V beta, V eta, C sign) {
        Score out;
        if (Form == ConfusionForm::unbounded) {
            out.s = sign < 0 ? M::splat(1) - z : z;
            out.slope = V{} + sign;
            out.steep = out.t = V{};
            return out;
        }
        V u = z, du = M::splat(1);
        if (Form == ConfusionForm::probability) sigma(z, u, du);
        out.t = u + eta;
        V bell;
        sigma(sign * beta * out.t, out.s, bell);
        out.steep = sign * bell;
        out.slope = out.steep * beta;
        if (Form == ConfusionForm::probability) out.slope *= du;
        return out;
    }

    static SK_INLINE double sum(V v) {
        C lanes[L];
        store(lanes, v);
        double s = 0;
        for (int i = 0; i < L; ++i) s += static_cast<double>(lanes[i]);
        return s;
    }

    // Calls f(z, y, mask) for every vector of a label; `end_of_run` after each kRun panels.
    template <class F, class G>
    SK_INLINE void each(int64_t t, F&& f, G&& end_of_run) const {
        const bool mirrored = job.confusion.mirrored;
        for (int64_t panel = 0; panel < panels; ++panel) {
            const int64_t at = panel * panel_stride<C>(job) + t * PW;
#pragma GCC unroll 2
            for (int v = 0; v < PW; v += L) {
                const V mask = load<V>(shared.scale + panel * PW + v);  // 1, and 0 for lanes without a row
                const V y = load<V>(local.y + at + v);
                f(local.z + at + v, mirrored ? mask - y : y, mask);
            }
            if (panel % kRun == kRun - 1 || panel == panels - 1) end_of_run();
        }
    }

    template <ConfusionForm Form>
    void run_as(bool grad) const {
        const ConfusionParams& a = job.confusion;
        const C sign = a.mirrored ? C(-1) : C(1);
        double* out = a.sums + 4 * thread;
        for (int64_t t = 0; t < count; ++t) {
            const C* betas = static_cast<const C*>(a.betas);
            const C* etas = static_cast<const C*>(a.etas);
            const V beta = betas ? V{} + betas[label + t] : M::splat(a.beta);
            const V eta = etas ? V{} + etas[label + t] : M::splat(a.eta);
            double on_y = a.on_y, on_all = a.on_all;
            if (!a.slopes_known) {
                double tp = 0, s = 0, p = 0;
                V vtp{}, vs{}, vp{};
                each(
                    t,
                    [&](const C* z, V y, V mask) __attribute__((always_inline)) {
                        const V score_here = score<Form>(load<V>(z), beta, eta, sign).s * mask;
                        vs += score_here;
                        vtp += score_here * y;
                        vp += y;
                    },
                    [&]() __attribute__((always_inline)) {
                        tp += sum(vtp), s += sum(vs), p += sum(vp);
                        vtp = vs = vp = V{};
                    });
                const double rows = static_cast<double>(job.rows);
                const double over = a.n_tp * tp + a.n_s * s + a.n_p * p + a.n_rows * rows;
                const double under = a.d_s * s + a.d_p * p + a.d_rows * rows;
                const double inverse = __builtin_fabs(under) > kTiny ? 1 / under : 0;
                const double value = over * inverse;
                out[0] += 1 - value, out[1] += tp, out[2] += s, out[3] += p;
                on_y = -a.scale * a.n_tp * inverse;
                on_all = -a.scale * (a.n_s - a.d_s * value) * inverse;
            }
            if (!grad) continue;
            const V slope_y = M::splat(on_y), slope_all = M::splat(on_all);
            double by_beta = 0, by_eta = 0;
            V vbeta{}, veta{};
            each(
                t,
                [&](C* z, V y, V mask) __attribute__((always_inline)) {
                    const Score here = score<Form>(load<V>(z), beta, eta, sign);
                    const V by_score = (slope_y * y + slope_all) * mask;
                    store(z, by_score * here.slope);
                    veta += by_score * here.steep;
                    vbeta += by_score * here.steep * here.t;
                },
                [&]() __attribute__((always_inline)) {
                    by_beta += sum(vbeta), by_eta += sum(veta);
                    vbeta = veta = V{};
                });
            if (a.grad_beta) a.grad_beta[label + t] = by_beta;
            if (a.grad_eta) a.grad_eta[label + t] = by_eta * (betas ? static_cast<double>(betas[label + t]) : a.beta);
        }
    }

    void fill_targets() const {
        for (int64_t panel = 0; panel < panels; ++panel) {
            Local<C> here = local;
            here.y += panel * panel_stride<C>(job);
            PanelLoss<C>{job, here, local.z, count, label, panel, nullptr, false}.fill_targets();
        }
    }

    void run(bool grad) const {
        fill_targets();
        if (job.confusion.form == ConfusionForm::logits) return run_as<ConfusionForm::logits>(grad);
        if (job.confusion.form == ConfusionForm::probability) return run_as<ConfusionForm::probability>(grad);
        run_as<ConfusionForm::unbounded>(grad);
    }
};

}  // namespace
}  // namespace sk
