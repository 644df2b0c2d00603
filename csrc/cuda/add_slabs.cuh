// The second kernel of the fused pass: adds the blocks' private sums in a fixed order.
//
// A block takes 32 neighbouring numbers; its warps share the slabs (warp w adds slabs w, w + 8, ...), and the eight
// partial sums meet in shared memory, again in order.
#pragma once

#include "types.cuh"

namespace sk {

template <class T>
struct AddSlabsArgs {
    const T* slabs;      // [count, size]
    T* out;              // [size]
    const T* scale;      // [1] or null: multiplies the sum
    int64_t count, size;
    int accumulate;      // add to what out holds
};

template <class T>
__global__ void __launch_bounds__(THREADS) add_slabs_kernel(const AddSlabsArgs<T> p) {
    SK_DYNAMIC_SHARED(memory);
    T* parts = reinterpret_cast<T*>(memory);  // [WARPS, 32]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t first = int64_t(blockIdx.x) * 32; first < p.size; first += int64_t(gridDim.x) * 32) {
        T sum = 0;
        if (first + lane < p.size) {
#pragma unroll 4
            for (int64_t slab = warp; slab < p.count; slab += WARPS) sum += p.slabs[slab * p.size + first + lane];
        }
        parts[threadIdx.x] = sum;
        __syncthreads();
        if (warp == 0 && first + lane < p.size) {
            T total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total += parts[32 * w + lane];
            if (p.scale) total *= *p.scale;
            T* to = p.out + first + lane;
            *to = p.accumulate ? *to + total : total;
        }
        __syncthreads();
    }
}

}  // namespace sk
