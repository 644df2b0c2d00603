// SK_HD marks a function that both the host compiler and nvcc may use.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SK_HD __host__ __device__ __forceinline__
#else
#define SK_HD inline __attribute__((always_inline))
#endif
