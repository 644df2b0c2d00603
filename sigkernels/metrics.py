"""Measures of multi-label predictions, streamed: state of O(n) numbers, no ``[B, n]`` array anywhere.

Each measure is an accumulator with ``update(…)`` once per batch, ``compute()``, ``merge(other)`` (for several workers)
and ``reset()``. They take what heads give: the labels (and logits) of ``head.topk`` or the sets of ``head.predict``.

    ranking = RankingMetrics(num_labels, m=(1, 5))
    for h, targets in loader:
        ranking.update(head.topk(h, 5)[1], targets)
    ranking.compute()          # {"P@1": …, "P@5": …, "R@1": …, …}

A row without labels counts with 0 in every per-row measure, as in scikit-learn with ``zero_division=0``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .edge import targets_for
from .labels import LabelSets

A = TypeVar("A", bound="Accumulator")


class Accumulator:
    """Named sums that batches are added to."""

    def __init__(self, num_labels: int, **sums: Tensor) -> None:
        if isinstance(num_labels, bool) or not hasattr(num_labels, "__index__") or num_labels < 1:
            raise ValueError(f"num_labels must be a positive whole number, got {num_labels!r}")
        self.num_labels = num_labels.__index__()
        self._sums = sums

    def reset(self) -> None:
        """Forgets everything."""
        self._sums = {name: torch.zeros_like(value) for name, value in self._sums.items()}

    def merge(self: A, other: A) -> A:
        """Adds what another accumulator of the same kind and settings has seen; returns self."""
        if type(other) is not type(self) or self._settings() != other._settings():
            raise ValueError(
                "only accumulators of one kind and with the same settings can be merged: "
                f"{type(self).__name__}{self._settings()} and {type(other).__name__}{other._settings()}"
            )
        for name, value in other._sums.items():
            self._add(name, value)
        return self

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
        made = targets_for(targets, torch.Size([batch]), self.num_labels, device)
        return made if isinstance(made, LabelSets) else LabelSets.from_dense(made)

    def _top(self, top: Tensor, least: int, name: str) -> Tensor:
        if not isinstance(top, Tensor) or top.ndim != 2 or top.is_floating_point() or top.dtype == torch.bool:
            raise ValueError(f"{name} must be an integer tensor [B, m] of labels, highest first, as topk gives it")
        if top.shape[1] < least:
            raise ValueError(f"{name} holds {top.shape[1]} labels per row, but {least} are needed; ask topk for more")
        if top.numel() and not 0 <= int(top.min()) <= int(top.max()) < self.num_labels:
            raise ValueError(
                f"{name} holds labels from {int(top.min())} to {int(top.max())}; labels are 0 … {self.num_labels - 1}"
            )
        return top


def _hits(top: Tensor, sets: LabelSets) -> Tensor:
    """Which of ``top [B, m]`` are in the row's set, bool ``[B, m]``."""
    keys = sets.rows() * sets.num_labels + sets.indices  # ascending
    if keys.numel() == 0:
        return torch.zeros_like(top, dtype=torch.bool)
    wanted = torch.arange(top.shape[0], device=top.device)[:, None] * sets.num_labels + top
    return keys[torch.searchsorted(keys, wanted).clamp_(max=keys.numel() - 1)] == wanted


