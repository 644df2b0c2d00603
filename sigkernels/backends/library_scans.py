"""Logits, their adjoint, top-m and prediction of the library path. Only ``predict`` waits for the device, once: its
result has a size that the device alone knows.

Logits, which are written in full anyway, are one product with ``[W_dft | C | weight]``, chunks of which are laid together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from .library_tables import code_columns, columns_shape, tables_of
from .library_walk import Chunk, GradientOfX, LabelWalk, multiplies_narrow, without_autocast


def _walk(x: Tensor, layer: Layer) -> LabelWalk:
    return LabelWalk(x, layer, multiplies_narrow(x.device))


@without_autocast
def logits(x: Tensor, layer: Layer) -> Tensor:
    """``[B, m]``, in the dtype of x."""
    (rows, slack), bias = layer.weight.shape, layer.bias
    z = x.new_empty(x.shape[0], rows)
    shape = columns_shape(layer.meta, rows, slack, x.dtype, x.device)
    if shape is None or (layer.codes and x.is_cpu):  # where a fast transform is less work
        walk = _walk(x, layer)
        for chunk in walk:
            z[:, chunk.start : chunk.stop] = walk.add_bias_(chunk)
        return z
    tables = tables_of(layer, shape)
    for start in range(0, rows, shape.size):
        stop = min(start + shape.size, rows)
        out, matrix = z[:, start:stop], layer.weight[start:stop].to(x.dtype)
        columns = tables.basis[start:stop], code_columns(layer, tables, start, stop)
        fixed = [part for part in columns if part is not None and part.shape[1]]
        matrix = torch.cat([*fixed, matrix], 1) if fixed else matrix
        if bias is None:
            torch.mm(x, matrix.T, out=out)
        else:
            torch.addmm(bias[start:stop].to(x.dtype), x, matrix.T, out=out)
    return z


@without_autocast
def logits_adjoint(g: Tensor, layer: Layer) -> Tensor:
    """``g W``: the gradient of x for a gradient ``g [B, m]`` of the logits, ``[B, D]``."""
    x = g.new_empty(g.shape[0], layer.in_columns)  # whose values do not matter
    walk = LabelWalk(x, layer, not g.is_cpu, logits=False)
    grad = GradientOfX(walk, g.dtype)
    for chunk in walk.parts():
        grad.add(chunk, g[:, chunk.start : chunk.stop].to(walk.operand))
    return grad.finish()


@without_autocast
def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """The m highest logits of each row and their labels, ``[B, m]`` each."""
    best_values, best_labels = x.new_empty(x.shape[0], 0), x.new_empty(x.shape[0], 0, dtype=torch.int64)
    walk = _walk(x, layer)
    for chunk in walk:
        values, picked = _top(walk.add_bias_(chunk).to(x.dtype), min(m, chunk.stop - chunk.start))
        # Kept labels are lower than all that follow and stand first, so that a stable sort breaks ties rightly.
        values, order = torch.sort(torch.cat([best_values, values], 1), dim=1, descending=True, stable=True)
        labels = torch.cat([best_labels, picked + (layer.label_start + chunk.start)], 1)
        best_values, best_labels = values[:, :m], labels.gather(1, order[:, :m])
    return best_values, best_labels


def _top(z: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m highest of each row and where they are; ties go to the lower position, NaN counts as highest."""
    if z.dtype == torch.float64 or z.device.type == "mps":
        values, order = torch.sort(z, dim=1, descending=True, stable=True)
        return values[:, :m], order[:, :m]
    # One integer that orders by value, then by position: unique, so that the choice among equals is decided.
    bits = (z.float() + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 and 0.0 are equal
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    ordered = torch.where(z.isnan(), 0x7FFFFFFF, ordered)
    width = z.shape[1]
    _, picked = torch.topk(ordered * width + torch.arange(width - 1, -1, -1, device=z.device), m, dim=1)
    return z.gather(1, picked), picked


@without_autocast
def predict(x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
    """The labels whose logit is above the threshold."""
    walk = _walk(x, layer)

    def hits(chunk: Chunk) -> Tensor:
        bound = threshold[chunk.start : chunk.stop].to(x.dtype) if isinstance(threshold, Tensor) else threshold
        return walk.add_bias_(chunk).to(x.dtype) > bound

    if x.device.type == "cpu" or walk.size >= layer.num_rows:
        return _one_sweep(x, layer, [(chunk.start, hits(chunk).nonzero()) for chunk in walk])
    return _two_sweeps(x, layer, walk, hits)


def _one_sweep(x: Tensor, layer: Layer, found: list[tuple[int, Tensor]]) -> LabelSets:
    """From the first label of every chunk and the rows and columns of its hits."""
    empty = torch.empty(0, dtype=torch.int64, device=x.device)
    row = torch.cat([empty, *(at[:, 0] for _, at in found)])
    label = torch.cat([empty, *(at[:, 1] + (layer.label_start + start) for start, at in found)])
    offsets = torch.searchsorted(row.sort()[0], torch.arange(x.shape[0] + 1, device=x.device))
    return LabelSets.from_sorted(label[torch.argsort(row, stable=True)], offsets, layer.num_labels)


def _two_sweeps(x: Tensor, layer: Layer, walk: LabelWalk, hits: Callable[[Chunk], Tensor]) -> LabelSets:
    """One bit of each logit is kept until the sizes of the sets are known; then the labels are written."""
    spans, packed, counts = [], [], []
    for chunk in walk:
        found = hits(chunk)
        spans.append((chunk.start, chunk.stop))
        counts.append(found.sum(1))
        packed.append(_pack(found))
    sizes = torch.stack(counts)  # [chunks, B]
    offsets = torch.cat([sizes.new_zeros(1), sizes.sum(0).cumsum(0)])
    starts = sizes.cumsum(0) - sizes + offsets[:-1]
    nnz = int(offsets[-1])
    indices = x.new_empty(nnz + 1, dtype=torch.int64)  # the last one takes what is not above
    for (first, stop), bits, start in zip(spans, packed, starts, strict=True):
        found = _unpack(bits, stop - first)
        place = torch.where(found, start[:, None] + found.cumsum(1) - 1, nnz)
        labels = torch.arange(layer.label_start + first, layer.label_start + stop, device=x.device)
        indices.scatter_(0, place.flatten(), labels.expand(found.shape).flatten())
    return LabelSets.from_sorted(indices[:-1], offsets, layer.num_labels)


def _pack(found: Tensor) -> Tensor:
    """bool ``[B, c]`` as bits, ``[B, ⌈c/8⌉]``."""
    padded = torch.nn.functional.pad(found, (0, -found.shape[1] % 8)).unflatten(1, (-1, 8))
    return (padded.to(torch.uint8) << _bit_places(found.device)).sum(2, dtype=torch.uint8)


def _unpack(bits: Tensor, width: int) -> Tensor:
    return ((bits[:, :, None] >> _bit_places(bits.device)) & 1).flatten(1)[:, :width].bool()


def _bit_places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
