"""What the losses that need a whole row of logits share: checks, targets as a list of entries, reductions over rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.interface import accumulate_dtype
from ..label_forms import checked_rows
from ..labels import LabelSets
from ..validation import DTYPES, check_int, check_memory, check_targets


class Entries(NamedTuple):
    """The targets that are not zero."""

    rows: Tensor  # [nnz]
    labels: Tensor  # [nnz]
    weights: Tensor | None  # [nnz]; None: all are 1

    def at_labels(self, labels: slice) -> Entries:
        """Those of a range of labels, numbered from its start."""
        inside = (self.labels >= labels.start) & (self.labels < labels.stop)
        weights = None if self.weights is None else self.weights[inside]
        return Entries(self.rows[inside], self.labels[inside] - labels.start, weights)

    def weighted(self, f: Tensor) -> Tensor:
        """``f [nnz]`` times the weights."""
        return f if self.weights is None else f * self.weights.to(f.dtype)


def entries(indices: Tensor | None, offsets: Tensor | None, dense: Tensor | None, num_labels: int) -> Entries:
    """The entries of sets in compressed rows, or of a dense target ``[B, num_labels]``."""
    if dense is not None:
        rows, labels = dense.nonzero(as_tuple=True)
        return Entries(rows, labels, dense[rows, labels])
    assert indices is not None and offsets is not None
    return Entries(checked_rows(indices, offsets, num_labels), indices, None)


def split_targets(targets: Any, z: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Targets in any accepted form → (indices, offsets, dense) as an operator takes them: the sets or dense are None."""
    checked = check_targets(targets, z.shape[:-1], z.shape[-1], z.device)
    return (*checked.unchecked(), None) if isinstance(checked, LabelSets) else (None, None, checked)


def reduce_rows(rows: Tensor, reduction: str, leading: torch.Size) -> Tensor:
    """``[B]`` → the reduced loss. The mean runs over rows (NaN for none, as torch): there are no per-label terms."""
    if reduction == "none":
        return rows.reshape(leading)
    return rows.mean() if reduction == "mean" else rows.sum()


def finish_rows(rows: Tensor, reduction: str, z: Tensor) -> Tensor:
    """``[B]`` → the loss of logits ``z [..., n]``, float32 (float64 for float64 logits)."""
    return reduce_rows(rows, reduction, z.shape[:-1]).to(accumulate_dtype(z.dtype))


def check_logits(z: Tensor, k: int) -> tuple[int, int]:
    """Checks logits ``[..., n]`` and ``1 ≤ k ≤ n``; returns n and k."""
    if not isinstance(z, Tensor):
        raise TypeError(f"z must be a tensor of logits, got {type(z).__name__}")
    if z.dtype not in DTYPES:
        raise TypeError(f"z must be floating point of 16, 32 or 64 bits, got {z.dtype}; call z.float()")
    check_memory("z", z)
    if z.ndim == 0:
        raise ValueError("z must have at least one dimension, [..., n], got a scalar")
    n = z.shape[-1]
    k = check_k(k)
    if k > n:
        raise ValueError(f"k = {k} labels cannot be chosen among n = {n} labels; k must lie in 1 … n")
    return n, k


def check_k(k: int) -> int:
    """Checks that k is a positive whole number, and returns it."""
    return check_int("k", k, 1)
