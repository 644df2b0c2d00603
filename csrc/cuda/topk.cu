#include "topk.cuh"

#include "launch.cuh"

namespace sk {

void topk(const LaunchOn& on, const Problem& p, int64_t ranges, int64_t m, void* keys, int32_t* labels) {
    with_work(p, [&](auto kind) {
        using K = decltype(kind);
        using Key = typename OrderKey<typename K::Acc>::type;
        constexpr int bytes = TopkShared<K>::bytes;
        TopkArgs<K> args{tile_args<K>(p, bytes), static_cast<int>(m), static_cast<Key*>(keys), labels};
        launch(on, "topk", topk_kernel<K>, scan_grid<K>(ranges, p.batch), bytes + args.tile.resident_bytes(), args);
    });
}

int64_t longest_list() { return MAX_LIST; }

int64_t topk_shared_bytes(DType dtype) {
    return by_kind(dtype, [](auto kind) { return TopkShared<decltype(kind)>::bytes; });
}

}  // namespace sk
