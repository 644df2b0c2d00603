#include "finish.cuh"

#include "launch.cuh"

namespace sk {

template <class W>
static void finish_as(const LaunchOn& on, const Flash& f, const Gradients& to) {
    using T = typename W::T;
    const WavesArgs<T> waves{static_cast<const T*>(f.grad_coef), static_cast<const T*>(f.turns), f.factors,
                             int(to.features), f.turns ? to.dft : nullptr};
    const FinishArgs<T> args{to.x ? f.slabs : nullptr, f.row_sums, f.totals, f.out_scale, f.scale, int(f.blocks),
                             int(f.batch), int(f.slack), to.wide, to.x, to.stride, to.rows, to.value, waves};
    launch(on, "finish", finish_kernel<W>, Finish<W>::blocks(args), W::BYTES, args);
}

// Few rows: many small blocks, for every multiprocessor one. Many rows: fewer blocks, which read less, where a warp has
// registers for all parts of a row.
template <class T>
static void finish_in(const LaunchOn& on, const Flash& f, const Gradients& to) {
    using Many = WavesGradient<T, 1, 2>;
    if (f.batch <= 128 || f.blocks > Many::WORDS * WavesArgs<T>::PER) finish_as<WavesGradient<T, 2, 1>>(on, f, to);
    else finish_as<Many>(on, f, to);
}

void finish(const LaunchOn& on, const Flash& f, const Gradients& to) {
    switch (f.dtype) {
        case DType::tf32: return finish_in<float>(on, f, to);
        case DType::f16: return finish_in<__half>(on, f, to);
        case DType::bf16: return finish_in<__nv_bfloat16>(on, f, to);
    }
}

}  // namespace sk
