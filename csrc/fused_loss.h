// The fused loss of torch's tensors: its value, and the gradients in memory that is made here.
#pragma once

#include <mutex>

#include "call.h"

namespace sk {

struct LossResult {
    pybind11::object rows;  // float64 [R]: the loss of each row
    double total = 0;       // their sum
    Gradients gradients;    // in bfloat16 for bfloat16, else in the dtype of the arithmetic
};

// What of an elementwise loss has an entry for each label or row; None: no part in the loss.
struct LossVectors {
    pybind11::handle label_weight, pos_weight, row_scale;  // of the dtype of the arithmetic
};

// The gradients are scaled by `scale`, or row by row; `call` has targets.
LossResult fused_loss(Call& call, const LossParams& loss, double scale, const LossVectors& vectors, Needs needs);

// The whole of an ordinary step in one call: an elementwise loss whose settings are numbers, against label sets; x, weight
// and bias are torch.Tensor or Parameter themselves.
class PlainLoss {
  public:
    // `fixed_columns` of x come before those of the weight, which are `slack`, or any number for -1.
    // `shape_of(dtype, rows, slack)` gives the Shape of a call.
    PlainLoss(const LossParams& loss, bool mean, int64_t num_labels, int64_t fixed_columns, int64_t slack,
              pybind11::object shape_of);

    // (the loss [], (gradients of x, weight and bias, None where none is required)), or None where anything is not as it
    // should be: the checks that explain what are Python's.
    pybind11::object operator()(pybind11::handle x, pybind11::handle weight, pybind11::handle bias, pybind11::handle indices,
                                pybind11::handle offsets, bool with_gradients);

  private:
    std::shared_ptr<const Shape> shape_for(Dtype dtype, int64_t rows, int64_t slack);

    const LossParams loss_;
    const bool mean_;
    const int64_t num_labels_, fixed_columns_, slack_;
    const pybind11::object shape_of_;
    std::mutex lock_;  // of what follows
    std::shared_ptr<const Shape> last_;
    int last_threads_ = 0;
};

}  // namespace sk
