"""Labels that nobody has annotated: which entries of a batch say nothing, neither that a label applies nor that not.

Two conventions: NaN in dense floating point targets, and ``unknown=``, label sets that list them. An entry that is both
listed as unknown and active counts as unknown, as under a mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .labels import LabelSets


def split_nan(targets: Any, unknown: Any, num_labels: int) -> tuple[Any, Any]:
    """(targets without NaN, unknown labels in any form or None), for dense targets whose NaN are unknown labels."""
    dense = torch.from_numpy(targets) if isinstance(targets, np.ndarray) and targets.dtype.kind == "f" else targets
    if not isinstance(dense, Tensor) or dense.layout is not torch.strided or not dense.is_floating_point():
        return targets, unknown
    missing = dense.isnan()
    if not bool(missing.any()):
        return targets, unknown
    if unknown is not None:
        missing = missing | LabelSets.of(unknown, num_labels, name="unknown").to_dense(torch.bool).to(missing.device)
    return dense.masked_fill(missing, 0.0), missing


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
