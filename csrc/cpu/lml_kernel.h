// One row of the LML projection; see lml.h for the steps and vec.h for the vectors.
#pragma once

#include "cpu/lml.h"
#include "cpu/vec.h"

namespace sk {
namespace {

template <class C>
struct LmlRow {
    using M = VecMath<C>;
    using V = typename Simd<C>::V;
    using I = typename Simd<C>::I;
    using Int = typename Format<C>::Int;
    static constexpr int L = Simd<C>::kLanes;
    static constexpr int kBlock = 32;  // vectors that are added up in C before they go into a double
    static constexpr C kInf = static_cast<C>(__builtin_inf());
    // Newton squares the error (the slope of log P - log Q lies in [1/2, 2]), so the step below this one is the last.
    static constexpr double kLastStep = sizeof(C) == 4 ? 1e-4 : 1e-8;
    static constexpr double kEps = sizeof(C) == 4 ? 1.2e-7 : 2.3e-16;
    static constexpr int kMaxSweeps = 2500;  // bisection over all exponents of a double
    // Sums of r below this one are as good as underflowed; the closed form is exact to the last digit there.
    static constexpr double kTiny = sizeof(C) == 4 ? 1e-30 : 1e-290;

    // sigma around a logit: big = sigma(|t|), r = sigma(-|t|), their product h, above: t > 0
    struct At {
        V big, r, h;
        I above;
    };

    // t = z + nu, where nu is the sum of two numbers of type C and the rounding error of the sum goes into the
    // exponential: without it a logit of size 100 would cost two digits.
    struct Shift {
        V hi, lo;
        explicit SK_INLINE Shift(double nu) {
            const C h = static_cast<C>(nu);
            hi = V{} + h;
            lo = V{} + static_cast<C>(nu - static_cast<double>(h));
        }
        SK_INLINE At at(V z) const {
            const V t = z + hi;
            const V back = t - z;
            const V lost = ((z - (t - back)) + (hi - back)) + lo;
            const V size = M::abs(t);
            At out;
            out.above = t > V{};
            const V away = out.above ? -lost : lost;  // d(-|t|)
            // an infinite t has lost nothing; the comparison is false for NaN, too
            const V e = M::exp_neg(-size) * (V{} + 1 + (size < static_cast<C>(1024) ? away : V{}));
            out.big = 1 / (1 + e);
            out.r = e * out.big;
            out.h = out.r * out.big;
            return out;
        }
    };

    static SK_INLINE double sum(V v) {
        double s = 0;
        for (int i = 0; i < L; ++i) s += static_cast<double>(v[i]);
        return s;
    }

    // Calls f(first index, count, V of z), in blocks after which end_of_block() runs; what lies behind the row is -inf,
    // whose sigma is 0.
    template <class F, class G>
    static SK_INLINE void each(const C* z, int64_t n, F&& f, G&& end_of_block) {
        const int64_t whole = n / L * L;
        for (int64_t start = 0; start < whole; start += kBlock * L) {
            const int64_t stop = start + kBlock * L < whole ? start + kBlock * L : whole;
            for (int64_t i = start; i < stop; i += L) f(i, L, load<V>(z + i));
            end_of_block();
        }
        if (whole < n) {
            C tail[L];
            for (int i = 0; i < L; ++i) tail[i] = whole + i < n ? z[whole + i] : -kInf;
            f(whole, static_cast<int>(n - whole), load<V>(tail));
            end_of_block();
        }
    }
    static SK_INLINE void put(C* out, int count, V v) {
        if (count == L) return store(out, v);
        C tail[L];
        store(tail, v);
        for (int i = 0; i < count; ++i) out[i] = tail[i];
    }

    struct Sums {
        double below = 0, above = 0;      // sums of r where t <= 0, where t > 0
        double h_below = 0, h_above = 0;  // sums of h
        int64_t count = 0;                // t > 0
    };

