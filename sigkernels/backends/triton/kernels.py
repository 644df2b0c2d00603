"""The bare Triton kernels. Every one is built on ``logit_tile``: the logits of BM rows and one tile of BN labels.

    z = x_slack · S_tileᵀ + c_tile · Uᵀ + bias          (c_tile = V · Rot(tile) · x_dft, see ``backends/tiles.py``)

Nothing is chosen here: block sizes and precision are constants of the launch (``configs.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .losses import value_and_grad


@triton.jit
def logit_tile(
    x,  # [B, s]
    weight,  # [m, s]
    c,  # [B, tiles·r]
    u,  # [BN, r]
    bias,  # [m]
    batch,
    labels,
    slack,
    rank,
    tiles,
    tile,
    row,  # [BM] int64
    BN: tl.constexpr,
    BK: tl.constexpr,
    RP: tl.constexpr,  # rank, rounded up to what a dot takes; 0: no DFT part
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``z [BM, BN]`` in ACC, and the labels (counted from the layer's first) of its columns."""
    BM: tl.constexpr = row.shape[0]
    label = tile * BN + tl.arange(0, BN)
    in_row = (row < batch)[:, None]
    in_label = label < labels
    x_row = x + row[:, None] * slack
    w_row = weight + label.to(tl.int64)[:, None] * slack
    z = tl.zeros((BM, BN), ACC)
    for start in range(0, slack, BK):
        column = start + tl.arange(0, BK)[None, :]
        a = tl.load(x_row + column, mask=in_row & (column < slack), other=0.0)
        w = tl.load(w_row + column, mask=in_label[:, None] & (column < slack), other=0.0)
        if UPCAST:
            a = a.to(ACC)
            w = w.to(ACC)
        z = tl.dot(a, tl.trans(w), z, input_precision=PRECISION, out_dtype=ACC)
    if RP > 0:
        j = tl.arange(0, RP)[None, :]
        # The coefficients stay in the accumulation dtype: they are few, and they carry the prior of every label.
        coefficient = tl.load(
            c + row[:, None] * (tiles * rank) + (tile * rank + j), mask=in_row & (j < rank), other=0.0
        )
        basis = tl.load(u + tl.arange(0, BN)[:, None] * rank + j, mask=j < rank, other=0.0)
        z = tl.dot(coefficient, tl.trans(basis), z, input_precision=PRECISION, out_dtype=ACC)
    if HAS_BIAS:
        z += tl.load(bias + label, mask=in_label, other=0.0).to(ACC)[None, :]
    return z, label


@triton.jit
def logits_kernel(
    x, weight, c, u, bias,
    out,  # [B, m] with a row stride
    out_stride,
    batch, labels, slack, rank, tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RP: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACC: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, tile)."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    z, label = logit_tile(
        x, weight, c, u, bias, batch, labels, slack, rank, tiles, tl.program_id(1), row,
        BN, BK, RP, HAS_BIAS, ACC, UPCAST, PRECISION,
    )  # fmt: skip
    mask = (row < batch)[:, None] & (label < labels)[None, :]
    tl.store(out + row[:, None] * out_stride + label[None, :], z.to(out.dtype.element_ty), mask=mask)


