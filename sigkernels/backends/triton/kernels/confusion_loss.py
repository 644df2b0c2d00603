"""Confusion-matrix losses as one Triton kernel on persistent programs; ``losses/confusion.py`` has the formulas.

A tile of labels is finished by one program: logits of all rows and their column sums, the value of every label and its
two slopes (∂loss/∂S = on_y·y + on_all), ∂loss/∂z of all rows, then the gradients as in the fused pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gradients import add_gradients, add_to
from .tile import logit_tile, narrow, target_tile, wide

MOST_BETA: tl.constexpr = tl.constexpr(3e38)  # finite in float32, too


@triton.jit
def sigma(v):
    """σ(v) and σ(v)σ(-v), without the cancellation of 1-σ."""
    e = tl.exp(-tl.abs(v))
    big = 1.0 / (1.0 + e)
    small = e * big
    return tl.where(v < 0, small, big), small * big


@triton.jit
def finite(beta):
    """An infinite β makes a step of S, whose slope is 0 wherever it is defined: 0 times a number, not times infinity."""
    return tl.minimum(tl.maximum(beta, -MOST_BETA), MOST_BETA)


@triton.jit
def score_of(z, beta, eta, FORM: tl.constexpr, MIRRORED: tl.constexpr):
    """S (1-S for a mirrored metric), ∂S/∂z, ∂S/∂(β(u+η)) and u+η. FORM: 0 logits, 1 probability, 2 unbounded."""
    SIGN: tl.constexpr = -1.0 if MIRRORED else 1.0
    if FORM == 2:
        s = 1.0 - z if MIRRORED else z
        slope = z * 0.0 + SIGN
        steep = z * 0.0
        t = z
    else:
        if FORM == 1:
            u, du = sigma(z)
        else:
            u = z
            du = 1.0
        t = u + eta
        s, bell = sigma(SIGN * beta * t)
        steep = SIGN * bell
        slope = steep * finite(beta) * du
    return s, slope, steep, t


@triton.jit
def setting(of, label, in_label, NUMBER: tl.constexpr, GIVEN: tl.constexpr, ACC: tl.constexpr):
    """β or η of a tile's labels. Loaded where it is used: held during the products it would take their registers."""
    if GIVEN:
        value = tl.load(of + label, mask=in_label, other=NUMBER)
    else:
        value = tl.full(label.shape, NUMBER, ACC)
    return value


