#include "fused_loss.cuh"

#include "launch.cuh"

namespace sk {

void fused_loss(const LaunchOn& on, const Problem& p, const Targets& targets, const Gradients& gradients,
                const FusedLoss& f, int64_t blocks) {
    with_work(p, [&](auto kind) {
        using K = decltype(kind);
        using Acc = typename K::Acc;
        const auto own = [&](FusedLossArgs<K>& args) {
            args.loss = f.loss, args.row_sums = f.row_sums;
            args.label_weight = static_cast<const Acc*>(f.label_weight);
            args.pos_weight = static_cast<const Acc*>(f.pos_weight);
            args.row_factor = static_cast<const Acc*>(f.row_factor);
        };
        launch_loss(on, "fused_loss", fused_loss_kernel<K>, p, targets, gradients, blocks, FusedShared<K>::bytes, kind,
                    own);
    });
}

int64_t rows_per_group(DType dtype) {
    return by_kind(dtype, [](auto kind) { return decltype(kind)::ROWS; });
}

int64_t resident_blocks(DType dtype, int device) {
    const DeviceGuard guard(device, "fused_loss");
    int processors = 0, per_processor = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    with_kind(dtype, [&](auto kind) {
        using K = decltype(kind);
        allow_shared_memory("fused_loss", fused_loss_kernel<K>, device);
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, fused_loss_kernel<K>, THREADS,
                                                            BLOCK_BYTES<K>),
              "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    });
    return static_cast<int64_t>(processors) * std::max(per_processor, 1);
}

int64_t tile_labels() { return TILE; }

int device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
}

std::pair<int, int> versions() {
    int driver = 0, runtime = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || cudaRuntimeGetVersion(&runtime) != cudaSuccess)
        cudaGetLastError();
    return {driver, runtime};
}

std::pair<int, int> capability(int device) {
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    return {major, minor};
}

std::string devices() {
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        cudaGetLastError();
        return std::string("no CUDA driver: ") + cudaGetErrorString(error);
    }
    std::string names;
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp properties;
        check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
        names += (i ? ", " : "") + std::string(properties.name) + " (sm_" +
                 std::to_string(properties.major * 10 + properties.minor) + ")";
    }
    return count ? names : "no GPU";
}

int64_t block_shared_bytes(DType dtype) {
    return by_kind(dtype, [](auto kind) { return BLOCK_BYTES<decltype(kind)>; });
}

int64_t fused_loss_shared_bytes(DType dtype) {
    return by_kind(dtype, [](auto kind) { return FusedShared<decltype(kind)>::bytes; });
}

}  // namespace sk
