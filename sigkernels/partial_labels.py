"""Labels that nobody has annotated: which entries of a batch say nothing, neither that a label applies nor that not.

``unknown=`` lists them. An entry that is both listed as unknown and active counts as unknown, as under a mask; the
target of an unknown entry may be anything, NaN too. NaN elsewhere is refused: it may as well be a mistake.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import label_forms, validation
from .labels import LabelSets
from .operator_dispatch import by_operator, refuse_mapped


class PartialTargets(NamedTuple):
    """Targets of which some entries say nothing."""

    targets: LabelSets | Tensor  # sets hold active and unknown labels; or [B, m], whose unknown entries are 0
    unknown: Tensor  # bool: of the entries of the sets [nnz], or [B, m]

    def for_kernels(self) -> tuple[LabelSets | Tensor, Tensor | None]:
        """(sets, which of their entries are unknown) or (dense targets whose unknown entries are NaN, None)."""
        if isinstance(self.targets, LabelSets):
            return self.targets, self.unknown.contiguous()
        return self.targets.masked_fill(self.unknown, torch.nan), None

    def at_labels(self, labels: slice) -> PartialTargets:
        """Those of a range of labels; sets keep all of them."""
        if isinstance(self.targets, LabelSets):
            return self
        return PartialTargets(self.targets[:, labels], self.unknown[:, labels])


def check_partial_targets(
    targets: Any, unknown: Any, leading: torch.Size, num_labels: int, device: torch.device
) -> tuple[PartialTargets, int | Tensor]:
    """(targets in any accepted form beside their unknown labels, how many entries are known)."""
    for given in (targets, unknown):
        if isinstance(given, LabelSets) or (given is unknown and isinstance(given, Tensor)):
            tensors = given.unchecked() if isinstance(given, LabelSets) else (given,)
            refuse_mapped("label sets beside unknown labels, and unknown labels; call the loss once for each", *tensors)
    if isinstance(targets, np.ndarray) and targets.dtype != object:
        targets = label_forms.tensor_of("targets", targets).to(device)
    if isinstance(targets, Tensor) and targets.layout is torch.strided and targets.is_floating_point():
        missing = _dense_mask(unknown, targets.shape, device)
        dense = validation.check_targets(targets.masked_fill(missing, 0.0), leading, num_labels, device)
        assert isinstance(dense, Tensor)
        missing = missing.reshape(dense.shape)
        return PartialTargets(dense, missing), missing.numel() - missing.sum()
    y = validation.check_targets(targets, leading, num_labels, device)
    if isinstance(y, Tensor):  # traced, or on an accelerator
        missing = _dense_mask(unknown, torch.Size((*leading, num_labels)), device).reshape(y.shape)
        return PartialTargets(y.masked_fill(missing, 0), missing), missing.numel() - missing.sum()
    sets = _sets(unknown, num_labels).to(device)
    if len(sets) != len(y):
        raise ValueError(f"unknown holds {len(sets)} label sets for {len(y)} rows of input; give one per row")
    parts = (*y.checked(), *sets.checked())
    indices, offsets, flags = (join_unknown if by_operator(*parts) else _join)(*parts, num_labels)
    known = len(y) * num_labels - sets.indices.numel()
    return PartialTargets(LabelSets.from_sorted(indices, offsets, num_labels), flags), known


def _sets(unknown: Any, num_labels: int) -> LabelSets:
    dense = isinstance(unknown, (Tensor, np.ndarray)) and unknown.ndim > 2
    return LabelSets.of(unknown.reshape(-1, num_labels) if dense else unknown, num_labels, name="unknown")


def _dense_mask(unknown: Any, shape: torch.Size, device: torch.device) -> Tensor:
    if isinstance(unknown, Tensor) and unknown.dtype == torch.bool and unknown.layout is torch.strided:
        if unknown.shape != shape:
            raise ValueError(
                f"a dense unknown must have the shape of the targets, {list(shape)}, got {list(unknown.shape)}"
            )
        return unknown.to(device)
    mask = _sets(unknown, shape[-1]).to_dense(torch.bool)
    if mask.shape[0] != math.prod(shape[:-1]):
        raise ValueError(f"unknown holds {mask.shape[0]} label sets for {math.prod(shape[:-1])} rows; give one per row")
    return mask.reshape(shape).to(device)


def _join(
    indices: Tensor, offsets: Tensor, unknown_indices: Tensor, unknown_offsets: Tensor, num_labels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(indices, offsets) of the union of active and unknown labels, and which of them are unknown, bool ``[nnz]``."""
    unknown = LabelSets.from_sorted(unknown_indices, unknown_offsets, num_labels)
    keys = torch.cat([LabelSets.from_sorted(indices, offsets, num_labels).keys(), unknown.keys()]).unique()
    sizes = torch.bincount(keys // num_labels, minlength=len(unknown))
    return keys % num_labels, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), listed_in(keys, unknown)


join_unknown: Any = torch.library.custom_op("sigkernels::join_unknown", _join, mutates_args=())


@join_unknown.register_fake
def _(
    indices: Tensor, offsets: Tensor, unknown_indices: Tensor, unknown_offsets: Tensor, num_labels: int
) -> tuple[Tensor, Tensor, Tensor]:
    nnz = torch.library.get_ctx().new_dynamic_size()
    return indices.new_empty(nnz), torch.empty_like(offsets), indices.new_empty(nnz, dtype=torch.bool)


def clear_unknown(targets: Any, unknown: LabelSets) -> Any:
    """The targets, whose unknown entries are 0 where they are dense: what stands there may be anything."""
    dense = torch.from_numpy(targets) if isinstance(targets, np.ndarray) and targets.dtype.kind == "f" else targets
    if not isinstance(dense, Tensor) or dense.layout is not torch.strided or not dense.is_floating_point():
        return targets
    missing = unknown.to_dense(torch.bool).to(dense.device)
    return dense.masked_fill(missing, 0.0) if missing.shape == dense.shape else targets


def listed_in(keys: Tensor, sets: LabelSets) -> Tensor:
    """Whether the sets hold the entries ``row · num_labels + label`` of ``keys […]``, bool ``[…]``."""
    own = sets.keys()
    if own.numel() == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    return own[torch.searchsorted(own, keys).clamp_(max=own.numel() - 1)] == keys


def without(sets: LabelSets, unknown: LabelSets) -> LabelSets:
    """The sets without the labels that ``unknown`` lists in the same row."""
    keep = ~listed_in(sets.keys(), unknown)
    sizes = torch.bincount(sets.rows()[keep], minlength=len(sets))
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return LabelSets.from_sorted(sets.indices[keep], offsets, sets.num_labels)
