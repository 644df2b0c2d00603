"""Losses made of a soft confusion matrix (Bénédict et al. 2022): one value per label from all rows of the batch.

    S_bc = 1/(1 + exp(-β_c (u_bc + η_c)))      u: the logits, or their sigmoid with ``on="probability"``
    tp_c = Σ_b S y,  fp_c = Σ_b S (1-y),  fn_c = Σ_b (1-S) y,  tn_c = Σ_b (1-S)(1-y)

    f1 = 2tp/(2tp+fn+fp)   precision = tp/(tp+fp)   recall = tp/(tp+fn)
    specificity = tn/(tn+fp)   npv = tn/(tn+fn)   accuracy = (tp+tn)/B

The loss of a label is 1 - value; a label whose denominator is 0 has value 0 and gradient 0.

Every value is N/D with N and D linear in tp, s = ΣS, p = Σy and B, so ∂loss/∂S_bc = A_c (y_bc - l_c) + C_c: two numbers
per label. l_c is the smallest target of a label where targets may lie between 0 and 1, else 0: the slope of a precision
is (y - value)/D, and written so it is 0 where all targets are equal, and not what rounding leaves of a difference.
specificity and npv are recall and precision with the roles of 0 and 1 exchanged, and are computed so: 1-S comes from σ of
the negated argument, not from a difference that cancels.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .base import ColumnLoss
from .kernel_params import SIGMOID_OF_LOGITS, SIGMOID_OF_PROBABILITY, UNBOUNDED, ConfusionParams, Form

Metric = Literal["f1", "precision", "recall", "accuracy", "specificity", "npv"]
Average = Literal["label", "pooled"]

# value = (a·tp + b·s + c·p + d·B) / (e·s + f·p + g·B)
_FRACTIONS = {
    "f1": ((2, 0, 0, 0), (1, 1, 0)),
    "precision": ((1, 0, 0, 0), (1, 0, 0)),
    "recall": ((1, 0, 0, 0), (0, 1, 0)),
    "accuracy": ((2, -1, -1, 1), (0, 0, 1)),
}
_MIRRORED = {"specificity": "recall", "npv": "precision"}
METRICS: tuple[str, ...] = get_args(Metric)
AVERAGES: tuple[str, ...] = get_args(Average)


class Slopes(NamedTuple):
    """∂value/∂S_bc = ``on_y``·(y_bc - least_c) + ``on_all``."""

    on_y: Tensor
    on_all: Tensor


class ConfusionLoss(ColumnLoss):
    """What the confusion-matrix losses share; a subclass defines ``scores``."""

    metric: Metric
    average: Average

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if self.average not in AVERAGES:
            raise ValueError(f"average must be one of {', '.join(AVERAGES)}, got {self.average!r}")
        super().__post_init__()

    @property
    def is_pooled(self) -> bool:
        return self.average == "pooled"

    # -- what S is ---------------------------------------------------------------------------------------------------

    def scores(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """S and 1-S for logits ``z [..., n]``, differentiable."""
        raise NotImplementedError(self.incomplete())

    def incomplete(self) -> str | None:
        if type(self).scores is not ConfusionLoss.scores:
            return None
        return f"{type(self).__name__} has no formula; define scores(self, z), S and 1-S, in torch"

    def _params(self, form: Form) -> ConfusionParams:
        over, under = self.coefficients
        return ConfusionParams(form, self.mirrored, self.is_pooled, *over, *under)

    # -- the fraction ------------------------------------------------------------------------------------------------

    @property
    def mirrored(self) -> bool:
        """The metric is about zeros: S and y trade places with 1-S and 1-y."""
        return self.metric in _MIRRORED

    @property
    def coefficients(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
        """Those of tp, s, p and B in the numerator, and of s, p and B in the denominator."""
        return _FRACTIONS[_MIRRORED.get(self.metric, self.metric)]

    def fraction(
        self, tp: Tensor, s: Tensor, p: Tensor, batch: int, tiny: float, least: Tensor | float = 0.0
    ) -> tuple[Tensor, Slopes]:
        """The value from the sums of S·(y - least), S and y, and its slopes; 0 where the denominator is."""
        (a, b, c, d), (e, f, g) = self.coefficients
        under, per_s, rest = e * s + f * p + g * batch, a * least + b, a * tp + c * p + d * batch
        vanishes = under.abs() <= tiny  # a NaN does not: it must reach the value
        inverse = torch.where(vanishes, 0, 1 / torch.where(vanishes, 1, under))
        value = (rest + per_s * s) * inverse
        on_all = (per_s * (f * p + g * batch) - e * rest) * inverse * inverse  # per_s - e·value without the terms in s
        return value, Slopes(a * inverse, on_all)

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss of logits ``z [B, n]`` and targets ``y [B, n]``, a scalar: the mean over labels, or pooled."""
        sums = self._sums(z, y)
        return self._one_minus([total.sum() for total in sums] if self.is_pooled else sums, z.dtype).mean()

    def column_values(self, z: Tensor, y: Tensor) -> Tensor:
        return self._one_minus(self._sums(z, y), z.dtype)

    def _sums(self, z: Tensor, y: Tensor) -> list[Tensor]:
        """tp, fp, fn and tn of each label."""
        s, rest = self.scores(z)
        return [(a * b).sum(0) for a, b in ((s, y), (s, 1 - y), (rest, y), (rest, 1 - y))]

    def _one_minus(self, sums: list[Tensor], dtype: torch.dtype) -> Tensor:
        tp, fp, fn, tn = sums
        over, under = {
            "f1": (2 * tp, 2 * tp + fn + fp),
            "precision": (tp, tp + fp),
            "recall": (tp, tp + fn),
            "specificity": (tn, tn + fp),
            "npv": (tn, tn + fn),
            "accuracy": (tp + tn, tp + fp + fn + tn),
        }[self.metric]
        vanishes = under.abs() <= torch.finfo(dtype).tiny
        return 1 - torch.where(vanishes, 0, over / torch.where(vanishes, 1, under))


