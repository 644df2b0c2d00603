"""The parameters that a kernel takes of a loss: one type per family, the same for every backend."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from torch import Tensor

Kind = Literal[0, 1, 2]  # LossKind in csrc/core/losses.h
BCE_KIND: Final = 0
FOCAL_KIND: Final = 1
ASYMMETRIC_KIND: Final = 2
Form = Literal[0, 1, 2]  # how scores come from logits
SIGMOID_OF_LOGITS: Final = 0
SIGMOID_OF_PROBABILITY: Final = 1
UNBOUNDED: Final = 2


class ElementwiseParams(NamedTuple):
    """An elementwise loss; the names are those of ``LossParams`` in ``csrc/core/losses.h``."""

    kind: Kind
    label_smoothing: float = 0.0
    gamma_pos: float = 0.0
    gamma_neg: float = 0.0
    alpha_pos: float = 1.0
    alpha_neg: float = 1.0
    clip: float = 0.0
    eps: float = 1e-8
    detach_focus: bool = False
    weight: float | Tensor | None = None  # a number, [] or [n]
    pos_weight: float | Tensor | None = None

    def numbers(self) -> dict[str, float]:
        """Everything but the label weights, by name."""
        return dict(zip(self._fields[:-2], self[:-2], strict=True))


class ConfusionParams(NamedTuple):
    """A loss of the confusion matrix of each label.

    value = (n_tp·tp + n_s·s + n_p·p + n_rows·B) / (d_s·s + d_p·p + d_rows·B)
    """

    form: Form
    mirrored: bool  # the metric is about zeros: S and y trade places with 1-S and 1-y
    pooled: bool  # one confusion matrix for all labels
    n_tp: float
    n_s: float
    n_p: float
    n_rows: float
    d_s: float
    d_p: float
    d_rows: float
    beta: float | Tensor = 1.0  # a number, [] or [n]
    eta: float | Tensor = 0.0

    @property
    def metric(self) -> tuple[float, ...]:
        """The coefficients of the numerator and of the denominator."""
        return tuple(float(c) for c in self[3:10])

    def numbers(self) -> dict[str, float]:
        """Everything but β, η and how labels are averaged, by the names of ``ConfusionParams`` in ``csrc/core/confusion.h``."""
        return {"form": self.form, "mirrored": self.mirrored} | dict(zip(self._fields[3:10], self[3:10], strict=True))

    def number(self, name: Literal["beta", "eta"]) -> float:
        """β or η where it is a number; its neutral value where it is a tensor."""
        value = getattr(self, name)
        return {"beta": 1.0, "eta": 0.0}[name] if isinstance(value, Tensor) else float(value)
