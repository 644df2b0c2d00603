// Enough of CUDA to execute the kernels of csrc/cuda on the host, from the very same source.
//
// Every thread of a block is a fiber.  A fiber runs until it waits (at a barrier, a shuffle, a warp-wide matrix
// instruction) or ends; the order in which fibers and blocks run is SHIM_ORDER: forward, reverse or random:<seed>.
// Waiting for a thread that cannot come any more, a misaligned matrix and the like end the run with a message.
// A copy that nobody has waited for has not arrived.
// Not modelled: the memory model between barriers, rounding of the GPU's libm.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SK_DYNAMIC_SHARED(name) unsigned char* name = shim::current->block->shared
#define SK_LAUNCH(kernel, grid, threads, bytes, stream, args) \
    shim::run(grid, threads, bytes, [&, entry = kernel] { entry(args); })

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace shim {

struct alignas(64) Warp {
    uint64_t slot[32];                  // one number per lane, for shuffles
    float left[16 * 16], right[8 * 16];  // the operands of a matrix instruction
};

struct Block {
    dim3 index, grid;
    unsigned char* shared;
    Warp* warps;
};

struct Copy {
    void* to;
    const void* from;
    int bytes, used;
};

struct Thread {
    dim3 index;
    Block* block;
    std::vector<Copy> copies;  // that were begun and not waited for
};

extern Thread* current;
extern thread_local int context;  // 1 + the device whose context is current, 0 for none
extern unsigned contexts;         // a bit for every device that has had a context
extern int attributes_set;        // calls of cudaFuncSetAttribute

[[noreturn]] void fail(const char* what);
void run(dim3 grid, int threads, int shared_bytes, const std::function<void()>& kernel);
void wait_block();
void wait_warp();

inline int lane() { return current->index.x % 32; }
inline Warp& warp() { return current->block->warps[current->index.x / 32]; }

template <class T>
T exchange(T value, int from) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    memcpy(&warp().slot[lane()], &value, sizeof(T));
    wait_warp();
    T got;
    memcpy(&got, &warp().slot[from & 31], sizeof(T));
    wait_warp();
    return got;
}

}  // namespace shim

#define threadIdx (shim::current->index)
#define blockIdx (shim::current->block->index)
#define gridDim (shim::current->block->grid)

