// The host side of the CUDA kernels: plain pointers and sizes, no torch.  Nothing here allocates, copies or waits, so
// that a launch can be captured in a CUDA graph.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/losses.h"

namespace sk {

enum class DType { tf32, f16, bf16 };

struct LaunchOn {
    int device;
    void* stream;  // cudaStream_t
};

// One launch of the pass; FlashLaunch in sigkernels/backends/flash_kernels.py says what is what. Types: x, weight, bias,
// basis, coef, waves, grad_coef and turns in the dtype; everything else as in FusedLossArgs.
struct Flash {
    DType dtype;
    const void *x, *weight, *bias, *basis, *coef, *waves;
    int64_t blank, features, wave_steps, x_stride, batch, labels, slack, block_labels, blocks;
    const int64_t *indices, *offsets;
    const void* dense;
    std::string dense_type;  // torch's name of it
    int64_t dense_stride, label_start;
    LossParams loss;
    const float *label_weight, *pos_weight, *row_factor, *out_scale;
    double scale;
    bool wide, accumulate;  // grad_weight and grad_bias are float; they are added to
    void *grad_weight, *grad_bias, *grad_coef;
    float *weight_sums, *bias_sums, *slabs, *row_sums;
    double* totals;
    const void* turns;  // and factors: WavesArgs says what they are
    const float* factors;
    int64_t numbers;
    double constant;  // multiplies the slabs' last column
};

// What `finish` writes. grad_x [batch, slack], that of the DFT features [batch, features], rows of both stride numbers
// apart: float where `wide`, else in the dtype; rows [batch] = Σ row sums; value [1] or null = scale · Σ totals
struct Gradients {
    void *x, *dft;  // or null
    int64_t features, stride;
    bool wide;
    double* rows;
    float* value;
};

void fused_loss(const LaunchOn&, const Flash&);
void finish(const LaunchOn&, const Flash&, const Gradients&);

// What a caller needs to size its work.
int64_t tile_labels();   // a block has a multiple of so many labels
int64_t widest_slack();  // columns
// Rows that a block keeps on chip, where there are `batch`, and the most DFT features whose coefficients it makes.
std::pair<int64_t, int64_t> sizes_of_block(DType, int64_t batch, int64_t slack, int device);
int64_t processors(int device);
std::string devices();                       // "NVIDIA H100 (sm_90), ..." or why there is none
int device_count();                          // 0 without a driver or a device
std::pair<int, int> versions();              // 1000 major + 10 minor of the driver (0 without one) and the runtime
std::pair<int, int> capability(int device);  // (9, 0) for sm_90

struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace sk
