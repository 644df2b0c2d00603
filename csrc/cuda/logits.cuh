// Logits into memory: block (tile, group of rows).
#pragma once

#include "tile.cuh"

namespace sk {

template <class K>
struct LogitsArgs {
    TileArgs<K> tile;
    typename K::Scalar* out;  // [batch, labels] with a row stride
    int64_t out_stride;
};

template <class K>
__global__ void __launch_bounds__(THREADS, 2) logits_kernel(const LogitsArgs<K> p) {
    SK_DYNAMIC_SHARED(memory);
    const Shared<K> shared{memory};
    const Factors<K> factors = load_factors(memory + Shared<K>::bytes_scan, p.tile);
    const int64_t tile = blockIdx.x;
    const int column = threadIdx.x % TILE;
    const int64_t label = tile * TILE + column;
    const auto bias = bias_of(p.tile, label);
    for (int64_t row0 = int64_t(blockIdx.y) * K::ROWS; row0 < p.tile.batch; row0 += int64_t(gridDim.y) * K::ROWS) {
        logits_tile(shared, p.tile, factors, tile, row0);
        for (int r = threadIdx.x / TILE; r < K::ROWS; r += THREADS / TILE)
            if (row0 + r < p.tile.batch && label < p.tile.labels)
                p.out[(row0 + r) * p.out_stride + label] =
                    Narrow<typename K::Scalar>::from(shared.z()[r * K::LD_Z + column] + bias);
    }
}

}  // namespace sk
