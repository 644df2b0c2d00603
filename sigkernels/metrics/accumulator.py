"""What the metrics share: sums that batches are added to, and checks of what ``topk`` gives."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..labels import LabelSets
from ..partial_labels import clear_unknown, listed_in, without
from ..validation import check_int, refuse_meta
from . import synchronise

A = TypeVar("A", bound="Accumulator")


class Accumulator:
    """Named sums that batches are added to.

    Example:
        >>> first, second = sk.metrics.F1Metrics(10), sk.metrics.F1Metrics(10)
        >>> first.update([[1, 2]], [[1]])
        >>> second.update([[3]], [[3]])
        >>> round(first.merge(second).compute()["micro_f1"], 3)
        0.8
    """

    num_labels: int

    def __init__(self, num_labels: int, **sums: Tensor) -> None:
        self.num_labels = check_int("num_labels", num_labels, 1)
        self._sums = sums

    def reset(self) -> None:
        """Forgets everything."""
        self._sums = {name: torch.zeros_like(value) for name, value in self._sums.items()}

    def merge(self: A, other: A) -> A:
        """Adds what another accumulator of the same kind and settings has seen; returns self."""
        if type(other) is not type(self):
            raise TypeError(f"other must be a {type(self).__name__} like this one, got {type(other).__name__}")
        if self._settings() != other._settings():
            raise ValueError(
                "only accumulators of one kind and with the same settings can be merged: "
                f"{type(self).__name__}{self._settings()} and {type(other).__name__}{other._settings()}"
            )
        for name, value in other._sums.items():
            self._add(name, value)
        return self

    def sync(self: A, group: Any = None) -> A:
        """An accumulator of what all ranks of a process group have seen together; this one stays as it is.

        Every rank has to call it, and gets the same: ``metric.sync().compute()``. Without torch.distributed there is one
        process, which has seen everything. A row that several ranks were given (``DistributedSampler`` fills up the last
        batch) counts as often.

        Args:
            group: default: all ranks.
        """
        whole = copy.copy(self)
        if synchronise.is_alone(group):
            whole._sums = {name: value.clone() for name, value in self._sums.items()}
            return whole
        every = synchronise.gather_objects((type(self).__name__, *self._settings(), *self._fingerprint()), group)
        if len(set(every)) > 1:
            listed = "; ".join(f"rank {rank}: {settings}" for rank, settings in enumerate(every))
            raise ValueError(f"the ranks have accumulators of different kinds or settings: {listed}")
        whole._sums = {name: synchronise.add_up(value, group) for name, value in self._sums.items()}
        return whole

    def _fingerprint(self) -> tuple[Any, ...]:
        """What else has to be equal on all ranks."""
        return ()

    def _settings(self) -> tuple[Any, ...]:
        return (self.num_labels,)

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value.to(self._sums[name].device)

    def _rows(self) -> float:
        rows = float(self._sums["rows"])
        if rows == 0:
            raise ValueError("nothing to compute: update() has not been called with any row yet")
        return rows

    def _sets(self, targets: Any, batch: int, device: torch.device) -> LabelSets:
        return self._rows_of_sets("targets", targets, batch, device)

    def _rows_of_sets(self, name: str, given: Any, batch: int, device: torch.device) -> LabelSets:
        sets = LabelSets.of(given, self.num_labels, name=name)
        if len(sets) != batch:
            raise ValueError(f"{name} hold {len(sets)} label sets for {batch} rows; give one per row")
        return sets.to(device)

    def _known(
        self, targets: Any, unknown: Any, batch: int, device: torch.device
    ) -> tuple[LabelSets, LabelSets | None]:
        """(true sets of labels that are known, unknown labels or None)."""
        if unknown is None:
            return self._sets(targets, batch, device), None
        missing = self._rows_of_sets("unknown", unknown, batch, device)
        return without(self._sets(clear_unknown(targets, missing), batch, device), missing), missing

    def _top(self, top: Tensor, least: int, name: str) -> Tensor:
        if not isinstance(top, Tensor) or top.ndim != 2 or top.is_floating_point() or top.dtype == torch.bool:
            got = f"{top.dtype} of shape {tuple(top.shape)}" if isinstance(top, Tensor) else type(top).__name__
            raise ValueError(
                f"{name} must be an integer tensor [B, m] of labels, highest first, as topk gives it, got {got}"
            )
        refuse_meta(name, top)
        if top.shape[1] < least:
            raise ValueError(f"{name} holds {top.shape[1]} labels per row, but {least} are needed; ask topk for more")
        if top.numel() and not 0 <= int(top.min()) <= int(top.max()) < self.num_labels:
            raise ValueError(
                f"{name} holds labels from {int(top.min())} to {int(top.max())}; labels are 0 … {self.num_labels - 1}"
            )
        ordered = top.sort(1).values
        repeated = (ordered.diff(dim=1) == 0).nonzero()
        if repeated.numel():
            row, at = repeated[0].tolist()
            raise ValueError(
                f"{name} holds label {int(ordered[row, at])} more than once in row {row}; topk gives each once"
            )
        return top


def hits_of(top: Tensor, sets: LabelSets) -> Tensor:
    """Which of ``top [B, m]`` are in the row's set, bool ``[B, m]``."""
    return listed_in(torch.arange(top.shape[0], device=top.device)[:, None] * sets.num_labels + top, sets)


def known_first(top: Tensor, unknown: LabelSets | None, *others: Tensor) -> tuple[Tensor, ...]:
    """(how many labels of each row are known ``[B, 1]``, ``top`` and others ``[B, m]`` with those first, in order)."""
    if unknown is None:
        return torch.full_like(top[:, :1], top.shape[1]), top, *others
    missing = hits_of(top, unknown)
    order = missing.to(torch.uint8).argsort(dim=1, stable=True)
    return (~missing).sum(1, keepdim=True), *(array.gather(1, order) for array in (top, *others))


def check_values(values: Any, top: Tensor) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.shape != top.shape:
        shape = tuple(getattr(values, "shape", ()))
        raise ValueError(f"values must be floating point of the shape of top, {tuple(top.shape)}, got {shape}")
    if bool(values.isnan().any()):
        raise ValueError("values hold NaN, which has no place in a ranking; look for its source in the logits")


def ratio(over: Tensor, under: Tensor) -> Tensor:
    return torch.where(under > 0, over / under.clamp(min=1), 0.0)
