"""Thresholds: the probability above which a label is predicted, one for all labels or one for each.

    F_β = (1 + β²) TP / (β² P + predicted)      with P true labels, of which TP are among those predicted

is best at a cut between two different scores. The threshold is put halfway between the logits around the best cut, of
several equal ones the cut that predicts least.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .labels import LabelSets
from .operator_dispatch import by_operator
from .validation import check_bool, check_number, refuse_meta

_CHUNK_ELEMENTS = 2**22  # logits that are sorted at a time
_REMEDY = "a threshold is a probability in [0, 1], or one for each label"


class LogitChunks:
    """Logits ``[N, n]`` of which a range of labels is made at a time."""

    make: Callable[[int, int], Tensor]
    rows: int
    num_labels: int

    def __init__(self, make: Callable[[int, int], Tensor], rows: int, num_labels: int) -> None:
        self.make, self.rows, self.num_labels = make, rows, num_labels

    @classmethod
    def of(cls, logits: Any) -> LogitChunks:
        """Chunks as they are, or those of a tensor ``[N, n]``."""
        if isinstance(logits, cls):
            return logits
        if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
            got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"logits must be a floating point tensor [N, n], got {got}; of probabilities take .logit()"
            )
        return cls(lambda first, last: logits[:, first:last], *logits.shape)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """(first label, logits ``[N, c]``, in the dtype in which thresholds are compared with them)."""
        size = max(_CHUNK_ELEMENTS // max(self.rows, 1), 1)
        for first in range(0, self.num_labels, size):
            z = self.make(first, min(first + size, self.num_labels)).detach()
            if bool(z.isnan().any()):
                raise ValueError("logits hold NaN, which is neither above nor below a threshold; look for its source")
            yield first, z


@dataclass(frozen=True, eq=False)
class Thresholds:
    """Thresholds that were tuned, and the F score that they have on the rows they were tuned on.

    Attributes:
        values: float64 probabilities strictly between 0 and 1, ``[n]`` or, for one threshold, ``[]``: what
            ``head.predict(h, threshold=…)`` and ``sk.verify(…, threshold=…)`` take. Probabilities within 1e-16 of 1 are
            not told apart: logits above 30 are coarsely, those above 36 not at all.
        f_score: of the same shape; 0 for labels that are true in no row.

    Example:
        >>> tuned = sk.Thresholds.tune(torch.tensor([[2.0, -1.0], [0.5, -3.0]]), [[0, 1], []])
        >>> tuned.f_score
        tensor([1., 1.], dtype=torch.float64)
        >>> bool(0.5 < tuned.values[0] < 1)
        True
    """

    values: Tensor
    f_score: Tensor

    @classmethod
    def tune(
        cls,
        logits: Any,
        targets: Any,
        *,
        per_label: bool = True,
        beta: float = 1.0,
        default: float = 0.5,
        unknown: Any = None,
    ) -> Thresholds:
        """The thresholds with the best F score on these rows; take rows that the model was not trained on.

        Args:
            logits: ``[N, n]``; ``head.tune_thresholds`` does without this array.
            targets: the true labels of each row, in any form of label sets.
            per_label: one threshold for each label, with the best F score of that label, or one for all, with the best
                F score of all labels pooled (micro). A label with few positive rows has a noisy threshold of its own.
            beta: how much more recall counts than precision.
            default: the threshold of labels that are true in no row, for which no threshold is better than another.
            unknown: labels of each row that say nothing, in any form of label sets; they are left out.
        """
        chunks, per_label = LogitChunks.of(logits), check_bool("per_label", per_label)
        beta, default = check_number("beta", beta), _probability(check_number("default", default, _REMEDY), "default")
        if not beta > 0:
            raise ValueError(f"beta must be positive, got {beta}")
        if not 0 < default < 1:
            raise ValueError(f"default must lie strictly between 0 and 1, got {default}")
        true = _ByLabel(targets, chunks, "targets")
        ignored = None if unknown is None else _ByLabel(unknown, chunks, "unknown")
        parts = _Parts(chunks, true, ignored)
        return cls(*(_tune_labels if per_label else _tune_all)(parts, beta**2, default))


class _ByLabel:
    """Label sets in order of label: a dense mask of a range of labels at a time."""

    def __init__(self, given: Any, chunks: LogitChunks, name: str) -> None:
        sets = LabelSets.of(given, chunks.num_labels, name=name)
        if len(sets) != chunks.rows:
            raise ValueError(f"{name} hold {len(sets)} label sets for {chunks.rows} rows of logits; give one per row")
        self.labels, order = torch.sort(sets.indices)
        self.rows, self.batch = sets.rows()[order], chunks.rows

    def mask(self, first: int, z: Tensor) -> Tensor:
        """Which entries of ``z [N, c]`` are listed."""
        edges = torch.tensor([first, first + z.shape[1]], device=self.labels.device)
        inside = slice(*torch.searchsorted(self.labels, edges).tolist())
        mask = torch.zeros(z.shape, dtype=torch.bool, device=z.device)
        mask[self.rows[inside].to(z.device), (self.labels[inside] - first).to(z.device)] = True
        return mask


class _Parts:
    """(logits, which are true, which are known) of a range of labels at a time, ``[N, c]`` each."""

    def __init__(self, chunks: LogitChunks, true: _ByLabel, ignored: _ByLabel | None) -> None:
        self.chunks, self.true, self.ignored = chunks, true, ignored

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for first, z in self.chunks:
            true = self.true.mask(first, z)
            known = torch.ones_like(true) if self.ignored is None else ~self.ignored.mask(first, z)
            yield z, true & known, known


def _tune_labels(parts: _Parts, beta2: float, default: float) -> tuple[Tensor, Tensor]:
    """(thresholds, F scores), ``[n]`` each."""
    found = [_best_cuts(z, true, known, beta2, default) for z, true, known in parts]
    values, scores = zip(*found, strict=True)
    return torch.cat(values), torch.cat(scores)


def _best_cuts(z: Tensor, true: Tensor, known: Tensor, beta2: float, default: float) -> tuple[Tensor, Tensor]:
    positives = true.sum(0)
    if not len(z):
        return torch.full(positives.shape, default, dtype=torch.float64), torch.zeros(positives.shape).double()
    z, order = z.masked_fill(~known, -math.inf).sort(0, descending=True)
    hits, predicted = (entries.gather(0, order).cumsum(0) for entries in (true, known))
    f = (1 + beta2) * hits.double() / (beta2 * positives + predicted).clamp(min=1e-300)
    f[:-1][z[:-1] == z[1:]] = -1.0  # no threshold cuts between equal scores
    f[z == -math.inf] = 0.0  # nor below a score that is never above one
    score, best = f.max(0)
    above = z.gather(0, best[None])[0]
    below = torch.cat([z, z.new_full((1, z.shape[1]), -math.inf)]).gather(0, best[None] + 1)[0]
    found = score > 0
    return torch.where(found, _between(below, above), default).cpu(), torch.where(found, score, 0.0).cpu()


def _tune_all(parts: _Parts, beta2: float, default: float) -> tuple[Tensor, Tensor]:
    """(threshold, F score), ``[]`` each: every good cut is just below a true label, and those are few."""
    found = torch.cat([z[true].cpu() for z, true, _ in parts])
    positives, found = found.numel(), found[found > -math.inf]  # no threshold is below the others
    if not found.numel():
        return torch.tensor(default, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    cuts, counts = found.unique(return_counts=True)  # ascending
    hits = counts.flip(0).cumsum(0).flip(0)
    at_least = torch.zeros(len(cuts) + 1, dtype=torch.int64)  # by how many cuts a score reaches
    highest = cuts.new_full((len(cuts) + 1,), -math.inf)
    for z, _, known in parts:
        scores = z[known].cpu()
        reached = torch.searchsorted(cuts, scores, right=True)
        at_least += torch.bincount(reached, minlength=len(cuts) + 1)
        highest.scatter_reduce_(0, reached, scores, "amax")
    predicted = at_least.flip(0).cumsum(0).flip(0)[1:]
    f = (1 + beta2) * hits.double() / (beta2 * positives + predicted)
    best = len(cuts) - 1 - int(f.flip(0).argmax())
    return _between(highest.cummax(0).values[best], cuts[best]), f[best]


def _between(below: Tensor, above: Tensor) -> Tensor:
    """The probability halfway between two logits, such that only ``above`` is above it in their dtype."""
    below = torch.where(below.isinf(), above - 2, below)
    halfway = (below.double() + above.double()) / 2
    rounded = halfway.to(above.dtype)
    logit = torch.where((rounded > below) & (rounded < above), halfway, below.double())
    return logit.sigmoid().clamp(torch.finfo(torch.float64).tiny, 1 - 2.0**-53)


# -- what predict takes --------------------------------------------------------------------------------------------


def log_odds_of_threshold(threshold: Any, num_labels: int, like: Any) -> float | Tensor:
    """What logits are compared with: a number, or float64 ``[n]`` on the device of ``like``."""
    if isinstance(threshold, Thresholds):
        raise TypeError("threshold is a Thresholds; pass the values that it holds: threshold=tuned.values")
    if not hasattr(threshold, "__len__") or getattr(threshold, "ndim", None) == 0:
        return _log_odds(_probability(check_number("threshold", threshold, _REMEDY), "threshold"))
    values = threshold if isinstance(threshold, Tensor) else _tensor(threshold)
    if values.shape != (num_labels,) or values.dtype == torch.bool or values.is_complex():
        raise ValueError(
            f"threshold must be a probability or one for each of the {num_labels} labels, got {values.dtype} of shape "
            f"{list(values.shape)}"
        )
    device = getattr(like, "device", values.device)
    if device.type != "meta":
        refuse_meta("threshold", values)
    values = values.detach().to(device, torch.float64)
    if not by_operator(values) and values.numel():
        low, high = (bound.item() for bound in torch.aminmax(values))
        _probability(low, "threshold")
        _probability(high, "threshold")
    return values.log() - (-values).log1p()


def _tensor(threshold: Any) -> Tensor:
    try:
        return torch.as_tensor(threshold)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"threshold must be a number or one for each label, got {reprlib.repr(threshold)}; {_REMEDY}"
        ) from None


def _probability(value: float, name: str) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is a probability and must lie in [0, 1], got {value}")
    return value


def _log_odds(threshold: float) -> float:
    if threshold in (0.0, 1.0):
        return math.inf if threshold else -math.inf
    return math.log(threshold) - math.log1p(-threshold)
