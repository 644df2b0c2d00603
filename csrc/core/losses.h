// Elementwise losses on logits and their exact derivatives, written once for every backend.
//
// Every loss here has the form  f(z, y) = w * (pw * y * P(z) + (1 - y) * N(z)):  P is the value at a positive label,
// N at a negative one; w (weight) and pw (pos_weight) are applied by the caller.  A functor gives
//     neg(z, f, g)   N(z) and N'(z)
//     pos(z, f, g)   P(z) and P'(z)
//     both(z, ...)   all four, sharing what they have in common (soft targets)
//
// `M` is the arithmetic: M::V is a float, or a vector of floats on the CPU.  It offers exp_neg(x) for x <= 0 (0 below
// the underflow limit, NaN stays NaN), log1p(x), log(x), abs, and select(a < b, ...) through lt_select(a, b, yes, no).
#pragma once

#include "core/hd.h"

namespace sk {

// The first three are elementwise and have their functors here; confusion is a loss of columns (cpu/confusion_tile.h).
enum class LossKind : int { bce = 0, focal = 1, asymmetric = 2, confusion = 3 };

struct LossParams {
    LossKind kind = LossKind::bce;
    double label_smoothing = 0;              // bce
    double gamma_pos = 0, gamma_neg = 0;     // focal has one gamma: both are set to it
    double alpha_pos = 1, alpha_neg = 1;     // focal
    double clip = 0, eps = 0;                // asymmetric
    int detach_focus = 0;                    // asymmetric
};

namespace {

// e = exp(-|z|) gives everything without cancellation: sigma(|z|) = 1/(1+e), sigma(-|z|) = e/(1+e).
template <class M>
struct Logistic {
    typename M::V p, q;          // sigma(z), sigma(-z)
    typename M::V sp_pos, sp_neg;  // softplus(z) = -log q, softplus(-z) = -log p

    static SK_HD typename M::V relu(typename M::V z) { return M::lt_select(M::splat(0), z, z, M::splat(0)); }

    SK_HD explicit Logistic(typename M::V z) {
        const auto e = M::exp_neg(-M::abs(z));
        const auto big = M::splat(1) / (M::splat(1) + e);
        const auto small = e * big;
        p = M::lt_select(z, M::splat(0), small, big);
        q = M::lt_select(z, M::splat(0), big, small);
        const auto l = M::log1p(e);
        sp_pos = relu(z) + l;
        sp_neg = relu(-z) + l;
    }
};

template <class M>
struct Bce {
    using V = typename M::V;
    SK_HD explicit Bce(const LossParams&) {}

    SK_HD void neg(V z, V& f, V& g) const {
        const Logistic<M> s(z);
        f = s.sp_pos;
        g = s.p;
    }
    SK_HD void pos(V z, V& f, V& g) const {
        const Logistic<M> s(z);
        f = s.sp_neg;
        g = -s.q;
    }
    SK_HD void both(V z, V& fn, V& gn, V& fp, V& gp) const {
        const Logistic<M> s(z);
        fn = s.sp_pos, gn = s.p;
        fp = s.sp_neg, gp = -s.q;
    }
};

// N = a_n p^c softplus(z), P(z) is its mirror image.  p^c = exp(-c softplus(-z)): no pow, no underflow of the base.
template <class M>
struct Focal {
    using V = typename M::V;
    V gamma, alpha_pos, alpha_neg;

    SK_HD explicit Focal(const LossParams& a)
        : gamma(M::splat(a.gamma_pos)), alpha_pos(M::splat(a.alpha_pos)), alpha_neg(M::splat(a.alpha_neg)) {}

    // Finite, so that 0 * inf (gamma or alpha = 0, or the focusing factor of an infinite logit) does not make a NaN.
    static SK_HD V finite(V a) { return M::lt_select(M::splat(1e30), a, M::splat(1e30), a); }

