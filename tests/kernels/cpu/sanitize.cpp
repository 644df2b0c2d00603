// Every consumer of the tile loop on odd shapes, with buffers of exactly the size that was asked for.  Built with
// sanitizers and without Python; test_cpu_sanitizers.py runs it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpu/driver.h"
#include "cpu/threads.h"

namespace sk {
// driver.cpp knows the names of all instruction sets; this program has its own.
#if defined(__x86_64__)
extern const Kernels kernels_avx2{"absent", 0, nullptr, nullptr}, kernels_avx512{"absent", 0, nullptr, nullptr},
    kernels_avx512_narrow{"absent", 0, nullptr, nullptr};
#endif
extern const Kernels kernels_portable, kernels_one_vector, kernels_in_pairs;
}  // namespace sk

namespace {

std::mt19937 draw(7);

double number() { return std::normal_distribution<>()(draw); }

// Numbers in the storage type of a dtype.
struct Array {
    std::vector<char> bytes;
    Array(sk::Dtype dtype, int64_t count) {
        const size_t size = dtype == sk::Dtype::f64 ? 8 : dtype == sk::Dtype::f32 ? 4 : dtype == sk::Dtype::u8 ? 1 : 2;
        bytes.resize(static_cast<size_t>(count) * size);
        for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
            const float f = static_cast<float>(number());
            const double d = f;
            uint32_t bits;
            std::memcpy(&bits, &f, 4);
            const uint16_t high = dtype == sk::Dtype::bf16 ? static_cast<uint16_t>(bits >> 16)
                                                           : static_cast<uint16_t>(0x3000u | (bits >> 9 & 0x83ffu));
            const uint8_t one = f > 1;
            const void* from[] = {&one, &high, &f, &d};
            std::memcpy(bytes.data() + i * size, from[size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : 3], size);
        }
    }
    void* data() { return bytes.empty() ? nullptr : bytes.data(); }
};

struct Case {
    int64_t rows, labels, slack, label_start;
    int k, codes, tile, threads, shares;
    int64_t chunk, stride_more;  // rows of x and weight are longer by that much
};

// Sets of labels of the layer and around it, sorted.
struct Sets {
    std::vector<int64_t> indices, offsets{0};
    Sets(int64_t rows, int64_t num_labels) {
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t label = row % 3; label < num_labels; label += 1 + static_cast<int64_t>(draw() % 40))
                indices.push_back(label);
            offsets.push_back(static_cast<int64_t>(indices.size()));
        }
    }
};

