"""Targets as the tensors that an operator takes, and back."""

from __future__ import annotations

from torch import Tensor

from ..labels import LabelSets

TargetTensors = tuple[Tensor | None, Tensor | None, Tensor | None]


def target_tensors(targets: LabelSets | Tensor) -> TargetTensors:
    """(indices, offsets, dense): the tensors of either form of targets."""
    if isinstance(targets, LabelSets):
        return targets.indices, targets.offsets, None
    return None, None, targets


def from_target_tensors(
    indices: Tensor | None, offsets: Tensor | None, dense: Tensor | None, num_labels: int
) -> LabelSets | Tensor:
    """The inverse of ``target_tensors``."""
    if indices is None or offsets is None:
        assert dense is not None
        return dense
    return LabelSets.from_sorted(indices, offsets, num_labels)
