"""Precision, recall and F1 of predicted sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..labels import LabelSets
from ..partial_labels import without
from ..validation import check_int
from .accumulator import Accumulator, ratio


class F1Metrics(Accumulator):
    """Micro, macro and weighted precision, recall and F1 of predicted sets, in scikit-learn's sense of the words.

    State: three counts per label. A ratio with denominator 0 counts as 0.

    Example:
        >>> f1 = sk.metrics.F1Metrics(num_labels=10)
        >>> f1.update([[1, 2], [3]], [[1], [3]])
        >>> round(f1.compute()["micro_f1"], 3)
        0.8
    """

    def __init__(self, num_labels: int) -> None:
        num_labels = check_int("num_labels", num_labels, 1)
        names = ("hits", "predicted", "true")
        super().__init__(
            num_labels,
            rows=torch.zeros((), dtype=torch.float64),
            **{name: torch.zeros(num_labels, dtype=torch.int64) for name in names},
        )

    def update(self, predicted: Any, targets: Any, unknown: Any = None) -> None:
        """Adds a batch of predicted sets (``head.predict``) and true sets, each in any form that a loss takes.

        ``unknown``: labels of each row that are not annotated; what was predicted of them counts nowhere.
        """
        predicted = LabelSets.of(predicted, self.num_labels, name="predicted")
        sets, missing = self._known(targets, unknown, len(predicted), predicted.device)
        if missing is not None:
            predicted = without(predicted, missing)
        both = [predicted.keys(), sets.keys()]
        common = both[0][torch.isin(both[0], both[1], assume_unique=True)] % self.num_labels
        for name, labels in (("hits", common), ("predicted", predicted.indices), ("true", sets.indices)):
            self._add(name, torch.bincount(labels, minlength=self.num_labels))
        self._add("rows", torch.tensor(float(len(sets)), dtype=torch.float64))

    def per_label(self) -> dict[str, Tensor]:
        """``{"precision": [n], "recall": [n], "f1": [n], "support": [n]}``."""
        hits, predicted, true = (self._sums[name].to(torch.float64) for name in ("hits", "predicted", "true"))
        return {
            "precision": ratio(hits, predicted),
            "recall": ratio(hits, true),
            "f1": ratio(2 * hits, predicted + true),
            "support": self._sums["true"],
        }

    def compute(self) -> dict[str, float]:
        """``{"micro_f1": …, "macro_f1": …, "weighted_f1": …}`` and the same for precision and recall."""
        self._rows()
        hits, predicted, true = (self._sums[name].sum().to(torch.float64) for name in ("hits", "predicted", "true"))
        micro = {"precision": (hits, predicted), "recall": (hits, true), "f1": (2 * hits, predicted + true)}
        labels = self.per_label()
        share = ratio(labels["support"].to(torch.float64), true)
        out = {}
        for name, fraction in micro.items():
            out[f"micro_{name}"] = float(ratio(*fraction))
            out[f"macro_{name}"] = float(labels[name].mean())
            out[f"weighted_{name}"] = float((labels[name] * share).sum())
        return out
