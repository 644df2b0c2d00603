"""Training examples, and the part of them that is held out for early stopping and thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..labels import LabelSets
from ..thresholds import log_odds_of_threshold
from ..validation import check_number
from .features import Features

TUNED = ("tuned", "tuned_global")


@dataclass(frozen=True)
class Examples:
    """Rows with their label sets and, where they have some, weights ``[N]``."""

    features: Features
    labels: LabelSets
    weights: Tensor | None

    def __len__(self) -> int:
        return len(self.features)

    def take(self, rows: np.ndarray) -> Examples:
        """The rows of these numbers."""
        at = torch.from_numpy(rows)
        return Examples(self.features.take(rows), self.labels[at], None if self.weights is None else self.weights[at])

    def split(self, fraction: float, rng: np.random.Generator) -> tuple[Examples, Examples]:
        """(those to train on, those held out): a random share of the rows, at least one on each side."""
        if len(self) < 2:
            raise ValueError(
                f"validation_fraction = {fraction} holds rows out, and X has {len(self)} sample: give at least 2, or "
                "early_stopping=False and a threshold that is not tuned"
            )
        held = min(max(round(fraction * len(self)), 1), len(self) - 1)
        order = rng.permutation(len(self))
        return self.take(np.sort(order[held:])), self.take(np.sort(order[:held]))


def check_fraction(fraction: Any) -> None:
    """Refuses what is no share of the rows."""
    if not 0 < check_number("validation_fraction", fraction) < 1:
        raise ValueError(f"validation_fraction must lie strictly between 0 and 1, got {fraction}")


def check_threshold(threshold: Any) -> None:
    """Refuses what is neither a probability, nor one for each label, nor to be tuned."""
    if isinstance(threshold, str):
        if threshold not in TUNED:
            raise ValueError(
                f"threshold must be a probability, one for each label, or one of {', '.join(map(repr, TUNED))}, "
                f"got {threshold!r}"
            )
        return
    log_odds_of_threshold(threshold, np.size(threshold), None)
