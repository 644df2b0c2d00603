"""The fused pass as one Triton kernel on persistent programs; ``backends/gpu_pass.py`` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from .gradients import add_gradients, add_to
from .losses import value_and_grad
from .tile import logit_tile, narrow, target_tile, wide


@triton.jit(do_not_specialize=["label_start", "batch", "labels", "rank", "even", "columns", "tiles", "rows"])
def fused_loss_kernel(
    x, dft, weight, bias, u, v, turn,
    indices, at, dense, dense_stride, label_start,
    label_weight,  # [m]
    label_pos_weight,  # [m]
    row_factor,  # [B]
    row_sums,  # [programs, B] float64
    scratch,  # [programs, rows, BN]: ∂loss/∂z of the tile in hand
    slabs,  # [programs, B, D]
    grad_weight,  # [m, s]
    grad_bias,  # [m]
    out_scale,  # [1]
    rows,  # of the scratch
    batch, labels, slack, rank, even, columns, dft_stride, tiles,
    SPARSE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_POS_WEIGHT: tl.constexpr,
    NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ACCUMULATE_BIAS: tl.constexpr, SCALED: tl.constexpr,
    KIND: tl.constexpr, SMOOTHING: tl.constexpr, GAMMA_POS: tl.constexpr, GAMMA_NEG: tl.constexpr,
    ALPHA_POS: tl.constexpr, ALPHA_NEG: tl.constexpr, CLIP: tl.constexpr, EPS: tl.constexpr, DETACH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_DFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program owns a contiguous range of tiles. Per tile: the loss and ∂loss/∂z of all rows, then the gradients."""
    program = tl.program_id(0).to(tl.int64)
    first = (program * tiles // tl.num_programs(0)).to(tl.int32)
    last = ((program + 1) * tiles // tl.num_programs(0)).to(tl.int32)
    scratch += program * rows * BN
    row_sums += program * batch
    slabs += program * batch * (columns + slack)
    for tile in tl.range(first, last, disable_licm=True):
        tl.debug_barrier()  # what the scratch holds of the tile before has been read
        bias_sum = tl.zeros((BN,), ACC)
        label = tile * BN + tl.arange(0, BN)
        in_label = label < labels
        for row0 in tl.range(0, batch, BM, disable_licm=True):
            r = tl.arange(0, BM)
            in_row = row0 + r < batch
            mask = in_row[:, None] & in_label[None, :]
            z, _ = logit_tile(
                x, dft, weight, bias, u, v, turn, batch, labels, slack, rank, even, columns, dft_stride,
                tile, row0, BM, BN, BK, HAS_DFT, HAS_BIAS, DTYPE, ACC, PRECISION,
            )  # fmt: skip
            y = target_tile(indices, at, dense, dense_stride, label_start, batch, tile, row0, mask, SPARSE, BM, BN, ACC)
            y, pos, dpos, neg, dneg = value_and_grad(
                z, y, KIND, SMOOTHING, GAMMA_POS, GAMMA_NEG, ALPHA_POS, ALPHA_NEG, CLIP, EPS, DETACH
            )
            if HAS_POS_WEIGHT:
                up = y * tl.load(label_pos_weight + label, mask=in_label, other=0.0)[None, :]
            else:
                up = y
            # A hard target must not see the other term: 0·inf at an infinite logit.
            f = tl.where(up == 0.0, 0.0, up * pos) + tl.where(y == 1.0, 0.0, (1.0 - y) * neg)
            g = up * dpos + (1.0 - y) * dneg
            if HAS_WEIGHT:
                w = tl.load(label_weight + label, mask=in_label, other=0.0)[None, :]
                f *= w
                g *= w
            total = tl.sum(tl.where(mask, f, 0.0), axis=1).to(tl.float64)
            add_to(row_sums + row0 + r, total, in_row, tile - first)
            if NEED_X or NEED_WEIGHT or NEED_BIAS:
                g = tl.where(mask, g * tl.load(row_factor + row0 + r, mask=in_row, other=0.0)[:, None], 0.0)
                if NEED_BIAS:
                    bias_sum += tl.sum(g, axis=0)
                if NEED_X or NEED_WEIGHT:
                    place = scratch + wide(row0) * BN + (r[:, None] * BN + tl.arange(0, BN)[None, :])
                    tl.store(place, narrow(g, scratch.dtype.element_ty, DTYPE))
        if NEED_BIAS:
            if SCALED:
                bias_sum *= tl.load(out_scale)
            add_to(grad_bias + label, bias_sum, in_label, 1 if ACCUMULATE_BIAS else 0)
        if NEED_X or NEED_WEIGHT:
            tl.debug_barrier()  # threads read what others have stored
            add_gradients(
                x, dft, weight, u, v, turn, scratch, slabs, grad_weight, out_scale,
                batch, labels, slack, rank, even, columns, tile, tile - first,
                NEED_X, NEED_WEIGHT, ACCUMULATE, SCALED, BM, BN, BK, HAS_DFT, DTYPE, ACC, PRECISION,
            )  # fmt: skip
