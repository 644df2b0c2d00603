// The host side of the CUDA kernels: plain pointers and sizes, no torch.  Nothing here allocates, copies or waits, so
// that a launch can be captured in a CUDA graph.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/losses.h"

namespace sk {

enum class DType { f32, tf32, f16, bf16, f64 };

struct LaunchOn {
    int device;
    void* stream;  // cudaStream_t
};

// z = x S^T + c U^T + bias; see tile.cuh.  Types: x, weight, bias in the dtype; c, u in float, or double for f64.
struct Problem {
    DType dtype;
    const void* x;       // [batch, slack]
    const void* weight;  // [labels, slack]
    const void* c;       // [batch, tiles * rank]
    const void* u;       // [tile, rank]
    const void* bias;    // [labels] or null
    int64_t batch, labels, slack, rank;
};

struct FusedLoss {
    bool sparse;
    const int64_t* indices;
    const int32_t* at;
    int64_t label_start;
    const void* dense;
    int64_t dense_stride;
    LossParams loss;
    const void *label_weight, *pos_weight, *row_factor, *out_scale;
    double* row_sums;
    bool need_x;
    void *slabs, *grad_c, *grad_weight;
    bool grad_weight_narrow, accumulate_weight;
    void* grad_bias;
    bool accumulate_bias;
    int64_t blocks;
};

void logits(const LaunchOn&, const Problem&, void* out, int64_t out_stride);
void fused_loss(const LaunchOn&, const Problem&, const FusedLoss&);
void topk(const LaunchOn&, const Problem&, int64_t ranges, int64_t m, void* keys, int32_t* labels);
void predict_count(const LaunchOn&, const Problem&, int64_t ranges, double threshold, int32_t* counts);
void predict_fill(const LaunchOn&, const Problem&, int64_t ranges, double threshold, const int64_t* starts,
                  int64_t label_start, int64_t* indices);

// What a caller needs to size its work.
int64_t tile_labels();             // labels per tile
int64_t rows_per_group(DType);     // rows of the batch that a block takes at a time
int64_t longest_list();            // the largest m of topk
int64_t logits_shared_bytes(DType);      // shared memory of a block
int64_t fused_loss_shared_bytes(DType);
int64_t topk_shared_bytes(DType);
int64_t predict_shared_bytes(DType);
int64_t resident_blocks(DType, int device);  // fused_loss blocks that run at once on the device
std::string devices();             // "NVIDIA H100 (sm_90), ..." or why there is none
int device_count();                // 0 without a driver or a device

struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace sk
