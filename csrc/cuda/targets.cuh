// Targets: label sets, of which every lane follows one row with a cursor, or numbers in memory.
#pragma once

#include "types.cuh"

namespace sk {

enum class Dense : int { none, f64, f32, f16, bf16, i64, i32, i16, i8, u8 };

struct TargetArgs {
    const int64_t* indices;  // [nnz] global labels, ascending in each row; null: dense
    const int64_t* offsets;  // [batch + 1]
    int64_t label_start;     // the global label of label 0
    const void* dense;       // [batch, labels], rows dense_stride numbers apart
    int64_t dense_stride;
    Dense type;

    __device__ __forceinline__ float number(int64_t at) const {
        switch (type) {
            case Dense::f64: return widen(static_cast<const double*>(dense)[at]);
            case Dense::f32: return static_cast<const float*>(dense)[at];
            case Dense::f16: return widen(static_cast<const __half*>(dense)[at]);
            case Dense::bf16: return widen(static_cast<const __nv_bfloat16*>(dense)[at]);
            case Dense::i64: return static_cast<float>(static_cast<const int64_t*>(dense)[at]);
            case Dense::i32: return static_cast<float>(static_cast<const int32_t*>(dense)[at]);
            case Dense::i16: return static_cast<float>(static_cast<const int16_t*>(dense)[at]);
            case Dense::i8: return static_cast<float>(static_cast<const int8_t*>(dense)[at]);
            default: return static_cast<float>(static_cast<const uint8_t*>(dense)[at]);
        }
    }
};

// Walks through the positives of one row, from `first` on.
class Cursor {
  public:
    __device__ __forceinline__ Cursor(const TargetArgs& targets, int row, bool real, int first) : targets_(targets) {
        if (!real || !targets.indices) return;
        const int64_t* low = targets.indices + targets.offsets[row];
        const int64_t* end = targets.indices + targets.offsets[row + 1];
        const int64_t* high = end;
        while (low < high) {
            const int64_t* middle = low + (high - low) / 2;
            if (*middle < targets.label_start + first) low = middle + 1;
            else high = middle;
        }
        at_ = low, left_ = static_cast<int>(end - low);
        look();
    }

    // The positives among `count` <= 32 labels from `first` on. `first` never decreases.
    __device__ __forceinline__ uint32_t bits(int first, int count) {
        uint32_t bits = 0;
        while (next_ < first + count) {
            if (next_ >= first) bits |= 1u << (next_ - first);
            ++at_, --left_;
            look();
        }
        return bits;
    }

  private:
    const TargetArgs& targets_;
    const int64_t* at_ = nullptr;
    int left_ = 0;          // of the row, from the cursor on: no more than there are labels
    int next_ = INT32_MAX;  // the label at the cursor

    __device__ __forceinline__ void look() {
        const int64_t label = left_ ? *at_ - targets_.label_start : INT32_MAX;
        next_ = label < INT32_MAX ? static_cast<int>(label) : INT32_MAX;
    }
};

}  // namespace sk
