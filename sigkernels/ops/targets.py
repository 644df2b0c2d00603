"""Targets as the tensors that an operator takes, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..labels import LabelSets

TargetTensors = tuple[Tensor | None, Tensor | None, Tensor | None]


def target_tensors(targets: LabelSets | Tensor) -> TargetTensors:
    """(indices, offsets, dense): the tensors of either form of targets, which were checked."""
    if isinstance(targets, LabelSets):
        return *targets.unchecked(), None
    return None, None, targets


def from_target_tensors(tensors: Sequence[Tensor | None], num_labels: int) -> LabelSets | Tensor:
    """The inverse of ``target_tensors``."""
    indices, offsets, dense = tensors
    if indices is None or offsets is None:
        assert dense is not None
        if dense.device.type == "cpu" and dense.is_floating_point() and bool(dense.isnan().any()):
            raise ValueError(
                "dense targets hold NaN, which torch.compile and torch.func do not see; give unknown=targets.isnan()"
            )
        return dense
    return LabelSets.from_sorted(indices, offsets, num_labels)