@triton.jit
def fused_loss_kernel(
    x, weight, c, u, bias,
    dense,  # [B, m] with a row stride, or unused
    dense_stride,
    indices,  # [nnz] int64, or unused
    at,  # [tiles+1, B] int32: where the positives of each row enter each tile
    label_start,  # what to subtract from an index
    label_weight,  # [m]
    label_pos_weight,  # [m]
    row_factor,  # [B]
    row_sums,  # [tiles, B]: the loss of each row in each tile
    grad,  # [B, tiles·BN]: ∂loss/∂z, zero beyond the last label
    batch, labels, slack, rank, tiles,
    SPARSE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_POS_WEIGHT: tl.constexpr, GRADIENT: tl.constexpr,
    KIND: tl.constexpr, SMOOTHING: tl.constexpr, GAMMA_POS: tl.constexpr, GAMMA_NEG: tl.constexpr,
    ALPHA_POS: tl.constexpr, ALPHA_NEG: tl.constexpr, CLIP: tl.constexpr, EPS: tl.constexpr, DETACH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RP: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACC: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, tile): logits, loss and ∂loss/∂z of a chunk of labels in one go."""
    tile = tl.program_id(1)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    in_row = row < batch
    z, label = logit_tile(
        x, weight, c, u, bias, batch, labels, slack, rank, tiles, tile, row,
        BN, BK, RP, HAS_BIAS, ACC, UPCAST, PRECISION,
    )  # fmt: skip
    in_label = label < labels
    mask = in_row[:, None] & in_label[None, :]
    if SPARSE:
        # A row has few positives in a tile, and a tile has 64 labels: one bit per label, set one positive at a time.
        tl.static_assert(BN == 64)
        position = tl.load(at + tile.to(tl.int64) * batch + row, mask=in_row, other=0)
        end = tl.load(at + (tile + 1).to(tl.int64) * batch + row, mask=in_row, other=0)
        bits = tl.zeros((BM,), tl.int64)
        left = tl.max(end - position, axis=0)
        while left > 0:
            here = position < end
            column = tl.load(indices + position, mask=here, other=0) - (label_start + tile * BN)
            bits |= tl.where(here, tl.full((BM,), 1, tl.int64) << tl.where(here, column, 0), 0)
            position += 1
            left -= 1
        y = ((bits[:, None] >> tl.arange(0, BN).to(tl.int64)[None, :]) & 1).to(ACC)
    else:
        y = tl.load(dense + row[:, None] * dense_stride + label[None, :], mask=mask, other=0.0).to(ACC)
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
    total = tl.sum(tl.where(mask, f, 0.0), axis=1)
    tl.store(row_sums + tile.to(tl.int64) * batch + row, total, mask=in_row)
    if GRADIENT:
        g *= tl.load(row_factor + row, mask=in_row, other=0.0)[:, None]
        place = grad + row[:, None] * (tiles * BN) + label[None, :]
        tl.store(place, tl.where(mask, g, 0.0).to(grad.dtype.element_ty), mask=in_row[:, None])


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


@triton.jit
def topk_kernel(
    x, weight, c, u, bias,
    best_keys,  # [B, splits, M]
    best_labels,  # [B, splits, M] int32
    m,
    splits,
    batch, labels, slack, rank, tiles,
    M: tl.constexpr,  # m rounded up to a power of two
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RP: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACC: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, split of the tiles): the m best labels of each row in its tiles, in no order."""
    KEY: tl.constexpr = best_keys.dtype.element_ty
    DTYPE: tl.constexpr = weight.dtype.element_ty
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
            x, weight, c, u, bias, batch, labels, slack, rank, tiles, tile, row,
            BN, BK, RP, HAS_BIAS, ACC, UPCAST, PRECISION,
        )  # fmt: skip
        keys = tl.where((label < labels)[None, :], order_key(z, DTYPE).to(KEY), LOWEST)
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


@triton.jit
def predict_kernel(
    x, weight, c, u, bias,
    threshold,  # [1]
    counts,  # [splits, B] int32: written when not FILL
    starts,  # [splits, B] int64: where each split of a row writes, when FILL
    indices,  # [nnz] int64
    label_start,
    tiles_per_split,
    batch, labels, slack, rank, tiles,
    FILL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RP: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACC: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row block, contiguous split of the tiles): counts the labels above the threshold, or writes them."""
    DTYPE: tl.constexpr = weight.dtype.element_ty
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
            x, weight, c, u, bias, batch, labels, slack, rank, tiles, tile, row,
            BN, BK, RP, HAS_BIAS, ACC, UPCAST, PRECISION,
        )  # fmt: skip
        if DTYPE != tl.float64:
            z = z.to(DTYPE).to(tl.float32)
        hit = (z > limit) & in_row[:, None] & (label < labels)[None, :]
        one = hit.to(tl.int32)
        if FILL:
            target = indices + position[:, None] + (tl.cumsum(one, axis=1) - one)
            tl.store(target, (label.to(tl.int64) + label_start)[None, :] + tl.zeros((BM, 1), tl.int64), mask=hit)
        position += tl.sum(one, axis=1)
    if not FILL:
        tl.store(counts + place, position.to(tl.int32), mask=in_row)
