// Which shape of a block serves which problem.
#pragma once

#include "launch.h"
#include "tile.cuh"

namespace sk {

constexpr int WIDEST = 128;  // slack columns

// f(shape) for the block with the most of `batch` rows that fits into `limit` bytes of shared memory.
template <class T, class F>
void with_shape_of(int64_t batch, int64_t slack, int limit, F f) {
    if (slack > 64) {
        constexpr int STEPS = WIDEST / Kind<T>::DEPTH;
        if constexpr (sizeof(T) == 4) {
            using Small = Shape<T, STEPS, 1, 4, 64>;
            using Large = Shape<T, STEPS, 1, 8, 32>;
            if (batch > 64 && limit >= Large::BYTES) return f(Large{});
            if (limit >= Small::BYTES) return f(Small{});
            f(Shape<T, STEPS, 1, 4, 32>{});
        } else {
            using Large = Shape<T, STEPS, 2, 8, 64>;
            if (batch <= 64) return f(Shape<T, STEPS, 1, 4, 64>{});
            if (batch > 128 && limit >= Large::BYTES) return f(Large{});
            f(Shape<T, STEPS, 1, 8, 64>{});
        }
        return;
    }
    if constexpr (sizeof(T) == 4) {
        using Large = Shape<T, 8, 2, 8, 32>;
        if (batch <= 64) return f(Shape<T, 8, 1, 4, 64>{});
        if (batch > 128 && limit >= Large::BYTES) return f(Large{});
        f(Shape<T, 8, 1, 8, 32>{});
    } else {
        using Large = Shape<T, 4, 2, 8, 128>;
        if (batch <= 64) return f(Shape<T, 4, 2, 2, 128>{});
        if (batch <= 128) return f(Shape<T, 4, 2, 4, 128>{});
        if (limit >= Large::BYTES) return f(Large{});
        f(Shape<T, 4, 2, 8, 64>{});
    }
}

template <class F>
void with_shape(DType dtype, int64_t batch, int64_t slack, int limit, F f) {
    switch (dtype) {
        case DType::tf32: return with_shape_of<float>(batch, slack, limit, f);
        case DType::f16: return with_shape_of<__half>(batch, slack, limit, f);
        case DType::bf16: return with_shape_of<__nv_bfloat16>(batch, slack, limit, f);
    }
}

}  // namespace sk
