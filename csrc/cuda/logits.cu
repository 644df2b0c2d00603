#include "logits.cuh"

#include "launch.cuh"

namespace sk {

void logits(const LaunchOn& on, const Problem& p, void* out, int64_t out_stride) {
    with_work(p, [&](auto kind) {
        using K = decltype(kind);
        constexpr int bytes = Shared<K>::bytes_scan;
        LogitsArgs<K> args{tile_args<K>(p, bytes), static_cast<typename K::Scalar*>(out), out_stride};
        launch(on, "logits", logits_kernel<K>, scan_grid<K>(args.tile.tiles, p.batch),
               bytes + args.tile.resident_bytes(), args);
    });
}

int64_t logits_shared_bytes(DType dtype) {
    return by_kind(dtype, [](auto kind) { return Shared<decltype(kind)>::bytes_scan; });
}

}  // namespace sk
