// Instructions that C++ has no word for, one function each. The host shim has the same functions, written from the
// fragment layouts that the PTX manual documents.
#pragma once

#include "platform.cuh"

#ifndef SIGKERNELS_HOST_SHIM
namespace sk {

__device__ __forceinline__ uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Four 8 x 8 matrices of 16-bit numbers (or 8 x 4 of 32 bits); lane 8 i + r has the address of row r of matrix i. A lane
// gets of each matrix the 32 bits at row lane / 4, column 2 (lane % 4).
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
}
// The same of their transposes.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
}

// sum [16, 8] += left [16, depth] right [depth, 8]: depth 16 for 16-bit numbers, 8 for tf32. A lane holds of the sum
// rows lane / 4 and that + 8, columns 2 (lane % 4) and that + 1.
#define SK_MULTIPLY(TYPE, SHAPE, NAME)                                                                          \
    __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2], \
                                             TYPE) {                                                            \
        asm("mma.sync.aligned." SHAPE ".row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "  \
            "{%8, %9}, {%0, %1, %2, %3};"                                                                       \
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                            \
            : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));             \
    }
SK_MULTIPLY(__nv_bfloat16, "m16n8k16", "bf16")
SK_MULTIPLY(__half, "m16n8k16", "f16")
SK_MULTIPLY(float, "m16n8k8", "tf32")
#undef SK_MULTIPLY

// BYTES from global to shared memory, which this thread sees after wait_for_copies, the others after a barrier.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES)
                     : "memory");
}
// The same of which only the first `used` are read and the others are zeros; where none is, `from` may be anywhere.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from, int used) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(used) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(used)
                     : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ float exp2_fast(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
__device__ __forceinline__ float reciprocal_fast(float v) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}
__device__ __forceinline__ uint32_t round_tf32(float v) {
    uint32_t result;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(v));
    return result;
}
// Two numbers as 16 bits each, the first in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
    uint32_t result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

__device__ __forceinline__ uint32_t pack(float, float, float) { return 0; }

}  // namespace sk
#endif
