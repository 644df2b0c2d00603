// What the kernels need from the outside: CUDA's own headers, or the host shim that executes them in tests.
#pragma once

#ifdef SIGKERNELS_HOST_SHIM
#include "cuda_shim.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>
// Dynamic shared memory of a block; a macro because the shim keeps one buffer per simulated block.
#define SK_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define SK_LAUNCH(kernel, grid, threads, bytes, stream, args) kernel<<<grid, threads, bytes, stream>>>(args)
#include "driver_context.h"
#endif

#include <math.h>
#include <stdint.h>

namespace sk {

// The number of this thread in its block.  Asked for anew each time: a kernel of several phases would otherwise work out
// every address that depends on it at its start, and run out of registers.
__device__ __forceinline__ int thread() {
#if defined(__CUDA_ARCH__)
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
#else
    return static_cast<int>(threadIdx.x);
#endif
}

}  // namespace sk
