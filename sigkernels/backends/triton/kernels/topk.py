"""The m best labels of each row among those of a chunk; ``triton/topk.py`` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from .elementwise import block_of_logits, constant_part, rounded


@triton.jit
def order_key(z, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Integers that order as ``z`` rounded to DTYPE does: NaN highest, -0 equal to 0."""
    if DTYPE != tl.float64:
        z = rounded(z, DTYPE, INTERPRETED).to(tl.float32)
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


@triton.jit(do_not_specialize=["labels", "batch", "label_start", "features_stride", "m", "width", "column"])
def topk_kernel(
    z,  # [B, c] with a row stride, the logits without bias and, with APART, without the constant feature
    stride,  # a multiple of 16
    features, features_stride,  # x, in the dtype of the result: its first column is the constant feature
    bias,  # [c]
    best_keys,  # [B, width]
    best_labels,  # [B, width] int64
    batch, labels, label_start, constant,
    m, width,
    column,  # where this chunk's candidates begin
    BIAS: tl.constexpr, APART: tl.constexpr, INTERPRETED: tl.constexpr,
    M: tl.constexpr,  # m rounded up to a power of two
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, split of the tiles): the m best labels of each row in its tiles, in no order."""
    KEY: tl.constexpr = best_keys.dtype.element_ty
    LOGIT: tl.constexpr = features.dtype.element_ty
    LOWEST: tl.constexpr = -(2**63) if KEY == tl.int64 else -(2**31)
    HIGHEST: tl.constexpr = 2**63 - 1 if KEY == tl.int64 else 2**31 - 1
    r = tl.arange(0, BM)
    row = tl.program_id(0).to(tl.int64) * BM + r
    in_row = row < batch
    split = tl.program_id(1)
    slot = tl.arange(0, M)
    start = tl.program_id(0).to(tl.int64) * BM * stride
    # Empty slots have the lowest key and different negative labels; slots beyond m can never be evicted.
    list_keys = tl.zeros((BM, M), KEY) + tl.where(slot < m, LOWEST, HIGHEST).to(KEY)[None, :]
    list_labels = tl.zeros((BM, M), tl.int32) - 1 - slot[None, :]
    apart = constant_part(features, features_stride, row, in_row, constant, APART, z.dtype.element_ty)
    for tile in range(split, (labels + BN - 1) // BN, tl.num_programs(1)):
        label = tile * BN + tl.arange(0, BN)
        value = block_of_logits(
            z + start, stride, apart, bias, in_row, label, tile * BN + BN - 1, labels, BIAS, APART, BM
        )  # fmt: skip
        keys = tl.where((label < labels)[None, :], order_key(value, LOGIT, INTERPRETED).to(KEY), LOWEST)
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
    place = row[:, None] * width + column + split * m + slot[None, :]
    mask = in_row[:, None] & (slot < m)[None, :]
    tl.store(best_keys + place, list_keys, mask=mask)
    tl.store(best_labels + place, list_labels.to(tl.int64) + label_start, mask=mask)
