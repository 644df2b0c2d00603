#include "fused_loss.cuh"

#include "launch.cuh"

namespace sk {

void fused_loss(const LaunchOn& on, const Problem& p, const Targets& targets, const Gradients& gradients,
                const FusedLoss& f, int64_t blocks) {
    if (p.batch == 0 || p.labels == 0) return;
    with_kind(p.dtype, [&](auto kind) {
        using K = decltype(kind);
        using Acc = typename K::Acc;
        constexpr int bytes = FusedShared<K>::bytes;
        FusedLossArgs<K> args{};
        args.tile = tile_args<K>(p, bytes);
        args.targets = target_args<K>(targets);
        args.gradients = gradient_args<K>(gradients);
        args.loss = f.loss;
        args.label_weight = static_cast<const Acc*>(f.label_weight);
        args.pos_weight = static_cast<const Acc*>(f.pos_weight);
        args.row_factor = static_cast<const Acc*>(f.row_factor);
        args.row_sums = f.row_sums;
        launch(on, "fused_loss", fused_loss_kernel<K>, dim3(static_cast<unsigned>(blocks)),
               bytes + args.tile.resident_bytes(), args);
    });
}

int64_t rows_per_group(DType dtype) {
    int64_t rows = 0;
    with_kind(dtype, [&](auto kind) { rows = decltype(kind)::ROWS; });
    return rows;
}

int64_t resident_blocks(DType dtype, int device) {
    const DeviceGuard guard(device, "fused_loss");
    int processors = 0, per_processor = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    with_kind(dtype, [&](auto kind) {
        using K = decltype(kind);
        check(cudaFuncSetAttribute(fused_loss_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, BLOCK_BYTES<K>),
              "fused_loss");
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
    int64_t bytes = 0;
    with_kind(dtype, [&](auto kind) { bytes = BLOCK_BYTES<decltype(kind)>; });
    return bytes;
}

int64_t fused_loss_shared_bytes(DType dtype) {
    int64_t bytes = 0;
    with_kind(dtype, [&](auto kind) { bytes = FusedShared<decltype(kind)>::bytes; });
    return bytes;
}

}  // namespace sk
