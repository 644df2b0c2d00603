"""The m highest logits of each row and their labels, without ``[B, n]``; ties go to the lower label.

Gradients reach the values as through ``torch.topk``: only the chosen rows of W take part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import backends
from ..codes import code_rows
from ..layer import Layer, LayerMeta
from ..operator_dispatch import by_operator
from .missing_derivatives import ReverseModeOnly


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """``[B, D] →`` values and labels, ``[B, m]`` each. Arguments were checked."""
    if by_operator(x, layer.weight, layer.bias):
        return topk_operator(x, *layer, m)
    return TopK.apply(x, *layer, m)


def _topk(x: Tensor, weight: Tensor, bias: Tensor | None, meta: Sequence[int], m: int) -> tuple[Tensor, Tensor]:
    layer = Layer(weight, bias, LayerMeta(*meta))
    return backends.select(x, "topk", codes=layer.codes).topk(x, layer, m)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.meta, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])


def _backward(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, bias, labels = ctx.saved_tensors
    layer = Layer(weight, bias, LayerMeta(*ctx.meta))
    return *_grads(g, x, layer, labels, ctx.needs_input_grad), None, None


class TopK(ReverseModeOnly):
    """The eager path."""

    forward: Callable[..., Any] = staticmethod(_topk)
    setup_context: Callable[..., Any] = staticmethod(_setup_context)
    backward: Callable[..., Any] = staticmethod(_backward)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, meta: LayerMeta, m: int
    ) -> tuple[Any, Any]:
        if in_dims[1] is not None or in_dims[2] is not None:
            raise RuntimeError("topk maps over rows of x, not over weights; call it once per weight")
        rows = x.movedim(in_dims[0], 0)
        results = TopK.apply(rows.flatten(0, 1), weight, bias, meta, m)
        return tuple(result.unflatten(0, rows.shape[:2]) for result in results), (0, 0)


def _grads(g: Tensor, x: Tensor, layer: Layer, labels: Tensor, needs: Any) -> tuple[Tensor | None, ...]:
    rows = labels - layer.label_start  # [B, m]
    slack = x[:, layer.fixed_columns :]
    grad_x = grad_weight = grad_bias = None
    if needs[0]:
        parts = [torch.einsum("bm,bms->bs", g, layer.weight[rows])]
        if layer.codes:
            parts.insert(0, torch.einsum("bm,bmc->bc", g, _code_rows(labels, layer.codes).to(g.dtype)))
        if layer.k >= 0:
            parts.insert(0, _dft_adjoint(g, labels, layer))
        grad_x = torch.cat(parts, 1)
    if needs[1]:
        outer = g[:, :, None] * slack[:, None, :]  # [B, m, s]
        grad_weight = torch.zeros_like(layer.weight).index_add(0, rows.flatten(), outer.flatten(0, 1))
    if needs[2] and layer.bias is not None:
        grad_bias = torch.zeros_like(layer.bias).index_add(0, rows.flatten(), g.flatten())
    return grad_x, grad_weight, grad_bias


def _dft_adjoint(g: Tensor, labels: Tensor, layer: Layer) -> Tensor:
    """``Σ_m g_bm · W_dft[label_bm]``, ``[B, 2k+1]``, from exactly reduced angles."""
    n, k = layer.num_labels, layer.k
    multiples = labels[:, :, None] * torch.arange(1, k + 1, device=g.device) % n
    angle = multiples.to(torch.float64) * (2 * math.pi / n)
    wide = g.to(torch.float64)
    pairs = torch.stack(
        [torch.einsum("bm,bmk->bk", wide, angle.cos()), torch.einsum("bm,bmk->bk", wide, angle.sin())], 2
    )
    constant = wide.sum(1, keepdim=True) / math.sqrt(n)
    return torch.cat([constant, pairs.flatten(1) * math.sqrt(2 / n)], 1).to(g.dtype)


def _code_rows(labels: Tensor, codes: int) -> Tensor:
    traced = by_operator(labels) or torch._C._are_functorch_transforms_active()
    return (rows_of_codes if traced else _rows_of_codes)(labels, codes)


def _rows_of_codes(labels: Tensor, codes: int) -> Tensor:
    """The rows of the codes for ``labels […]``, ``[…, c]`` float32: exact. An operator, as numpy cannot be traced."""
    rows = code_rows(codes, labels.detach().cpu().numpy().ravel()).astype(np.float32)
    return torch.from_numpy(rows).to(labels.device).reshape(*labels.shape, codes)


rows_of_codes: Any = torch.library.custom_op("sigkernels::rows_of_codes", _rows_of_codes, mutates_args=())


@rows_of_codes.register_fake
def _(labels: Tensor, codes: int) -> Tensor:
    return labels.new_empty(*labels.shape, codes, dtype=torch.float32)


@torch.library.custom_op("sigkernels::topk", mutates_args=())
def topk_operator(x: Tensor, weight: Tensor, bias: Tensor | None, meta: Sequence[int], m: int) -> tuple[Tensor, Tensor]:
    return _topk(x, weight, bias, meta, m)


@topk_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, meta: Sequence[int], m: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], m), x.new_empty(x.shape[0], m, dtype=torch.int64)


topk_operator.register_autograd(_backward, setup_context=_setup_context)
