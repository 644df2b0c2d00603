"""Losses made of a soft confusion matrix (Bénédict et al. 2022): one value per label from all rows of the batch.

    S_bc = 1/(1 + exp(-β_c (u_bc + η_c)))      u: the logits, or their sigmoid with ``on="probability"``
    tp_c = Σ_b S y,  fp_c = Σ_b S (1-y),  fn_c = Σ_b (1-S) y,  tn_c = Σ_b (1-S)(1-y)

    f1 = 2tp/(2tp+fn+fp)   precision = tp/(tp+fp)   recall = tp/(tp+fn)
    specificity = tn/(tn+fp)   npv = tn/(tn+fn)   accuracy = (tp+tn)/B

The loss of a label is 1 - value; a label whose denominator is 0 has value 0 and gradient 0.

Every value is N/D with N and D linear in tp, s = ΣS, p = Σy and B, so ∂loss/∂S_bc = A_c (y_bc - l_c) + C_c: two numbers
per label. l_c is the smallest target of a label where targets may lie between 0 and 1, else 0: the slope of a precision is
(y - value)/D, and written so it is 0 where all targets are equal, and not what rounding leaves of a difference. specificity and npv are recall and precision with the roles of 0 and 1 exchanged, and are computed so: 1-S comes
from σ of the negated argument, not from a difference that cancels.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .base import Loss

# value = (a·tp + b·s + c·p + d·B) / (e·s + f·p + g·B)
_FRACTIONS = {
    "f1": ((2, 0, 0, 0), (1, 1, 0)),
    "precision": ((1, 0, 0, 0), (1, 0, 0)),
    "recall": ((1, 0, 0, 0), (0, 1, 0)),
    "accuracy": ((2, -1, -1, 1), (0, 0, 1)),
}
_MIRRORED = {"specificity": "recall", "npv": "precision"}
METRICS = (*_FRACTIONS, *_MIRRORED)
AVERAGES = ("label", "pooled")


class Slopes(NamedTuple):
    """∂value/∂S_bc = ``on_y``·(y_bc - least_c) + ``on_all``."""

    on_y: Tensor
    on_all: Tensor


class ConfusionLoss(Loss):
    """What the confusion-matrix losses share."""

    tensor_fields: ClassVar[tuple[str, ...]] = ()

    metric: str
    average: str

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if self.average not in AVERAGES:
            raise ValueError(f"average must be one of {', '.join(AVERAGES)}, got {self.average!r}")

    # -- what S is ---------------------------------------------------------------------------------------------------

    def scores(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """S and 1-S for logits ``z [..., n]``, differentiable."""
        raise NotImplementedError

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
        usable = under.abs() > tiny
        inverse = torch.where(usable, 1 / torch.where(usable, under, 1), 0)
        value = (rest + per_s * s) * inverse
        on_all = (
            (per_s * (f * p + g * batch) - e * rest) * inverse
        ) * inverse  # per_s - e·value without the terms in s
        return value, Slopes(a * inverse, on_all)

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss of logits ``z [B, n]`` and targets ``y [B, n]``, a scalar: the mean over labels, or pooled."""
        s, rest = self.scores(z)
        tp, fp, fn, tn = ((a * b).sum(0) for a, b in ((s, y), (s, 1 - y), (rest, y), (rest, 1 - y)))
        if self.average == "pooled":
            tp, fp, fn, tn = tp.sum(), fp.sum(), fn.sum(), tn.sum()
        over, under = {
            "f1": (2 * tp, 2 * tp + fn + fp),
            "precision": (tp, tp + fp),
            "recall": (tp, tp + fn),
            "specificity": (tn, tn + fp),
            "npv": (tn, tn + fn),
            "accuracy": (tp + tn, tp + fp + fn + tn),
        }[self.metric]
        usable = under.abs() > torch.finfo(z.dtype).tiny
        return (1 - torch.where(usable, over / torch.where(usable, under, 1), 0)).mean()


@dataclasses.dataclass(frozen=True, eq=False)
class SigmoidF1(ConfusionLoss):
    """sigmoidF1 and its relatives: 1 - a metric of the soft confusion matrix.

    Args:
        beta: slope β of the inner sigmoid, a number or a tensor ``[]`` or ``[n]``; tensors can be learned.
        eta: its offset η, likewise.
        metric: ``"f1"``, ``"precision"``, ``"recall"``, ``"specificity"``, ``"npv"`` or ``"accuracy"``.
        average: ``"label"``: the mean of the labels' losses; ``"pooled"``: one confusion matrix for all labels.
        on: ``"logits"``: S acts on the logits; ``"probability"``: on their sigmoid, as the published code does.

    Reductions: ``"mean"`` is the loss as defined above; ``"sum"`` adds up the labels instead (n times the mean; with
    ``average="pooled"`` there is one value and nothing to add up). A row has no loss of its own: ``"none"`` is refused.
    """

    beta: float | Tensor = 1.0
    eta: float | Tensor = 0.0
    metric: str = "f1"
    average: str = "label"
    on: str = "logits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on not in ("logits", "probability"):
            raise ValueError(f"on must be 'logits' or 'probability', got {self.on!r}")
        for name in ("beta", "eta"):
            setting = getattr(self, name)
            if isinstance(setting, Tensor):
                if setting.ndim > 1 or not setting.is_floating_point():
                    raise ValueError(
                        f"{name} must be a number or a floating point tensor of shape [] or [n], "
                        f"got {setting.dtype} of shape {tuple(setting.shape)}"
                    )
            else:
                self._take_numbers(name)

    def check_labels(self, num_labels: int, device: torch.device) -> None:
        for name in ("beta", "eta"):
            setting = getattr(self, name)
            if not isinstance(setting, Tensor):
                continue
            if setting.ndim == 1 and setting.shape[0] != num_labels:
                raise ValueError(
                    f"{name} of SigmoidF1 has {setting.shape[0]} entries for {num_labels} labels; "
                    "give one entry per label, or one number for all"
                )
            if setting.device != device:
                raise ValueError(
                    f"{name} of SigmoidF1 is on {setting.device} and the input on {device}; "
                    f"move it with {name}.to('{device}')"
                )

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
    """

    metric: str = "f1"
    average: str = "label"

    def scores(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return z, 1 - z
