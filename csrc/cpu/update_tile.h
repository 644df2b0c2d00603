// The step of an optimizer on the labels of a tile, whose gradient was just made: no array of the gradient's size exists.
//
//     sgd        g += decay w;                                     w -= lr g
//     momentum   g += decay w;  m = momentum m + g;                w -= lr m
//     adagrad    g += decay w;  h += mean of g^2 over the row;     w -= lr g / (sqrt h + eps)
//     adamw      m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;      w = (1 - lr decay) w - lr/c1 m / (sqrt(v/c2) + eps)
//
// All of it in C, decay too, and rounded once: to bfloat16 at random, in proportion (the mean of the result is what was
// rounded), or to the nearest with what was lost kept beside it (kahan).
#pragma once

#include "core/optim.h"
#include "cpu/convert.h"

namespace sk {
namespace {

// The bits of a rounded up or down, with 16 random bits for the 16 that are cut off.  Infinity and NaN stay.
SK_INLINE uint16_t round_at_random(float a, uint32_t random) {
    const uint32_t u = bit_cast<uint32_t>(a), nan = (u & 0x7fffffffu) > 0x7f800000u ? 0x40u : 0u;
    const uint32_t special = u >> 16 | nan, rounded = (u + (random & 0xffffu)) >> 16;
    return static_cast<uint16_t>((u & 0x7f800000u) == 0x7f800000u ? special : rounded);
}

template <class C, class E, UpdateKind kKind, Rounding kRounding>
struct TileUpdate {
    using V = typename Simd<C>::V;
    static constexpr int L = Simd<C>::kLanes;

    const Update& update;
    const int64_t columns;

    // w[j] = rounded(step(w[j], j)) for a row
    template <class Step>
    SK_INLINE void each(int64_t row, int64_t label, Step step) const {
        E* __restrict w = static_cast<E*>(update.parameter) + row * update.stride;
        const int64_t count = columns;
        if constexpr (kRounding == Rounding::kahan) {
            Bf16* __restrict lost = static_cast<Bf16*>(update.compensation) + row * count;
            for (int64_t j = 0; j < count; ++j) {
                const C exact = step(widen<C>(w[j]) + widen<C>(lost[j]), j);
                // Bits and not structures: a copy of one would keep the loop from becoming vectors.
                const uint16_t near = Narrow<E, C>::from(exact).bits;
                w[j].bits = near;
                lost[j].bits = Narrow<Bf16, C>::from(exact - widen<C>(Bf16{near})).bits;
            }
        } else if constexpr (kRounding == Rounding::stochastic) {
            const RandomRow random(update.key, label);
            for (int64_t j = 0; j < count; ++j)
                w[j].bits = round_at_random(step(widen<C>(w[j]), j), random.bits(static_cast<uint32_t>(j)));
        } else {
            (void)label;
            for (int64_t j = 0; j < count; ++j) w[j] = Narrow<E, C>::from(step(widen<C>(w[j]), j));
        }
    }

    // Row `row` of the parameter, which is label `label` among all; g is used up.
    void operator()(C* __restrict g, int64_t row, int64_t label) const {
        const C lr = static_cast<C>(update.lr), decay = static_cast<C>(update.weight_decay);
        C* __restrict first = static_cast<C*>(update.first);
        if constexpr (kKind == UpdateKind::sgd) {
            each(row, label, [=](C w, int64_t j) __attribute__((always_inline)) { return w - lr * (g[j] + decay * w); });
        } else if constexpr (kKind == UpdateKind::momentum) {
            const C momentum = static_cast<C>(update.momentum);
            first += row * columns;
            each(row, label, [=](C w, int64_t j) __attribute__((always_inline)) {
                const C m = momentum * first[j] + (g[j] + decay * w);
                first[j] = m;
                return w - lr * m;
            });
        } else if constexpr (kKind == UpdateKind::adagrad) {
            if (decay != C(0)) add_decay(g, row, decay);
            const C sum = first[row] + squares(g) / static_cast<C>(columns);
            first[row] = sum;
            // A row that never had a gradient stays, also where eps is 0.
            const C scale = sum == C(0) ? C(0) : lr / (static_cast<C>(__builtin_sqrt(sum)) + static_cast<C>(update.eps));
            each(row, label, [=](C w, int64_t j) __attribute__((always_inline)) { return w - scale * g[j]; });
        } else {
            C* __restrict second = static_cast<C*>(update.second) + row * columns;
            first += row * columns;
            const C keep = static_cast<C>(1 - update.lr * update.weight_decay);
            const C b1 = static_cast<C>(1 - update.beta1);
            const C b2 = static_cast<C>(update.beta2), rest = static_cast<C>(1 - update.beta2);
            const C scale = static_cast<C>(update.lr / update.correction1), eps = static_cast<C>(update.eps);
            const C root = static_cast<C>(1 / __builtin_sqrt(update.correction2));
            each(row, label, [=](C w, int64_t j) __attribute__((always_inline)) {
                const C m = first[j] + b1 * (g[j] - first[j]), v = b2 * second[j] + rest * (g[j] * g[j]);
                first[j] = m;
                second[j] = v;
                return keep * w - scale * m / (square_root(v) * root + eps);
            });
        }
    }

