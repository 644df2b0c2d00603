#include "finish.cuh"

#include "launch.cuh"

namespace sk {

template <class W>
static void finish_as(const LaunchOn& on, const Flash& f, const Gradients& to) {
    using T = typename W::T;
    const WavesArgs<T> waves{static_cast<const T*>(f.grad_coef), static_cast<const T*>(f.turns), f.factors,
                             int(to.features), to.dft};
    const FinishArgs<T> args{to.x ? f.slabs : nullptr, f.row_sums, f.totals, f.out_scale, f.scale, float(f.constant), int(f.blocks),
                             int(f.batch), int(f.slack), to.wide, to.x, to.stride, to.rows, to.value, waves};
    launch(on, "finish", finish_kernel<W>, Finish<W>::blocks(args), W::BYTES, args);
}

// Few rows: small blocks, of four, for every multiprocessor one. Many rows: blocks that read less.
template <class T>
static void finish_in(const LaunchOn& on, const Flash& f, const Gradients& to) {
    const bool few = f.batch <= 128;
    if (f.numbers == 8) few ? finish_as<WavesGradient<T, 8, 4>>(on, f, to) : finish_as<WavesGradient<T, 8, 1>>(on, f, to);
    else few ? finish_as<WavesGradient<T, 16, 2>>(on, f, to) : finish_as<WavesGradient<T, 16, 1>>(on, f, to);
}

void finish(const LaunchOn& on, const Flash& f, const Gradients& to) {
    switch (f.dtype) {
        case DType::tf32: return finish_in<float>(on, f, to);
        case DType::f16: return finish_in<__half>(on, f, to);
        case DType::bf16: return finish_in<__nv_bfloat16>(on, f, to);
    }
}

}  // namespace sk
