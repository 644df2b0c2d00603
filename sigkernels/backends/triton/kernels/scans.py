"""The bare Triton kernels of the scans: logits, the m best labels, and the labels above a threshold.

Nothing is chosen here: block sizes and precision are constants of the launch (``configs.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import logit_tile


@triton.jit(do_not_specialize=["batch", "labels", "rank", "even", "columns", "tiles", "out_stride"])
def logits_kernel(
    x, dft, weight, bias, u, v, turn,
    out,  # [B, m] with a row stride
    out_stride,
    batch, labels, slack, rank, even, columns, dft_stride, tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_DFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, tile)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    z, label = logit_tile(
        x, dft, weight, bias, u, v, turn, batch, labels, slack, rank, even, columns, dft_stride,
        tl.program_id(1), tl.program_id(0) * BM, BM, BN, BK, HAS_DFT, HAS_BIAS, DTYPE, ACC, PRECISION,
    )  # fmt: skip
    mask = (row < batch)[:, None] & (label < labels)[None, :]
    tl.store(out + row[:, None] * out_stride + label[None, :], z.to(out.dtype.element_ty), mask=mask)


@triton.jit
def order_key(z, DTYPE: tl.constexpr):
    """Integers that order as ``z`` rounded to DTYPE does: NaN highest, -0 equal to 0."""
    if DTYPE != tl.float64:
        z = z.to(DTYPE).to(tl.float32)
    z = tl.where(z == 0.0, 0.0, z)
    if DTYPE == tl.float64:
        bits = z.to(tl.int64, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)
        key = tl.where(z != z, 0x7FFFFFFFFFFFFFFF, key)
    else:
        bits = z.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        key = tl.where(z != z, 0x7FFFFFFF, key)
    return key


@triton.jit(do_not_specialize=["batch", "labels", "rank", "even", "columns", "tiles", "m", "splits"])
def topk_kernel(
    x, dft, weight, bias, u, v, turn,
    best_keys,  # [B, splits, M]
    best_labels,  # [B, splits, M] int32
    m,
    splits,
    batch, labels, slack, rank, even, columns, dft_stride, tiles,
    M: tl.constexpr,  # m rounded up to a power of two
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_DFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, split of the tiles): the m best labels of each row in its tiles, in no order."""
    KEY: tl.constexpr = best_keys.dtype.element_ty
    LOGIT: tl.constexpr = weight.dtype.element_ty
    LOWEST: tl.constexpr = -(2**63) if KEY == tl.int64 else -(2**31)
    HIGHEST: tl.constexpr = 2**63 - 1 if KEY == tl.int64 else 2**31 - 1
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.arange(0, M)
    # Empty slots have the lowest key and different negative labels; slots beyond m can never be evicted.
    list_keys = tl.zeros((BM, M), KEY) + tl.where(slot < m, LOWEST, HIGHEST).to(KEY)[None, :]
    list_labels = tl.zeros((BM, M), tl.int32) - 1 - slot[None, :]
    for tile in range(split, tiles, splits):
        z, label = logit_tile(
            x, dft, weight, bias, u, v, turn, batch, labels, slack, rank, even, columns, dft_stride,
            tile, tl.program_id(0) * BM, BM, BN, BK, HAS_DFT, HAS_BIAS, DTYPE, ACC, PRECISION,
        )  # fmt: skip
        keys = tl.where((label < labels)[None, :], order_key(z, LOGIT).to(KEY), LOWEST)
        more = 1
        while more > 0:
            # The best of the tile against the worst of the list, all rows at once; of equals the lower label wins.
            best = tl.max(keys, axis=1)
            best_label = tl.min(tl.where(keys == best[:, None], label[None, :], 2147483647), axis=1)
            worst = tl.min(list_keys, axis=1)
            worst_label = tl.max(tl.where(list_keys == worst[:, None], list_labels, -2147483648), axis=1)
            take = best > worst
            evict = take[:, None] & (list_keys == worst[:, None]) & (list_labels == worst_label[:, None])
            list_keys = tl.where(evict, best[:, None], list_keys)
            list_labels = tl.where(evict, best_label[:, None], list_labels)
            keys = tl.where(take[:, None] & (label[None, :] == best_label[:, None]), LOWEST, keys)
            more = tl.max(take.to(tl.int32), axis=0)
    place = (row * splits + split)[:, None] * m + slot[None, :]
    mask = (row < batch)[:, None] & (slot < m)[None, :]
    tl.store(best_keys + place, list_keys, mask=mask)
    tl.store(best_labels + place, list_labels, mask=mask)


@triton.jit(do_not_specialize=["batch", "labels", "rank", "even", "columns", "tiles", "label_start", "tiles_per_split"])
def predict_kernel(
    x, dft, weight, bias, u, v, turn,
    threshold,  # [1]
    counts,  # [splits, B] int32: written when not FILL
    starts,  # [splits, B] int64: where each split of a row writes, when FILL
    indices,  # [nnz] int64
    label_start,
    tiles_per_split,
    batch, labels, slack, rank, even, columns, dft_stride, tiles,
    FILL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_DFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, contiguous split of the tiles): counts the labels above the threshold, or writes them."""
    LOGIT: tl.constexpr = weight.dtype.element_ty
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    in_row = row < batch
    split = tl.program_id(1)
    limit = tl.load(threshold)
    place = split.to(tl.int64) * batch + row
    if FILL:
        position = tl.load(starts + place, mask=in_row, other=0)
    else:
        position = tl.zeros((BM,), tl.int64)
    first = split * tiles_per_split
    for tile in range(first, tl.minimum(first + tiles_per_split, tiles)):
        z, label = logit_tile(
            x, dft, weight, bias, u, v, turn, batch, labels, slack, rank, even, columns, dft_stride,
            tile, tl.program_id(0) * BM, BM, BN, BK, HAS_DFT, HAS_BIAS, DTYPE, ACC, PRECISION,
        )  # fmt: skip
        if LOGIT != tl.float64:
            z = z.to(LOGIT).to(tl.float32)
        hit = (z > limit) & in_row[:, None] & (label < labels)[None, :]
        one = hit.to(tl.int32)
        if FILL:
            target = indices + position[:, None] + (tl.cumsum(one, axis=1) - one)
            tl.store(target, (label.to(tl.int64) + label_start)[None, :] + tl.zeros((BM, 1), tl.int64), mask=hit)
        position += tl.sum(one, axis=1)
    if not FILL:
        tl.store(counts + place, position.to(tl.int32), mask=in_row)
