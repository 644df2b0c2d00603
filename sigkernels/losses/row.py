"""Losses of a whole row: they need all of its logits at once, so ``[B, n]`` logits are made, once, and then overwritten
by their own gradient. A head computes everything else as for the other losses.
"""

from __future__ import annotations

import dataclasses

import torch

from ..validation import check_int, check_tau
from .base import RowLoss


class RankedRowLoss(RowLoss):
    """What the row losses of this package share: k, the number of labels that are chosen."""

    k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_int("k", self.k, 1))

    def check_labels(self, num_labels: int, device: torch.device) -> None:
        if self.k > num_labels:
            raise ValueError(f"k = {self.k} of {type(self).__name__} is more than the {num_labels} labels there are")

    @property
    def fused(self) -> bool:
        """Whether the fused pass knows this loss: one of this module's own classes, not a subclass."""
        return type(self) in (LMLNLL, SmoothTopKSVM, TruncatedTopKEntropy)

    def incomplete(self) -> str | None:
        return None if self.fused else super().incomplete()


@dataclasses.dataclass(frozen=True, eq=False)
class LMLNLL(RankedRowLoss):
    """The negative log-likelihood of a label set under the LML projection, ``functional.lml_nll``.

    Args:
        k: how many labels the projection chooses in each row.

    Example:
        >>> x, weight, targets = torch.ones(2, 3), torch.zeros(5, 3), [[1], [0, 4]]
        >>> sk.functional.linear_loss(x, weight, targets, loss=sk.LMLNLL(k=2))
        tensor(1.3744)
    """

    k: int


@dataclasses.dataclass(frozen=True, eq=False)
class TruncatedTopKEntropy(RankedRowLoss):
    """The truncated top-k entropy, ``functional.truncated_topk_entropy``.

    Args:
        k: how many labels may be ranked first at no cost.

    Example:
        >>> second = torch.tensor([[30.0], [15.0], [0.0]])  # of three labels, 1 is ranked second: free for k=2
        >>> sk.functional.linear_loss(torch.ones(1, 1), second, [[1]], loss=sk.TruncatedTopKEntropy(k=2)) < 1e-6
        tensor(True)
    """

    k: int


@dataclasses.dataclass(frozen=True, eq=False)
class SmoothTopKSVM(RankedRowLoss):
    """The smooth top-k SVM loss (Berrada, Zisserman, Kumar 2018), ``functional.smooth_topk_svm``.

    Args:
        k: among how many of the highest logits a label of the set should be.
        tau: the temperature, at least 1e-6.

    Example:
        >>> x, weight, targets = torch.ones(2, 3), torch.zeros(5, 3), [[1], [0, 4]]
        >>> sk.functional.linear_loss(x, weight, targets, loss=sk.SmoothTopKSVM(k=2))
        tensor(2.1257)
    """

    k: int
    tau: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tau", check_tau(self.tau))
