// What the launchers share: device guard, checks, and the dispatch from a dtype to a kernel's type.
#pragma once

#include <algorithm>

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

// Makes a device current, and the one before it again at the end.  This module has its own copy of the runtime.
class DeviceGuard {
  public:
    DeviceGuard(int device, const char* what) {
        check(cudaGetDevice(&before_), what);
        if (device != before_) check(cudaSetDevice(device), what);
        changed_ = device != before_;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int before_ = 0;
    bool changed_ = false;
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
    g.accumulate_weight = p.accumulate_weight;
    g.grad_bias = static_cast<Acc*>(p.grad_bias), g.accumulate_bias = p.accumulate_bias;
    g.scratch = static_cast<typename K::Operand*>(p.scratch);
    return g;
}

// Launches a kernel whose only argument is a struct; its shared memory may be above the 48 KB that need no asking.
template <class Args>
void launch(const LaunchOn& on, const char* name, void (*kernel)(Args), dim3 grid, int shared_bytes, const Args& args) {
    const DeviceGuard guard(on.device, name);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
    SK_LAUNCH(kernel, grid, THREADS, shared_bytes, static_cast<cudaStream_t>(on.stream), args);
    check(cudaGetLastError(), name);
}

template <class K>
dim3 scan_grid(int64_t across, int64_t batch) {
    const int64_t groups = (batch + K::ROWS - 1) / K::ROWS;
    return dim3(static_cast<unsigned>(across), static_cast<unsigned>(std::min<int64_t>(groups, 65535)));
}

}  // namespace sk
