"""The oracle: every operation as plain, dense, differentiable torch. Exact, readable, and O(B·n) in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from sigkernels.codes import code_matrix
from sigkernels.dft import dft_matrix
from sigkernels.labels import LabelSets
from sigkernels.layer import Layer
from sigkernels.losses import ElementwiseLoss


def matrix(layer: Layer) -> Tensor:
    """``W = [W_dft | C | weight]``, ``[m, D]``."""
    weight, parts = layer.weight, []
    place = {"dtype": weight.dtype, "device": weight.device}
    if layer.k >= 0:
        parts.append(dft_matrix(layer.num_labels, layer.k, **place)[layer.labels])
    if layer.codes:
        parts.append(code_matrix(layer.num_labels, layer.codes, **place)[layer.labels])
    return torch.cat([*parts, weight], dim=1)


def logits(x: Tensor, layer: Layer) -> Tensor:
    """``z = x Wᵀ + bias``, ``[B, m]``."""
    return torch.nn.functional.linear(x, matrix(layer), layer.bias)


def dense_targets(targets: LabelSets | Tensor, layer: Layer, dtype: torch.dtype) -> Tensor:
    """The targets of this layer's labels as ``[B, m]``."""
    if isinstance(targets, LabelSets):
        return targets.to_dense(dtype)[:, layer.label_start : layer.label_start + layer.num_rows]
    return targets.to(dtype)


def loss_rows(x: Tensor, layer: Layer, targets: LabelSets | Tensor, loss: ElementwiseLoss) -> Tensor:
    """The loss of each row, summed over its labels, ``[B]``; differentiable in x, weight and bias."""
    z = logits(x, layer)
    start = layer.label_start
    return loss.at_labels(z, start, start + layer.num_rows).value(z, dense_targets(targets, layer, z.dtype)).sum(1)


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """A stable sort of all logits: ties go to the lower label."""
    values, labels = torch.sort(logits(x, layer), dim=1, descending=True, stable=True)
    return values[:, :m], labels[:, :m] + layer.label_start


def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    """Every logit against the threshold."""
    above = (logits(x, layer) > threshold).nonzero()
    rows, labels = above[:, 0], above[:, 1] + layer.label_start
    offsets = torch.cat([rows.new_zeros(1), torch.bincount(rows, minlength=x.shape[0]).cumsum(0)])
    return LabelSets(labels, offsets, layer.num_labels)
