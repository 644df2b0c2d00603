"""Confusion-matrix losses of a chunk of labels that has all rows; ``losses/confusion.py`` has the formulas.

A program has the rows of its labels once for the column sums, which make the value of every label and its two slopes,
``∂loss/∂S = on_y·(y - least) + on_all``, and once more for ``∂loss/∂z``: in registers, or where they are too many in two
sweeps over blocks of them. Pooled losses do these in two launches.
Compiled without the fusion of products into sums: lanes that hold copies of a sum would fuse different ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elementwise import block_of_logits, constant_part, in_full, rounded
from .losses import exp_minus
from .targets import soft_targets

MOST_BETA: tl.constexpr = tl.constexpr(3e38)  # finite in float32, too


@triton.jit
def sigma(v):
    """σ(v) and σ(v)σ(-v), without the cancellation of 1-σ."""
    e = exp_minus(tl.abs(v))
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
    """β or η of a program's labels."""
    if GIVEN:
        value = tl.load(of + label, mask=in_label, other=NUMBER)
    else:
        value = tl.full(label.shape, NUMBER, ACC)
    return value


@triton.jit
def target_block(
    marks, dense, dense_stride, dense_step, row, in_row, batch, tile, label, mask,
    SPARSE: tl.constexpr, MIRRORED: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``y [BM, BN]``, or 1-y of a mirrored metric."""
    if SPARSE:
        word = (tl.zeros((), tl.int64) + tile * BN // 32) * batch
        bits = tl.load(marks + word + row, mask=in_row, other=0)
        y = tl.where(((bits[:, None] >> (label % 32)[None, :]) & 1) != 0, 1.0, 0.0).to(ACC)
    else:
        y = soft_targets(dense, dense_stride, dense_step, row, label, mask, ACC)
    if MIRRORED:
        y = 1.0 - y
    return y


@triton.jit
def scored_rows(
    z, stride, features, features_stride, bias, marks, dense, dense_stride, dense_step,
    row0, batch, tile, label, in_label, labels, constant, beta, eta,
    BIAS: tl.constexpr, APART: tl.constexpr, SPARSE: tl.constexpr, FORM: tl.constexpr, MIRRORED: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``score_of`` the rows from ``row0`` on, ``[BM, BN]``, their targets, which elements there are and have memory, where they start."""
    row = tl.zeros((BM,), tl.int64) + row0 + tl.arange(0, BM)
    in_row = row < batch
    mask = in_row[:, None] & in_label[None, :]
    start = (tl.zeros((), tl.int64) + row0) * stride
    apart = constant_part(features, features_stride, row, in_row, constant, APART, ACC)
    value = block_of_logits(
        z + start, stride, apart, bias, in_row, label, tile * BN + BN - 1, labels, BIAS, APART, BM
    )  # fmt: skip
    y = target_block(
        marks, dense, dense_stride, dense_step, row, in_row, batch, tile, label, mask, SPARSE, MIRRORED, ACC, BN
    )
    score, slope, steep, t = score_of(value, beta, eta, FORM, MIRRORED)
    return score, slope, steep, t, y, mask, in_row[:, None] & (label < stride)[None, :], start


@triton.jit
def sums_of(score, y, least, mask, WIDE: tl.constexpr):
    """The sums over the rows of S·(y - least), S and y."""
    score = tl.where(mask, score, 0.0)
    tp = tl.sum(score * (y - least[None, :]), axis=0).to(WIDE)
    return tp, tl.sum(score, axis=0).to(WIDE), tl.sum(tl.where(mask, y, 0.0), axis=0).to(WIDE)


@triton.jit
def store_slopes(
    g, place, on_y, on_all, slope, steep, t, y, least, mask, room,
    COLUMN_SUMS: tl.constexpr, NEED_BETA: tl.constexpr, NEED_ETA: tl.constexpr, INTERPRETED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``∂loss/∂z``; the sums over the rows of it and of what β and η multiply. ``room``: there is memory for an element."""
    by_score = on_y[None, :] * (y - least[None, :]) + on_all[None, :]
    nothing = tl.zeros((y.shape[1],), WIDE)
    by_beta, by_eta, bias_sum = nothing, nothing, nothing
    if NEED_BETA:
        by_beta = tl.sum(tl.where(mask, by_score * steep * t, 0.0), axis=0).to(WIDE)
    if NEED_ETA:
        by_eta = tl.sum(tl.where(mask, by_score * steep, 0.0), axis=0).to(WIDE)
    slope *= by_score
    if COLUMN_SUMS:
        bias_sum = tl.sum(tl.where(mask, slope, 0.0), axis=0).to(WIDE)
    tl.store(g + place, rounded(slope, g.dtype.element_ty, INTERPRETED), mask=room)
    return by_beta, by_eta, bias_sum


@triton.jit(do_not_specialize=["labels", "batch", "features_stride", "dense_stride", "dense_step", "more"])
def columns_kernel(
    z,  # [B, c] with a row stride, the logits without bias and, with APART, without the constant feature
    g,  # the same, out: ∂loss/∂z; z itself where it is as wide
    stride,  # of both, a multiple of 16
    features, features_stride,  # x: its first column is the constant feature
    bias,  # [c]
    marks,  # [⌈c/32⌉, B] int32, SPARSE: label 32·w + i of the chunk is bit i of word w
    dense, dense_stride, dense_step,  # else [B, c] of any dtype
    betas, etas,  # [c]
    pooled,  # [2] float64: on_y and on_all of a pooled loss
    sums,  # [3, c] float64 out: of S·y, S and y, for a pooled loss
    values,  # [tiles] float64: the losses of a tile's labels, added up over chunks
    column_sums,  # [c] out: the sums of ∂loss/∂z
    grad_beta, grad_eta,  # [c] float64, out
    batch, labels, constant, scale, scale_low,
    more,  # above 0 where `values` holds those of earlier chunks
    BIAS: tl.constexpr, APART: tl.constexpr, SPARSE: tl.constexpr, FORM: tl.constexpr, MIRRORED: tl.constexpr,
    METRIC: tl.constexpr, BETA: tl.constexpr, ETA: tl.constexpr, TINY: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_ETA: tl.constexpr, POOLED: tl.constexpr, SUMS: tl.constexpr, SLOPES: tl.constexpr,
    COLUMN_SUMS: tl.constexpr, NEED_BETA: tl.constexpr, NEED_ETA: tl.constexpr,
    ONCE: tl.constexpr,  # whether one block has all rows
    INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """METRIC: the coefficients of tp, s, p and B in the numerator, and of s, p and B in the denominator."""
    ACC: tl.constexpr = z.dtype.element_ty
    WIDE: tl.constexpr = ACC if ONCE else tl.float64  # of what is made of the column sums
    tile = tl.program_id(0)
    r = tl.arange(0, BM)
    label = tile * BN + tl.arange(0, BN)
    in_label = label < labels
    beta = setting(betas, label, in_label, BETA, HAS_BETA, ACC)[None, :]
    eta = setting(etas, label, in_label, ETA, HAS_ETA, ACC)[None, :]
    nothing = tl.zeros((BN,), WIDE)
    least = tl.zeros((BN,), ACC)  # the smallest target of each label where they may lie between 0 and 1
    if ONCE:
        score, slope, steep, t, y, mask, room, _ = scored_rows(
            z, stride, features, features_stride, bias, marks, dense, dense_stride, dense_step, 0, batch, tile,
            label, in_label, labels, constant, beta, eta, BIAS, APART, SPARSE, FORM, MIRRORED, ACC, BM, BN,
        )  # fmt: skip
    if not SPARSE and not POOLED:
        if ONCE:
            least = tl.min(tl.where(mask, y, float("inf")), axis=0)
        else:
            least += float("inf")
            for row0 in range(0, batch, BM):
                row = tl.zeros((BM,), tl.int64) + row0 + r
                inside = (row < batch)[:, None] & in_label[None, :]
                soft = target_block(
                    marks, dense, dense_stride, dense_step, row, row < batch, batch, tile, label, inside, SPARSE, MIRRORED, ACC, BN
                )  # fmt: skip
                least = tl.minimum(least, tl.min(tl.where(inside, soft, float("inf")), axis=0))
        least = tl.where(in_label, least, 0.0)
    if SUMS:
        tp, s, p = nothing, nothing, nothing
        if ONCE:
            tp, s, p = sums_of(score, y, least, mask, WIDE)
        else:
            for row0 in range(0, batch, BM):
                score, _, _, _, y, mask, _, _ = scored_rows(
                    z, stride, features, features_stride, bias, marks, dense, dense_stride, dense_step, row0, batch, tile,
                    label, in_label, labels, constant, beta, eta, BIAS, APART, SPARSE, FORM, MIRRORED, ACC, BM, BN,
                )  # fmt: skip
                more_tp, more_s, more_p = sums_of(score, y, least, mask, WIDE)
                tp += more_tp
                s += more_s
                p += more_p
        if POOLED:
            tl.store(sums + label, tp, mask=in_label)
            tl.store(sums + labels + label, s, mask=in_label)
            tl.store(sums + 2 * labels + label, p, mask=in_label)
        else:
            under = METRIC[4] * s + METRIC[5] * p + METRIC[6] * batch
            per_s = METRIC[0] * least.to(WIDE) + METRIC[1]
            rest = METRIC[0] * tp + METRIC[2] * p + METRIC[3] * batch
            vanishes = tl.abs(under) <= TINY  # a NaN does not: it must reach the value
            inverse = tl.where(vanishes, 0.0, 1.0 / tl.where(vanishes, 1.0, under))
            loss = tl.sum(tl.where(in_label, 1.0 - (rest + per_s * s) * inverse, 0.0).to(tl.float64), axis=0)
            if more > 0:
                loss += tl.load(values + tile)
            tl.debug_barrier()  # every thread has read it, one of them writes it
            tl.store(values + tile, loss)
            by_y = METRIC[0] * inverse
            # per_s - METRIC[4] · value, with the terms in s gone
            by_all = (per_s * (METRIC[5] * p + METRIC[6] * batch) - METRIC[4] * rest) * inverse * inverse
    if SLOPES:
        by_beta, by_eta, bias_sum = nothing, nothing, nothing
        if POOLED:
            by_y = nothing + tl.load(pooled).to(WIDE)
            by_all = nothing + tl.load(pooled + 1).to(WIDE)
        factor = -in_full(scale, scale_low, WIDE)
        on_y = (factor * by_y).to(ACC)
        on_all = (factor * by_all).to(ACC)
        place = r[:, None] * stride + label[None, :]
        if ONCE:
            by_beta, by_eta, bias_sum = store_slopes(
                g, place, on_y, on_all, slope, steep, t, y, least, mask, room, COLUMN_SUMS, NEED_BETA, NEED_ETA, INTERPRETED, WIDE
            )  # fmt: skip
        else:
            for row0 in range(0, batch, BM):
                _, slope, steep, t, y, mask, room, start = scored_rows(
                    z, stride, features, features_stride, bias, marks, dense, dense_stride, dense_step, row0, batch, tile,
                    label, in_label, labels, constant, beta, eta, BIAS, APART, SPARSE, FORM, MIRRORED, ACC, BM, BN,
                )  # fmt: skip
                more_beta, more_eta, more_bias = store_slopes(
                    g + start, place, on_y, on_all, slope, steep, t, y, least, mask, room, COLUMN_SUMS, NEED_BETA, NEED_ETA,
                    INTERPRETED, WIDE,
                )  # fmt: skip
                by_beta += more_beta
                by_eta += more_eta
                bias_sum += more_bias
        if COLUMN_SUMS:
            tl.store(column_sums + label, bias_sum.to(ACC), mask=in_label)
        if NEED_BETA:
            tl.store(grad_beta + label, by_beta, mask=in_label)
        if NEED_ETA:
            by_eta *= finite(setting(betas, label, in_label, BETA, HAS_BETA, ACC))
            tl.store(grad_eta + label, by_eta, mask=in_label)
