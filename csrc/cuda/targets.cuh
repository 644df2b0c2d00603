// Targets of a group of rows and a tile: label sets as 64 bits per row, or numbers in memory.
#pragma once

#include "tile.cuh"

namespace sk {

template <class K>
struct TargetArgs {
    int sparse;                    // targets are indices and at; dense otherwise
    const int64_t* indices;        // [nnz] sorted labels of each row
    const int32_t* at;             // [tiles + 1, batch]: where the positives of a row enter a tile
    int64_t label_start;           // what to subtract from an index
    const typename K::Acc* dense;  // [batch, labels] with a row stride
    int64_t dense_stride;

    __device__ __forceinline__ typename K::Acc of(const uint32_t* bits, int r, int column, int64_t row,
                                                  int64_t label) const {
        using Acc = typename K::Acc;
        return sparse ? Acc(bits[2 * r + column / 32] >> column % 32 & 1u) : dense[row * dense_stride + label];
    }
};

// The positives of each row of the group that fall into the tile, as 64 bits per row: one thread per row.
template <class K>
__device__ __forceinline__ void mark_positives(const TargetArgs<K>& p, int64_t batch, uint32_t* bits, int tile,
                                               int row0) {
    const int r = thread();
    if (!p.sparse || r >= K::ROWS) return;
    uint32_t word[2] = {0, 0};
    if (row0 + r < batch) {
        const int32_t end = p.at[(int64_t(tile) + 1) * batch + row0 + r];
        for (int32_t i = p.at[tile * batch + row0 + r]; i < end; ++i) {
            const int column = static_cast<int>(p.indices[i] - p.label_start - int64_t(tile) * TILE);
            if (column < 32) word[0] |= 1u << column;
            else word[1] |= 1u << (column - 32);
        }
    }
    bits[2 * r] = word[0];
    bits[2 * r + 1] = word[1];
}

}  // namespace sk
