"""The flash kernel: all labels of a block pass by the rows that it keeps on chip (``backends/flash_kernels.py``).

A program marks the positives of its labels as bits. Then it keeps its BM rows of x and of coef, and their gradients, in
registers. Per step of BN labels it reads ``[weight | basis]`` once, stages ahead, and writes their rows of grad_weight.

For BCE of plain sets a loss takes one exponential, e = exp(-|z|), and one reciprocal square root: σ(|z|) = 1/(1+e),
σ(-|z|) = e/(1+e), softplus(z) = max(z, 0) + log(1+e). The logarithms of a row's labels are one, of the product of the
1+e, which is carried as q ← (q + e) + q·e so that small e are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .losses import value_and_grad
from .targets import mark_positives

RANK: tl.constexpr = tl.constexpr(16)


@triton.jit
def product_less_one(a, b):
    """``(1+a)(1+b) - 1``."""
    return (a + b) + a * b


@triton.jit
def log1p_of(q):
    """``log(1+q)``: a series where ``log2(1+q)`` would have lost digits of q."""
    series = q * (1.0 - q * (0.5 - q * (0.33333333 - q * (0.25 - q * 0.2))))
    return tl.where(q < 0.015625, series, tl.log2(1.0 + q) * 0.6931471805599453)


@triton.jit
def rounded(value, DTYPE: tl.constexpr, OPERAND: tl.constexpr):
    """``value`` in DTYPE, rounded to nearest."""
    if DTYPE == tl.bfloat16 and OPERAND == tl.float32:
        # Only the interpreter multiplies bfloat16 in float32, and its conversion cuts bits off: round by hand.
        bits = value.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == 0.0, 0.0, bits.to(tl.float32, bitcast=True))
    return value.to(DTYPE)


@triton.jit
def signs(marks, at, batch, row, label, BM: tl.constexpr, BN: tl.constexpr):
    """The sign bit for each of the labels ``at + label`` that is positive, else 0: ``[BM, BN]`` int32."""
    word = marks + at // 32 * batch + row
    bits = tl.load(word, mask=row < batch, other=0)[:, None]
    if BN == 64:
        bits = tl.where(label[None, :] < 32, bits, tl.load(word + batch, mask=row < batch, other=0)[:, None])
    # A thread's labels differ in bits 0, 3 and 4 alone: one shift by the others serves them all, and then constants.
    return ((bits >> (label & 6)[None, :]) << (31 - (label & 25))[None, :]) & -0x80000000


@triton.jit
def with_sign(value, sign):
    """``-value`` where there is a sign."""
    return (value.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def plain_bce(z, sign):
    """∂f/∂z ``[BM, BN]`` and the loss of each row for targets 0 and 1: a positive label is a negative one of -z."""
    t = with_sign(z, sign)
    e = tl.exp2(tl.abs(t) * -1.4426950408889634)
    # In this order few of the tile's arrays live at once.
    root = tl.rsqrt(1.0 + e)
    slope = root * root * tl.where(t > 0, 1.0, e)
    loss = tl.sum(tl.maximum(t, 0.0), 1) + log1p_of(tl.reduce(e, 1, product_less_one))
    return with_sign(slope, sign), loss


@triton.jit(do_not_specialize=["label_start", "batch", "labels", "block_labels"])
def flash_kernel(
    x,  # [B, s], x_stride
    weight,  # [m, s]
    bias,  # [m]
    basis,  # [T+1, 16]
    coef,  # [B, blocks · 16], coef_stride
    indices,  # int64 [nnz] global labels, ascending in each row
    offsets,  # int64 [B+1]
    marks,  # [blocks · T / 32, B] int32, made here
    dense,  # [B, m], dense_stride
    label_weight, pos_weight,  # [m]
    row_factor,  # [B]
    out_scale,  # []
    grad_weight,  # [m, s]
    grad_bias,  # [m]
    grad_coef,  # as coef
    slabs,  # [blocks, B, s]
    row_sums,  # [blocks, B]
    totals,  # [blocks] float64
    x_stride, coef_stride, dense_stride, label_start, batch, labels, block_labels, scale,
    SLACK: tl.constexpr, WIDTH: tl.constexpr,  # columns, and the power of two that holds them
    WORDS: tl.constexpr, ENTRIES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    HAS_DFT: tl.constexpr, HAS_BIAS: tl.constexpr, SPARSE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_POS_WEIGHT: tl.constexpr, HAS_ROW_FACTOR: tl.constexpr, SCALED: tl.constexpr, ACCUMULATE: tl.constexpr,
    NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    KIND: tl.constexpr, SMOOTHING: tl.constexpr, GAMMA_POS: tl.constexpr, GAMMA_NEG: tl.constexpr,
    ALPHA_POS: tl.constexpr, ALPHA_NEG: tl.constexpr, CLIP: tl.constexpr, EPS: tl.constexpr, DETACH: tl.constexpr,
    DTYPE: tl.constexpr,  # of the operands of products
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program is a block of ``block_labels`` labels."""
    PLAIN: tl.constexpr = KIND == 0 and SPARSE and SMOOTHING == 0.0 and not HAS_WEIGHT and not HAS_POS_WEIGHT
    block = tl.program_id(0).to(tl.int64)
    first = block * block_labels
    count = tl.minimum(labels - first, block_labels).to(tl.int32)
    weight += first * SLACK
    coef += block * RANK
    grad_weight += first * SLACK
    bias += first
    grad_bias += first
    label_weight += first
    pos_weight += first
    dense += first
    marks += first // 32 * batch
    r, c, j, d = tl.arange(0, BM), tl.arange(0, WIDTH)[None, :], tl.arange(0, BN), tl.arange(0, RANK)[None, :]

    inside = r < batch
    in_row = inside[:, None] & (c < SLACK)
    # What comes before the loop waits for memory alone, so all of it is asked for first.
    rows = tl.load(x + (r[:, None] * x_stride + c), mask=in_row, other=0.0).to(DTYPE)
    if HAS_DFT:
        coefs = tl.load(coef + (r[:, None] * coef_stride + d), mask=inside[:, None], other=0.0)
        coefs = tl.where(d == RANK - 1, 1.0, coefs).to(DTYPE)
        grad_coefs = tl.zeros((BM, RANK), tl.float32)
    if SPARSE:
        words = tl.cdiv(count, BN) * BN // 32
        mark_positives(indices, offsets, marks, r, inside, batch, first + label_start, count, words, WORDS, ENTRIES)
        tl.debug_barrier()  # threads read what others have written
    grad_rows = tl.zeros((BM, WIDTH), tl.float32)
    if HAS_ROW_FACTOR:
        row_factors = tl.load(row_factor + r, mask=inside, other=0.0)[:, None]
    if NEED_BIAS:
        ones = tl.where(inside[:, None] & (d == 0), 1.0, 0.0).to(DTYPE)
    losses = tl.zeros((BM,), tl.float32)
    factor = scale
    if SCALED:
        factor *= tl.load(out_scale)

    for at in tl.range(0, count, BN, num_stages=STAGES):
        label = at + j
        in_block = label < count
        place = label[:, None] * SLACK + c
        mask = in_block[:, None] & (c < SLACK)
        w = tl.load(weight + place, mask=mask, other=0.0).to(DTYPE)
        z = tl.dot(rows, tl.trans(w), input_precision=PRECISION)
        if HAS_DFT:
            # Row T of the basis makes the logits of labels that are not there so low that they cost nothing.
            basis_row = tl.where(in_block, label, block_labels)[:, None]
            u = tl.load(basis + (basis_row * RANK + d)).to(DTYPE)
            z = tl.dot(coefs, tl.trans(u), z, input_precision=PRECISION)
        if HAS_BIAS:
            z += tl.load(bias + label, mask=in_block, other=0.0).to(tl.float32)[None, :]
        if PLAIN:
            if not HAS_DFT:  # labels that are not there cost nothing
                z = tl.where(in_block[None, :], z, float("-inf"))
            g, loss = plain_bce(z, signs(marks, at, batch, r, j, BM, BN))
        else:
            known = in_block[None, :] & inside[:, None]
            if SPARSE:
                y = tl.where(signs(marks, at, batch, r, j, BM, BN) < 0, 1.0, 0.0)
            else:
                y = tl.load(dense + (r.to(tl.int64)[:, None] * dense_stride + label[None, :]), mask=known, other=0)
                y = y.to(tl.float32)
            y, pos, dpos, neg, dneg = value_and_grad(
                z, y, KIND, SMOOTHING, GAMMA_POS, GAMMA_NEG, ALPHA_POS, ALPHA_NEG, CLIP, EPS, DETACH
            )
            up = y
            if HAS_POS_WEIGHT:
                up = y * tl.load(pos_weight + label, mask=in_block, other=0.0)[None, :]
            # A hard target must not see the other term: 0·inf at an infinite logit.
            f = tl.where(up == 0.0, 0.0, up * pos) + tl.where(y == 1.0, 0.0, (1.0 - y) * neg)
            g = up * dpos + (1.0 - y) * dneg
            if HAS_WEIGHT:
                per_label = tl.load(label_weight + label, mask=in_block, other=0.0)[None, :]
                f *= per_label
                g *= per_label
            loss = tl.sum(tl.where(known, f, 0.0), 1)
            g = tl.where(known, g, 0.0)
        losses += loss
        if HAS_ROW_FACTOR:
            g *= row_factors
        narrow = g.to(DTYPE)
        if NEED_WEIGHT:
            grad_w = tl.dot(tl.trans(narrow), rows, input_precision=PRECISION)
        if NEED_X:
            grad_rows = tl.dot(narrow, w, grad_rows, input_precision=PRECISION)
            if HAS_DFT:
                grad_coefs = tl.dot(narrow, u, grad_coefs, input_precision=PRECISION)
        if NEED_WEIGHT:
            grad_w *= factor
            if ACCUMULATE:
                grad_w += tl.load(grad_weight + place, mask=mask, other=0.0)
            tl.store(grad_weight + place, rounded(grad_w, grad_weight.dtype.element_ty, DTYPE), mask=mask)
        if NEED_BIAS:
            grad_b = tl.sum(tl.dot(tl.trans(narrow), ones, input_precision=PRECISION), 1) * factor
            if ACCUMULATE:
                grad_b += tl.load(grad_bias + label, mask=in_block, other=0.0)
            tl.store(grad_bias + label, rounded(grad_b, grad_bias.dtype.element_ty, DTYPE), mask=in_block)

    if NEED_X:
        slabs += block * batch * SLACK
        tl.store(slabs + (r[:, None] * SLACK + c), grad_rows, mask=in_row)
        if HAS_DFT:
            grad_coef += block * RANK
            made = rounded(grad_coefs, grad_coef.dtype.element_ty, DTYPE)
            tl.store(grad_coef + (r[:, None] * coef_stride + d), made, mask=inside[:, None])
    tl.store(row_sums + block * batch + r, losses, mask=inside)
    tl.store(totals + block, tl.sum(tl.where(inside, losses, 0.0).to(tl.float64), 0))


