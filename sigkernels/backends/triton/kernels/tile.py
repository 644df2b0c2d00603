"""What every Triton kernel is built on: the logits of BM rows and one tile of BN labels, and its targets.

    z = x_dft · Mᵀ · Uᵀ + x_slack · S_tileᵀ + bias,    M = V · Rot(tile)          (``backends/gpu_tiles.py``)

The factors of the DFT part are worked on RB columns at a time, whatever their rank. They carry the prior of every
label, and they are few: with 16-bit inputs a factor is used as high + low half, so that 16 bits of it count.
"""

from __future__ import annotations

import triton
import triton.language as tl

RB: tl.constexpr = tl.constexpr(16)  # the least that a dot takes


@triton.jit
def wide(number):
    """An int64, also of what the interpreter holds as a Python number."""
    return tl.zeros((), tl.int64) + number


@triton.jit
def narrow(value, DTYPE: tl.constexpr, OPERAND: tl.constexpr):
    """``value`` in DTYPE, rounded to nearest."""
    if DTYPE == tl.bfloat16 and OPERAND == tl.float32:
        # Only the interpreter multiplies bfloat16 in float32, and its conversion cuts bits off: round by hand.
        bits = value.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == 0.0, 0.0, bits.to(tl.float32, bitcast=True))
    return value.to(DTYPE)


@triton.jit
def halves(m, DTYPE: tl.constexpr):
    """``m`` as high + low in DTYPE."""
    high = m.to(DTYPE)
    return high, (m - high.to(m.dtype)).to(DTYPE)


