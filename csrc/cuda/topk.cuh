// The m <= 32 highest logits of each row within a range of tiles: block (range, group of rows).
//
// A row's list lies sorted across the lanes of a warp (lane j holds the j-th best).  Labels come in ascending order, so a
// newcomer must be strictly better than the last of the list: ties stay with the lower label.
#pragma once

#include "tile.cuh"

namespace sk {

constexpr int MAX_LIST = 32;

template <class Acc>
struct OrderKey;  // integers that order as the numbers do: NaN highest, -0 equal to 0
template <>
struct OrderKey<float> {
    using type = int32_t;
    static constexpr int32_t lowest = INT32_MIN, highest = INT32_MAX;
    static __device__ __forceinline__ int32_t bits(float v) { return __float_as_int(v); }
};
template <>
struct OrderKey<double> {
    using type = int64_t;
    static constexpr int64_t lowest = INT64_MIN, highest = INT64_MAX;
    static __device__ __forceinline__ int64_t bits(double v) { return __double_as_longlong(v); }
};

template <class Acc>
__device__ __forceinline__ typename OrderKey<Acc>::type order_key(Acc v) {
    using O = OrderKey<Acc>;
    if (v != v) return O::highest;
    const auto bits = O::bits(v == 0 ? Acc(0) : v);
    return bits < 0 ? bits ^ O::highest : bits;
}

template <class K>
struct TopkArgs {
    TileArgs<K> tile;
    int m;
    typename OrderKey<typename K::Acc>::type* keys;  // [batch, ranges, m]
    int32_t* labels;                                 // [batch, ranges, m], counted from the first label here
};

template <class K>
struct TopkShared {
    using Key = typename OrderKey<typename K::Acc>::type;
    static constexpr int at_keys = Shared<K>::bytes_scan;                                    // [ROWS, MAX_LIST]
    static constexpr int at_labels = at_keys + K::ROWS * MAX_LIST * int(sizeof(Key));   // [ROWS, MAX_LIST]
    static constexpr int bytes = at_labels + K::ROWS * MAX_LIST * 4;
};

// Offers one value per lane (columns in lane order, the first being label `first`) to the warp's list.
template <class Key>
__device__ __forceinline__ void offer(Key value, int32_t first, int m, Key& list_key, int32_t& list_label) {
    constexpr unsigned all = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    Key last = __shfl_sync(all, list_key, m - 1);
    for (unsigned better = __ballot_sync(all, value > last); better; better &= better - 1) {
        const int source = __ffs(better) - 1;
        const Key key = __shfl_sync(all, value, source);
        if (key <= last) continue;  // the list has improved since the vote; the same in every lane
        const int place = __popc(__ballot_sync(all, lane < m && list_key >= key));
        const Key above_key = __shfl_up_sync(all, list_key, 1);
        const int32_t above_label = __shfl_up_sync(all, list_label, 1);
        if (lane > place) list_key = above_key, list_label = above_label;
        if (lane == place) list_key = key, list_label = first + source;
        last = __shfl_sync(all, list_key, m - 1);
    }
}

// Two blocks per multiprocessor, except with 16-bit operands: a selection beside tensor-core fragments needs a few
// registers more than half of them.
template <class K>
__global__ void __launch_bounds__(THREADS, sizeof(typename K::Operand) == 2 ? 1 : 2) topk_kernel(const TopkArgs<K> p) {
    using Acc = typename K::Acc;
    using Key = typename OrderKey<Acc>::type;
    SK_DYNAMIC_SHARED(memory);
    const Shared<K> shared{memory};
    const Factors<K> factors = load_factors(memory + TopkShared<K>::bytes, p.tile);
    auto* keys = reinterpret_cast<Key*>(memory + TopkShared<K>::at_keys);
    auto* labels = reinterpret_cast<int32_t*>(memory + TopkShared<K>::at_labels);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = first_tile(p.tile, blockIdx.x), last = first_tile(p.tile, blockIdx.x + int64_t(1));
    for (int64_t row0 = int64_t(blockIdx.y) * K::ROWS; row0 < p.tile.batch; row0 += int64_t(gridDim.y) * K::ROWS) {
        for (int64_t tile = first; tile < last; ++tile) {
            logits_tile(shared, p.tile, factors, tile, row0);
            const int32_t label = static_cast<int32_t>(tile * TILE);
#pragma unroll 1  // several rows at a time would need more registers than there are
            for (int r = warp; r < K::ROWS && row0 + r < p.tile.batch; r += WARPS) {
                const int slot = r * MAX_LIST + lane;
                Key list_key = tile == first ? OrderKey<Acc>::lowest : keys[slot];
                int32_t list_label = tile == first ? -1 : labels[slot];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int column = lane + 32 * half;
                    Key key = OrderKey<Acc>::lowest;
                    if (label + column < p.tile.labels) {
                        const Acc z = shared.z()[r * K::LD_Z + column] + bias_of(p.tile, label + column);
                        key = order_key<Acc>(widen(Narrow<typename K::Scalar>::from(z)));
                    }
                    offer(key, label + 32 * half, p.m, list_key, list_label);
                }
                keys[slot] = list_key;
                labels[slot] = list_label;
                if (tile + 1 == last && lane < p.m) {
                    const int64_t place = ((row0 + r) * gridDim.x + blockIdx.x) * p.m + lane;
                    p.keys[place] = list_key;
                    p.labels[place] = list_label;
                }
            }
        }
    }
}

}  // namespace sk