    // All sums at nu; writes y = sigma(z + nu) where out is given.
    template <bool Write>
    static Sums sweep(const C* z, int64_t n, double nu, C* out) {
        const Shift shift(nu);
        Sums s;
        V below{}, above{}, h_below{}, h_above{};
        I count{};
        each(
            z, n,
            [&](int64_t i, int number, V v) __attribute__((always_inline)) {
                const At a = shift.at(v);
                below += a.above ? V{} : a.r;
                above += a.above ? a.r : V{};
                h_below += a.above ? V{} : a.h;
                h_above += a.above ? a.h : V{};
                count -= a.above;
                if (Write) put(out + i, number, a.above ? a.big : a.r);
            },
            [&]() __attribute__((always_inline)) {
                s.below += sum(below), s.above += sum(above);
                s.h_below += sum(h_below), s.h_above += sum(h_above);
                for (int i = 0; i < L; ++i) s.count += count[i];
                below = above = h_below = h_above = V{};
                count = I{};
            });
        return s;
    }

    struct Range {
        double max, min;
        int64_t finite = 0, plus_inf = 0;
        bool nan = false;
    };

    static Range range(const C* z, int64_t n) {
        V hi = V{} - kInf, lo = V{} + kInf;
        I finite{}, plus_inf{}, nan{};
        each(
            z, n,
            [&](int64_t, int, V v) __attribute__((always_inline)) {
                const I here = M::abs(v) < kInf;
                const V up = here ? v : V{} - kInf, down = here ? v : V{} + kInf;
                hi = up > hi ? up : hi;
                lo = down < lo ? down : lo;
                finite -= here;
                plus_inf -= v == kInf;
                nan |= v != v;
            },
            []() {});
        Range r{-__builtin_inf(), __builtin_inf()};
        for (int i = 0; i < L; ++i) {
            r.max = hi[i] > r.max ? hi[i] : r.max;
            r.min = lo[i] < r.min ? lo[i] : r.min;
            r.finite += finite[i];
            r.plus_inf += plus_inf[i];
            r.nan |= nan[i] != 0;
        }
        return r;
    }

    struct Root {
        double nu;
        double log_slope = 0;  // negative where the sum of h underflows
    };

    // Where k logits lie so far above the others that every r underflows, sigma is an exponential on both sides, and
    // P = Q has a closed form: nu = (logsumexp of -z above - logsumexp of z below) / 2.
    static Root far_apart(const C* z, int64_t n, double nu) {
        double least = __builtin_inf(), most = -__builtin_inf();  // the finite logits next to the gap
        for (int64_t i = 0; i < n; ++i) {
            const double v = z[i];
            if (v + nu > 0 ? v < least : false) least = v;
            if (v + nu > 0 ? false : v > most) most = v;
        }
        double above = 0, below = 0;
        for (int64_t i = 0; i < n; ++i) {
            const double v = z[i];
            (v + nu > 0 ? above : below) += __builtin_exp(v + nu > 0 ? least - v : v - most);
        }
        const double log_above = __builtin_log(above) - least, log_below = __builtin_log(below) + most;
        return {log_above / 2 - log_below / 2, log_above / 2 + log_below / 2 + __builtin_log(2.0)};
    }