  private:
    static SK_INLINE C square_root(C a) {
        if constexpr (sizeof(C) == 4)
            return __builtin_sqrtf(a);
        else
            return __builtin_sqrt(a);
    }

    void add_decay(C* __restrict g, int64_t row, C decay) const {
        const E* __restrict w = static_cast<const E*>(update.parameter) + row * update.stride;
        const Bf16* __restrict lost = static_cast<const Bf16*>(update.compensation) + row * columns;
        for (int64_t j = 0; j < columns; ++j)
            if constexpr (kRounding == Rounding::kahan)
                g[j] += decay * (widen<C>(w[j]) + widen<C>(lost[j]));
            else
                g[j] += decay * widen<C>(w[j]);
    }

    C squares(const C* g) const {
        V sums{};
        int64_t j = 0;
        for (; j + L <= columns; j += L) sums += load<V>(g + j) * load<V>(g + j);
        C lanes[L], sum = 0;
        store(lanes, sums);
        for (int i = 0; i < L; ++i) sum += lanes[i];
        for (; j < columns; ++j) sum += g[j] * g[j];
        return sum;
    }
};

// `count` labels from `row` on of the parameter, label `label` among all; their gradient has rows `stride` apart.
template <class C, class E, Rounding kRounding>
void update_rows_as(const Update& update, C* g, int64_t stride, int64_t count, int64_t columns, int64_t row, int64_t label) {
    const auto run = [&](auto kind) {
        const TileUpdate<C, E, decltype(kind)::value, kRounding> tile{update, columns};
        for (int64_t t = 0; t < count; ++t) tile(g + t * stride, row + t, label + t);
    };
    switch (update.kind) {
        case UpdateKind::none: return;
        case UpdateKind::sgd: return run(std::integral_constant<UpdateKind, UpdateKind::sgd>{});
        case UpdateKind::momentum: return run(std::integral_constant<UpdateKind, UpdateKind::momentum>{});
        case UpdateKind::adagrad: return run(std::integral_constant<UpdateKind, UpdateKind::adagrad>{});
        case UpdateKind::adamw: return run(std::integral_constant<UpdateKind, UpdateKind::adamw>{});
    }
}

template <class C>
void update_rows(const Update& update, Dtype dtype, C* g, int64_t stride, int64_t count, int64_t columns, int64_t row,
                 int64_t label) {
    if (dtype != Dtype::bf16) return update_rows_as<C, C, Rounding::nearest>(update, g, stride, count, columns, row, label);
    if constexpr (sizeof(C) == 4) switch (update.rounding) {
            case Rounding::nearest:
                return update_rows_as<C, Bf16, Rounding::nearest>(update, g, stride, count, columns, row, label);
            case Rounding::stochastic:
                return update_rows_as<C, Bf16, Rounding::stochastic>(update, g, stride, count, columns, row, label);
            case Rounding::kahan:
                return update_rows_as<C, Bf16, Rounding::kahan>(update, g, stride, count, columns, row, label);
        }
}

}  // namespace
}  // namespace sk
