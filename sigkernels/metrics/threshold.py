"""A threshold from the rows' best cuts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .accumulator import Accumulator, check_values, hits_of, known_first


class ThresholdAveraging(Accumulator):
    """A global threshold: the mean over rows of the threshold that gives the row its best F1 (Decubber et al.).

    For each row the cut with the best F1 among its top m-1 labels is taken, the shortest if several are equal, and the
    threshold halfway between the scores around the cut. Rows without labels have no best cut and are left out. Ask
    ``topk`` for more labels than a set has. The threshold is on the scale of the values: give ``values.sigmoid()`` for
    one that fits ``head.predict(h, threshold)``.

    Example:
        >>> threshold = sk.metrics.ThresholdAveraging(num_labels=3)
        >>> threshold.update(torch.tensor([[0.9, 0.5, 0.1]]), torch.tensor([[0, 2, 1]]), [[0, 2]])
        >>> round(threshold.compute()["threshold"], 3)
        0.3
    """

    def __init__(self, num_labels: int) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        super().__init__(num_labels, rows=zero, threshold=zero.clone(), best_f1=zero.clone())

    def update(self, values: Tensor, top: Tensor, targets: Any, unknown: Any = None) -> None:
        """Adds a batch: scores ``values [B, m]``, their labels ``top [B, m]``, highest first, and its true sets.

        ``unknown``: labels of each row that are not annotated; rows with fewer than two known labels in ``top`` are left
        out.
        """
        top = self._top(top, 2, "top")
        check_values(values, top)
        if bool((values.diff(dim=1) > 0).any()):
            row = int((values.diff(dim=1) > 0).nonzero()[0, 0])
            raise ValueError(f"values of row {row} are not in descending order; give them as topk does, highest first")
        sets, missing = self._known(targets, unknown, top.shape[0], top.device)
        known, top, values = known_first(top, missing, values.to(torch.float64))
        cuts = torch.arange(1, top.shape[1], device=top.device)
        f1 = 2 * hits_of(top, sets)[:, :-1].cumsum(1, dtype=torch.float64) / (cuts + sets.sizes[:, None])
        best = torch.where(cuts < known, f1, -1.0).argmax(1, keepdim=True)
        halfway = (values.gather(1, best) + values.gather(1, best + 1)) / 2
        used = (sets.sizes > 0) & (known[:, 0] > 1)
        self._add("threshold", halfway[used].sum())
        self._add("best_f1", f1.gather(1, best)[used].sum())
        self._add("rows", used.sum().to(torch.float64))

    def compute(self) -> dict[str, float]:
        """``{"threshold": the mean threshold, "best_f1": the mean of the rows' best F1}``."""
        rows = self._rows()
        return {name: float(self._sums[name]) / rows for name in ("threshold", "best_f1")}