inline void __syncthreads() { shim::wait_block(); }
inline void __syncwarp() { shim::wait_warp(); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
    return shim::exchange(value, from);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return shim::exchange(value, shim::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    shim::warp().slot[shim::lane()] = vote;
    shim::wait_warp();
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= unsigned(shim::warp().slot[i]) << i;
    shim::wait_warp();
    return votes;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __float_as_int(float v) {
    int bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
inline float __int_as_float(int bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

// --- 16-bit numbers -------------------------------------------------------------------------------------------------

struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 v) { return __int_as_float(int(uint32_t(v.bits) << 16)); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
    const uint32_t b = uint32_t(__float_as_int(v));
    if (v != v) return {0x7fff};
    return {uint16_t((b + 0x7fffu + (b >> 16 & 1u)) >> 16)};
}

struct __half {
    uint16_t bits;
};
inline float __half2float(__half h) {
    const int exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
    float v = exponent == 31  ? (mantissa ? NAN : INFINITY)
              : exponent == 0 ? ldexpf(float(mantissa), -24)
                              : ldexpf(float(mantissa + 1024), exponent - 25);
    return h.bits >> 15 ? -v : v;
}
inline __half __float2half_rn(float v) {
    const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
    const float a = fabsf(v);
    if (v != v) return {0x7fff};
    if (a >= 65520.0f) return {uint16_t(sign | 0x7c00)};
    int exponent = 0;
    frexpf(a, &exponent);
    const int ulp = (exponent < -13 ? -14 : exponent - 1) - 10;  // exponent of the last bit; subnormals share one
    const int units = int(nearbyintf(ldexpf(a, -ulp)));          // ties to even
    const int biased = ulp + 25;                                 // of a number with 1024 <= units < 2048
    const int bits = units < 1024 ? units : ((biased << 10) + (units - 1024));
    return {uint16_t(sign | bits)};
}

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x = 0, y = 0, z = 0, w = 0;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

// --- the functions of csrc/cuda/warp.cuh, with the fragment layouts of the PTX manual -----------------------------------

namespace sk {

// A lane's four words, word i of which `of(row of matrix i, column)` puts together.
template <class Of>
void load_matrices_as(uint32_t (&to)[4], const void* row, Of of) {
    if (reinterpret_cast<uintptr_t>(row) % 16) shim::fail("a row for ldmatrix must start at a multiple of 16 bytes");
    shim::warp().slot[shim::lane()] = reinterpret_cast<uintptr_t>(row);
    shim::wait_warp();
    for (int i = 0; i < 4; ++i) {
        const auto half = [i](int r, int c) {
            return uint32_t(reinterpret_cast<const uint16_t*>(shim::warp().slot[8 * i + r])[c]);
        };
        to[i] = of(half);
    }
    shim::wait_warp();
}
inline void load_matrices(uint32_t (&to)[4], const void* row) {
    const int r = shim::lane() / 4, c = shim::lane() % 4 * 2;
    load_matrices_as(to, row, [=](auto at) { return at(r, c) | at(r, c + 1) << 16; });
}
inline void load_transposed(uint32_t (&to)[4], const void* row) {
    const int c = shim::lane() / 4, r = shim::lane() % 4 * 2;
    load_matrices_as(to, row, [=](auto at) { return at(r, c) | at(r + 1, c) << 16; });
}

inline float number(uint32_t word, int half, __nv_bfloat16) { return __bfloat162float({uint16_t(word >> 16 * half)}); }
inline float number(uint32_t word, int half, __half) { return __half2float({uint16_t(word >> 16 * half)}); }
inline float number(uint32_t word, int, float) { return __int_as_float(int(word & ~0x1fffu)); }  // digits are cut off

// m16n8k16 of 16-bit numbers, m16n8k8 of tf32: PER numbers in a word, 4 words across the lanes of a row.
template <class T>
void multiply(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2], T type) {
    constexpr int PER = sizeof(T) == 2 ? 2 : 1, DEPTH = 8 * PER;
    shim::Warp& w = shim::warp();
    const int lane = shim::lane();
    for (int i = 0; i < 4; ++i)
        for (int h = 0; h < PER; ++h)
            w.left[(lane / 4 + i % 2 * 8) * 16 + (lane % 4) * PER + h + i / 2 * 4 * PER] = number(left[i], h, type);
    for (int i = 0; i < 2; ++i)
        for (int h = 0; h < PER; ++h)
            w.right[lane / 4 * 16 + (lane % 4) * PER + h + i * 4 * PER] = number(right[i], h, type);
    shim::wait_warp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < DEPTH; ++k) sum[i] += w.left[row * 16 + k] * w.right[column * 16 + k];
    }
    shim::wait_warp();
}

// Nothing arrives before it is waited for.
template <int BYTES>
void copy_async(void* to, const void* from, int used) {
    if (reinterpret_cast<uintptr_t>(to) % BYTES || reinterpret_cast<uintptr_t>(from) % BYTES)
        shim::fail("cp.async needs addresses that are multiples of its size");
    if (used < 0 || used > BYTES) shim::fail("cp.async reads 0 bytes to its size");
    shim::current->copies.push_back({to, from, BYTES, used});
}
template <int BYTES>
void copy_async(void* to, const void* from) {
    copy_async<BYTES>(to, from, BYTES);
}
inline void wait_for_copies() {
    for (const auto& copy : shim::current->copies) {
        memcpy(copy.to, copy.from, size_t(copy.used));
        memset(static_cast<char*>(copy.to) + copy.used, 0, size_t(copy.bytes - copy.used));
    }
    shim::current->copies.clear();
}

inline float exp2_fast(float v) { return exp2f(v); }
inline float reciprocal_fast(float v) { return 1 / v; }
inline uint32_t round_tf32(float v) {
    const auto bits = uint32_t(__float_as_int(v));
    return v - v == 0 ? (bits + 0x1000u) & ~0x1fffu : bits;
}
inline uint32_t pack(float low, float high, __nv_bfloat16) {
    return __float2bfloat16_rn(low).bits | uint32_t(__float2bfloat16_rn(high).bits) << 16;
}
inline uint32_t pack(float low, float high, __half) {
    return __float2half_rn(low).bits | uint32_t(__float2half_rn(high).bits) << 16;
}
inline uint32_t pack(float, float, float) { return 0; }

}  // namespace sk

// --- the runtime: one device, always ready --------------------------------------------------------------------------

typedef void* cudaStream_t;
enum cudaError_t {
    cudaSuccess,
    cudaErrorInsufficientDriver,
    cudaErrorNoDevice,
    cudaErrorStubLibrary,
    cudaErrorNoKernelImageForDevice,
    cudaErrorUnsupportedPtxVersion
};
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaDeviceProp {
    char name[32];
    int major, minor;
};
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
// As the runtime does: device 0 where no context is current, and a context for whichever device is set.
inline cudaError_t cudaGetDevice(int* device) { return *device = shim::context ? shim::context - 1 : 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
    shim::context = device + 1;
    shim::contexts |= 1u << device;
    return cudaSuccess;
}
namespace sk {
struct DriverContext {
    int (*get)(void**) = [](void** now) { return *now = reinterpret_cast<void*>(intptr_t(shim::context)), 0; };
    int (*set)(void*) = [](void* before) { return shim::context = int(reinterpret_cast<intptr_t>(before)), 0; };
};
inline const DriverContext& driver_context() {
    static const DriverContext driver;
    return driver;
}
}  // namespace sk
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const bool shared = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin;
    if (!shared && attribute != cudaDevAttrMultiProcessorCount) return *value = 8, cudaSuccess;
    const char* set = getenv(shared ? "SHIM_SHARED" : "SHIM_PROCESSORS");
    return *value = set ? atoi(set) : shared ? 163 * 1024 : 3, cudaSuccess;
}
template <class F>
cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) {
    ++shim::attributes_set;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    strcpy(p->name, "host shim");
    return p->major = p->minor = 0, cudaSuccess;
}
