"""Average precision: per label and its means, over all pairs, and per row.

    AP = Σ_t (R_t - R_{t-1}) P_t      over the distinct scores t from high to low, as scikit-learn has it

Labels that ``topk`` did not return for a row are tied below all that it did return.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..validation import check_int, check_number
from . import synchronise
from .accumulator import Accumulator, check_values, hits_of, ratio


class MeanAveragePrecision(Accumulator):
    """Average precision of each label over all rows, its mean (mAP), and its relatives.

    The rank of a score is known only when all others are, so an exact answer has to keep them: every score that
    ``update`` is given, 9 bytes each (4 of score, 4 of label, 1 of truth). Given the m best labels of every row that is
    9·m bytes per row, and with m = n the result is scikit-learn's on the dense arrays.

    ``bins`` asks for O(n) state instead, however many rows there are: logits are sorted into equal bins between -bound
    and bound, and what falls into one bin counts as tied. The result is exact for the binned scores; ``bounds()`` says
    between which values the exact one lies.

    Args:
        num_labels: n.
        bins: None for exact results; else bins per label, and a state of 2·n·bins numbers.
        bound: logits beyond ±bound fall into the outermost bins. Without bins it is not used.

    Example:
        >>> precision = sk.metrics.MeanAveragePrecision(num_labels=3)
        >>> precision.update(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0, 2, 1]]), [[0, 1]])
        >>> round(precision.compute()["samples_ap"], 3)
        0.833
    """

    bins: int | None
    bound: float

    def __init__(self, num_labels: int, bins: int | None = None, bound: float = 16.0) -> None:
        bins = None if bins is None else check_int("bins", bins, 2)
        self.bins, self.bound = bins, float(check_number("bound", bound))
        if not self.bound > 0:
            raise ValueError(f"bound must be positive, got {bound}")
        zero = torch.zeros((), dtype=torch.float64)
        super().__init__(num_labels, rows=zero, samples=zero.clone())
        for name in ("true", "unknown"):
            self._sums[name] = torch.zeros(self.num_labels, dtype=torch.int64)
        if bins is not None:
            for name in ("seen", "hits"):
                self._sums[name] = torch.zeros(self.num_labels, bins, dtype=torch.int64)
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # labels, scores, hits

    def _settings(self) -> tuple[Any, ...]:
        return (self.num_labels, self.bins, self.bound)

    def reset(self) -> None:
        super().reset()
        self._pairs = []

    def merge(self, other: MeanAveragePrecision) -> MeanAveragePrecision:
        super().merge(other)
        self._pairs = self._pairs + other._pairs
        return self

    def sync(self, group: Any = None) -> MeanAveragePrecision:
        whole = super().sync(group)
        whole._pairs = [self._scores()]
        if not synchronise.is_alone(group):
            labels, scores, hits = self._scores()
            every = synchronise.gather_objects((len(scores), scores.dtype == torch.float64), group)
            sizes = [size for size, _ in every]
            if any(wide for _, wide in every):
                scores = scores.to(torch.float64)
            kind = torch.int32 if self.num_labels < 2**31 else torch.int64
            parts = (labels.to(kind), scores, hits)
            whole._pairs = [tuple(synchronise.join(part, sizes, group) for part in parts)]  # type: ignore[list-item]
        return whole

    @property
    def nbytes(self) -> int:
        """What the state takes now."""
        return sum(t.nbytes for pair in self._pairs for t in pair) + sum(t.nbytes for t in self._sums.values())

    def update(self, values: Tensor, top: Tensor, targets: Any, unknown: Any = None) -> None:
        """Adds a batch: logits ``values [B, m]``, their labels ``top [B, m]``, highest first, and true sets.

        ``unknown``: labels of each row that are not annotated; they take part in no ranking.
        """
        top = self._top(top, 1, "top")
        check_values(values, top)
        sets, missing = self._known(targets, unknown, top.shape[0], top.device)
        hits = hits_of(top, sets)
        known = torch.ones_like(hits) if missing is None else ~hits_of(top, missing)
        if self.bins is None:
            exact = values.detach().to("cpu", torch.promote_types(values.dtype, torch.float32), copy=True)
            kind = torch.int32 if self.num_labels < 2**31 else torch.int64
            keep = known.cpu()
            self._pairs.append((top.to("cpu", kind)[keep], exact[keep], hits.cpu()[keep]))
        else:
            at = top * self.bins + self.bin(values)
            shape = (self.num_labels, self.bins)
            for name, where in (("seen", at[known]), ("hits", at[hits])):
                self._add(name, torch.bincount(where, minlength=math.prod(shape)).view(shape))
        self._add("true", torch.bincount(sets.indices, minlength=self.num_labels))
        labels = torch.full_like(sets.sizes, self.num_labels)
        if missing is not None:
            self._add("unknown", torch.bincount(missing.indices, minlength=self.num_labels))
            labels = labels - missing.sizes
        self._add("samples", _row_precision(values, hits, known, sets.sizes, labels).sum())
        self._add("rows", torch.tensor(float(top.shape[0]), dtype=torch.float64))

    def bin(self, values: Tensor) -> Tensor:
        """The bin of each logit, 0 … bins-1."""
        if self.bins is None:
            raise ValueError("this MeanAveragePrecision is exact and has no bins; give bins= for binned scores")
        share = (values.to(torch.float64).clamp(-self.bound, self.bound) + self.bound) / (2 * self.bound)
        return (share * self.bins).to(torch.int64).clamp_(max=self.bins - 1)

    def per_label(self) -> Tensor:
        """The average precision of each label, float64 ``[n]``; NaN for labels that never were true."""
        true, rows = self._sums["true"].to(torch.float64), self._known_rows()
        if self.bins is None:
            return _exact(*self._scores(), true, rows)
        return _binned(self._sums["seen"], self._sums["hits"], true, rows)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """(lowest, highest) that the exact average precision of each label can be, float64 ``[n]`` each.

        Of the exact form both are the value itself. Of the binned form: within a bin the hits come last, or they come
        first with equal scores.
        """
        if self.bins is None:
            value = self.per_label()
            return value, value
        seen, hits = (self._sums[name].flip(1).to(torch.float64) for name in ("seen", "hits"))
        true, rows = self._sums["true"].to(torch.float64), self._known_rows()
        before, above = seen.cumsum(1) - seen, hits.cumsum(1) - hits  # what lies in higher bins: all, hits
        highest = hits * ratio(above + hits, before + hits)
        # Σ_i (above + i)/(misses + above + i), i = 1 … hits, where all misses of the bin come before its hits
        misses = before + seen - hits - above
        start = misses + above + 1
        lowest = hits - misses * (torch.digamma(start + hits) - torch.digamma(start))
        rest = (true - hits.sum(1)) * ratio(true, rows)  # never returned: tied for certain
        return (lowest.sum(1) + rest) / true, (highest.sum(1) + rest) / true

    def compute(self) -> dict[str, float]:
        """``{"mAP": …, "weighted_ap": …, "micro_ap": …, "samples_ap": …}``, in scikit-learn's sense of the words.

        mAP is the mean over the labels that were true at least once, weighted_ap the same weighted by how often each
        was true; micro_ap ranks all pairs of a row and a label together; samples_ap is the mean over rows of the
        average precision of the row's ranking.
        """
        rows = self._rows()
        labels, true = self.per_label(), self._sums["true"].to(torch.float64)
        known, pairs = true > 0, self._known_rows().sum()[None]
        if self.bins is None:
            everything, scores, hits = self._scores()
            micro = _exact(torch.zeros_like(everything), scores, hits, true.sum()[None], pairs)
        else:
            seen, hits = (self._sums[name].sum(0, keepdim=True) for name in ("seen", "hits"))
            micro = _binned(seen, hits, true.sum()[None], pairs)
        return {
            "mAP": float(labels[known].mean()) if known.any() else 0.0,
            "weighted_ap": float((labels[known] * true[known]).sum() / true.sum()) if known.any() else 0.0,
            "micro_ap": float(micro) if known.any() else 0.0,
            "samples_ap": float(self._sums["samples"]) / rows,
        }

    def _known_rows(self) -> Tensor:
        """In how many rows each label was known, float64 ``[n]``."""
        return self._sums["rows"] - self._sums["unknown"].to(torch.float64)

    def _scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """All labels, scores and hits that were given; joined once and kept so."""
        if len(self._pairs) > 1:
            labels, scores, hits = zip(*self._pairs, strict=True)
            self._pairs = [(torch.cat(labels), torch.cat(scores), torch.cat(hits))]
        if self._pairs:
            return self._pairs[0]
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0, dtype=torch.bool)


def _exact(labels: Tensor, scores: Tensor, hits: Tensor, true: Tensor, rows: Tensor) -> Tensor:
    """Average precision ``[n]`` from all scores ``[p]`` with their labels; ``true`` and ``rows`` per label."""
    order = torch.argsort(scores, descending=True)
    order = order[torch.argsort(labels[order], stable=True)]
    labels, scores, hits = labels[order].long(), scores[order], hits[order]
    # A step is a run of equal scores of one label; what counts is the precision at its end.
    last = torch.ones_like(hits)
    last[:-1] = (labels[1:] != labels[:-1]) | (scores[1:] != scores[:-1])
    ends = last.nonzero()[:, 0]
    found = hits.cumsum(0)
    label = labels[ends]
    sizes = torch.bincount(labels, minlength=true.numel())
    starts = sizes.cumsum(0) - sizes
    earlier = torch.cat([found.new_zeros(1), found])[starts[label]]  # hits of the labels before
    gained = found[ends].diff(prepend=found.new_zeros(1))
    precision = (found[ends] - earlier).to(torch.float64) / (ends + 1 - starts[label])
    total = torch.zeros_like(true).index_add_(0, label, gained * precision)
    returned = torch.zeros_like(true).index_add_(0, label, gained.to(torch.float64))
    return (total + (true - returned) * ratio(true, rows)) / true


def _binned(seen: Tensor, hits: Tensor, true: Tensor, rows: Tensor) -> Tensor:
    """Average precision ``[n]`` from counts ``[n, bins]``, low scores first."""
    # a last bin for everything that was not returned: all rows, all true labels
    seen, hits = (
        torch.cat([counts.flip(1).cumsum(1).to(torch.float64), total[:, None]], 1)
        for counts, total in ((seen, rows), (hits, true))
    )
    gained = hits.diff(dim=1, prepend=hits.new_zeros(len(hits), 1))
    return (gained * ratio(hits, seen)).sum(1) / true


def _row_precision(values: Tensor, hits: Tensor, known: Tensor, sizes: Tensor, labels: Tensor) -> Tensor:
    """Average precision of each row's ranking, float64 ``[B]``; 0 for rows without labels.

    ``known [B, m]``: what takes part; ``labels [B]``: how many labels of the row are known.
    """
    values = values.masked_fill(~known, -math.inf)
    order = torch.argsort(values, dim=1, descending=True, stable=True)
    values, hits, known = (array.gather(1, order) for array in (values, hits, known))
    last = torch.ones_like(hits)
    last[:, :-1] = values[:, 1:] != values[:, :-1]
    # the place of the end of each run of equal scores: the next one to the right, seen from the right
    place = torch.arange(hits.shape[1], device=hits.device).expand_as(hits)
    ends = torch.where(last, place, hits.shape[1]).flip(1).cummin(1).values.flip(1)
    found = hits.cumsum(1)
    precision = ratio(found.gather(1, ends).to(torch.float64), known.cumsum(1).gather(1, ends))
    size = sizes.to(torch.float64)
    missing = size - found[:, -1]
    return ratio((hits * precision).sum(1) + missing * ratio(size, labels), size)