// Runs all consumers of one case; returns a sum over all results, so that none can be left out.
double run_case(const sk::Kernels& kernels, const Case& a, sk::Dtype dtype, bool pairs_only) {
    const sk::Dtype real = dtype == sk::Dtype::f64 ? sk::Dtype::f64 : sk::Dtype::f32;
    const int64_t width = (a.k >= 0 ? 2 * a.k + 1 : 0) + a.codes + a.slack, num_labels = a.label_start + a.labels + 5;
    sk::Job job;
    job.dtype = dtype, job.threads = a.threads, job.shares = a.shares, job.tile = a.tile, job.rows = a.rows, job.labels = a.labels;
    job.slack = a.slack, job.label_start = a.label_start, job.k = a.k, job.codes = a.codes;
    const int64_t x_stride = width + a.stride_more, weight_stride = a.slack + a.stride_more;
    Array x(dtype, (a.rows - 1) * x_stride + width);
    Array weight(dtype, a.slack ? (a.labels - 1) * weight_stride + a.slack : 0), bias(real, a.labels);
    job.x = x.data(), job.x_stride = x_stride, job.weight = weight.data(), job.weight_stride = weight_stride;
    job.bias = bias.data();
    std::vector<uint8_t> bits;
    if (a.codes) {
        const int64_t blocks = (a.label_start + a.labels + a.codes - 1) / a.codes - a.label_start / a.codes;
        bits.resize(static_cast<size_t>(blocks * a.codes / 8));
        for (auto& byte : bits) byte = static_cast<uint8_t>(draw());
        job.code_bits = bits.data();
    }
    // Spans of tiles depend on all coefficients, or on fewer numbers.
    if (a.k >= 0) job.rank = 5, job.even_rank = 3;
    if (a.k >= 4) job.low_even = 4, job.low_odd = 2;
    const int64_t k = a.k >= 0 ? a.k : 0, angles = a.shares * sk::most_spans(job) * k;
    Array u(real, job.tile * job.rank), v_even(real, job.low_even * (k + 1)), v_odd(real, job.low_odd * k);
    Array even(real, sk::even_takers(job) * sk::low_even_rows(job)), odd(real, sk::odd_takers(job) * sk::low_odd_rows(job));
    Array cos(real, angles), sin(real, angles);
    if (a.k >= 0) {
        job.u = u.data(), job.v_even = v_even.data(), job.v_odd = v_odd.data();
        job.even = even.data(), job.odd = odd.data(), job.cos = cos.data(), job.sin = sin.data();
    }

    double check = 0;
    const auto add = [&](const Array& array) {
        for (char byte : array.bytes) check += byte;
    };
    std::vector<double> row_loss(static_cast<size_t>(a.rows));
    const Sets sets(a.rows, num_labels);
    Array weights(real, a.labels), row_scale(real, a.rows);
    const auto run_losses = [&](sk::LossKind kind, double smoothing) {
        for (const int form : {0, 1, 2}) {  // sparse, dense, dense with its labels apart
            const sk::Dtype dense_dtype = form == 1 ? sk::Dtype::u8 : sk::Dtype::f16;
            sk::Job loss = job;
            loss.loss.kind = kind, loss.loss.label_smoothing = smoothing;
            loss.loss.gamma_pos = loss.loss.gamma_neg = 1.5, loss.loss.eps = 1e-8, loss.loss.clip = 0.05;
            const int64_t step = form == 2 ? 3 : 1;
            Array dense(dense_dtype, ((a.rows - 1) * a.labels + a.labels - 1) * step + 1);
            if (form)
                loss.dense = dense.data(), loss.dense_dtype = dense_dtype, loss.dense_stride = a.labels * step;
            else
                loss.indices = sets.indices.data(), loss.offsets = sets.offsets.data();
            loss.dense_step = step, loss.num_labels = num_labels;
            loss.num_indices = static_cast<int64_t>(sets.indices.size());
            if (form == 1) loss.label_weight = loss.pos_weight = weights.data(), loss.row_scale = row_scale.data();
            Array grad_x(real, a.rows * width), grad_bias(real, a.labels);
            const bool whole = kind == sk::LossKind::confusion, narrow = dtype == sk::Dtype::bf16 && a.rows <= a.chunk;
            loss.grad_weight_dtype = narrow ? dtype : real;
            Array grad_weight(loss.grad_weight_dtype, a.labels * a.slack);
            loss.row_loss = row_loss.data(), loss.grad_x = grad_x.data(), loss.needs_x = width;
            loss.grad_weight = grad_weight.data(), loss.needs_weight = a.slack, loss.grad_weight_stride = a.slack;
            loss.grad_bias = grad_bias.data(), loss.needs_bias = true;
            std::vector<double> sums(static_cast<size_t>(4 * a.shares)), grad_beta(static_cast<size_t>(a.labels)),
                grad_eta = grad_beta;
            sk::ConfusionPass& pass = loss.confusion;
            pass.params.n_tp = 2, pass.params.d_s = pass.params.d_p = 1, pass.params.mirrored = form == 2;
            pass.params.form = static_cast<sk::ConfusionForm>(form), pass.sums = sums.data();
            pass.grad_beta = grad_beta.data(), pass.grad_eta = grad_eta.data(), pass.betas = weights.data();
            sk::run_job(kernels, loss, whole ? a.rows : a.chunk, {});
            add(grad_x), add(grad_weight), add(grad_bias);
            loss.needs_x = loss.needs_weight = loss.needs_bias = false;
            pass.grad_beta = pass.grad_eta = nullptr;
            sk::run_job(kernels, loss, whole ? a.rows : a.chunk, {});
        }
    };
    run_losses(sk::LossKind::bce, 0);
    run_losses(sk::LossKind::bce, 0.1);
    run_losses(sk::LossKind::focal, 0);
    run_losses(sk::LossKind::asymmetric, 0);
    if (pairs_only) return check;
    run_losses(sk::LossKind::confusion, 0);

    job.consumer = sk::Consumer::logits;
    Array out(dtype, a.rows * a.labels);
    job.out = out.data(), job.out_stride = a.labels;
    sk::run_job(kernels, job, a.chunk, {});
    add(out);
    job.consumer = sk::Consumer::topk, job.keep = a.labels < 7 ? a.labels : 7;
    Array values(real, a.rows * job.keep);
    std::vector<int64_t> labels(static_cast<size_t>(a.rows * job.keep));
    sk::Outputs outputs;
    outputs.top_values = values.data(), outputs.top_labels = labels.data();
    sk::run_job(kernels, job, a.chunk, outputs);
    job.consumer = sk::Consumer::predict, job.threshold = 0.5;
    sk::Found found;
    outputs.found = &found;
    sk::run_job(kernels, job, a.chunk, outputs);
    std::vector<int64_t> offsets(static_cast<size_t>(a.rows + 1)), indices(static_cast<size_t>(found.total));
    found.write(a.rows, offsets.data(), indices.data());
    return check + static_cast<double>(found.total);
}

