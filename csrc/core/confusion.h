// Losses of a soft confusion matrix, written once for every backend (sigkernels/losses/confusion.py has the formulas).
//
// A label's value is N / D, both linear in tp = sum S y, s = sum S, p = sum y and the number of rows:
//
//     value = (n_tp tp + n_s s + n_p p + n_rows rows) / (d_s s + d_p p + d_rows rows),  0 where |D| <= tiny
//
// so dvalue/dS = on_y (y - least) + on_all: two numbers per label.  `least` is the smallest target of the label where
// targets may lie between 0 and 1, else 0, and tp is summed as S (y - least).  The slope of a precision is (y - value)/D:
// with equal targets it vanishes, and this way of writing it leaves no rounding error in its place.
//
// `M` is the arithmetic, as in core/losses.h.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace sk {

// What S is a function of: sigma(beta (z + eta)), sigma(beta (sigma(z) + eta)), or z itself.
enum class ConfusionForm : int { logits = 0, probability = 1, unbounded = 2 };

struct ConfusionParams {
    ConfusionForm form = ConfusionForm::logits;
    bool mirrored = false;  // S and y trade places with 1 - S and 1 - y
    double n_tp = 0, n_s = 0, n_p = 0, n_rows = 0, d_s = 0, d_p = 0, d_rows = 0;
    double tiny = 0;
    double scale = 1;  // of a label's loss in the result
    double beta = 1, eta = 0;
};

namespace {

// The value of one label and the slopes of its loss, scale (1 - value).
struct ConfusionValue {
    double value, on_y, on_all;

    SK_HD ConfusionValue(const ConfusionParams& a, double above_least, double s, double p, double rows, double least) {
        const double under = a.d_s * s + a.d_p * p + a.d_rows * rows;
        const double inverse = (under < 0 ? -under : under) > a.tiny ? 1 / under : 0;
        const double per_s = a.n_tp * least + a.n_s;
        const double rest = a.n_tp * above_least + a.n_p * p + a.n_rows * rows;  // of the numerator, without s
        value = (rest + per_s * s) * inverse;
        on_y = -a.scale * a.n_tp * inverse;
        // per_s - d_s value, with the terms in s gone
        on_all = -a.scale * inverse * ((per_s * (a.d_p * p + a.d_rows * rows) - a.d_s * rest) * inverse);
    }
};

constexpr double kMostBeta = 3e38;  // finite in float, too

// The gradient by eta from that by beta (u + eta): 0 where it is, also at an infinite beta.
SK_HD double times_beta(double by_eta, double beta) { return by_eta == 0 ? 0 : by_eta * beta; }

template <class M>
struct ConfusionScore {
    using V = typename M::V;
    V s;      // S, or 1 - S for a mirrored metric
    V slope;  // ds/dz
    V steep;  // ds/d(beta (u + eta))
    V t;      // u + eta

    // sigma(x) and sigma(x) sigma(-x) without the cancellation of 1 - sigma
    static SK_HD void sigma(V x, V& value, V& bell) {
        const V e = M::exp_neg(-M::abs(x));
        const V big = M::splat(1) / (M::splat(1) + e), small = e * big;
        value = M::lt_select(x, M::splat(0), small, big);
        bell = small * big;
    }

    // An infinite beta makes a step of S, whose slope is 0 wherever it is defined: 0 times a number, not times infinity.
    static SK_HD V finite(V beta) {
        const V most = M::splat(kMostBeta);
        const V below = M::lt_select(most, beta, most, beta);
        return M::lt_select(below, -most, -most, below);
    }

    SK_HD ConfusionScore(ConfusionForm form, bool mirrored, V z, V beta, V eta) {
        const V sign = M::splat(mirrored ? -1 : 1);
        if (form == ConfusionForm::unbounded) {
            s = mirrored ? M::splat(1) - z : z;
            slope = sign;
            steep = t = M::splat(0);
            return;
        }
        V u = z, du = M::splat(1), bell;
        if (form == ConfusionForm::probability) sigma(z, u, du);
        t = u + eta;
        sigma(sign * beta * t, s, bell);
        steep = sign * bell;
        slope = steep * finite(beta);
        if (form == ConfusionForm::probability) slope = slope * du;
    }
};

}  // namespace
}  // namespace sk
