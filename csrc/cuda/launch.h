// The host side of the CUDA kernels: plain pointers and sizes, no torch.  Nothing here allocates, copies or waits, so
// that a launch can be captured in a CUDA graph.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/confusion.h"
#include "core/losses.h"

namespace sk {

enum class DType { f32, tf32, f16, bf16, f64 };

struct LaunchOn {
    int device;
    void* stream;  // cudaStream_t
};

// What a kernel's struct of the same name in tile.cuh, targets.cuh, gradients.cuh holds.  Types: x, dft, weight and bias
// in the dtype; everything else in float, or double for f64, where nothing else is said.
struct Problem {
    DType dtype;
    const void* x;       // [batch, slack]
    const void* dft;     // [batch, dft_stride]
    const void* weight;  // [labels, slack]
    const void* bias;    // [labels] or null
    const void* u;       // [tile, rank]
    const void* v;       // [rank, columns / 2 + 1]
    const void* turn;    // [tiles, 2, columns]
    int64_t batch, labels, slack, rank, even, columns, dft_stride;
};

struct Targets {
    bool sparse;
    const int64_t* indices;
    const int32_t* at;
    int64_t label_start;
    const void* dense;
    int64_t dense_stride;
};

struct Gradients {
    const void* out_scale;
    bool need_x;
    void *slabs, *grad_weight;
    bool grad_weight_narrow;
    void* grad_bias;
    bool accumulate;
    void* scratch;
};

struct FusedLoss {
    LossParams loss;
    const void *label_weight, *pos_weight, *row_factor;
    double* row_sums;
};

struct ConfusionLoss {
    ConfusionParams loss;
    const void *beta, *eta;
    void* logits;
    double *values, *grad_beta, *grad_eta;
};

struct AddSlabs {
    const void* slabs;
    void* out;
    const void* scale;
    int64_t count, size;
    bool wide, accumulate;  // wide: numbers are double, else float
};

void logits(const LaunchOn&, const Problem&, void* out, int64_t out_stride);
void fused_loss(const LaunchOn&, const Problem&, const Targets&, const Gradients&, const FusedLoss&, int64_t blocks);
void confusion_loss(const LaunchOn&, const Problem&, const Targets&, const Gradients&, const ConfusionLoss&,
                    int64_t blocks);
void add_slabs(const LaunchOn&, const AddSlabs&);
void topk(const LaunchOn&, const Problem&, int64_t ranges, int64_t m, void* keys, int32_t* labels);
void predict_count(const LaunchOn&, const Problem&, int64_t ranges, double threshold, int32_t* counts);
void predict_fill(const LaunchOn&, const Problem&, int64_t ranges, double threshold, const int64_t* starts,
                  int64_t label_start, int64_t* indices);

// What a caller needs to size its work.
int64_t tile_labels();          // labels per tile
int64_t rows_per_group(DType);  // rows of the batch that a block takes at a time
int64_t longest_list();         // the largest m of topk
int64_t logits_shared_bytes(DType);  // shared memory of a block, without U and V
int64_t fused_loss_shared_bytes(DType);
int64_t confusion_loss_shared_bytes(DType);
int64_t topk_shared_bytes(DType);
int64_t predict_shared_bytes(DType);
int64_t block_shared_bytes(DType);           // the most that a block takes with U and V
int64_t resident_blocks(DType, int device);  // blocks of fused_loss that run at once on the device
std::string devices();                       // "NVIDIA H100 (sm_90), ..." or why there is none
int device_count();                          // 0 without a driver or a device
std::pair<int, int> versions();              // 1000 major + 10 minor of the driver (0 without one) and the runtime
std::pair<int, int> capability(int device);  // (9, 0) for sm_90

struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace sk