@triton.jit
def factor_dot(a, m, acc, DTYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """``acc + a · m``: ``a`` an exact operand in DTYPE, ``m`` a factor in ACC."""
    if DTYPE == ACC:
        acc = tl.dot(a, m, acc, input_precision=PRECISION, out_dtype=ACC)
    else:
        high, low = halves(m, DTYPE)
        acc = tl.dot(a, low, acc, out_dtype=ACC)
        acc = tl.dot(a, high, acc, out_dtype=ACC)
    return acc


@triton.jit
def two_factor_dot(c, m, acc, DTYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """``acc + c · m``: both in ACC."""
    if DTYPE == ACC:
        acc = tl.dot(c, m, acc, input_precision=PRECISION, out_dtype=ACC)
    else:
        c_high, c_low = halves(c, DTYPE)
        high, low = halves(m, DTYPE)
        acc = tl.dot(c_high, low, acc, out_dtype=ACC)
        acc = tl.dot(c_low, high, acc, out_dtype=ACC)
        acc = tl.dot(c_high, high, acc, out_dtype=ACC)
    return acc


@triton.jit
def turned(v, turn, rank, even, columns, tile, rank0, start, BK: tl.constexpr):
    """``M [RB, BK]``: rows from rank0 and columns from start on; zero outside."""
    i = rank0 + tl.arange(0, RB)[:, None]
    column = start + tl.arange(0, BK)[None, :]
    inside = (i < rank) & (column < columns)
    value = tl.load(v + i * (columns // 2 + 1) + (column + 1) // 2, mask=inside, other=0.0)
    parity = tl.where(i < even, 0, 1)
    turn += wide(tile) * 2 * columns
    return value * tl.load(turn + (parity * columns + column), mask=inside, other=0.0)


@triton.jit
def basis(u, rank, rank0, inner):
    """Rows of ``Uᵀ`` from rank0 on, RB of them, and the columns ``inner``; zero outside."""
    i = rank0 + tl.arange(0, RB)[:, None]
    return tl.load(u + inner[None, :] * rank + i, mask=i < rank, other=0.0)


@triton.jit
def logit_tile(
    x,  # [B, s]
    dft,  # [B, dft_stride], zero beyond the last column
    weight,  # [m, s]
    bias,  # [m]
    u,  # [BN, r]
    v,  # [r, k+1]
    turn,  # [tiles, 2, 2k+1]
    batch, labels, slack, rank, even, columns, dft_stride,
    tile, row0,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_DFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,  # of the operands of products
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``z [BM, BN]`` in ACC, and the labels (counted from the layer's first) of its columns."""
    # A product on the FMA units has its operands in registers, all columns at once: take few of them at a time.
    KB: tl.constexpr = 16 if DTYPE == ACC and PRECISION == "ieee" else BK
    # Places are a 64-bit start plus 32-bit offsets within the block: half the registers.
    r = tl.arange(0, BM)[:, None]
    inner = tl.arange(0, BN)
    label = tile * BN + inner
    in_row = row0 + r < batch
    in_label = label < labels
    dft += wide(row0) * dft_stride
    x += wide(row0) * slack
    weight += wide(tile) * BN * slack
    z = tl.zeros((BM, BN), ACC)
    # Columns from the last to the first, and slack before them: column 0 carries the prior of all labels, and what comes
    # after a large number is rounded with it.
    for start in tl.range(0, slack, KB, disable_licm=True):
        column = start + tl.arange(0, KB)[None, :]
        a = tl.load(x + (r * slack + column), mask=in_row & (column < slack), other=0.0).to(DTYPE)
        w = tl.load(
            weight + (inner[:, None] * slack + column), mask=in_label[:, None] & (column < slack), other=0.0
        ).to(DTYPE)
        z = tl.dot(a, tl.trans(w), z, input_precision=PRECISION, out_dtype=ACC)
    if HAS_DFT:
        for rank0 in tl.range(0, rank, RB, disable_licm=True):
            c = tl.zeros((BM, RB), ACC)
            for done in tl.range(0, columns, BK, disable_licm=True):
                start = (columns - 1) // BK * BK - done
                column = start + tl.arange(0, BK)[None, :]
                a = tl.load(dft + (r * dft_stride + column), mask=in_row, other=0.0).to(DTYPE)
                m = turned(v, turn, rank, even, columns, tile, rank0, start, BK)
                c = factor_dot(a, tl.trans(m), c, DTYPE, ACC, PRECISION)
            z = two_factor_dot(c, basis(u, rank, rank0, inner), z, DTYPE, ACC, PRECISION)
    if HAS_BIAS:
        z += tl.load(bias + label, mask=in_label, other=0.0).to(ACC)[None, :]
    return z, label


@triton.jit
def target_tile(
    indices,  # [nnz] int64, or unused
    at,  # [tiles+1, B] int32: where the positives of each row enter each tile
    dense,  # [B, m] with a row stride, or unused
    dense_stride, label_start, batch, tile, row0, mask,
    SPARSE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """``y [BM, BN]`` in ACC."""
    r = tl.arange(0, BM)
    if SPARSE:
        # A row has few positives in a tile, and a tile has 64 labels: one bit per label, set one positive at a time.
        tl.static_assert(BN == 64)
        in_row = row0 + r < batch
        at += wide(tile) * batch + row0
        position = tl.load(at + r, mask=in_row, other=0)
        end = tl.load(at + batch + r, mask=in_row, other=0)
        bits = tl.zeros((BM,), tl.int64)
        left = tl.max(end - position, axis=0)
        while left > 0:
            here = position < end
            column = tl.load(indices + position, mask=here, other=0) - (label_start + wide(tile) * BN)
            bits |= tl.where(here, tl.full((BM,), 1, tl.int64) << tl.where(here, column, 0), 0)
            position += 1
            left -= 1
        y = ((bits[:, None] >> tl.arange(0, BN).to(tl.int64)[None, :]) & 1).to(ACC)
    else:
        row = (row0 + r).to(tl.int64)[:, None]
        y = tl.load(dense + row * dense_stride + (tile * BN + tl.arange(0, BN))[None, :], mask=mask, other=0.0).to(ACC)
    return y
