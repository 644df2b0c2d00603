"""The step of an optimizer that a pass over the labels makes in place of gradients of weight and bias, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SGD, MOMENTUM, ADAGRAD, ADAMW = 1, 2, 3, 4  # UpdateKind of csrc/core/optim.h
ROUNDINGS = ("nearest", "stochastic", "kahan")  # in the order of Rounding there


class ParameterUpdate(NamedTuple):
    """One step of one parameter, ``[m, s]`` or ``[m]``, which is changed in place."""

    parameter: Tensor
    kind: int
    lr: float
    weight_decay: float
    step: int  # of this one, from 1 on
    rounding: str  # of bfloat16
    key: int  # 64 bits: of the random bits of stochastic rounding
    momentum: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    # In float32 (float64 for float64): like the parameter, but [m] for Adagrad's sums of squares
    first: Tensor | None = None  # momentum, Adagrad's sums, AdamW's exp_avg
    second: Tensor | None = None  # AdamW's exp_avg_sq
    compensation: Tensor | None = None  # bfloat16, for "kahan"


class LayerUpdate(NamedTuple):
    """The steps of a layer; None for what is not trained."""

    weight: ParameterUpdate | None
    bias: ParameterUpdate | None

    def parts(self) -> list[ParameterUpdate]:
        """Those that are there."""
        return [part for part in (self.weight, self.bias) if part is not None]