@triton.jit(do_not_specialize=["grad_stride", "batch", "blocks"])
def finish_kernel(
    slabs,  # [blocks, B, s]
    row_sums,  # [blocks, B]
    totals,  # [blocks]
    out_scale,  # []
    grad_x,  # [B, s], grad_stride
    rows,  # [B] float64
    value,  # [] float32
    grad_stride, batch, blocks, scale,
    SLACK: tl.constexpr, NEED_X: tl.constexpr, SCALED: tl.constexpr, HAS_VALUE: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The blocks' sums, PARTS of them at a time, which meet in a fixed order. The last programs add the losses."""
    size = batch * SLACK
    sums = tl.cdiv(size, BLOCK) if NEED_X else 0  # programs
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)[:, None]
    if NEED_X and program < sums:
        wide = tl.zeros((PARTS, BLOCK), tl.float32)
        for start in range(0, blocks, PARTS):
            block = start + part
            mask = (block < blocks) & (at < size)[None, :]
            wide += tl.load(slabs + block.to(tl.int64) * size + at[None, :], mask=mask, other=0.0)
        made = tl.sum(wide, 0) * scale
        if SCALED:
            made *= tl.load(out_scale)
        place = grad_x + (at // SLACK).to(tl.int64) * grad_stride + at % SLACK
        tl.store(place, rounded(made, grad_x.dtype.element_ty, DTYPE), mask=at < size)
    else:
        row = at - sums * BLOCK
        losses = tl.zeros((PARTS, BLOCK), tl.float64)
        for start in range(0, blocks, PARTS):
            block = start + part
            mask = (block < blocks) & (row < batch)[None, :]
            losses += tl.load(row_sums + block.to(tl.int64) * batch + row[None, :], mask=mask, other=0.0).to(tl.float64)
        tl.store(rows + row, tl.sum(losses, 0), mask=row < batch)
        if HAS_VALUE and program == sums:
            whole = tl.zeros((PARTS, BLOCK), tl.float64)
            for start in range(0, blocks, PARTS * BLOCK):
                block = start + part * BLOCK + tl.arange(0, BLOCK)[None, :]
                whole += tl.load(totals + block, mask=block < blocks, other=0.0)
            tl.store(value, (tl.sum(tl.sum(whole, 0), 0) * scale).to(tl.float32))
