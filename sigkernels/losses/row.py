"""Losses of a whole row: they need all of its logits at once, so ``[B, n]`` logits are made, once, and then overwritten
by their own gradient. A head computes everything else as for the other losses.

Reductions: ``"none"`` gives the loss of each row, ``"sum"`` their sum, ``"mean"`` their mean over the rows: there are
no terms per label that could be averaged over.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ..validation import check_int
from .base import Loss


class RowLoss(Loss):
    """What the row losses share: k, the number of labels that are chosen."""

    tensor_fields: ClassVar[tuple[str, ...]] = ()
    number_fields: ClassVar[tuple[str, ...]] = ("k",)

    k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_int("k", self.k, 1))

    def check_labels(self, num_labels: int, device: torch.device) -> None:
        if self.k > num_labels:
            raise ValueError(f"k = {self.k} of {type(self).__name__} is more than the {num_labels} labels there are")


@dataclasses.dataclass(frozen=True, eq=False)
class LMLNLL(RowLoss):
    """The negative log-likelihood of a label set under the LML projection, ``functional.lml_nll``.

    Args:
        k: how many labels the projection chooses in each row.
    """

    k: int


@dataclasses.dataclass(frozen=True, eq=False)
class TruncatedTopKEntropy(RowLoss):
    """The truncated top-k entropy, ``functional.truncated_topk_entropy``.

    Args:
        k: how many labels may be ranked first at no cost.
    """

    k: int