    static Root root(const C* z, int64_t n, int64_t k) {
        const Range r = range(z, n);
        const int64_t need = k - r.plus_inf;
        // More logits at +inf than k, or fewer than k above -inf: no y satisfies that.
        if (r.nan || need < 0 || need > r.finite) return {__builtin_nan("")};
        const double limit = sizeof(C) == 4 ? 1.7e38 : 8.9e307;
        if (need == 0) return {-limit};  // the labels at +inf are all that are chosen
        if (need == r.finite) return {limit};
        const double prior = __builtin_log(static_cast<double>(need) / static_cast<double>(r.finite - need));
        double lo = prior - r.max, hi = prior - r.min, nu = lo;
        double step_1 = hi - lo + 1, step_2 = step_1;  // sizes of the last step and of the one before
        for (int i = 0; i < kMaxSweeps; ++i) {
            const Sums s = sweep<false>(z, n, nu, nullptr);
            const double excess = static_cast<double>(s.count - k);
            const double p = s.below + (excess > 0 ? excess : 0), q = s.above + (excess < 0 ? -excess : 0);
            if (excess == 0 && p < kTiny && q < kTiny) return far_apart(z, n, nu);
            if (p == q) break;
            (p < q ? lo : hi) = nu;
            double step = -__builtin_log(p / q) / (s.h_below / p + s.h_above / q);
            // False for NaN, too, which is what p = 0 or q = 0 gives.
            const bool newton = nu + step >= lo && nu + step <= hi && __builtin_fabs(step) <= 0.7 * step_2;
            if (!newton) step = (lo + hi) / 2 - nu;
            step_2 = step_1;
            step_1 = newton ? __builtin_fabs(step) : (hi - lo) / 2;
            nu += step;
            if (newton && step_1 <= kLastStep) break;
            if (hi - lo <= kEps * 1e-3 * __builtin_fabs(nu)) break;
        }
        return {nu};
    }

    static void run(const LmlJob& job, int64_t row, const C* z, const C* grad, C* out) {
        const int64_t n = job.n;
        if (job.step == LmlStep::solve || job.step == LmlStep::project) {
            const Root found = root(z, n, job.k);
            const double nu = job.nu[row] = found.nu;
            const Sums s = job.step == LmlStep::project ? sweep<true>(z, n, nu, out) : sweep<false>(z, n, nu, nullptr);
            job.slope[row] = nu == nu ? (found.log_slope < 0 ? found.log_slope : s.h_below + s.h_above) : nu;
            return;
        }
        if (job.slope[row] < 0) return run_far_apart(job, row, z, grad, out);
        const Shift shift(job.nu[row]);
        const double slope = job.slope[row];
        if (job.step == LmlStep::spread) {
            const V scale = V{} + static_cast<C>(slope > 0 || slope != slope ? job.total[row] / slope : 0);
            each(
                z, n,
                [&](int64_t i, int number, V v) __attribute__((always_inline)) {
                    const At a = shift.at(v);
                    put(out + i, number, a.h * scale);
                },
                []() {});
            return;
        }
        // pullback: h goes to out first, so that it is made once
        double weighted = 0;
        V part{};
        each(
            z, n,
            [&](int64_t i, int number, V v) __attribute__((always_inline)) {
                const At a = shift.at(v);
                put(out + i, number, a.h);
                part += a.h * (number == L ? load<V>(grad + i) : part_of(grad + i, number));
            },
            [&]() __attribute__((always_inline)) {
                weighted += sum(part);
                part = V{};
            });
        const C mean = static_cast<C>(slope > 0 || slope != slope ? weighted / slope : 0);
        for (int64_t i = 0; i < n; ++i) out[i] *= grad[i] - mean;
    }
    // The same in logarithms: h = exp(-|t|), and h / sum(h) is a softmax.
    static void run_far_apart(const LmlJob& job, int64_t row, const C* z, const C* grad, C* out) {
        const double nu = job.nu[row], log_slope = job.slope[row];
        const auto size = [&](int64_t i) { return __builtin_fabs(static_cast<double>(z[i]) + nu); };
        if (job.step == LmlStep::spread) {
            for (int64_t i = 0; i < job.n; ++i)
                out[i] = static_cast<C>(job.total[row] * __builtin_exp(-size(i) - log_slope));
            return;
        }
        double mean = 0;
        for (int64_t i = 0; i < job.n; ++i)
            mean += __builtin_exp(-size(i) - log_slope) * static_cast<double>(grad[i]);
        for (int64_t i = 0; i < job.n; ++i)
            out[i] = static_cast<C>(__builtin_exp(-size(i)) * (static_cast<double>(grad[i]) - mean));
    }
    static SK_INLINE V part_of(const C* p, int count) {
        C tail[L];
        for (int i = 0; i < L; ++i) tail[i] = i < count ? p[i] : C{0};
        return load<V>(tail);
    }
};

}  // namespace
}  // namespace sk
