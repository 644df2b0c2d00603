// The last few slack columns of grad_weight, where they do not fill a vector: rows of the batch in the lanes, as many
// multiplications as there are columns, and the lanes added up at the end.
//
//     grad_weight[t][j] = sum over rows of g[t][row] * x[j][row]        for the layout.tail last columns j
#pragma once

#include "cpu/layout.h"

namespace sk {
namespace {

// a and b are cut into segments of Segment lanes: the low or the high halves of a's, then of b's.
template <int Segment, bool High, class V, class I, int... At>
SK_INLINE V halves(V a, V b, std::integer_sequence<int, At...>) {
    constexpr int half = Segment / 2;
    return shuffle<V, I>(a, b, std::integer_sequence<int, (At / half * Segment + At % half + (High ? half : 0))...>{});
}

// out[i] = the sum of the lanes of a[i]
template <class C, int Segment, int N>
SK_INLINE void sum_lanes(const typename Simd<C>::V (&a)[N], C* out) {
    using V = typename Simd<C>::V;
    using I = typename Simd<C>::I;
    constexpr int L = Simd<C>::kLanes;
    if constexpr (Segment == 1) {
        SK_EACH(i, N) store(out + i * L, a[i]);
    } else {
        constexpr int M = (N + 1) / 2;
        constexpr auto lanes = std::make_integer_sequence<int, L>{};
        V folded[M];
        SK_EACH(i, M) {
            const V one = a[2 * i], other = a[2 * i + 1 < N ? 2 * i + 1 : 2 * i];
            folded[i] = halves<Segment, false, V, I>(one, other, lanes) + halves<Segment, true, V, I>(one, other, lanes);
        }
        sum_lanes<C, Segment / 2>(folded, out);
    }
}

template <class V>
SK_INLINE V multiply_add(V acc, V a, V b) {
    return acc + a * b;
}
#if defined(SK_DOT2)
SK_INLINE Simd<float>::V multiply_add(Simd<float>::V acc, PairV a, PairV b) { return dot2(acc, a, b); }
#endif

// In memory the sums are of type E: C, or bfloat16, to which nothing is added.
template <class C, class E = C>
struct GradTail {
    using V = typename Simd<C>::V;
    using F = std::conditional_t<kDot2, PairV, V>;  // a vector of Factors
    static constexpr int L = Simd<C>::kLanes;
    static constexpr int64_t kTerms = kPanel<C> / kPack;  // Factors of a panel

    const Layout<C>& layout;
    const Factor<C>* g;    // [P][labels][kTerms], panels g_panel apart
    int64_t g_panel;
    const Factor<C>* x;    // [P][tail][kTerms]
    E* out;                // [labels], rows `stride` apart: the first of the columns
    int64_t stride;
    bool add;

    void run(int64_t labels) const {
        call_with_rows<kMostTail>(layout.tail, [&](auto width) {
            constexpr int W = decltype(width)::value, MR = W < kAccumulators ? kAccumulators / W : 1;
            // The last block begins early, and what it shares with the one before it is not written again.
            int64_t t = 0;
            for (; labels >= MR && t < labels; t += MR) {
                const int64_t from = t + MR <= labels ? t : labels - MR;
                block<MR, W>(from, t - from);
            }
            for (; t < labels; ++t) block<1, W>(t, 0);
        });
    }

  private:
    static constexpr int kAccumulators = SK_REGISTERS >= 32 ? 16 : 8;

    template <int MR, int W>
    SK_INLINE void block(int64_t t, int64_t skip) const {
        V acc[MR * W]{};
        for (int64_t panel = 0; panel < layout.panels; ++panel) {
            const auto* from = g + panel * g_panel + t * kTerms;
            const auto* by = x + panel * W * kTerms;
#pragma GCC unroll 1
            for (int64_t v = 0; v < kTerms; v += L) {
                F columns[W];
                SK_EACH(j, W) columns[j] = load<F>(by + j * kTerms + v);
                SK_EACH(i, MR) {
                    const F row = load<F>(from + i * kTerms + v);
                    SK_EACH(j, W) acc[i * W + j] = multiply_add(acc[i * W + j], row, columns[j]);
                }
            }
        }
        C sums[(MR * W + L - 1) / L * L];
        sum_lanes<C, L>(acc, sums);
        if constexpr (std::is_same<E, C>::value) {
            if (add)
                for (int64_t i = skip; i < MR; ++i) SK_EACH(j, W) sums[i * W + j] += out[(t + i) * stride + j];
            for (int64_t i = skip; i < MR; ++i) __builtin_memcpy(out + (t + i) * stride, sums + i * W, W * sizeof(C));
        } else {
            E narrow[sizeof(sums) / sizeof(C)];
            for (int64_t v = 0; v < static_cast<int64_t>(sizeof(sums) / sizeof(C)); v += L)
                store(narrow + v, rounded(load<V>(sums + v)));
            for (int64_t i = skip; i < MR; ++i) __builtin_memcpy(out + (t + i) * stride, narrow + i * W, W * sizeof(E));
        }
    }
};

}  // namespace
}  // namespace sk