@dataclasses.dataclass(frozen=True, eq=False)
class SigmoidF1(ConfusionLoss):
    """sigmoidF1 and its relatives: 1 - a metric of the soft confusion matrix.

    Args:
        beta: slope β > 0 of the inner sigmoid, a number or a tensor ``[]`` or ``[n]``; tensors can be learned, and their
            values are not looked at. An infinite entry makes a step of S, which has no gradient: that of its label is 0.
        eta: its offset η, likewise.
        metric: ``"f1"``, ``"precision"``, ``"recall"``, ``"specificity"``, ``"npv"`` or ``"accuracy"``.
        average: ``"label"``: the mean of the labels' losses; ``"pooled"``: one confusion matrix for all labels.
        on: ``"logits"``: S acts on the logits; ``"probability"``: on their sigmoid, as the published code does.

    Reductions: ``"mean"`` is the loss as defined above; ``"sum"`` adds up the labels instead (n times the mean; with
    ``average="pooled"`` there is one value and nothing to add up). A row has no loss of its own: ``"none"`` is refused.

    Example:
        >>> x, weight, targets = torch.ones(2, 3), torch.zeros(5, 3), [[1], [0, 4]]
        >>> sk.functional.linear_loss(x, weight, targets, loss=sk.SigmoidF1(beta=2.0))
        tensor(0.7000)
    """

    takes_gradients: ClassVar[tuple[str, ...]] = ("beta", "eta")

    beta: float | Tensor = 1.0
    eta: float | Tensor = 0.0
    metric: Metric = "f1"
    average: Average = "label"
    on: Literal["logits", "probability"] = "logits"

    def __post_init__(self) -> None:
        if self.on not in ("logits", "probability"):
            raise ValueError(f"on must be 'logits' or 'probability', got {self.on!r}")
        super().__post_init__()
        self._take_numbers(*(name for name in ("beta", "eta") if not isinstance(getattr(self, name), Tensor)))
        if not isinstance(self.beta, Tensor) and self.beta <= 0:
            raise ValueError(
                f"beta must be positive, got {self.beta}: S has to rise with the logits, or the loss learns nothing or the "
                "opposite; the published value is 1.0"
            )

    def learned(self) -> tuple[Tensor | None, Tensor | None]:
        beta, eta = (setting if isinstance(setting, Tensor) else None for setting in (self.beta, self.eta))
        return beta, eta

    def kernel_params(self) -> ConfusionParams | None:
        if not self.has_kernel:
            return None
        form: Form = SIGMOID_OF_LOGITS if self.on == "logits" else SIGMOID_OF_PROBABILITY
        return self._params(form)._replace(beta=self.beta, eta=self.eta)

    def scores(self, z: Tensor) -> tuple[Tensor, Tensor]:
        u = torch.sigmoid(z) if self.on == "probability" else z
        t = self.beta * (u + self.eta)
        return torch.sigmoid(t), torch.sigmoid(-t)


@dataclasses.dataclass(frozen=True, eq=False)
class UnboundedF1(ConfusionLoss):
    """unboundedF1: the soft confusion matrix with the logits themselves as scores, ``S(u) = u``.

    Args:
        metric: as for ``SigmoidF1``.
        average: as for ``SigmoidF1``.

    Example:
        >>> x, weight, targets = torch.ones(2, 3), torch.ones(5, 3), [[1], [0, 4]]
        >>> sk.functional.linear_loss(x, weight, targets, loss=sk.UnboundedF1())
        tensor(0.4857)
    """

    metric: Metric = "f1"
    average: Average = "label"

    def kernel_params(self) -> ConfusionParams | None:
        return self._params(UNBOUNDED) if self.has_kernel else None

    def scores(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return z, 1 - z
