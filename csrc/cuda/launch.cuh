// What the launchers share: device guard, checks, limits of a device.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "launch.h"
#include "platform.cuh"

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

// The most shared memory that a block may ask for.
inline int shared_limit(int device) {
    int most = 0;
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
    return most;
}

// Lets a kernel have more than the 48 KB of shared memory that need no asking, once per kernel and device: the setting
// belongs to the device and launches run in several threads at once.
template <class Args>
void allow_shared_memory(const char* name, void (*kernel)(Args), int device, int bytes) {
    static std::mutex mutex;
    static std::set<std::pair<void (*)(Args), int>> allowed;
    const std::lock_guard<std::mutex> lock(mutex);
    if (allowed.count({kernel, device})) return;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
    allowed.insert({kernel, device});
}

// Launches a kernel whose only argument is a struct.
template <class Args>
void launch(const LaunchOn& on, const char* name, void (*kernel)(Args), int64_t blocks, int shared_bytes,
            const Args& args) {
    const DeviceGuard guard(on.device, name);
    allow_shared_memory(name, kernel, on.device, shared_bytes);
    SK_LAUNCH(kernel, dim3(static_cast<unsigned>(blocks)), THREADS, shared_bytes, static_cast<cudaStream_t>(on.stream),
              args);
    check(cudaGetLastError(), name);
}

}  // namespace sk
