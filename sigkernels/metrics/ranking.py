"""P@m, R@m, F1@m, nDCG@m and PSP@m."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..labels import LabelSets
from ..validation import check_int, check_number
from .accumulator import Accumulator, hits_of, known_first


def propensities(counts: Tensor, num_points: int, a: float = 0.55, b: float = 1.5) -> Tensor:
    """How likely a label is annotated where it applies (Jain et al. 2016): ``1/(1 + C (N_l + b)^-a)``, float64 ``[n]``.

    Args:
        counts: ``[n]``, the rows of the training set that carry each label.
        num_points: rows of the training set (at least 3: C is ``(log N - 1)(b + 1)^a`` and must be positive).

    Example:
        >>> sk.metrics.propensities(torch.tensor([1, 10, 100]), num_points=100)
        tensor([0.2171, 0.3910, 0.6802], dtype=torch.float64)
    """
    num_points = check_int("num_points", num_points, 3)
    if not isinstance(counts, Tensor):
        raise TypeError(f"counts must be a tensor [n], got {type(counts).__name__}; use torch.bincount on the labels")
    if counts.ndim != 1 or counts.is_complex() or counts.dtype == torch.bool:
        raise ValueError(f"counts must be numbers of shape [n], got {counts.dtype} of shape {tuple(counts.shape)}")
    bad = ~((counts >= 0) & (counts <= num_points))  # true for NaN, too
    if bool(bad.any()):
        label = int(bad.nonzero()[0])
        raise ValueError(
            f"counts must lie in 0 … num_points = {num_points}, got {counts[label].item()} for label {label}"
        )
    a, b = check_number("a", a), check_number("b", b)
    if not (a > 0 and b > 0):
        raise ValueError(f"a and b must be positive, got a = {a} and b = {b}")
    c = (math.log(num_points) - 1) * (b + 1) ** a
    return 1 / (1 + c * (counts.to(torch.float64) + b) ** -a)


class RankingMetrics(Accumulator):
    """P@m, R@m, F1@m, nDCG@m and, with propensities, PSP@m from the labels that ``topk`` gives.

    P@m and R@m are means over rows of ``hits/m`` and ``hits/|Y|``; F1@m is the harmonic mean of these two means. nDCG@m has
    gain 1/log2(rank + 1) and divides by the best possible. PSP@m weighs a hit by 1/propensity and divides, summed over
    all rows, by what the best ranking would get.

    Args:
        num_labels: n.
        m: the cut-offs.
        propensity: ``[n]``, see ``propensities``; adds PSP@m.

    Example:
        >>> ranking = sk.metrics.RankingMetrics(num_labels=10, m=(1, 2))
        >>> ranking.update(torch.tensor([[3, 1], [4, 0]]), [[3], [0, 5]])
        >>> ranking.compute()["P@1"], ranking.compute()["R@2"]
        (0.5, 0.75)
    """

    m: tuple[int, ...]

    def __init__(self, num_labels: int, m: Sequence[int] = (1, 3, 5), propensity: Tensor | None = None) -> None:
        num_labels = check_int("num_labels", num_labels, 1)
        if not isinstance(m, Iterable):
            raise TypeError(f"m must hold the cut-offs, like (1, 3, 5), got {m!r}; write m=({m!r},) for one")
        self.m = tuple(check_int("a cut-off of m", at) for at in m)
        if not self.m or any(not 1 <= at <= num_labels for at in self.m):
            raise ValueError(f"m must hold cut-offs in 1 … num_labels = {num_labels}, got {m!r}")
        if propensity is not None:
            if not isinstance(propensity, Tensor):
                raise TypeError(
                    f"propensity must be a tensor [{num_labels}], got {type(propensity).__name__}; "
                    "metrics.propensities makes one from label counts"
                )
            if propensity.shape != (num_labels,):
                raise ValueError(f"propensity must have shape [{num_labels}], got {tuple(propensity.shape)}")
            bad = ~((propensity > 0) & (propensity <= 1))  # true for NaN, too
            if bool(bad.any()):
                label = int(bad.nonzero()[0])
                raise ValueError(
                    f"propensity must lie in (0, 1], got {propensity[label].item()} for label {label}; "
                    "metrics.propensities makes them from label counts"
                )
        self.propensity = propensity
        names = ["P", "R", "nDCG"] + (["PSP", "PSP_best"] if propensity is not None else [])
        zeros = {name: torch.zeros(len(self.m), dtype=torch.float64) for name in names}
        super().__init__(num_labels, rows=torch.zeros((), dtype=torch.float64), **zeros)

    def _settings(self) -> tuple[Any, ...]:
        return (self.num_labels, self.m, self.propensity is not None)

    def merge(self, other: RankingMetrics) -> RankingMetrics:
        ours, theirs = self.propensity, getattr(other, "propensity", None)
        if ours is not None and theirs is not None and not torch.equal(ours, theirs.to(ours)):
            raise ValueError("the two accumulators have different propensities; merge those made with the same ones")
        return super().merge(other)

    def _fingerprint(self) -> tuple[Any, ...]:
        return () if self.propensity is None else (zlib.crc32(self.propensity.detach().cpu().numpy().tobytes()),)

    def update(self, top: Tensor, targets: Any, unknown: Any = None) -> None:
        """Adds a batch: ``top [B, ≥ max(m)]`` labels, highest first, and its true sets.

        ``unknown``: labels of each row that are not annotated; the ranking is that of the others. Ask ``topk`` for so
        many more labels, since ``max(m)`` of them have to be known.
        """
        most = max(self.m)
        top = self._top(top, most, "top")
        sets, missing = self._known(targets, unknown, top.shape[0], top.device)
        known, top = known_first(top, missing)
        if bool((known < most).any()) and top.shape[1] < self.num_labels:
            row = int((known < most).nonzero()[0, 0])
            raise ValueError(
                f"top holds {int(known[row])} labels of row {row} that are known, but {most} are needed; ask topk for more"
            )
        top = top[:, :most]
        hits = hits_of(top, sets).to(torch.float64)
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