@triton.jit(do_not_specialize=["label_start", "batch", "labels", "rank", "even", "columns", "tiles", "rows"])
def confusion_loss_kernel(
    x, dft, weight, bias, u, v, turn,
    indices, at, dense, dense_stride, label_start,
    betas,  # [m]
    etas,  # [m]
    logits,  # [programs, rows, BN] ACC: the tile in hand
    values,  # [programs] float64
    grad_beta,  # [m] float64
    grad_eta,  # [m] float64
    scratch,  # [programs, rows, BN]: ∂loss/∂z of the tile in hand
    slabs,  # [programs, B, D]
    grad_weight,  # [m, s]
    grad_bias,  # [m]
    out_scale,  # [1]
    rows,  # of the scratch arrays
    batch, labels, slack, rank, even, columns, dft_stride, tiles,
    SPARSE: tl.constexpr, FORM: tl.constexpr, MIRRORED: tl.constexpr, METRIC: tl.constexpr,
    SCALE: tl.constexpr, BETA: tl.constexpr, ETA: tl.constexpr, TINY: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_ETA: tl.constexpr,
    NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    NEED_BETA: tl.constexpr, NEED_ETA: tl.constexpr, SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_DFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """METRIC: the coefficients of tp, s, p and B in the numerator, and of s, p and B in the denominator."""
    program = tl.program_id(0).to(tl.int64)
    first = (program * tiles // tl.num_programs(0)).to(tl.int32)
    last = ((program + 1) * tiles // tl.num_programs(0)).to(tl.int32)
    scratch += program * rows * BN
    logits += program * rows * BN
    slabs += program * batch * (columns + slack)
    column = tl.arange(0, BN)
    loss = tl.zeros((), tl.float64)
    for tile in tl.range(first, last, disable_licm=True):
        tl.debug_barrier()  # what the scratch arrays hold of the tile before has been read
        label = tile * BN + column
        in_label = label < labels
        tp = tl.zeros((BN,), tl.float64)
        s = tl.zeros((BN,), tl.float64)
        p = tl.zeros((BN,), tl.float64)
        for row0 in tl.range(0, batch, BM, disable_licm=True):
            r = tl.arange(0, BM)
            mask = (row0 + r < batch)[:, None] & in_label[None, :]
            z, _ = logit_tile(
                x, dft, weight, bias, u, v, turn, batch, labels, slack, rank, even, columns, dft_stride,
                tile, row0, BM, BN, BK, HAS_DFT, HAS_BIAS, DTYPE, ACC, PRECISION,
            )  # fmt: skip
            tl.store(logits + wide(row0) * BN + (r[:, None] * BN + column[None, :]), z)
            y = target_tile(indices, at, dense, dense_stride, label_start, batch, tile, row0, mask, SPARSE, BM, BN, ACC)
            if MIRRORED:
                y = 1.0 - y
            beta = setting(betas, label, in_label, BETA, HAS_BETA, ACC)
            eta = setting(etas, label, in_label, ETA, HAS_ETA, ACC)
            score, _, _, _ = score_of(z, beta[None, :], eta[None, :], FORM, MIRRORED)
            score = tl.where(mask, score, 0.0)
            tp += tl.sum(score * y, axis=0).to(tl.float64)
            s += tl.sum(score, axis=0).to(tl.float64)
            p += tl.sum(tl.where(mask, y, 0.0), axis=0).to(tl.float64)
        under = METRIC[4] * s + METRIC[5] * p + METRIC[6] * batch
        usable = tl.abs(under) > TINY
        inverse = tl.where(usable, 1.0 / tl.where(usable, under, 1.0), 0.0)
        rest = METRIC[0] * tp + METRIC[2] * p + METRIC[3] * batch  # of the numerator, without s
        value = (rest + METRIC[1] * s) * inverse
        loss += tl.sum(tl.where(in_label, 1.0 - value, 0.0), axis=0)
        if NEED_X or NEED_WEIGHT or NEED_BIAS or NEED_BETA or NEED_ETA:
            on_y = (-SCALE * METRIC[0] * inverse).to(ACC)
            # METRIC[1] - METRIC[4] · value, with the terms in s gone
            slope_all = (METRIC[1] * (METRIC[5] * p + METRIC[6] * batch) - METRIC[4] * rest) * inverse
            on_all = (-SCALE * inverse * slope_all).to(ACC)
            tl.debug_barrier()  # threads read what others have stored
            bias_sum = tl.zeros((BN,), ACC)
            by_beta = tl.zeros((BN,), tl.float64)
            by_eta = tl.zeros((BN,), tl.float64)
            for row0 in tl.range(0, batch, BM, disable_licm=True):
                r = tl.arange(0, BM)
                mask = (row0 + r < batch)[:, None] & in_label[None, :]
                z = tl.load(logits + wide(row0) * BN + (r[:, None] * BN + column[None, :]))
                y = target_tile(
                    indices, at, dense, dense_stride, label_start, batch, tile, row0, mask, SPARSE, BM, BN, ACC
                )
                if MIRRORED:
                    y = 1.0 - y
                beta = setting(betas, label, in_label, BETA, HAS_BETA, ACC)
                eta = setting(etas, label, in_label, ETA, HAS_ETA, ACC)
                _, slope, steep, t = score_of(z, beta[None, :], eta[None, :], FORM, MIRRORED)
                by_score = on_y[None, :] * y + on_all[None, :]
                if NEED_BETA:
                    by_beta += tl.sum(tl.where(mask, by_score * steep * t, 0.0), axis=0).to(tl.float64)
                if NEED_ETA:
                    by_eta += tl.sum(tl.where(mask, by_score * steep, 0.0), axis=0).to(tl.float64)
                g = tl.where(mask, by_score * slope, 0.0)
                if NEED_BIAS:
                    bias_sum += tl.sum(g, axis=0)
                if NEED_X or NEED_WEIGHT:
                    place = scratch + wide(row0) * BN + (r[:, None] * BN + column[None, :])
                    tl.store(place, narrow(g, scratch.dtype.element_ty, DTYPE))
            if NEED_BETA:
                tl.store(grad_beta + label, by_beta, mask=in_label)
            if NEED_ETA:
                by_eta *= finite(setting(betas, label, in_label, BETA, HAS_BETA, ACC))
                tl.store(grad_eta + label, by_eta, mask=in_label)
            if NEED_BIAS:
                if SCALED:
                    bias_sum *= tl.load(out_scale)
                add_to(grad_bias + label, bias_sum, in_label, 0)
            if NEED_X or NEED_WEIGHT:
                tl.debug_barrier()
                add_gradients(
                    x, dft, weight, u, v, turn, scratch, slabs, grad_weight, out_scale,
                    batch, labels, slack, rank, even, columns, tile, tile - first,
                    NEED_X, NEED_WEIGHT, False, SCALED, BM, BN, BK, HAS_DFT, DTYPE, ACC, PRECISION,
                )  # fmt: skip
    tl.store(values + program, loss)
