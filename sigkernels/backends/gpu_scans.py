"""Logits, top-m and prediction of the GPU backends on the host side. Only ``predict`` synchronises: its result has a size
that the device alone knows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from .gpu_kernels import GPUKernels
from .gpu_tiles import Chunk, label_chunks
from .torch_tiled import without_autocast

_SORT_ELEMENTS = 2**23  # logits in memory at a time when m is too large for the kernels' lists


@without_autocast
def logits(x: Tensor, layer: Layer, kernels: GPUKernels) -> Tensor:
    """``[B, m]``."""
    z = x.new_empty(x.shape[0], layer.num_rows)
    if z.numel():
        kernels.logits(Chunk.of(x, layer, kernels.tile), z)
    return z


@without_autocast
def topk(x: Tensor, layer: Layer, m: int, kernels: GPUKernels) -> tuple[Tensor, Tensor]:
    """The m highest logits of each row and their labels, ``[B, m]`` each."""
    batch, m = x.shape[0], min(m, layer.num_rows)  # a label range may be shorter than m
    if not batch:
        return x.new_empty(0, m), torch.empty(0, m, dtype=torch.int64, device=x.device)
    whole = Chunk.of(x, layer, kernels.tile)
    if m > kernels.longest_list:
        return _topk_by_sorting(whole, m, kernels)
    candidates = batch, kernels.parts(whole) * m
    keys = torch.empty(candidates, dtype=torch.int64 if x.dtype == torch.float64 else torch.int32, device=x.device)
    labels = torch.empty(candidates, dtype=torch.int32, device=x.device)
    kernels.topk(whole, m, keys, labels)
    return _merge_candidates(keys, labels.to(torch.int64) + layer.label_start, m, x.dtype)


def _topk_by_sorting(whole: Chunk, m: int, kernels: GPUKernels) -> tuple[Tensor, Tensor]:
    """For long lists: the logits of a chunk at a time, sorted together with the best so far."""
    values = whole.slack.new_empty(whole.batch, 0)
    labels = values.new_empty(whole.batch, 0, dtype=torch.int64)
    for first, count in label_chunks(whole.layer, kernels.tile, whole.batch, _SORT_ELEMENTS):
        chunk = whole.part(whole.rows, first, count)
        z = values.new_empty(whole.batch, chunk.layer.num_rows)
        kernels.logits(chunk, z)
        more, order = torch.sort(z, dim=1, descending=True, stable=True)
        labels = torch.cat([labels, order[:, :m] + chunk.layer.label_start], 1)
        # What is kept has lower labels than what comes: a stable sort breaks ties rightly.
        values, order = torch.sort(torch.cat([values, more[:, :m]], 1), dim=1, descending=True, stable=True)
        values, labels = values[:, :m], labels.gather(1, order[:, :m])
    return values, labels


def _merge_candidates(keys: Tensor, labels: Tensor, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The m best of ``keys, labels [B, candidates]``: by key, ties to the lower label; keys become logits again.

    A key is the bit pattern of a logit, bent so that integers order as the numbers do (NaN highest).
    """
    order = labels.argsort(dim=1, stable=True)
    keys, labels = keys.gather(1, order), labels.gather(1, order)
    keys, order = keys.sort(dim=1, descending=True, stable=True)
    keys, labels = keys[:, :m].contiguous(), labels.gather(1, order[:, :m])
    bits = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)
    values = bits.view(torch.float64 if keys.dtype == torch.int64 else torch.float32)
    return values.to(dtype), labels.to(torch.int64)


@without_autocast
def predict(x: Tensor, layer: Layer, threshold: float, kernels: GPUKernels) -> LabelSets:
    """The labels whose logit is above the threshold: counted, then written."""
    batch = x.shape[0]
    if not batch:
        indices, offsets = (torch.zeros(count, dtype=torch.int64, device=x.device) for count in (0, 1))
        return LabelSets.from_sorted(indices, offsets, layer.num_labels)
    # As torch compares: the threshold is rounded to the dtype of the logits.
    limit = torch.tensor(threshold, dtype=x.dtype).item()
    whole = Chunk.of(x, layer, kernels.tile)
    counts = torch.empty(kernels.parts(whole), batch, dtype=torch.int32, device=x.device)
    kernels.predict_count(whole, limit, counts)
    offsets, starts = _set_offsets(counts)
    indices = torch.empty(int(offsets[-1]), dtype=torch.int64, device=x.device)
    kernels.predict_fill(whole, limit, starts, indices)
    return LabelSets.from_sorted(indices, offsets, layer.num_labels)


def _set_offsets(counts: Tensor) -> tuple[Tensor, Tensor]:
    """``counts [parts, B]`` of predicted labels → (``offsets [B+1]``, start of every part of a row ``[parts, B]``)."""
    sizes = counts.sum(0, dtype=torch.int64)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    before = counts.cumsum(0, dtype=torch.int64) - counts
    return offsets, (before + offsets[:-1]).contiguous()
