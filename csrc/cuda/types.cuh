// Number types and the shape of a block's work for each of them.
//
// A block takes ROWS rows of the batch and TILE labels at a time and walks the shared dimension (the few columns of the
// DFT factors, RANK at a time, then the slack columns) in steps of DEPTH.  All products read operands of type Operand from shared memory and
// accumulate in Acc.
#pragma once

#include "platform.cuh"

namespace sk {

constexpr int TILE = 64;      // labels per tile; the tile of the DFT plan
constexpr int RANK = 16;      // columns of the DFT factors that are worked on together
constexpr int THREADS = 256;  // per block: 8 warps, or a 16 x 16 grid
constexpr int WARPS = THREADS / 32;

// --- conversions ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ double widen(double v) { return v; }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
struct Narrow;
template <>
struct Narrow<float> {
    static __device__ __forceinline__ float from(float v) { return v; }
};
template <>
struct Narrow<double> {
    static __device__ __forceinline__ double from(double v) { return v; }
};
template <>
struct Narrow<__half> {
    static __device__ __forceinline__ __half from(float v) { return __float2half_rn(v); }
};
template <>
struct Narrow<__nv_bfloat16> {
    static __device__ __forceinline__ __nv_bfloat16 from(float v) { return __float2bfloat16_rn(v); }
};

// 16 bytes at a time
template <class T>
struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T at[size];
};

// f(0) ... f(COUNT - 1), shared by the threads of a block.
template <int COUNT, int UNROLL = 4, class F>
__device__ __forceinline__ void share(F f) {
    static_assert(COUNT % THREADS == 0, "every thread has as much to do");
    const int first = thread();
#pragma unroll UNROLL
    for (int round = 0; round < COUNT / THREADS; ++round) f(first + round * THREADS);
}

// --- one description per dtype ----------------------------------------------------------------------------------

enum class Engine { simt, tensor };  // who multiplies: FMA units, or tensor cores

// DFT_PARTS: 16-bit operands hold a factor of the DFT part as high + low half, so that U c = Uh ch + Uh cl + Ul ch keeps
// 16 bits of it: these columns carry the prior of every label, and they are few.
template <class Scalar_, class Acc_, class Operand_, Engine ENGINE_, int ROWS_, int DEPTH_, int DFT_PARTS_>
struct Kind {
    using Scalar = Scalar_;    // of x, weight and bias in memory
    using Acc = Acc_;          // of sums
    using Operand = Operand_;  // of products, in shared memory
    static constexpr Engine engine = ENGINE_;
    static constexpr int ROWS = ROWS_;
    static constexpr int DEPTH = DEPTH_;
    static constexpr int DFT_PARTS = DFT_PARTS_;
    static constexpr int FACTOR_PARTS = DFT_PARTS > 1 ? 2 : 1;  // high + low of one factor, where the other is exact
    // A row of a shared array is 16 bytes longer than its contents: neighbouring rows start in different banks.
    static constexpr int LD_CHUNK = DEPTH + 16 / sizeof(Operand);
    static constexpr int LD_Z = TILE + 16 / sizeof(Acc);
    static constexpr int LD_G = TILE + 16 / sizeof(Operand);
};

using F32 = Kind<float, float, float, Engine::simt, 128, 32, 1>;
using TF32 = Kind<float, float, float, Engine::tensor, 128, 32, 1>;
using F16 = Kind<__half, float, __half, Engine::tensor, 128, 64, 3>;
using BF16 = Kind<__nv_bfloat16, float, __nv_bfloat16, Engine::tensor, 128, 64, 3>;
using F64 = Kind<double, double, double, Engine::simt, 64, 32, 1>;

// The matrix that the tensor cores see as tf32 is float in memory.
template <class K>
struct IsTf32 {
    static constexpr bool value = false;
};
template <>
struct IsTf32<TF32> {
    static constexpr bool value = true;
};

}  // namespace sk
