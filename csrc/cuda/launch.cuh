// What the launchers share: device guard, checks, and the dispatch from a dtype to a kernel's type.
#pragma once

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "gradients.cuh"
#include "launch.h"
#include "targets.cuh"

namespace sk {

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // a launch error is not sticky once it has been taken
    std::string text = std::string(what) + ": " + cudaGetErrorString(error);
    if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice || error == cudaErrorStubLibrary)
        text += " (no CUDA driver or no GPU that it can use on this machine)";
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion)
        text += " (sigkernels._cuda was not built for this GPU: rebuild with TORCH_CUDA_ARCH_LIST set to its architecture)";
    throw CudaError(text);
}

// Makes a device current, and at the end again what was current before: another device's context, or none.
class DeviceGuard {
  public:
    DeviceGuard(int device, const char* what) {
        int current = 0;
        check(cudaGetDevice(&current), what);
        if (device == current) return;
        const DriverContext& driver = driver_context();
        restore_ = driver.get && driver.set && driver.get(&before_) == 0;
        check(cudaSetDevice(device), what);
    }
    ~DeviceGuard() {
        if (restore_) driver_context().set(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    void* before_ = nullptr;
    bool restore_ = false;
};

template <class F>
void with_kind(DType dtype, F f) {
    switch (dtype) {
        case DType::f32: return f(F32{});
        case DType::tf32: return f(TF32{});
        case DType::f16: return f(F16{});
        case DType::bf16: return f(BF16{});
        case DType::f64: return f(F64{});
    }
}

// Calls f where there is anything to do.
template <class F>
void with_work(const Problem& p, F f) {
    if (p.batch > 0 && p.labels > 0) with_kind(p.dtype, f);
}

// Bytes of shared memory that a block may take with U and V: two blocks share the 164 KB of an sm_80 multiprocessor
// (each costs 1 KB beside).  One that has it to itself (float64, and lists that take more) may have the 99 KB that
// sm_120 gives.
constexpr int ONE_BLOCK_BYTES = 99 * 1024;
template <class K>
constexpr int BLOCK_BYTES = sizeof(typename K::Acc) == 8 ? ONE_BLOCK_BYTES : 81 * 1024;

// `bytes`: what the kernel needs besides U and V, which become resident as far as the rest allows.
template <class K>
TileArgs<K> tile_args(const Problem& p, int bytes) {
    TileArgs<K> t{};
    t.x = static_cast<const typename K::Scalar*>(p.x);
    t.dft = static_cast<const typename K::Scalar*>(p.dft);
    t.weight = static_cast<const typename K::Scalar*>(p.weight);
    t.bias = static_cast<const typename K::Scalar*>(p.bias);
    t.u = static_cast<const typename K::Acc*>(p.u);
    t.v = static_cast<const typename K::Acc*>(p.v);
    t.turn = static_cast<const typename K::Acc*>(p.turn);
    t.batch = p.batch, t.labels = p.labels, t.tiles = (p.labels + TILE - 1) / TILE;
    t.slack = static_cast<int>(p.slack), t.rank = static_cast<int>(p.rank), t.even = static_cast<int>(p.even);
    t.columns = static_cast<int>(p.columns), t.dft_stride = static_cast<int>(p.dft_stride);
    const auto starts = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.weight);
    t.aligned = starts % 16 == 0 && p.slack * sizeof(typename K::Scalar) % 16 == 0;
    const int most = bytes > BLOCK_BYTES<K> ? ONE_BLOCK_BYTES : BLOCK_BYTES<K>;
    t.resident_u = bytes + t.u_bytes() <= most;
    t.resident_v = t.resident_u && bytes + t.u_bytes() + t.v_bytes() <= most;
    return t;
}

template <class K>
TargetArgs<K> target_args(const Targets& p) {
    using Acc = typename K::Acc;
    return {p.sparse, p.indices, p.at, p.label_start, static_cast<const Acc*>(p.dense), p.dense_stride};
}

template <class K>
GradientArgs<K> gradient_args(const Gradients& p) {
    using Acc = typename K::Acc;
    GradientArgs<K> g{};
    g.out_scale = static_cast<const Acc*>(p.out_scale);
    g.need_x = p.need_x, g.slabs = static_cast<Acc*>(p.slabs);
    g.grad_weight = p.grad_weight, g.grad_weight_narrow = p.grad_weight_narrow;
    g.grad_bias = static_cast<Acc*>(p.grad_bias), g.accumulate = p.accumulate;
    g.scratch = static_cast<typename K::Operand*>(p.scratch);
    return g;
}

// Lets a kernel have more than the 48 KB of shared memory that need no asking: as much as any launch takes, once per
// kernel and device, because the setting belongs to the device and launches run in several threads at once.
template <class Args>
void allow_shared_memory(const char* name, void (*kernel)(Args), int device) {
    static std::mutex mutex;
    static std::set<std::pair<void (*)(Args), int>> allowed;
    const std::lock_guard<std::mutex> lock(mutex);
    if (allowed.count({kernel, device})) return;
    int most = 0;
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, std::min(most, ONE_BLOCK_BYTES)),
          name);
    allowed.insert({kernel, device});
}

// Launches a kernel whose only argument is a struct.
template <class Args>
void launch(const LaunchOn& on, const char* name, void (*kernel)(Args), dim3 grid, int shared_bytes, const Args& args) {
    const DeviceGuard guard(on.device, name);
    allow_shared_memory(name, kernel, on.device);
    SK_LAUNCH(kernel, grid, THREADS, shared_bytes, static_cast<cudaStream_t>(on.stream), args);
    check(cudaGetLastError(), name);
}

// The arguments that both losses share, on `blocks` persistent blocks; `fill` adds a loss's own.
template <class Args, class K, class Fill>
void launch_loss(const LaunchOn& on, const char* name, void (*kernel)(Args), const Problem& p, const Targets& targets,
                 const Gradients& gradients, int64_t blocks, int bytes, K, Fill fill) {
    Args args{};
    args.tile = tile_args<K>(p, bytes);
    args.targets = target_args<K>(targets);
    args.gradients = gradient_args<K>(gradients);
    fill(args);
    launch(on, name, kernel, dim3(static_cast<unsigned>(blocks)), bytes + args.tile.resident_bytes(), args);
}

// A number of a kernel that depends on the dtype alone.
template <class F>
int64_t by_kind(DType dtype, F number) {
    int64_t result = 0;
    with_kind(dtype, [&](auto kind) { result = number(kind); });
    return result;
}

template <class K>
dim3 scan_grid(int64_t across, int64_t batch) {
    const int64_t groups = (batch + K::ROWS - 1) / K::ROWS;
    return dim3(static_cast<unsigned>(across), static_cast<unsigned>(std::min<int64_t>(groups, 65535)));
}

}  // namespace sk
