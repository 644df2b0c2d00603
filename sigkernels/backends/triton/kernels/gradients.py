"""From ∂loss/∂z of a tile to the gradients of x and weight, and the kernel that adds the programs' private sums."""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import RB, basis, factor_dot, narrow, turned, two_factor_dot, wide


@triton.jit
def add_to(place, value, mask, more):
    """Adds to what is there where ``more`` is above 0; writes otherwise."""
    tl.store(place, tl.load(place, mask=(mask.to(tl.int32) * more) > 0, other=0.0) + value, mask=mask)


@triton.jit
def add_gradients(
    x, dft, weight, u, v, turn,
    scratch,  # [rows, BN]: ∂loss/∂z of this tile, zero outside the batch and the labels
    slab,  # [B, D]: this program's grad_x
    grad_weight,  # [m, s]
    out_scale,  # [1]: multiplies grad_weight
    batch, labels, slack, rank, even, columns, tile,
    more,  # earlier tiles that the slab holds
    NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, ACCUMULATE: tl.constexpr, SCALED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_DFT: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of ∂loss/∂z with x (written once), and with S, U and V."""
    # As for the logits: on the FMA units a sum over labels takes few of them at a time, and loads S again for each block
    # of rows. On tensor cores S stays.
    GB: tl.constexpr = 16 if DTYPE == ACC and PRECISION == "ieee" else BN
    inner = tl.arange(0, BN)
    r = tl.arange(0, BM)[:, None]
    width = columns + slack
    weight += wide(tile) * BN * slack
    grad_weight += wide(tile) * BN * slack
    in_label = (tile * BN + inner < labels)[:, None]
    for start in tl.range(0, slack, BK, disable_licm=True):
        column = start + tl.arange(0, BK)[None, :]
        place = inner[:, None] * slack + column
        if NEED_WEIGHT:
            total = tl.zeros((BN, BK), ACC)
            for row0 in tl.range(0, batch, BM, disable_licm=True):
                g = tl.load(scratch + wide(row0) * BN + (r * BN + inner[None, :])).to(DTYPE)
                mask = (row0 + r < batch) & (column < slack)
                a = tl.load(x + wide(row0) * slack + (r * slack + column), mask=mask, other=0.0).to(DTYPE)
                total = tl.dot(tl.trans(g), a, total, input_precision=PRECISION, out_dtype=ACC)
            if SCALED:
                total *= tl.load(out_scale)
            if ACCUMULATE:
                total += tl.load(grad_weight + place, mask=in_label & (column < slack), other=0.0).to(ACC)
            made = narrow(total, grad_weight.dtype.element_ty, DTYPE)
            tl.store(grad_weight + place, made, mask=in_label & (column < slack))
        if NEED_X:
            if GB == BN:
                w = tl.load(weight + place, mask=in_label & (column < slack), other=0.0).to(DTYPE)
            for row0 in tl.range(0, batch, BM, disable_licm=True):
                if GB == BN:
                    g = tl.load(scratch + wide(row0) * BN + (r * BN + inner[None, :])).to(DTYPE)
                    dx = tl.dot(g, w, input_precision=PRECISION, out_dtype=ACC)
                else:
                    dx = tl.zeros((BM, BK), ACC)
                    for part in tl.range(0, BN, GB, disable_licm=True):
                        few = part + tl.arange(0, GB)
                        g = tl.load(scratch + wide(row0) * BN + (r * BN + few[None, :])).to(DTYPE)
                        mask = (tile * BN + few < labels)[:, None] & (column < slack)
                        w = tl.load(weight + (few[:, None] * slack + column), mask=mask, other=0.0).to(DTYPE)
                        dx = tl.dot(g, w, dx, input_precision=PRECISION, out_dtype=ACC)
                mask = (row0 + r < batch) & (column < slack)
                add_to(slab + wide(row0) * width + columns + (r * width + column), dx, mask, more)
    if NEED_X and HAS_DFT:
        for row0 in tl.range(0, batch, BM, disable_licm=True):
            for rank0 in tl.range(0, rank, RB, disable_licm=True):
                tl.debug_barrier()  # the slab holds what the ranks before have added
                c = tl.zeros((BM, RB), ACC)
                for part in tl.range(0, BN, GB, disable_licm=True):
                    few = part + tl.arange(0, GB)
                    g = tl.load(scratch + wide(row0) * BN + (r * BN + few[None, :])).to(DTYPE)
                    c = factor_dot(g, tl.trans(basis(u, rank, rank0, few)), c, DTYPE, ACC, PRECISION)
                for start in tl.range(0, columns, BK, disable_licm=True):
                    column = start + tl.arange(0, BK)[None, :]
                    m = turned(v, turn, rank, even, columns, tile, rank0, start, BK)
                    dx = two_factor_dot(c, m, tl.zeros((BM, BK), ACC), DTYPE, ACC, PRECISION)
                    mask = (row0 + r < batch) & (column < columns)
                    add_to(slab + wide(row0) * width + (r * width + column), dx, mask, more + rank0)


@triton.jit
def add_slabs_kernel(
    slabs,  # [count, size]
    out,  # [size]
    scale,  # [1]
    count, size,
    SCALED: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``out = scale · Σ slabs``, or that added to ``out``: PARTS sums at a time, which meet in a fixed order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((PARTS, BLOCK), out.dtype.element_ty)
    for first in range(0, count, PARTS):
        slab = (first + tl.arange(0, PARTS)).to(tl.int64)[:, None]
        sums += tl.load(slabs + slab * size + at[None, :], mask=(slab < count) & (at < size)[None, :], other=0.0)
    total = tl.sum(sums, axis=0)
    if SCALED:
        total *= tl.load(scale)
    if ACCUMULATE:
        total += tl.load(out + at, mask=at < size, other=0.0)
    tl.store(out + at, total, mask=at < size)