def propensities(counts: Tensor, num_points: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    """How likely a label is annotated where it applies (Jain et al. 2016): ``1/(1 + C (N_l + b)^-a)``, float64 ``[n]``.

    Args:
        counts: ``[n]``, the rows of the training set that carry each label.
        num_points: rows of the training set (at least 3: C is ``(log N - 1)(b + 1)^a`` and must be positive).
    """
    if num_points < 3:
        raise ValueError(f"num_points must be at least 3, got {num_points}")
    c = (math.log(num_points) - 1) * (b + 1) ** a
    return 1 / (1 + c * (counts.to(torch.float64) + b) ** -a)


class RankingMetrics(Accumulator):
    """P@m, R@m, F1@m, nDCG@m and, with propensities, PSP@m from the labels that ``topk`` gives.

    P@m and R@m are means over rows of hits/m and hits/|Y|; F1@m is the harmonic mean of these two means. nDCG@m has
    gain 1/log2(rank + 1) and divides by the best possible. PSP@m weighs a hit by 1/propensity and divides, summed over
    all rows, by what the best ranking would get.

    Args:
        num_labels: n.
        m: the cut-offs.
        propensity: ``[n]``, see ``propensities``; adds PSP@m.
    """

    def __init__(self, num_labels: int, m: Sequence[int] = (1, 3, 5), propensity: Tensor | None = None) -> None:
        self.m = tuple(m)
        if not self.m or any(isinstance(at, bool) or not 1 <= at <= num_labels for at in self.m):
            raise ValueError(f"m must hold cut-offs in 1 … num_labels = {num_labels}, got {m!r}")
        if propensity is not None:
            if propensity.shape != (num_labels,):
                raise ValueError(f"propensity must have shape [{num_labels}], got {tuple(propensity.shape)}")
            if not bool(((propensity > 0) & (propensity <= 1)).all()):
                raise ValueError("propensity must lie in (0, 1]; metrics.propensities makes them from label counts")
        self.propensity = propensity
        names = ["P", "R", "nDCG"] + (["PSP", "PSP_best"] if propensity is not None else [])
        zeros = {name: torch.zeros(len(self.m), dtype=torch.float64) for name in names}
        super().__init__(num_labels, rows=torch.zeros((), dtype=torch.float64), **zeros)

    def _settings(self) -> tuple[Any, ...]:
        return (self.num_labels, self.m, self.propensity is not None)

    def update(self, top: Tensor, targets: Any) -> None:
        """Adds a batch: ``top [B, ≥ max(m)]`` labels, highest first, and its true sets."""
        most = max(self.m)
        top = self._top(top, most, "top")[:, :most]
        sets = self._sets(targets, top.shape[0], top.device)
        hits = _hits(top, sets).to(torch.float64)
        sizes = sets.sizes
        discount = 1 / torch.arange(2, most + 2, device=top.device, dtype=torch.float64).log2()
        best = torch.cat([discount.new_zeros(1), discount.cumsum(0)])
        found, gained = hits.cumsum(1), (hits * discount).cumsum(1)
        at = torch.tensor(self.m, device=top.device) - 1
        ideal = best[torch.minimum(sizes[:, None], at + 1)]
        self._add("P", found[:, at].sum(0) / (at + 1))
        self._add("R", (found[:, at] / sizes.clamp(min=1)[:, None]).sum(0))
        self._add("nDCG", torch.where(ideal > 0, gained[:, at] / ideal.clamp(min=1e-300), 0).sum(0))
        if self.propensity is not None:
            gain = 1 / self.propensity.to(device=top.device, dtype=torch.float64)
            self._add("PSP", (hits * gain[top]).cumsum(1)[:, at].sum(0))
            self._add("PSP_best", _best_gains(gain, sets, most)[:, at].sum(0))
        self._add("rows", hits.new_tensor(top.shape[0]))

    def compute(self) -> dict[str, float]:
        """``{"P@1": …, "R@1": …, "F1@1": …, "nDCG@1": …, …}``."""
        rows, out = self._rows(), {}
        for i, at in enumerate(self.m):
            p, r = float(self._sums["P"][i]) / rows, float(self._sums["R"][i]) / rows
            out[f"P@{at}"], out[f"R@{at}"] = p, r
            out[f"F1@{at}"] = 2 * p * r / (p + r) if p + r else 0.0
            out[f"nDCG@{at}"] = float(self._sums["nDCG"][i]) / rows
            if self.propensity is not None:
                best = float(self._sums["PSP_best"][i])
                out[f"PSP@{at}"] = float(self._sums["PSP"][i]) / best if best else 0.0
        return out


def _best_gains(gain: Tensor, sets: LabelSets, most: int) -> Tensor:
    """The sums of each set's 1 … most largest gains, ``[B, most]``."""
    gains, rows = gain[sets.indices], sets.rows()
    order = torch.argsort(gains, descending=True, stable=True)
    order = order[torch.argsort(rows[order], stable=True)]
    rank = torch.arange(order.numel(), device=gain.device) - sets.offsets[rows[order]]
    keep = rank < most
    table = gain.new_zeros(len(sets), most)
    table[rows[order][keep], rank[keep]] = gains[order][keep]
    return table.cumsum(1)


class F1Metrics(Accumulator):
    """Micro, macro and weighted precision, recall and F1 of predicted sets, in scikit-learn's sense of the words.

    State: three counts per label. A ratio with denominator 0 counts as 0.
    """

    def __init__(self, num_labels: int) -> None:
        names = ("hits", "predicted", "true")
        super().__init__(
            num_labels,
            rows=torch.zeros((), dtype=torch.float64),
            **{name: torch.zeros(num_labels, dtype=torch.int64) for name in names},
        )

    def update(self, predicted: Any, targets: Any) -> None:
        """Adds a batch of predicted sets (``head.predict``) and true sets, each in any form that a loss takes."""
        if not isinstance(predicted, LabelSets):
            batch = predicted.shape[0] if hasattr(predicted, "shape") else len(predicted)
            device = predicted.device if isinstance(predicted, Tensor) else torch.device("cpu")
            predicted = self._sets(predicted, batch, device)
        if predicted.num_labels != self.num_labels:
            raise ValueError(f"predicted has num_labels = {predicted.num_labels}, but {self.num_labels} were announced")
        sets = self._sets(targets, len(predicted), predicted.device)
        both = [s.rows() * self.num_labels + s.indices for s in (predicted, sets)]
        common = both[0][torch.isin(both[0], both[1], assume_unique=True)] % self.num_labels
        for name, labels in (("hits", common), ("predicted", predicted.indices), ("true", sets.indices)):
            self._add(name, torch.bincount(labels, minlength=self.num_labels))
        self._add("rows", torch.tensor(float(len(sets)), dtype=torch.float64))

    def per_label(self) -> dict[str, Tensor]:
        """``{"precision": [n], "recall": [n], "f1": [n], "support": [n]}``."""
        hits, predicted, true = (self._sums[name].to(torch.float64) for name in ("hits", "predicted", "true"))
        return {
            "precision": _ratio(hits, predicted),
            "recall": _ratio(hits, true),
            "f1": _ratio(2 * hits, predicted + true),
            "support": self._sums["true"],
        }

    def compute(self) -> dict[str, float]:
        """``{"micro_f1": …, "macro_f1": …, "weighted_f1": …}`` and the same for precision and recall."""
        self._rows()
        hits, predicted, true = (self._sums[name].sum().to(torch.float64) for name in ("hits", "predicted", "true"))
        micro = {"precision": (hits, predicted), "recall": (hits, true), "f1": (2 * hits, predicted + true)}
        labels = self.per_label()
        share = _ratio(labels["support"].to(torch.float64), true)
        out = {}
        for name, fraction in micro.items():
            out[f"micro_{name}"] = float(_ratio(*fraction))
            out[f"macro_{name}"] = float(labels[name].mean())
            out[f"weighted_{name}"] = float((labels[name] * share).sum())
        return out


class MeanAveragePrecision(Accumulator):
    """Average precision of each label over all rows, and its mean (mAP).

    Exact average precision of a label needs every score that it ever got, O(rows · n). State of O(n) needs coarser
    scores: logits are sorted into ``bins`` equal bins between -bound and bound, and what falls into one bin counts as
    tied. The result is exactly scikit-learn's ``average_precision_score`` of the binned scores. Labels that ``topk``
    did not return for a row share one further bin below all others.

    Args:
        num_labels: n.
        bins: bins per label; the state is 2·n·(bins + 1) numbers.
        bound: logits beyond ±bound fall into the outermost bins.
    """

    def __init__(self, num_labels: int, bins: int = 128, bound: float = 16.0) -> None:
        if bins < 2 or not 0 < bound < math.inf:
            raise ValueError(f"bins must be at least 2 and bound positive, got bins={bins}, bound={bound}")
        self.bins, self.bound = bins, float(bound)
        super().__init__(
            num_labels,
            rows=torch.zeros((), dtype=torch.float64),
            seen=torch.zeros(num_labels, bins, dtype=torch.int64),
            hits=torch.zeros(num_labels, bins, dtype=torch.int64),
            true=torch.zeros(num_labels, dtype=torch.int64),
        )

    def _settings(self) -> tuple[Any, ...]:
        return (self.num_labels, self.bins, self.bound)

    def update(self, values: Tensor, top: Tensor, targets: Any) -> None:
        """Adds a batch: logits ``values [B, m]``, their labels ``top [B, m]``, highest first, and true sets."""
        top = self._top(top, 1, "top")
        _check_values(values, top)
        sets = self._sets(targets, top.shape[0], top.device)
        at = top * self.bins + self.bin(values)
        size = self.num_labels * self.bins
        shape = (self.num_labels, self.bins)
        self._add("seen", torch.bincount(at.flatten(), minlength=size).view(shape))
        self._add("hits", torch.bincount(at[_hits(top, sets)], minlength=size).view(shape))
        self._add("true", torch.bincount(sets.indices, minlength=self.num_labels))
        self._add("rows", torch.tensor(float(top.shape[0]), dtype=torch.float64))

    def bin(self, values: Tensor) -> Tensor:
        """The bin of each logit, 0 … bins-1."""
        if bool(values.isnan().any()):
            raise ValueError("values hold NaN, which has no place in a ranking")
        share = (values.to(torch.float64).clamp(-self.bound, self.bound) + self.bound) / (2 * self.bound)
        return (share * self.bins).to(torch.int64).clamp_(max=self.bins - 1)

    def per_label(self) -> Tensor:
        """The average precision of each label, float64 ``[n]``; NaN for labels that never were true."""
        true = self._sums["true"].to(torch.float64)[:, None]
        seen, hits = (self._sums[name].flip(1).cumsum(1).to(torch.float64) for name in ("seen", "hits"))
        # the bin of everything that was not returned: all rows, all true labels
        rows = self._sums["rows"].to(seen.device).expand(self.num_labels, 1)
        seen, hits = torch.cat([seen, rows], 1), torch.cat([hits, true], 1)
        gained = hits.diff(dim=1, prepend=torch.zeros_like(true))
        return (gained * _ratio(hits, seen)).sum(1) / true[:, 0]

    def compute(self) -> dict[str, float]:
        """``{"mAP": …}``: the mean over the labels that were true at least once."""
        self._rows()
        labels = self.per_label()
        known = labels[~labels.isnan()]
        return {"mAP": float(known.mean()) if known.numel() else 0.0}


class ThresholdAveraging(Accumulator):
    """A global threshold: the mean over rows of the threshold that gives the row its best F1 (Decubber et al.).

    For each row the cut with the best F1 among its top m-1 labels is taken, the shortest if several are equal, and the
    threshold halfway between the scores around the cut. Rows without labels have no best cut and are left out. Ask
    ``topk`` for more labels than a set has. The threshold is on the scale of the values: give ``values.sigmoid()`` for
    one that fits ``head.predict(h, threshold)``.
    """

    def __init__(self, num_labels: int) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        super().__init__(num_labels, rows=zero, threshold=zero.clone(), best_f1=zero.clone())

    def update(self, values: Tensor, top: Tensor, targets: Any) -> None:
        """Adds a batch: scores ``values [B, m]``, their labels ``top [B, m]``, highest first, and its true sets."""
        top = self._top(top, 2, "top")
        _check_values(values, top)
        sets = self._sets(targets, top.shape[0], top.device)
        values = values.to(torch.float64)
        cuts = torch.arange(1, top.shape[1], device=top.device)
        f1 = 2 * _hits(top, sets)[:, :-1].cumsum(1) / (cuts + sets.sizes[:, None])
        best = f1.argmax(1, keepdim=True)
        halfway = (values.gather(1, best) + values.gather(1, best + 1)) / 2
        used = sets.sizes > 0
        self._add("threshold", halfway[used].sum())
        self._add("best_f1", f1.gather(1, best)[used].sum())
        self._add("rows", used.sum().to(torch.float64))

    def compute(self) -> dict[str, float]:
        """``{"threshold": the mean threshold, "best_f1": the mean of the rows' best F1}``."""
        rows = self._rows()
        return {name: float(self._sums[name]) / rows for name in ("threshold", "best_f1")}


def _check_values(values: Any, top: Tensor) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.shape != top.shape:
        shape = tuple(getattr(values, "shape", ()))
        raise ValueError(f"values must be floating point of the shape of top, {tuple(top.shape)}, got {shape}")


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    return torch.where(under > 0, over / under.clamp(min=1), 0.0)
