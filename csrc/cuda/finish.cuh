// The second kernel of the fused pass: adds the blocks' private sums in a fixed order.
//
// A block takes 32 neighbouring numbers; its warps share the parts (warp w adds parts w, w + 8, ...), and the eight
// sums meet in shared memory, again in order. The first blocks have the slabs, the next the rows, the last the total.
#pragma once

#include "tile.cuh"

namespace sk {

template <class T>
struct FinishArgs {
    const float* slabs;     // [parts, batch, slack] or null
    const float* row_sums;  // [parts, batch]
    const double* totals;   // [parts]
    const float* out_scale;  // [1] or null: multiplies grad_x, as scale does
    double scale;
    int parts, batch, slack;
    int wide;               // grad_x is float, else T
    void* grad_x;           // [batch, slack], rows stride numbers apart
    int64_t stride;
    double* rows;           // [batch]
    float* value;           // [1] or null: scale · Σ totals

    __host__ __device__ __forceinline__ int64_t slab_size() const { return slabs ? int64_t(batch) * slack : 0; }
    __host__ __device__ __forceinline__ int64_t slab_blocks() const { return (slab_size() + 31) / 32; }
    __host__ __device__ __forceinline__ int64_t blocks() const { return slab_blocks() + (batch + 31) / 32 + 1; }
};

// put(number, sum) for the 32 numbers from `first` on of which `size` are there.
template <class V, class Put>
__device__ __forceinline__ void add_parts(unsigned char* memory, const V* from, int parts, int64_t first, int64_t size,
                                          Put put) {
    auto* sums = reinterpret_cast<double*>(memory);  // [WARPS, 32]
    const int64_t at = first + lane();
    double sum = 0;
    if (at < size) {
#pragma unroll 4
        for (int part = thread() / 32; part < parts; part += WARPS) sum += double(from[part * size + at]);
    }
    sums[thread()] = sum;
    __syncthreads();
    if (thread() >= 32 || at >= size) return;
    for (int w = 1; w < WARPS; ++w) sum += sums[32 * w + lane()];
    put(at, sum);
}

template <class T>
__global__ void __launch_bounds__(THREADS) finish_kernel(const FinishArgs<T> p) {
    SK_DYNAMIC_SHARED(memory);
    int64_t block = blockIdx.x;
    if (block < p.slab_blocks()) {
        const double scale = p.out_scale ? p.scale * *p.out_scale : p.scale;
        add_parts(memory, p.slabs, p.parts, 32 * block, p.slab_size(), [&](int64_t at, double sum) {
            put<T>(p.grad_x, p.wide, at / p.slack * p.stride + at % p.slack, static_cast<float>(scale * sum));
        });
        return;
    }
    block -= p.slab_blocks();
    if (32 * block < p.batch)
        add_parts(memory, p.row_sums, p.parts, 32 * block, p.batch, [&](int64_t at, double sum) { p.rows[at] = sum; });
    else if (p.value)
        add_parts(memory, p.totals, p.parts, 0, 1, [&](int64_t, double sum) { *p.value = static_cast<float>(p.scale * sum); });
}

}  // namespace sk
