#include "predict.cuh"

#include "launch.cuh"

namespace sk {

template <bool FILL>
static void predict(const LaunchOn& on, const Problem& p, int64_t ranges, double threshold, int32_t* counts,
                    const int64_t* starts, int64_t label_start, int64_t* indices) {
    with_work(p, [&](auto kind) {
        using K = decltype(kind);
        constexpr int bytes = PredictShared<K>::bytes;
        PredictArgs<K> args{tile_args<K>(p, bytes), static_cast<typename K::Acc>(threshold), counts, starts,
                            indices, label_start};
        launch(on, FILL ? "predict (write)" : "predict (count)", predict_kernel<K, FILL>, scan_grid<K>(ranges, p.batch),
               bytes + args.tile.resident_bytes(), args);
    });
}

void predict_count(const LaunchOn& on, const Problem& p, int64_t ranges, double threshold, int32_t* counts) {
    predict<false>(on, p, ranges, threshold, counts, nullptr, 0, nullptr);
}

void predict_fill(const LaunchOn& on, const Problem& p, int64_t ranges, double threshold, const int64_t* starts,
                  int64_t label_start, int64_t* indices) {
    predict<true>(on, p, ranges, threshold, nullptr, starts, label_start, indices);
}

int64_t predict_shared_bytes(DType dtype) {
    return by_kind(dtype, [](auto kind) { return PredictShared<decltype(kind)>::bytes; });
}

}  // namespace sk
