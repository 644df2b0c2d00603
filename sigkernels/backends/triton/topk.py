"""Top-m of the library path: the best labels of every part of a chunk, then the best of those."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...layer import Layer
from .. import library_scans
from ..library_walk import LabelWalk, without_autocast
from . import configs, interpreted
from .kernels.topk import topk_kernel
from .pointwise import entries_of, on


@without_autocast
def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """The m highest logits of each row and their labels, ``[B, m]`` each; a layer may have fewer labels than m."""
    m = min(m, layer.num_rows)
    if m > configs.MAX_LIST or not x.shape[0] or not m:
        return library_scans.topk(x, layer, m)
    walk, config = LabelWalk(x, layer, True), configs.TOPK
    blocks, tiles = triton.cdiv(walk.batch, config.BM), triton.cdiv(walk.size, config.BN)
    parts = min(max(configs.TOPK_PROGRAMS // blocks, 1), tiles)
    width = -(-layer.num_rows // walk.size) * parts * m
    keys = torch.empty(
        walk.batch, width, dtype=torch.int64 if x.dtype == torch.float64 else torch.int32, device=x.device
    )
    labels = torch.empty(walk.batch, width, dtype=torch.int64, device=x.device)
    for chunk in walk:
        bias = entries_of(layer.bias, chunk)
        with on(x):
            topk_kernel[(blocks, parts)](
                chunk.z, chunk.z.stride(0), walk.x, walk.x.stride(0), bias, keys, labels,
                walk.batch, chunk.z.shape[1], layer.label_start + chunk.start, walk.constant,
                m, width, chunk.number * parts * m,
                BIAS=layer.bias is not None, APART=walk.apart, INTERPRETED=interpreted(),
                M=max(2, triton.next_power_of_2(m)), **config.options(configs.platform()),
            )  # fmt: skip
    return _best(keys, labels, m, x.dtype)


def _best(keys: Tensor, labels: Tensor, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The m best of ``keys, labels [B, candidates]``: by key, ties to the lower label; keys become logits again.

    A key is the bit pattern of a logit, bent so that integers order as the numbers do (NaN highest).
    """
    order = labels.argsort(dim=1, stable=True)
    keys, labels = keys.gather(1, order), labels.gather(1, order)
    keys, order = keys.sort(dim=1, descending=True, stable=True)
    keys, labels = keys[:, :m].contiguous(), labels.gather(1, order[:, :m])
    bits = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)
    return bits.view(torch.float64 if keys.dtype == torch.int64 else torch.float32).to(dtype), labels
