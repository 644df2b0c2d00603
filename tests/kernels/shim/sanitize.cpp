// Every kernel once, on buffers of exactly the right size, for a run under a sanitizer.
#include <cstdio>
#include <vector>

#include "fused_loss.cuh"
#include "logits.cuh"
#include "predict.cuh"
#include "topk.cuh"

using namespace sk;

// Two groups of rows for the fused pass, two tiles, more than one chunk of columns, nothing a multiple of anything.
constexpr int64_t batch = 131, scanned = 20, labels = 70, tiles = 2, blocks = 2;
constexpr int slack = 37, rank = 3, m = 5;

template <class T>
std::vector<T> numbers(int64_t count, float scale) {
    std::vector<T> v(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) v[size_t(i)] = Narrow<T>::from(scale * float((i * 7919) % 201 - 100) / 100);
    return v;
}

template <class K>
void every_kernel() {
    using Scalar = typename K::Scalar;
    using Acc = typename K::Acc;
    const auto x = numbers<Scalar>(batch * slack, 1), weight = numbers<Scalar>(labels * slack, 0.3f);
    const auto bias = numbers<Scalar>(labels, 1);
    const auto c = numbers<Acc>(batch * tiles * rank, 1), u = numbers<Acc>(TILE * rank, 1);
    TileArgs<K> tile{x.data(), weight.data(), c.data(), u.data(), bias.data(), batch, labels, tiles, slack, rank, 0};

    // One positive per row: label (b mod labels).
    std::vector<int64_t> indices(batch);
    std::vector<int32_t> at((tiles + 1) * batch);
    for (int64_t b = 0; b < batch; ++b) {
        indices[size_t(b)] = b % labels;
        for (int64_t t = 0; t <= tiles; ++t) at[size_t(t * batch + b)] = int32_t(b + (t * TILE > b % labels));
    }
    const std::vector<Acc> factor(batch, Acc(1) / batch);
    std::vector<double> row_sums(blocks * batch);
    std::vector<Acc> slabs(blocks * batch * slack), grad_c(batch * tiles * rank), grad_weight(labels * slack);
    std::vector<Acc> grad_bias(labels);
    FusedLossArgs<K> fused{};
    fused.tile = tile, fused.sparse = 1, fused.indices = indices.data(), fused.at = at.data();
    fused.row_factor = factor.data(), fused.row_sums = row_sums.data(), fused.need_x = 1, fused.slabs = slabs.data();
    fused.grad_c = grad_c.data(), fused.grad_weight = grad_weight.data(), fused.grad_bias = grad_bias.data();
    SK_LAUNCH(fused_loss_kernel<K>, dim3(blocks), THREADS, FusedShared<K>::bytes, nullptr, fused);

    // The scans, each in one block that walks both tiles.
    tile.batch = scanned;
    std::vector<typename OrderKey<Acc>::type> keys(scanned * m);
    std::vector<int32_t> best(scanned * m);
    TopkArgs<K> topk{tile, m, keys.data(), best.data()};
    SK_LAUNCH(topk_kernel<K>, dim3(1, 1), THREADS, TopkShared<K>::bytes, nullptr, topk);

    std::vector<Scalar> z(scanned * labels);
    LogitsArgs<K> logits{tile, z.data(), labels};
    SK_LAUNCH(logits_kernel<K>, dim3(tiles, 1), THREADS, Shared<K>::bytes_scan, nullptr, logits);

    std::vector<int32_t> counts(scanned);
    PredictArgs<K> count{tile, Acc(0), counts.data(), nullptr, nullptr, 0};
    SK_LAUNCH((predict_kernel<K, false>), dim3(1, 1), THREADS, PredictShared<K>::bytes, nullptr, count);
    std::vector<int64_t> starts(scanned);
    int64_t total = 0;
    for (int64_t b = 0; b < scanned; ++b) {
        starts[size_t(b)] = total;
        total += counts[size_t(b)];
    }
    std::vector<int64_t> found(static_cast<size_t>(total));
    PredictArgs<K> fill{tile, Acc(0), nullptr, starts.data(), found.data(), 0};
    SK_LAUNCH((predict_kernel<K, true>), dim3(1, 1), THREADS, PredictShared<K>::bytes, nullptr, fill);

    double loss = 0;
    for (double row : row_sums) loss += row;
    printf("loss %.6f, %lld predicted\n", loss, static_cast<long long>(total));
}

int main() {
    every_kernel<F32>();
#ifndef SANITIZE_ONLY_F32
    every_kernel<BF16>();
#endif
    return 0;
}
