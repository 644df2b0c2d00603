// The second kernel of the fused pass: adds the blocks' private sums in a fixed order, and makes the gradient of the DFT
// features from those of the blocks' coefficients.
//
// The first blocks have the DFT features, the next the slabs, the next the rows, the last the total: they share nothing.
// Whatever a thread reads is on its way before the first number is added: the kernel waits for memory about once.
#pragma once

#include "waves.cuh"

namespace sk {

template <class T>
struct FinishArgs {
    const float* slabs;     // [parts, batch, columns()] or null: those of slack, and with waves the constant's
    const float* row_sums;  // [parts, batch]
    const double* totals;   // [parts]
    const float* out_scale;  // [1] or null: multiplies gradients, as scale does
    double scale;
    float constant;         // multiplies the constant's, too
    int parts, batch, slack;
    int wide;               // gradients are float, else T
    void* grad_x;           // [batch, slack], rows stride numbers apart
    int64_t stride;
    double* rows;           // [batch]
    float* value;           // [1] or null: scale · Σ totals
    WavesArgs<T> waves;

    __host__ __device__ __forceinline__ int columns() const { return slack + int(waves.grad_coef != nullptr); }
    __host__ __device__ __forceinline__ int slab_size() const { return slabs ? batch * columns() : 0; }
    __host__ __device__ __forceinline__ int slab_blocks() const { return (slab_size() + 31) / 32; }
    __host__ __device__ __forceinline__ int row_blocks() const { return (batch + 7) / 8; }
};

// put(number, sum) for the COUNT numbers from `first` on of which `size` are there. THREADS / COUNT threads have one number
// and share the parts; MANY of them are read at a time.
template <class A, int COUNT, int MANY, class V, class Put>
__device__ __forceinline__ void add_parts(unsigned char* memory, const V* from, int parts, int first, int size, Put put) {
    constexpr int SHARES = THREADS / COUNT;
    auto* sums = reinterpret_cast<A*>(memory);  // [WARPS, COUNT]
    const int at = first + thread() % COUNT, mine = thread() / COUNT, stride = SHARES * size;
    const int count = at < size ? (parts - mine + SHARES - 1) / SHARES : 0;
    from += int64_t(mine) * size + at;
    A sum = 0;
#pragma unroll 1
    for (int done = 0; done < count; done += MANY, from += int64_t(MANY) * stride) {
        V numbers[MANY];
#pragma unroll
        for (int i = 0; i < MANY; ++i) numbers[i] = done + i < count ? from[int64_t(i) * stride] : V(0);
#pragma unroll
        for (int i = 0; i < MANY; ++i) sum += A(numbers[i]);
    }
#pragma unroll
    for (int step = COUNT; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane() < COUNT) sums[thread() / 32 * COUNT + lane()] = sum;
    __syncthreads();
    if (thread() >= COUNT || at >= size) return;
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) sum += sums[COUNT * warp + thread()];
    put(at, sum);
}

// What a block does, by the part of the work that it has. W: a WavesGradient
template <class W>
struct Finish {
    using T = typename W::T;
    const FinishArgs<T>& p;
    unsigned char* const memory;
    const float scale;

    __device__ __forceinline__ Finish(const FinishArgs<T>& args, unsigned char* shared)
        : p(args), memory(shared), scale(static_cast<float>(p.out_scale ? p.scale * *p.out_scale : p.scale)) {}

    static int64_t blocks(const FinishArgs<T>& p) {
        return int64_t(W::blocks(p.waves, p.batch)) + p.slab_blocks() + p.row_blocks() + 1;
    }
    __device__ __forceinline__ void run(int block) const {
        if (block < W::blocks(p.waves, p.batch)) return features(block);
        block -= W::blocks(p.waves, p.batch);
        if (block < p.slab_blocks()) return slabs(block);
        block -= p.slab_blocks();
        if (block < p.row_blocks()) return rows(block);
        if (p.value) total();
    }

    __device__ __forceinline__ void features(int block) const {
        W::run(p.waves, memory, p.parts, p.batch, block, [&](int row, int feature, float sum) {
            put<T>(p.waves.gradient, p.wide, row * p.stride + feature, scale * sum);
        });
    }
    __device__ __forceinline__ void slabs(int block) const {
        add_parts<float, 32, 20>(memory, p.slabs, p.parts, 32 * block, p.slab_size(), [&](int at, float sum) {
            const int64_t row = at / p.columns() * p.stride;
            const int column = at % p.columns();
            if (column < p.slack) put<T>(p.grad_x, p.wide, row + column, scale * sum);
            else if (p.waves.gradient) put<T>(p.waves.gradient, p.wide, row, scale * (p.constant * sum));
        });
    }
    __device__ __forceinline__ void rows(int block) const {
        add_parts<double, 8, 5>(memory, p.row_sums, p.parts, 8 * block, p.batch, [&](int at, double sum) { p.rows[at] = sum; });
    }
    __device__ __forceinline__ void total() const {
        add_parts<double, 1, 1>(memory, p.totals, p.parts, 0, 1,
                                [&](int, double sum) { *p.value = static_cast<float>(p.scale * sum); });
    }
};

template <class W>
__global__ void __launch_bounds__(THREADS, 2) finish_kernel(const FinishArgs<typename W::T> p) {
    SK_DYNAMIC_SHARED(memory);
    Finish<W>(p, memory).run(int(blockIdx.x));
}

}  // namespace sk
