"""Logits ``z = [W_dft | weight] x + bias``, ``[B, m]``, for those who want all of them.

grad_x = g W,   grad_weight = gᵀ x_s,   grad_bias = Σ_b g_b
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import torch_tiled
from ..layer import Layer
from ..operator_dispatch import by_operator


def logits(x: Tensor, layer: Layer) -> Tensor:
    """``[B, D] → [B, m]``. Arguments were checked."""
    if by_operator(x, layer.weight, layer.bias):
        return logits_operator(x, *layer)
    return Logits.apply(x, layer.weight, layer.bias, layer)


class Logits(torch.autograd.Function):
    """The eager path. The map is linear in each input, so double backward is plain torch again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:  # type: ignore[override]
        ctx.meta = layer[2:]
        ctx.save_for_backward(x, weight, bias)
        return backends.by_name(backends.select(x)).logits(x, layer)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        layer = Layer(weight, bias, *ctx.meta)
        grad_x = LogitsAdjoint.apply(g, weight, layer) if ctx.needs_input_grad[0] else None
        return grad_x, *_weight_grads(g, x, layer, ctx.needs_input_grad[1:3]), None


class LogitsAdjoint(torch.autograd.Function):
    """``g [B, m] → g W [B, D]``, whose own gradients are logits again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, weight: Tensor, layer: Layer) -> Tensor:  # type: ignore[override]
        ctx.meta = layer[2:]
        ctx.save_for_backward(g, weight)
        return torch_tiled.logits_adjoint(g, layer)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        g, weight = ctx.saved_tensors
        layer = Layer(weight, None, *ctx.meta)
        grad_g = Logits.apply(gg, weight, None, layer) if ctx.needs_input_grad[0] else None
        grad_weight = g.T @ gg[:, layer.dft_columns :] if ctx.needs_input_grad[1] else None
        return grad_g, grad_weight, None


def _weight_grads(g: Tensor, x: Tensor, layer: Layer, needs: tuple[bool, ...]) -> tuple[Tensor | None, Tensor | None]:
    grad_weight = g.T @ x[:, layer.dft_columns :] if needs[0] else None
    grad_bias = g.sum(0) if layer.bias is not None and needs[1] else None
    return grad_weight, grad_bias


@torch.library.custom_op("sigkernels::logits", mutates_args=())
def logits_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_labels: int, k: int, label_start: int
) -> Tensor:
    layer = Layer(weight, bias, num_labels, k, label_start)
    return backends.by_name(backends.select(x)).logits(x, layer)


@logits_operator.register_fake
def _(x, weight, bias, num_labels, k, label_start):
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("sigkernels::logits_adjoint", mutates_args=())
def logits_adjoint_operator(g: Tensor, weight: Tensor, num_labels: int, k: int, label_start: int) -> Tensor:
    return torch_tiled.logits_adjoint(g, Layer(weight, None, num_labels, k, label_start))


@logits_adjoint_operator.register_fake
def _(g, weight, num_labels, k, label_start):
    return g.new_empty(g.shape[0], weight.shape[1] + (2 * k + 1 if k >= 0 else 0))


def _adjoint_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, weight, *ctx.meta = inputs
    ctx.save_for_backward(g, weight)


def _adjoint_backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
    g, weight = ctx.saved_tensors
    grad_g = logits_operator(gg, weight, None, *ctx.meta) if ctx.needs_input_grad[0] else None
    dft_columns = gg.shape[1] - weight.shape[1]
    grad_weight = g.T @ gg[:, dft_columns:] if ctx.needs_input_grad[1] else None
    return grad_g, grad_weight, None, None, None


logits_adjoint_operator.register_autograd(_adjoint_backward, setup_context=_adjoint_setup_context)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.meta = inputs
    ctx.save_for_backward(x, weight, bias)


def _operator_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    layer = Layer(weight, bias, *ctx.meta)
    grad_x = logits_adjoint_operator(g, weight, *ctx.meta) if ctx.needs_input_grad[0] else None
    return grad_x, *_weight_grads(g, x, layer, ctx.needs_input_grad[1:3]), None, None, None


logits_operator.register_autograd(_operator_backward, setup_context=_setup_context)
