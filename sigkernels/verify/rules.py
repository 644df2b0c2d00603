"""Decision rules: which labels a classifier predicts from its logits.

Every rule asks for signs of logits, so one engine decides them all:

* a threshold t on the probability compares the logit with ``logit(t)``, which is a bias of ``-logit(t)``;
* a threshold that is chosen for each input is one more column of W, constant over the labels, with a feature of its own;
* the r highest logits are the labels above *some* threshold, and the winner of a softmax is the highest of all.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy import ndarray

from ..labels import LabelSets
from ..thresholds import Thresholds
from ..validation import check_number

Rule = Literal["threshold", "topk", "argmax"]
Domain = Literal["all", "nonnegative"]
RULES: tuple[str, ...] = get_args(Rule)
FREE = "free"


@dataclass(frozen=True, eq=False)
class DecisionRule:
    """``name`` is one of ``RULES``; ``threshold``: a probability, one for each label [n], or ``"free"``."""

    name: Rule = "threshold"
    threshold: float | ndarray | str = 0.5

    @classmethod
    def of(cls, rule: Any, threshold: Any) -> DecisionRule:
        """The rule that ``verify`` was asked for, checked; ``threshold=None`` is 0.5."""
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: use one of {', '.join(map(repr, RULES))}")
        if rule != "threshold":
            if threshold is not None and not (isinstance(threshold, str) and threshold == FREE):
                raise ValueError(f"rule={rule!r} compares logits with each other: leave threshold out")
            return cls(rule, FREE)
        if threshold is None:
            return cls()
        if isinstance(threshold, str):
            if threshold != FREE:
                raise ValueError(f'threshold={threshold!r}: use a probability, one for each label, or "free"')
            return cls(rule, FREE)
        if isinstance(threshold, Thresholds):
            raise TypeError("threshold is a Thresholds; pass the values that it holds: threshold=tuned.values")
        if np.ndim(threshold) == 0:
            number = threshold.item() if isinstance(threshold, ndarray) else threshold
            return cls(rule, _inside(check_number("threshold", number, 'give a probability, or "free"')))
        try:
            values = np.asarray(threshold.tolist() if hasattr(threshold, "tolist") else threshold, dtype=np.float64)
        except (TypeError, ValueError):
            got = reprlib.repr(np.asarray(threshold).tolist())
            raise TypeError(f"threshold must hold one probability for each label, got {got}") from None
        for value in values.ravel():
            _inside(float(value))
        return cls(rule, values)

    @property
    def is_free(self) -> bool:
        """Whether the threshold may differ from input to input."""
        return isinstance(self.threshold, str)

    def logit(self) -> float | ndarray:
        """What logits are compared with, [] or [n], as ``predict`` computes it; 0 where the threshold is free."""
        if isinstance(self.threshold, str):
            return 0.0
        out = np.log(self.threshold) - np.log1p(-np.asarray(self.threshold))
        return float(out) if np.ndim(out) == 0 else out

    def check_shape(self, n: int) -> None:
        """Refuse thresholds for another number of labels."""
        if np.ndim(self.threshold) and np.shape(self.threshold) != (n,):
            raise ValueError(
                f"threshold must be one number or one for each of the {n} labels, got shape {np.shape(self.threshold)}"
            )

    def check_sets(self, sets: LabelSets) -> None:
        """Refuse label sets that the rule never predicts by its form."""
        if self.name == "argmax" and len(sets) and bool((sets.sizes != 1).any()):
            line = int((sets.sizes != 1).nonzero()[0])
            raise ValueError(
                f'label_sets[{line}] has {int(sets.sizes[line])} labels; rule="argmax" predicts exactly one: '
                'give sets of one label, or use rule="topk"'
            )

    def __str__(self) -> str:
        if self.name == "argmax":
            return "the label with the highest logit"
        if self.name == "topk":
            return "as many labels as the set has, those with the highest logits"
        if self.is_free:
            return "labels above a threshold that is chosen for each input"
        if np.ndim(self.threshold):
            low, high = np.min(self.threshold), np.max(self.threshold)
            return f"labels above thresholds of their own ({low:g} … {high:g})"
        return f"labels with a probability above {self.threshold:g}"


def _inside(value: float) -> float:
    if not 0.0 < value < 1.0:
        raise ValueError(f'threshold must lie strictly between 0 and 1, got {value}; "free" leaves it open')
    return value
