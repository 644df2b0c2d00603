// Enough of CUDA to execute the kernels of csrc/cuda on the host, from the very same source.
//
// Every thread of a block is a fiber.  A fiber runs until it waits (at a barrier, a shuffle, a warp-wide matrix
// instruction) or ends; the order in which fibers and blocks run is SHIM_ORDER: forward, reverse or random:<seed>.
// Waiting for a thread that cannot come any more, a misaligned matrix and the like end the run with a message.
// Not modelled: the memory model between barriers, rounding of the GPU's libm, the layout of fragments.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <functional>
#include <type_traits>

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
    float left[16 * 16], right[16 * 16];  // the operands of a matrix instruction
};

struct Block {
    dim3 index, grid;
    unsigned char* shared;
    Warp* warps;
};

struct Thread {
    dim3 index;
    Block* block;
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
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) {
    return shim::exchange(value, shim::lane() < delta ? shim::lane() : shim::lane() - delta);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    shim::warp().slot[shim::lane()] = vote;
    shim::wait_warp();
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= unsigned(shim::warp().slot[i]) << i;
    shim::wait_warp();
    return votes;
}
inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __float_as_int(float v) {
    int bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline float __int_as_float(int bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
inline long long __double_as_longlong(double v) {
    long long bits;
    memcpy(&bits, &v, 8);
    return bits;
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

// --- nvcuda::wmma: elements of a fragment are dealt out to the lanes, so that only a whole warp can multiply -----------

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
namespace precision {
struct tf32 {};
}
enum layout_t { mem_row_major, mem_col_major };

inline float __float_to_tf32(float v) { return __int_as_float((__float_as_int(v) + 0x1000) & ~0x1fff); }

inline float number(float v) { return v; }
inline float number(__half v) { return __half2float(v); }
inline float number(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    using Stored = std::conditional_t<std::is_same<T, precision::tf32>::value, float, T>;
    static constexpr int rows = std::is_same<Use, matrix_b>::value ? K : M;
    static constexpr int columns = std::is_same<Use, matrix_a>::value ? K : N;
    static constexpr int num_elements = rows * columns / 32;
    Stored x[num_elements];
};

inline void check_matrix(const void* at, int ld, size_t size) {
    if (reinterpret_cast<uintptr_t>(at) % 32) shim::fail("a matrix for a warp must start at a multiple of 32 bytes");
    if (ld * size % 16) shim::fail("the leading dimension of a matrix must be a multiple of 16 bytes");
}

template <class Use, int M, int N, int K, class T, class Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const typename fragment<Use, M, N, K, T, Layout>::Stored* from,
                      int ld) {
    using F = fragment<Use, M, N, K, T, Layout>;
    check_matrix(from, ld, sizeof(*from));
    for (int i = 0; i < F::num_elements; ++i) {
        const int e = shim::lane() + 32 * i, r = e / F::columns, c = e % F::columns;
        f.x[i] = from[std::is_same<Layout, row_major>::value ? r * ld + c : c * ld + r];
    }
}

template <int M, int N, int K>
void store_matrix_sync(float* to, const fragment<accumulator, M, N, K, float>& f, int ld, layout_t layout) {
    check_matrix(to, ld, sizeof(*to));
    for (int i = 0; i < f.num_elements; ++i) {
        const int e = shim::lane() + 32 * i, r = e / N, c = e % N;
        to[layout == mem_row_major ? r * ld + c : c * ld + r] = f.x[i];
    }
}

template <class F>
void fill_fragment(F& f, float v) {
    for (int i = 0; i < F::num_elements; ++i) f.x[i] = v;
}

template <class T, class F>
void publish(const F& f, float* to) {
    for (int i = 0; i < F::num_elements; ++i) {
        const float v = number(f.x[i]);
        if (std::is_same<T, precision::tf32>::value && v == v && (__float_as_int(v) & 0x1fff))
            shim::fail("a tf32 fragment holds a number that was not rounded to tf32");
        to[shim::lane() + 32 * i] = v;
    }
}

template <int M, int N, int K, class T, class LA, class LB>
void mma_sync(fragment<accumulator, M, N, K, float>& d, const fragment<matrix_a, M, N, K, T, LA>& a,
              const fragment<matrix_b, M, N, K, T, LB>& b, const fragment<accumulator, M, N, K, float>& c) {
    shim::Warp& w = shim::warp();
    publish<T>(a, w.left);
    publish<T>(b, w.right);
    shim::wait_warp();
    for (int i = 0; i < d.num_elements; ++i) {
        const int e = shim::lane() + 32 * i, r = e / N, column = e % N;
        float sum = c.x[i];
        for (int k = 0; k < K; ++k) sum += w.left[r * K + k] * w.right[k * N + column];
        d.x[i] = sum;
    }
    shim::wait_warp();
}

}  // namespace wmma
}  // namespace nvcuda

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
    if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) return *value = 163 * 1024, cudaSuccess;
    if (attribute != cudaDevAttrMultiProcessorCount) return *value = 8, cudaSuccess;
    const char* told = getenv("SHIM_PROCESSORS");
    return *value = told ? atoi(told) : 3, cudaSuccess;
}
template <class F>
cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) {
    ++shim::attributes_set;
    return cudaSuccess;
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int, int) {
    return *blocks = 1, cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    strcpy(p->name, "host shim");
    return p->major = p->minor = 0, cudaSuccess;
}
