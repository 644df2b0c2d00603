// Confusion-matrix losses of one tile of labels, all rows of the batch at once (core/confusion.h has the arithmetic of a
// label).  Logits z [P][T][PW] become their gradients in place; targets y lie as z does.
//
// S is computed twice, once for the sums and once for the gradient, because that is cheaper than a second array.  Lanes
// without a row are left out of every sum, and not multiplied by 0: an infinite beta makes a NaN of them.
#pragma once

#include "core/confusion.h"
#include "cpu/loss_panel.h"

namespace sk {
namespace {

template <class C>
struct ConfusionTile {
    using M = VecMath<C>;
    using V = typename Simd<C>::V;
    using I = typename Simd<C>::I;
    using Score = ConfusionScore<M>;
    static constexpr int L = Simd<C>::kLanes, PW = kPanel<C>;
    static constexpr int kRun = 8;  // panels that are added up in C before they go into a double

    const Job& job;
    const Layout<C>& layout;
    const Local<C>& local;
    int64_t count;  // labels
    int64_t label;  // the first of them, counted from label_start
    int64_t share;

    // For each lane of the last panel: does it have a row?
    struct Present {
        I lanes[kVectors];
        explicit Present(int64_t rows) {
            for (int v = 0; v < kVectors; ++v)
                for (int i = 0; i < L; ++i) lanes[v][i] = v * L + i < rows ? -1 : 0;
        }
    };
    const Present last{layout.rows_of(layout.panels - 1)};

    static SK_INLINE double sum(V v) {
        C lanes[L];
        store(lanes, v);
        double s = 0;
        for (int i = 0; i < L; ++i) s += static_cast<double>(lanes[i]);
        return s;
    }

    // Calls f(z, y, present) for every vector of a label; `end_of_run` after each kRun panels.
    template <class F, class G>
    SK_INLINE void each(int64_t t, F&& f, G&& end_of_run) const {
        const bool mirrored = job.confusion.params.mirrored;
        for (int64_t panel = 0; panel < layout.panels; ++panel) {
            const int64_t at = panel * layout.panel_stride + t * PW;
            const bool whole = panel + 1 < layout.panels;
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
                const V y = load<V>(local.y + at + v * L);
                f(local.z + at + v * L, mirrored ? M::splat(1) - y : y, whole ? ~I{} : last.lanes[v]);
            }
            if (panel % kRun == kRun - 1 || panel == layout.panels - 1) end_of_run();
        }
    }

    // The smallest target of a label where there are others than 0 and 1.
    double least(int64_t t) const {
        if (!job.dense || job.confusion.slopes_known) return 0;
        V smallest = M::splat(__builtin_inf());
        each(
            t, [&](const C*, V y, I present) __attribute__((always_inline)) {
                smallest = present & (y < smallest) ? y : smallest;
            },
            [] {});
        C lanes[L];
        store(lanes, smallest);
        C out = lanes[0];
        for (int i = 1; i < L; ++i) out = out <= lanes[i] ? out : lanes[i];
        return static_cast<double>(out);
    }

    template <ConfusionForm Form>
    void run_as(bool grad) const {
        const ConfusionPass& pass = job.confusion;
        const ConfusionParams& a = pass.params;
        const bool mirrored = a.mirrored;
        double* out = pass.sums + 4 * share;
        for (int64_t t = 0; t < count; ++t) {
            const C* betas = static_cast<const C*>(pass.betas);
            const C* etas = static_cast<const C*>(pass.etas);
            const V beta = betas ? broadcast<V>(betas[label + t]) : M::splat(a.beta);
            const V eta = etas ? broadcast<V>(etas[label + t]) : M::splat(a.eta);
            const double smallest = least(t);
            const V low = M::splat(smallest), zero{};
            double on_y = pass.on_y, on_all = pass.on_all;
            if (!pass.slopes_known) {
                double tp = 0, s = 0, p = 0;
                V vtp{}, vs{}, vp{};
                each(
                    t,
                    [&](const C* z, V y, I present) __attribute__((always_inline)) {
                        const Score score(Form, mirrored, load<V>(z), beta, eta);
                        const V counted = present ? score.s : zero;
                        vs += counted;
                        vtp += counted * (y - low);
                        vp += present ? y : zero;
                    },
                    [&]() __attribute__((always_inline)) {
                        tp += sum(vtp), s += sum(vs), p += sum(vp);
                        vtp = vs = vp = V{};
                    });
                const ConfusionValue of_label(a, tp, s, p, static_cast<double>(layout.rows), smallest);
                out[0] += 1 - of_label.value, out[1] += tp + smallest * s, out[2] += s, out[3] += p;
                on_y = of_label.on_y, on_all = of_label.on_all;
            }
            if (!grad) continue;
            const V slope_y = M::splat(on_y), slope_all = M::splat(on_all);
            double by_beta = 0, by_eta = 0;
            V vbeta{}, veta{};
            each(
                t,
                [&](C* z, V y, I present) __attribute__((always_inline)) {
                    const Score score(Form, mirrored, load<V>(z), beta, eta);
                    const V by_score = slope_y * (y - low) + slope_all, by_steep = by_score * score.steep;
                    store(z, by_score * score.slope);
                    veta += present ? by_steep : zero;
                    vbeta += present ? by_steep * score.t : zero;
                },
                [&]() __attribute__((always_inline)) {
                    by_beta += sum(vbeta), by_eta += sum(veta);
                    vbeta = veta = V{};
                });
            if (pass.grad_beta) pass.grad_beta[label + t] = by_beta;
            if (pass.grad_eta)
                pass.grad_eta[label + t] = times_beta(by_eta, betas ? static_cast<double>(betas[label + t]) : a.beta);
        }
    }

    void fill_targets() const {
        for (int64_t panel = 0; panel < layout.panels; ++panel) {
            C* y = local.y + panel * layout.panel_stride;
            PanelLoss<C>{job, layout, local, local.z, y, count, label, panel, nullptr}.fill_targets();
        }
    }

    void run(bool grad) const {
        fill_targets();
        if (job.confusion.params.form == ConfusionForm::logits) return run_as<ConfusionForm::logits>(grad);
        if (job.confusion.params.form == ConfusionForm::probability) return run_as<ConfusionForm::probability>(grad);
        run_as<ConfusionForm::unbounded>(grad);
    }
};

}  // namespace
}  // namespace sk
