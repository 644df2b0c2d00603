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

// Walks through the positives of one row, once it has been told from where on.
class Cursor {
  public:
    __device__ __forceinline__ Cursor(const TargetArgs& targets, int row, bool real) : targets_(targets) {
        if (!real || !targets.indices) return;
        start_ = targets.offsets[row], end_ = targets.offsets[row + 1];
    }

    // Goes to the first positive from `first` on. Three are looked at together: half as many ways to memory as by halves.
    __device__ __forceinline__ void seek(int first) {
        const int64_t wanted = targets_.label_start + first;
        int64_t found = targets_.label_start + INT32_MAX;
        at_ = targets_.indices + start_, left_ = static_cast<int>(end_ - start_);
        for (int count = left_; count > 0;) {  // it is among so many, or the one behind them
            const int places[3] = {count / 4, count / 2, count - 1 - count / 4};
            int64_t labels[3];
#pragma unroll
            for (int i = 0; i < 3; ++i) labels[i] = at_[places[i]];
            int skip = 0;
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (labels[i] < wanted) skip = places[i] + 1;
#pragma unroll
            for (int i = 2; i >= 0; --i)
                if (labels[i] >= wanted) count = places[i], found = labels[i];
            at_ += skip, left_ -= skip, count -= skip;
        }
        next_ = near(found);
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
    int64_t start_ = 0, end_ = 0;  // the row's, until the cursor seeks
    const int64_t* at_ = nullptr;
    int left_ = 0;          // of the row, from the cursor on: no more than there are labels
    int next_ = INT32_MAX;  // the label at the cursor

    __device__ __forceinline__ void look() { next_ = left_ ? near(*at_) : INT32_MAX; }

    __device__ __forceinline__ int near(int64_t label) const {
        label -= targets_.label_start;
        return label < INT32_MAX ? static_cast<int>(label) : INT32_MAX;
    }
};

}  // namespace sk
