#include "finish.cuh"

#include "launch.cuh"

namespace sk {

template <class T>
static void finish_as(const LaunchOn& on, const Flash& f, void* grad_x, int64_t stride, bool wide, double* rows,
                      float* value) {
    const FinishArgs<T> args{grad_x ? f.slabs : nullptr, f.row_sums, f.totals, f.out_scale, f.scale, int(f.blocks),
                             int(f.batch), int(f.slack), wide, grad_x, stride, rows, value};
    launch(on, "finish", finish_kernel<T>, args.blocks(), THREADS * int(sizeof(double)), args);
}

void finish(const LaunchOn& on, const Flash& f, void* grad_x, int64_t stride, bool wide, double* rows, float* value) {
    switch (f.dtype) {
        case DType::tf32: return finish_as<float>(on, f, grad_x, stride, wide, rows, value);
        case DType::f16: return finish_as<__half>(on, f, grad_x, stride, wide, rows, value);
        case DType::bf16: return finish_as<__nv_bfloat16>(on, f, grad_x, stride, wide, rows, value);
    }
}

}  // namespace sk
