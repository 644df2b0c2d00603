"""What every backend module provides."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..losses import Loss


class LossResult(NamedTuple):
    """The outcome of one fused pass; a gradient that nobody asked for is ``None``.

    Gradients have the dtype of the input, except for float16 inputs, where they are float32: a mean over B·n
    terms underflows in float16, so rounding waits until the upstream gradient has been applied.
    """

    rows: Tensor  # [B] float64: the loss of each row, summed over its labels
    grad_x: Tensor | None  # [B, D]
    grad_weight: Tensor | None  # [m, s]
    grad_bias: Tensor | None  # [m]
    total: float | None = None  # the sum of the rows, from backends that know it without another operation

    @property
    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, weight and bias."""
        return self.grad_x, self.grad_weight, self.grad_bias


class Backend(Protocol):
    """A module with these functions. Arguments were checked by the public edge."""

    def available(self) -> str | None:
        """``None``, or one sentence: why this backend cannot be used and what to install."""

    def devices(self) -> tuple[str, ...] | None:
        """The device types it takes; ``None`` for any."""

    def supports(self, loss: Loss) -> str | None:
        """``None``, or one sentence: why ``fused_loss`` does not take this loss."""

    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        """``[B, D] → [B, m]``, in the dtype of x."""

    def fused_loss(
        self,
        x: Tensor,  # [B, D]
        layer: Layer,
        targets: LabelSets | Tensor,  # sets of global labels, or [B, m] in [0, 1]
        loss: Loss,  # its tensors are [n]
        row_scale: float | Tensor,  # a number or [B]: multiplies the gradients, not the rows
        needs: tuple[bool, bool, bool],  # gradients of x, weight, bias
        grad_weight_into: Tensor | None = None,  # [m, s]: add the gradient of weight here
    ) -> LossResult:
        """The loss of each row and the gradients, in one pass over label tiles."""

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        """The m highest logits of each row and their labels, ``[B, m]`` each; ties go to the lower label."""

    def predict(self, x: Tensor, layer: Layer, threshold: float) -> LabelSets:
        """The labels whose logit is above ``threshold``."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, else the type itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a backend hands out gradients for inputs of ``dtype``."""
    return torch.float32 if dtype == torch.float16 else dtype


def sum_dtype(device: torch.device) -> torch.dtype:
    """The widest floating point type of a device, in which rows are summed."""
    return torch.float32 if device.type == "mps" else torch.float64
