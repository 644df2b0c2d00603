"""Logits ``z = [W_dft | C | weight] x + bias``, ``[B, m]``, for those who want all of them.

grad_x = g W,   grad_weight = gᵀ x_s,   grad_bias = Σ_b g_b

The map is linear in each input and its adjoint ``g → g W`` is too, so each is the other's backward, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..layer import Layer, LayerMeta
from ..operator_dispatch import by_operator
from .missing_derivatives import ReverseModeOnly


def logits(x: Tensor, layer: Layer) -> Tensor:
    """``[B, D] → [B, m]``. Arguments were checked."""
    if by_operator(x, layer.weight, layer.bias):
        return logits_operator(x, layer.weight, layer.bias, layer.meta)
    return Logits.apply(x, layer.weight, layer.bias, layer.meta)


def logits_adjoint(g: Tensor, weight: Tensor, meta: LayerMeta) -> Tensor:
    """``g [B, m] → g W [B, D]``."""
    if by_operator(g, weight):
        return logits_adjoint_operator(g, weight, meta)
    return LogitsAdjoint.apply(g, weight, meta)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, meta: Sequence[int]) -> Tensor:
    layer = Layer(weight, bias, LayerMeta(*meta))
    return backends.select(x, "logits", codes=layer.codes).logits(x, layer)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *arrays, ctx.meta = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    meta = LayerMeta(*ctx.meta)
    grad_x = logits_adjoint(g, weight, meta) if ctx.needs_input_grad[0] else None
    grad_weight = g.T @ x[:, meta.fixed_columns :] if ctx.needs_input_grad[1] else None
    grad_bias = g.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
    return grad_x, grad_weight, grad_bias, None


def _adjoint(g: Tensor, weight: Tensor, meta: Sequence[int]) -> Tensor:
    layer = Layer(weight, None, LayerMeta(*meta))
    return backends.select(g, "logits_adjoint", codes=layer.codes).logits_adjoint(g, layer)


def _adjoint_backward(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
    g, weight = ctx.saved_tensors
    meta = LayerMeta(*ctx.meta)
    grad_g = logits(gg, Layer(weight, None, meta)) if ctx.needs_input_grad[0] else None
    grad_weight = g.T @ gg[:, meta.fixed_columns :] if ctx.needs_input_grad[1] else None
    return grad_g, grad_weight, None


class Logits(ReverseModeOnly):
    """The eager path."""

    forward: Callable[..., Any] = staticmethod(_logits)
    setup_context: Callable[..., Any] = staticmethod(_setup_context)
    backward: Callable[..., Any] = staticmethod(_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, meta: LayerMeta) -> Any:
        return _fold_rows(Logits.apply, info, in_dims, (x, weight, bias, meta))


class LogitsAdjoint(torch.autograd.Function):
    """The eager path of the adjoint."""

    forward: Callable[..., Any] = staticmethod(_adjoint)
    setup_context: Callable[..., Any] = staticmethod(_setup_context)
    backward: Callable[..., Any] = staticmethod(_adjoint_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, weight: Tensor, meta: LayerMeta) -> Any:
        return _fold_rows(LogitsAdjoint.apply, info, in_dims, (g, weight, meta))


def _fold_rows(function: Any, info: Any, in_dims: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, int]:
    """torch.func.vmap: more rows of one layer, or one layer after another."""
    (rows, *others), dims = arguments, in_dims
    if all(dim is None for dim in dims[1:-1]):
        folded = rows.movedim(dims[0], 0)
        return function(folded.flatten(0, 1), *others).unflatten(0, folded.shape[:2]), 0
    items = (
        [a if dim is None else a.select(dim, i) for a, dim in zip(arguments[:-1], dims[:-1], strict=True)]
        for i in range(info.batch_size)
    )
    return torch.stack([function(*item, arguments[-1]) for item in items]), 0


@torch.library.custom_op("sigkernels::logits", mutates_args=())
def logits_operator(x: Tensor, weight: Tensor, bias: Tensor | None, meta: Sequence[int]) -> Tensor:
    return _logits(x, weight, bias, meta)


@logits_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, meta: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


logits_operator.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("sigkernels::logits_adjoint", mutates_args=())
def logits_adjoint_operator(g: Tensor, weight: Tensor, meta: Sequence[int]) -> Tensor:
    return _adjoint(g, weight, meta)


@logits_adjoint_operator.register_fake
def _(g: Tensor, weight: Tensor, meta: Sequence[int]) -> Tensor:
    return g.new_empty(g.shape[0], weight.shape[1] + LayerMeta(*meta).fixed_columns)


logits_adjoint_operator.register_autograd(_adjoint_backward, setup_context=_setup_context)
