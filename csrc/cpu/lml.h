// The LML projection of rows of logits: y = sigma(z + nu) with sum(y) = k.  sigkernels/ops/lml.py has the mathematics.
// Plain data only: this crosses into code that is compiled once per instruction set.
#pragma once

#include <cstdint>

namespace sk {

enum class LmlStep : int {
    solve = 0,     // z -> nu, slope
    project = 1,   // z -> nu, slope, out = sigma(z + nu)
    pullback = 2,  // z, nu, slope, grad -> out = h (grad - E[grad]),  h = sigma(t) sigma(-t) at t = z + nu
    spread = 3,    // z, nu, slope, total -> out = total h / sum(h)
};

struct LmlJob {
    LmlStep step = LmlStep::solve;
    int64_t n = 0, k = 0;
    double* nu = nullptr;           // [B]
    double* slope = nullptr;        // [B]: sum of h; its logarithm, which is negative, where it underflows
    const double* total = nullptr;  // [B]
};

// What one instruction set offers: the work on one row whose numbers are already of the arithmetic's type.  `z` has
// room for reading, and `out` for writing, exactly n numbers.
struct LmlKernels {
    const char* name;
    void (*row_f32)(const LmlJob&, int64_t row, const float* z, const float* grad, float* out);
    void (*row_f64)(const LmlJob&, int64_t row, const double* z, const double* grad, double* out);
};

extern const LmlKernels lml_portable;
#if defined(__x86_64__) || defined(_M_X64)
extern const LmlKernels lml_avx2, lml_avx512;
#endif

}  // namespace sk