    // sp = -log(1 - pr), sp_other = -log(pr) of the probability pr of the wrong answer
    SK_HD void term(V alpha, V pr, V other, V sp, V sp_other, V& f, V& g) const {
        const V focus = alpha * M::exp_neg(-gamma * finite(sp_other));
        f = focus * M::lt_select(M::splat(0), alpha, sp, finite(sp));
        g = focus * (gamma * other * finite(sp) + pr);
    }
    SK_HD void neg(V z, V& f, V& g) const {
        const Logistic<M> s(z);
        term(alpha_neg, s.p, s.q, s.sp_pos, s.sp_neg, f, g);
    }
    SK_HD void pos(V z, V& f, V& g) const {
        const Logistic<M> s(z);
        term(alpha_pos, s.q, s.p, s.sp_neg, s.sp_pos, f, g);
        g = -g;
    }
    SK_HD void both(V z, V& fn, V& gn, V& fp, V& gp) const {
        const Logistic<M> s(z);
        term(alpha_neg, s.p, s.q, s.sp_pos, s.sp_neg, fn, gn);
        term(alpha_pos, s.q, s.p, s.sp_neg, s.sp_pos, fp, gp);
        gp = -gp;
    }
};

// P = -q^{c+} log max(p, eps);  N = -m^{c-} log max(1 - m, eps) with m = max(p - clip, 0).
template <class M>
struct Asymmetric {
    using V = typename M::V;
    V gamma_pos, gamma_neg, clip, eps, log_eps, through_focus;
    int whole_gamma_neg;  // gamma_neg where it is a small whole number (the usual case), else -1

    SK_HD explicit Asymmetric(const LossParams& a)
        : gamma_pos(M::splat(a.gamma_pos)), gamma_neg(M::splat(a.gamma_neg)), clip(M::splat(a.clip)),
          eps(M::splat(a.eps)), log_eps(M::log(M::splat(a.eps))), through_focus(M::splat(a.detach_focus ? 0 : 1)) {
        const int whole = a.gamma_neg >= 0 && a.gamma_neg <= 16 ? static_cast<int>(a.gamma_neg) : -1;
        whole_gamma_neg = whole == a.gamma_neg ? whole : -1;
    }

    // m^gamma and gamma * m^(gamma - 1) for m in [0, 1]
    SK_HD void power(V m, V& value, V& slope) const {
        if (whole_gamma_neg == 0) {
            value = M::splat(1), slope = M::splat(0);
        } else if (whole_gamma_neg > 0) {
            V lower = M::splat(1);
            for (int i = 1; i < whole_gamma_neg; ++i) lower = lower * m;
            value = lower * m, slope = gamma_neg * lower;
        } else {
            const V tiny = M::splat(1e-30);
            const V base = M::lt_select(m, tiny, tiny, m);
            value = M::lt_select(m, tiny, M::splat(0), M::exp_neg(gamma_neg * M::log(base)));
            slope = gamma_neg * value / base;
        }
    }
    SK_HD void neg_term(const Logistic<M>& s, V& f, V& g) const {
        const V zero = M::splat(0), one = M::splat(1);
        const V m = M::lt_select(s.p, clip, zero, s.p - clip);
        const V u = M::lt_select(s.p, clip, one, s.q + clip);  // 1 - m from q: exact where m is near 1
        // log(1 - m): near m = 0 from m, near m = 1 from u
        V log_u = M::lt_select(u, M::splat(0.5), M::log(M::lt_select(u, eps, eps, u)), M::log1p(-m));
        V value, slope;
        power(m, value, slope);
        f = -value * log_u;
        const V clamped = M::lt_select(u, eps, zero, value / M::lt_select(u, eps, one, u));
        const V inside = clamped - through_focus * slope * log_u;
        g = M::lt_select(s.p, clip, zero, inside * s.p * s.q);
    }
    SK_HD void pos_term(const Logistic<M>& s, V& f, V& g) const {
        const V focus = M::exp_neg(-gamma_pos * Focal<M>::finite(s.sp_pos));  // q^gamma
        const V log_p = M::lt_select(s.p, eps, log_eps, -s.sp_neg);
        f = -focus * log_p;
        const V straight = M::lt_select(s.p, eps, M::splat(0), s.q);
        g = focus * (through_focus * gamma_pos * s.p * log_p - straight);
    }
    SK_HD void neg(V z, V& f, V& g) const { neg_term(Logistic<M>(z), f, g); }
    SK_HD void pos(V z, V& f, V& g) const { pos_term(Logistic<M>(z), f, g); }
    SK_HD void both(V z, V& fn, V& gn, V& fp, V& gp) const {
        const Logistic<M> s(z);
        neg_term(s, fn, gn);
        pos_term(s, fp, gp);
    }
};

}  // namespace
}  // namespace sk