// Arrays that are no label sets are refused before anything is read through them.
int refused() {
    int count = 0;
    const std::vector<std::vector<int64_t>> offsets = {{0, 1000000, 2}, {0, -1, 2}, {1, 1, 2}, {0, 1, 1}, {0, 2, 1}};
    const std::vector<std::vector<int64_t>> indices = {{5, 1}, {3, 3}, {-1, 2}, {2, 90}};
    for (size_t i = 0; i < offsets.size() + indices.size(); ++i) {
        const std::vector<int64_t> at = i < offsets.size() ? offsets[i] : std::vector<int64_t>{0, 2, 2};
        const std::vector<int64_t> labels = i < offsets.size() ? std::vector<int64_t>{1, 2} : indices[i - offsets.size()];
        Array x(sk::Dtype::f32, 2), weight(sk::Dtype::f32, 50);
        std::vector<double> rows(2);
        sk::Job job;
        job.rows = 2, job.labels = 50, job.slack = 1, job.x_stride = job.weight_stride = 1, job.tile = 48;
        job.x = x.data(), job.weight = weight.data(), job.row_loss = rows.data();
        job.indices = labels.data(), job.offsets = at.data(), job.num_indices = 2, job.num_labels = 50;
        try {
            sk::run_job(sk::kernels_portable, job, 256, {});
        } catch (const std::invalid_argument&) {
            ++count;
        }
    }
    return count;
}

// An exception in a thread reaches the caller.
bool rethrown() {
    try {
        sk::for_tasks(4, 9, [](int64_t task) { if (task == 2) throw std::bad_alloc(); });
    } catch (const std::bad_alloc&) {
        return true;
    }
    return false;
}

}  // namespace

int main() {
    // rows, labels, slack, label_start, k, codes, tile, threads, shares, chunk, stride_more
    const std::vector<Case> cases = {
        {3, 101, 7, 0, 5, 0, 48, 1, 1, 256, 0},      {33, 131, 35, 7, -1, 0, 48, 2, 4, 256, 3},
        {1, 1, 2, 0, 0, 0, 24, 1, 1, 256, 0},        {70, 150, 0, 0, 4, 0, 72, 3, 4, 32, 0},
        {6, 300, 40, 37, -1, 16, 64, 2, 2, 256, 1},  {37, 290, 5, 0, 3, 64, 128, 2, 2, 16, 0},
        {5, 300, 3, 5, 0, 256, 64, 1, 2, 256, 0},    {4, 270, 0, 250, -1, 1024, 256, 1, 1, 256, 0},
        {2, 30, 3, 0, 1, 0, 24, 2, 8, 256, 0},       {5, 461, 3, 0, 4, 0, 24, 2, 1, 256, 0},
    };
    const int no_sets = refused();
    double check = 0;
    for (const Case& a : cases) {
        for (const sk::Dtype dtype : {sk::Dtype::f32, sk::Dtype::f64, sk::Dtype::bf16, sk::Dtype::f16})
            check += run_case(sk::kernels_portable, a, dtype, false) + run_case(sk::kernels_one_vector, a, dtype, false);
        check += run_case(sk::kernels_in_pairs, a, sk::Dtype::bf16, true);
    }
    std::printf("cases %zu refused %d rethrown %d check %g\n", cases.size(), no_sets, rethrown(), check);
}
