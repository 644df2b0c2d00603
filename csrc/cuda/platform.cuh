// What the kernels need from the outside: CUDA's own headers, or the host shim that executes them in tests.
#pragma once

#ifdef SIGKERNELS_HOST_SHIM
#include "cuda_shim.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
// Dynamic shared memory of a block; a macro because the shim keeps one buffer per simulated block.
#define SK_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define SK_LAUNCH(kernel, grid, threads, bytes, stream, args) kernel<<<grid, threads, bytes, stream>>>(args)
#include "driver_context.h"
#endif

#include <math.h>
#include <stdint.h>

namespace sk {

constexpr int THREADS = 256;  // per block
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int lane() { return thread() % 32; }
// thread(), of which the compiler keeps nothing in registers around a loop: what is made of it is made again.
__device__ __forceinline__ int thread_again() {
    int now = thread();
    asm volatile("" : "+r"(now));
    return now;
}

}  // namespace sk
