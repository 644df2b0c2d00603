// Every kernel once, on buffers of exactly the right size, for a run under a sanitizer.  KERNELS: those that are compiled.
#include <cstdio>
#include <vector>

#include "add_slabs.cuh"
#include "confusion_loss.cuh"
#include "fused_loss.cuh"
#include "logits.cuh"
#include "predict.cuh"
#include "topk.cuh"

using namespace sk;

constexpr int FUSED_LOSS = 1, ADD_SLABS = 2, CONFUSION_LOSS = 4, LOGITS = 8, TOPK = 16, PREDICT = 32;
#ifndef KERNELS
#define KERNELS (FUSED_LOSS | ADD_SLABS | CONFUSION_LOSS | LOGITS | TOPK | PREDICT)
#endif

// Two groups of rows for the losses, two tiles, more than one chunk of columns and of ranks, nothing a multiple of
// anything.
constexpr int64_t batch = 131, scanned = 20, labels = 70, tiles = 2, blocks = 2, groups = 2;
constexpr int slack = 37, rank = 19, even = 10, columns = 67, stride = 128, m = 5, width = columns + slack;

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
    auto dft = numbers<Scalar>(batch * stride, 1);
    for (int64_t i = 0; i < batch * stride; ++i)
        if (i % stride >= columns) dft[size_t(i)] = Narrow<Scalar>::from(0);
    const auto u = numbers<Acc>(TILE * rank, 0.1f), v = numbers<Acc>(rank * (columns / 2 + 1), 0.1f);
    const auto turn = numbers<Acc>(tiles * 2 * columns, 1);
    TileArgs<K> tile{};
    tile.x = x.data(), tile.dft = dft.data(), tile.weight = weight.data(), tile.bias = bias.data();
    tile.u = u.data(), tile.v = v.data(), tile.turn = turn.data();
    tile.batch = batch, tile.labels = labels, tile.tiles = tiles;
    tile.slack = slack, tile.rank = rank, tile.even = even, tile.columns = columns, tile.dft_stride = stride;
    tile.resident_u = 1, tile.resident_v = 1;
    const int factors = tile.resident_bytes();

    // One positive per row: label (b mod labels).
    std::vector<int64_t> indices(batch);
    std::vector<int32_t> at((tiles + 1) * batch);
    for (int64_t b = 0; b < batch; ++b) {
        indices[size_t(b)] = b % labels;
        for (int64_t t = 0; t <= tiles; ++t) at[size_t(t * batch + b)] = int32_t(b + (t * TILE > b % labels));
    }
    const std::vector<Acc> factor(batch, Acc(1) / batch);
    std::vector<double> row_sums(blocks * batch);
    std::vector<Acc> slabs(blocks * batch * width), grad_x(batch * width), grad_weight(labels * slack);
    std::vector<Acc> grad_bias(labels), logit_scratch(blocks * groups * K::ROWS * TILE);
    std::vector<typename K::Operand> scratch(blocks * groups * K::ROWS * TILE);
    FusedLossArgs<K> fused{};
    fused.tile = tile;
    fused.targets.sparse = 1, fused.targets.indices = indices.data(), fused.targets.at = at.data();
    fused.row_factor = factor.data(), fused.row_sums = row_sums.data();
    fused.gradients.need_x = 1, fused.gradients.slabs = slabs.data(), fused.gradients.scratch = scratch.data();
    fused.gradients.grad_weight = grad_weight.data(), fused.gradients.grad_bias = grad_bias.data();
    if constexpr (KERNELS & FUSED_LOSS)
        SK_LAUNCH(fused_loss_kernel<K>, dim3(blocks), THREADS, FusedShared<K>::bytes + factors, nullptr, fused);
    double loss = 0;
    for (double row : row_sums) loss += row;

    AddSlabsArgs<Acc> add{slabs.data(), grad_x.data(), nullptr, blocks, batch * width, 0};
    if constexpr (KERNELS & ADD_SLABS)
        SK_LAUNCH(add_slabs_kernel<Acc>, dim3(3), THREADS, THREADS * int(sizeof(Acc)), nullptr, add);

    std::vector<double> values(blocks), grad_beta(labels), grad_eta(labels);
    const std::vector<Acc> ones(labels, Acc(1));
    ConfusionLossArgs<K> confusion{};
    confusion.tile = tile, confusion.targets = fused.targets, confusion.gradients = fused.gradients;
    confusion.loss.n_tp = 2, confusion.loss.d_s = confusion.loss.d_p = 1;
    confusion.beta = confusion.eta = ones.data(), confusion.logits = logit_scratch.data();
    confusion.values = values.data(), confusion.grad_beta = grad_beta.data(), confusion.grad_eta = grad_eta.data();
    if constexpr (KERNELS & CONFUSION_LOSS)
        SK_LAUNCH(confusion_loss_kernel<K>, dim3(blocks), THREADS, ConfusionShared<K>::bytes + factors, nullptr,
                  confusion);

    // The scans, each in one block that walks both tiles.
    tile.batch = scanned;
    std::vector<typename OrderKey<Acc>::type> keys(scanned * m);
    std::vector<int32_t> best(scanned * m);
    TopkArgs<K> topk{tile, m, keys.data(), best.data()};
    if constexpr (KERNELS & TOPK)
        SK_LAUNCH(topk_kernel<K>, dim3(1, 1), THREADS, TopkShared<K>::bytes + factors, nullptr, topk);

    std::vector<Scalar> z(scanned * labels);
    LogitsArgs<K> logits{tile, z.data(), labels};
    if constexpr (KERNELS & LOGITS)
        SK_LAUNCH(logits_kernel<K>, dim3(tiles, 1), THREADS, Shared<K>::bytes_scan + factors, nullptr, logits);

    std::vector<int32_t> counts(scanned);
    PredictArgs<K> count{tile, Acc(0), counts.data(), nullptr, nullptr, 0};
    if constexpr (KERNELS & PREDICT)
        SK_LAUNCH((predict_kernel<K, false>), dim3(1, 1), THREADS, PredictShared<K>::bytes + factors, nullptr, count);
    std::vector<int64_t> starts(scanned);
    int64_t total = 0;
    for (int64_t b = 0; b < scanned; ++b) {
        starts[size_t(b)] = total;
        total += counts[size_t(b)];
    }
    std::vector<int64_t> found(static_cast<size_t>(total));
    PredictArgs<K> fill{tile, Acc(0), nullptr, starts.data(), found.data(), 0};
    if constexpr (KERNELS & PREDICT)
        SK_LAUNCH((predict_kernel<K, true>), dim3(1, 1), THREADS, PredictShared<K>::bytes + factors, nullptr, fill);

    printf("loss %.6f, values %.6f, %lld predicted\n", loss, values[0] + values[1], static_cast<long long>(total));
}

int main() {
    every_kernel<F32>();
#ifndef ONLY_F32
    every_kernel<BF16>();
#endif
    return 0;
}
