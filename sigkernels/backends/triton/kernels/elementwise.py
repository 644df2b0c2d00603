"""From the logits of a chunk to an elementwise loss and ``∂loss/∂z``; ``triton/pointwise.py`` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from .losses import softplus_and_sigmoid, value_and_grad
from .targets import entries_from, entry_at, negate_positives, sign_changes, soft_targets

RANK: tl.constexpr = tl.constexpr(16)


@triton.jit
def rounded(value, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """``value`` in DTYPE, to nearest. The interpreter's conversion to bfloat16 cuts bits off."""
    if DTYPE == tl.bfloat16 and INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        value = tl.where((value == 0.0) | (value != value), value, bits.to(tl.float32, bitcast=True))
    return value.to(DTYPE)


@triton.jit
def operand(value, INTERPRETED: tl.constexpr):
    """``value`` for a product: of float32 the nearest tf32, where hardware cuts bits off. The interpreter multiplies
    16 bits as float32."""
    if value.dtype == tl.float32:
        bits = (value.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
        value = tl.where(value == value, bits, value)
    elif INTERPRETED:
        value = value.to(tl.float32)
    return value


@triton.jit
def in_full(high, low, LIKE: tl.constexpr):
    """A number that comes as two float32."""
    if LIKE == tl.float64:
        number = tl.zeros((), tl.float64) + high + low
    else:
        number = high
    return number


@triton.jit
def constant_part(features, features_stride, row, in_row, constant, APART: tl.constexpr, ACC: tl.constexpr):
    """What products leave out of the logits of each row."""
    part = tl.zeros(row.shape, ACC)
    if APART:
        part += tl.load(features + row * features_stride, mask=in_row, other=0.0).to(ACC) * constant
    return part


@triton.jit
def block_of_logits(
    z, stride,  # [rows, c]: those of the block, and a multiple of 16 between them
    apart, bias, in_row, label, last, labels,
    BIAS: tl.constexpr, APART: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The logits of a block, up to the label ``last``, with what their products lack: the constant feature and the bias.
    -∞ outside."""
    in_label = label < labels
    place = tl.arange(0, BM)[:, None] * stride + label[None, :]
    value = tl.load(z + place, mask=in_row[:, None] & (label < stride)[None, :], other=float("-inf"))
    if last >= labels:
        value = tl.where(in_label[None, :], value, float("-inf"))
    if APART:
        value += apart[:, None]
    if BIAS:
        value += tl.load(bias + label, mask=in_label, other=0.0).to(value.dtype)[None, :]
    return value


@triton.jit(
    do_not_specialize=[
        "labels",
        "batch",
        "label_start",
        "features_stride",
        "dense_stride",
        "dense_step",
        "more",
        "parts",
    ]
)
def elementwise_kernel(
    z,  # [B, c] with a row stride, the logits without bias and, with APART, without the constant feature
    g,  # the same, out: ∂loss/∂z; z itself where it is as wide
    stride,  # of both, a multiple of 16
    features, features_stride,  # x: its first column is the constant feature
    waves,  # [tiles · BN, 16], WAVES: U of a part's labels
    coef, coef_stride,  # [B, parts · 16]: what U is multiplied by; out, GRAD_WAVES: the gradient of that
    bias,  # [c]
    indices, offsets, unknown,  # label sets, SPARSE
    dense, dense_stride, dense_step,  # else [B, c] of any dtype; NaN says nothing, with UNKNOWN
    label_weight, label_pos_weight,  # [c]
    row_scale,  # [B]
    losses,  # [parts, blocks], then [parts, B]: of blocks of rows and of rows in each part of the labels, added up over chunks
    parts, batch, labels, label_start, constant, scale, scale_low,
    tiles,  # of a part
    more,  # above 0 where losses holds those of earlier chunks
    BIAS: tl.constexpr, APART: tl.constexpr, WAVES: tl.constexpr, GRAD_WAVES: tl.constexpr,
    SPARSE: tl.constexpr, UNKNOWN: tl.constexpr, LABEL_WEIGHT: tl.constexpr, LABEL_POS_WEIGHT: tl.constexpr,
    WEIGHT: tl.constexpr, POS_WEIGHT: tl.constexpr, ROW_SCALE: tl.constexpr, GRADIENT: tl.constexpr,
    KIND: tl.constexpr, SMOOTHING: tl.constexpr, GAMMA_POS: tl.constexpr, GAMMA_NEG: tl.constexpr,
    ALPHA_POS: tl.constexpr, ALPHA_NEG: tl.constexpr, CLIP: tl.constexpr, EPS: tl.constexpr, DETACH: tl.constexpr,
    ROUGH: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, part of the labels): it walks over the tiles of its part, whose DFT part is ``coef · Uᵀ``."""
    ACC: tl.constexpr = z.dtype.element_ty
    PRECISION: tl.constexpr = "tf32" if g.dtype.element_ty == tl.float32 else "ieee"
    HARD: tl.constexpr = KIND == 0 and SMOOTHING == 0.0 and SPARSE
    block, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    in_row = row < batch
    z += block * BM * stride
    g += block * BM * stride
    if SPARSE:
        position, end = entries_from(indices, offsets, row, in_row, part * tiles * BN + label_start)
        upcoming = entry_at(indices, position, end, in_row)
    else:
        upcoming = row
        position = row
        end = row
    if WAVES:
        d = tl.arange(0, RANK)[None, :]
        wave_place = row[:, None] * coef_stride + part * RANK + d
        coefs = operand(tl.load(coef + wave_place, mask=in_row[:, None], other=0.0), INTERPRETED)
        grad_coefs = tl.zeros((BM, RANK), tl.float32)
    apart = constant_part(features, features_stride, row, in_row, constant, APART, ACC)
    loss = tl.zeros((BM, BN), ACC)
    for tile in range(tl.program_id(1) * tiles, tl.minimum((tl.program_id(1) + 1) * tiles, tl.cdiv(labels, BN))):
        label = tile * BN + tl.arange(0, BN)
        in_label = label < labels
        mask = in_row[:, None] & in_label[None, :]
        # Outside, a logit of -∞ costs nothing.
        value = block_of_logits(
            z, stride, apart, bias, in_row, label, tile * BN + BN - 1, labels, BIAS, APART, BM
        )  # fmt: skip
        if WAVES:
            step = (tile - tl.program_id(1) * tiles) * BN + tl.arange(0, BN)
            u = tl.load(waves + step[:, None] * RANK + d)
            u = u.to(tl.float32) if INTERPRETED else u
            value = tl.dot(coefs, tl.trans(u), value, input_precision=PRECISION)
        if SPARSE:
            first = (tl.zeros((), tl.int64) + tile) * BN + label_start
            t, known, upcoming, position = negate_positives(
                value, indices, unknown, upcoming, position, end, first, labels - tile * BN, UNKNOWN, BM, BN
            )
            changes = sign_changes(t, value)
            positive = changes < 0
            y = positive.to(ACC)
        else:
            y = soft_targets(dense, dense_stride, dense_step, row, label, mask, ACC)
            known = y == y
            if UNKNOWN:
                y = tl.where(known, y, 0.0)
        if HARD:
            f, slope = softplus_and_sigmoid(t, ROUGH)
            slope = (slope.to(changes.dtype, bitcast=True) ^ changes).to(ACC, bitcast=True)
            if LABEL_POS_WEIGHT:
                up = tl.load(label_pos_weight + label, mask=in_label, other=1.0)[None, :]
                f = tl.where(positive, f * up, f)
                slope = tl.where(positive, slope * up, slope)
            elif POS_WEIGHT != 1.0:
                f = tl.where(positive, f * POS_WEIGHT, f)
                slope = tl.where(positive, slope * POS_WEIGHT, slope)
        else:
            y, pos, dpos, neg, dneg = value_and_grad(
                value, y, KIND, SMOOTHING, GAMMA_POS, GAMMA_NEG, ALPHA_POS, ALPHA_NEG, CLIP, EPS, DETACH, ROUGH
            )
            if LABEL_POS_WEIGHT:
                up = y * tl.load(label_pos_weight + label, mask=in_label, other=0.0)[None, :]
            else:
                up = y * POS_WEIGHT
            # A hard target must not see the other term: 0·inf at an infinite logit.
            f = tl.where(up == 0.0, 0.0, up * pos) + tl.where(y == 1.0, 0.0, (1.0 - y) * neg)
            slope = up * dpos + (1.0 - y) * dneg
            f = tl.where(mask, f, 0.0)
            slope = tl.where(mask, slope, 0.0)
        if LABEL_WEIGHT:
            w = tl.load(label_weight + label, mask=in_label, other=0.0)[None, :]
            f *= w
            slope *= w
        elif WEIGHT != 1.0:
            f *= WEIGHT
            slope *= WEIGHT
        if UNKNOWN:
            f = tl.where(known, f, 0.0)
            slope = tl.where(known, slope, 0.0)
        loss += f
        if GRADIENT:
            if ROW_SCALE:
                slope *= tl.load(row_scale + row, mask=in_row, other=0.0).to(ACC)[:, None]
            else:
                slope *= in_full(scale, scale_low, ACC)
            place = tl.arange(0, BM)[:, None] * stride + label[None, :]
            made = rounded(slope, g.dtype.element_ty, INTERPRETED)
            if GRAD_WAVES:
                grad_coefs = tl.dot(operand(made, INTERPRETED), u, grad_coefs, input_precision=PRECISION)
            tl.store(g + place, made, mask=in_row[:, None] & (label < stride)[None, :])
    if GRAD_WAVES:
        tl.debug_barrier()  # several threads have read a row's coefficients, one of them writes there
        made = rounded(grad_coefs, coef.dtype.element_ty, INTERPRETED)
        tl.store(coef + wave_place, made, mask=in_row[:, None])
    blocks = tl.num_programs(0)
    row_sums = losses + parts * blocks + part * batch + row
    before = tl.load(row_sums, mask=in_row.to(tl.int32) * more > 0, other=0.0)
    tl.debug_barrier()  # several threads have read a row's, one of them writes it
    row_loss = tl.sum(loss, axis=1) + before
    tl.store(row_sums, row_loss, mask=in_row)
    tl.store(losses + part * blocks + block, tl.sum(tl.where(in_row, row_loss, 0.0), axis=0))


@triton.jit(do_not_specialize=["batch", "parts", "blocks", "size"])
def finish_kernel(
    losses,  # [parts, blocks], then [parts, B]
    rows,  # [B] float64, out: sums over the parts
    value,  # [] out, TOTAL: scale · Σ of all blocks
    wide, narrow,  # [size], CONVERT: float32 numbers, and out the same in another dtype
    batch, parts, blocks, size, scale, scale_low,
    TOTAL: tl.constexpr, CONVERT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
    SHARE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """What is left at the end of a step. All sums meet in a fixed order, PARTS or COUNT of them at a time."""
    first_row = tl.program_id(0).to(tl.int64) * BLOCK
    if first_row < batch:
        row = first_row + tl.arange(0, BLOCK)
        row_sums = losses + parts * blocks
        whole = tl.zeros((PARTS, BLOCK), losses.dtype.element_ty)
        for first in range(0, parts, PARTS):
            part = (first + tl.arange(0, PARTS)).to(tl.int64)[:, None]
            inside = (part < parts) & (row < batch)[None, :]
            whole += tl.load(row_sums + part * batch + row[None, :], mask=inside, other=0.0)
        tl.store(rows + row, tl.sum(whole, axis=0).to(tl.float64), mask=row < batch)
    if TOTAL and tl.program_id(0) == tl.num_programs(0) - 1:
        total = tl.zeros((COUNT,), tl.float64)
        for begin in range(0, parts * blocks, COUNT):
            place = begin + tl.arange(0, COUNT)
            total += tl.load(losses + place, mask=place < parts * blocks, other=0.0).to(tl.float64)
        result = tl.sum(total, axis=0) * in_full(scale, scale_low, tl.float64)
        tl.store(value, result.to(value.dtype.element_ty))
    if CONVERT:
        for start in range(tl.program_id(0).to(tl.int64) * SHARE, size, tl.num_programs(0).to(tl.int64) * SHARE):
            at = start + tl.arange(0, SHARE)
            number = tl.load(wide + at, mask=at < size, other=0.0)
            tl.store(narrow + at, rounded(number, narrow.dtype.element_ty, INTERPRETED), mask=at < size)
