// The labels whose logit is above a threshold, in two passes of the same scan: count them, then write them in order.
// Block (range of tiles, group of rows).
#pragma once

#include "tile.cuh"

namespace sk {

template <class K>
struct PredictArgs {
    TileArgs<K> tile;
    typename K::Acc threshold;
    int32_t* counts;        // [ranges, batch]: the first pass
    const int64_t* starts;  // [ranges, batch]: where each range of a row writes, the second pass
    int64_t* indices;       // [nnz]
    int64_t label_start;    // of the labels here
};

template <class K>
struct PredictShared {
    static constexpr int at_position = Shared<K>::bytes_scan;  // int64 [ROWS]
    static constexpr int bytes = at_position + K::ROWS * 8;
};

template <class K, bool FILL>
__global__ void __launch_bounds__(THREADS, 2) predict_kernel(const PredictArgs<K> p) {
    using Acc = typename K::Acc;
    SK_DYNAMIC_SHARED(memory);
    const Shared<K> shared{memory};
    const Factors<K> factors = load_factors(memory + PredictShared<K>::bytes, p.tile);
    auto* position = reinterpret_cast<int64_t*>(memory + PredictShared<K>::at_position);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = first_tile(p.tile, blockIdx.x), last = first_tile(p.tile, blockIdx.x + int64_t(1));
    for (int64_t row0 = int64_t(blockIdx.y) * K::ROWS; row0 < p.tile.batch; row0 += int64_t(gridDim.y) * K::ROWS) {
        for (int64_t tile = first; tile < last; ++tile) {
            logits_tile(shared, p.tile, factors, tile, row0);
#pragma unroll 1  // several rows at a time would need more registers than there are
            for (int r = warp; r < K::ROWS && row0 + r < p.tile.batch; r += WARPS) {
                const int64_t place = blockIdx.x * p.tile.batch + row0 + r;
                int64_t at = tile > first ? position[r] : FILL ? p.starts[place] : 0;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int64_t label = tile * TILE + lane + 32 * half;
                    const Acc z = shared.z()[r * K::LD_Z + lane + 32 * half] + bias_of(p.tile, label);
                    const bool hit =
                        label < p.tile.labels && widen(Narrow<typename K::Scalar>::from(z)) > p.threshold;
                    const unsigned hits = __ballot_sync(0xffffffffu, hit);
                    if (FILL && hit) p.indices[at + __popc(hits & ((1u << lane) - 1))] = p.label_start + label;
                    at += __popc(hits);
                }
                __syncwarp();  // every lane has read position[r]
                if (lane == 0) {
                    position[r] = at;
                    if (!FILL && tile + 1 == last) p.counts[place] = static_cast<int32_t>(at);
                }
                __syncwarp();
            }
        }
    }
}

}  // namespace sk
