// Both kernels once, on buffers of exactly the right size, for a run under a sanitizer.
#include <cstdio>
#include <memory>
#include <vector>

#include "finish.cuh"
#include "fused_loss.cuh"

using namespace sk;

// Several blocks, of which the first has several tiles and the last the rest of one, and a group of rows and the rest of
// one; nothing a multiple of anything.
constexpr int64_t batch = 69, labels = 171, block_labels = 160, blocks = 2;
constexpr int slack = 6;

template <class T>
std::vector<T> numbers(int64_t count, float scale) {
    std::vector<T> v(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) v[size_t(i)] = narrow<T>(scale * float((i * 7919) % 201 - 100) / 100);
    return v;
}

constexpr int features = 5;  // before x in its rows, where the kernel makes their coefficients

template <class S>
void both_kernels() {
    using T = typename S::Scalar;
    const auto x = numbers<T>(batch * slack, 1), whole_x = numbers<T>(batch * (features + slack), 1);
    const auto waves = numbers<T>(blocks * 32 * 16 / sizeof(T), 0.1f), weight = numbers<T>(labels * slack, 0.3f);
    const auto bias = numbers<T>(labels, 1), basis = numbers<T>(block_labels * 16, 0.1f);
    const auto coef = numbers<T>(batch * blocks * 16, 0.1f);
    std::vector<int64_t> indices, offsets{0};  // positives: every 40th label, from the row's own on
    for (int64_t b = 0; b < batch; ++b) {
        for (int64_t label = b; label < labels; label += 40) indices.push_back(label);
        offsets.push_back(int64_t(indices.size()));
    }
    std::vector<T> grad_weight(labels * slack), grad_bias(labels), grad_coef(batch * 2 * 16), grad_x(batch * slack);
    const auto turns = numbers<T>(8 * 32 * (4 / sizeof(T)), 1);
    const std::vector<float> factors(16 * 16 * 2, 0.1f);
    std::vector<T> grad_features(batch * slack);
    std::vector<float> slabs(blocks * batch * (slack + 1)), row_sums(blocks * batch);
    std::vector<float> weight_sums(labels * slack), bias_sums(labels);
    std::vector<double> totals(blocks), rows(batch);
    float value = 0;

    FusedLossArgs<T> p{};
    p.x = x.data(), p.weight = weight.data(), p.bias = bias.data(), p.basis = basis.data(), p.coef = coef.data();
    p.x_stride = slack, p.batch = batch, p.labels = labels, p.slack = slack, p.block_labels = block_labels;
    p.x_moves = 1, p.weight_piece = 4, p.pairs = 1, p.scale = 1, p.wide = sizeof(T) == 4, p.basis_at = S::COLUMNS;
    p.loss.kind = LossKind::bce, p.loss.plain = 1;
    p.loss.targets.indices = indices.data(), p.loss.targets.offsets = offsets.data();
    p.grad_weight = grad_weight.data(), p.grad_bias = grad_bias.data(), p.grad_coef = grad_coef.data(), p.numbers = 8;
    p.weight_sums = weight_sums.data(), p.bias_sums = bias_sums.data();
    p.slabs = slabs.data(), p.row_sums = row_sums.data(), p.totals = totals.data();
    SK_LAUNCH(fused_loss_kernel<S>, dim3(blocks), THREADS, S::BYTES, nullptr, p);

    FinishArgs<T> f{slabs.data(), row_sums.data(), totals.data(), nullptr, 1, 0.5f, blocks, batch, slack, p.wide,
                          grad_x.data(), slack, rows.data(), &value,
                          {grad_coef.data(), turns.data(), factors.data(), slack, nullptr}};
    const auto finish = [&](auto waves) {
        using W = decltype(waves);
        SK_LAUNCH(finish_kernel<W>, dim3(unsigned(Finish<W>::blocks(f))), THREADS, W::BYTES, nullptr, f);
    };
    finish(WavesGradient<T, 8, 4>{});
    f.slabs = nullptr, f.waves.gradient = grad_features.data();  // one after the other: not too many threads
    finish(WavesGradient<T, 8, 4>{});
    finish(WavesGradient<T, 8, 1>{});
    finish(WavesGradient<T, 16, 2>{});
    printf("loss %.6f\n", double(value));

    p.slabs = nullptr, p.grad_coef = nullptr;  // x needs no gradient
    SK_LAUNCH(fused_loss_kernel<S>, dim3(blocks), THREADS, S::BYTES, nullptr, p);

    p.basis_at = S::COLUMNS - 12;  // in the columns that slack leaves
    p.coef = nullptr, p.waves = waves.data(), p.features = features, p.wave_steps = 1;
    p.x = whole_x.data() + features, p.x_stride = features + slack;
    SK_LAUNCH(fused_loss_kernel<S>, dim3(blocks), THREADS, S::BYTES, nullptr, p);
}

int main() {
    both_kernels<Shape<__nv_bfloat16, 4, 2, 2, 128>>();  // four warps have the same rows
#ifndef ONLY_ONE
    both_kernels<Shape<float, 8, 1, 4, 64>>();
#endif
    return 0;
}
