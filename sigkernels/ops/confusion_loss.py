"""Confusion-matrix losses fused with the layer: logits, column sums, loss and gradients by label chunk, no ``[B, n]``.

    loss = mean_c (1 - value_c)  or  1 - value of the pooled sums;   ``losses/confusion.py`` has the formulas

A label's value depends on all rows of the batch, so there is a scalar and no loss per row. The gradients, those of β
and η included, are made in the forward pass; the backward pass scales them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import torch_confusion
from ..backends.interface import accumulate_dtype, gradient_dtype, sum_dtype
from ..backends.torch_confusion import ConfusionResult
from ..labels import LabelSets
from ..layer import Layer
from ..losses import ConfusionLoss, SigmoidF1, UnboundedF1
from ..operator_dispatch import by_operator
from .fused_loss import _RefuseDoubleBackward, _target_tensors, _targets


def confusion_loss(
    x: Tensor,  # [B, D]
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: ConfusionLoss,
    reduction: str,
) -> Tensor:
    """The loss, ``[]``, in float32 (float64 for float64 inputs). Arguments were checked."""
    if reduction == "none":
        raise ValueError(
            f"{type(loss).__name__} has one value per label, made of all rows: a row has no loss of its own; "
            "use reduction='mean' or 'sum'"
        )
    beta, eta = _settings(loss)
    if by_operator(x, layer.weight, layer.bias, beta, eta, *_target_tensors(targets)):
        return _call_operator(x, layer, targets, loss, reduction)
    enabled = torch.is_grad_enabled()
    return FusedConfusionLoss.apply(x, layer.weight, layer.bias, beta, eta, layer, targets, loss, reduction, enabled)


def _settings(loss: ConfusionLoss) -> list[Tensor | None]:
    """β and η where they are tensors."""
    settings = (getattr(loss, name, None) for name in ("beta", "eta"))
    return [setting if isinstance(setting, Tensor) else None for setting in settings]


def _evaluate(
    backend: str,
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: ConfusionLoss,
    reduction: str,
    needs: Sequence[bool],
) -> ConfusionResult:
    make = getattr(backends.by_name(backend), "confusion_loss", torch_confusion.confusion_loss)
    return make(x, layer, targets, loss, reduction, (needs[0], needs[1], needs[2], needs[3], needs[4]))


class FusedConfusionLoss(torch.autograd.Function):
    """The eager path. The gradients are made in the forward pass and handed out once, without a copy."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        beta: Tensor | None,
        eta: Tensor | None,
        layer: Layer,
        targets: LabelSets | Tensor,
        loss: ConfusionLoss,
        reduction: str,
        grad_enabled: bool,
    ) -> Tensor:
        ctx.needs = tuple(ctx.needs_input_grad[:5]) if grad_enabled else (False,) * 5
        ctx.backend = backends.select(x, loss)
        result = _evaluate(ctx.backend, x, layer, targets, loss, reduction, ctx.needs)
        ctx.grads = list(result[1:])
        ctx.call = (layer[2:], loss, reduction)
        ctx.save_for_backward(x, weight, bias, beta, eta, *_target_tensors(targets))
        return result.value.to(accumulate_dtype(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        with torch.no_grad():
            grads, ctx.grads = ctx.grads or _remake(ctx), None
            if not (grad_output.device.type == "cpu" and grad_output.item() == 1.0):
                for grad in grads:
                    if grad is not None:
                        grad.mul_(grad_output)
            inputs = ctx.saved_tensors[:5]
            out = [None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]
        if torch.is_grad_enabled():
            out = _RefuseDoubleBackward.apply(*inputs[:3], grad_output, *out)
        return (*out, *[None] * 5)


def _remake(ctx: Any) -> list[Tensor | None]:
    """The gradients by another sweep, for a second backward pass through a retained graph."""
    x, weight, bias, _, _, indices, offsets, dense = ctx.saved_tensors
    meta, loss, reduction = ctx.call
    layer = Layer(weight, bias, *meta)
    targets = _targets(indices, offsets, dense, layer.num_labels)
    return list(_evaluate(ctx.backend, x, layer, targets, loss, reduction, ctx.needs)[1:])


# -- torch.library: the same operation, kept whole by torch.compile ------------------------------------------------


def _call_operator(x: Tensor, layer: Layer, targets: LabelSets | Tensor, loss: ConfusionLoss, reduction: str) -> Tensor:
    numbers = [0.0 if isinstance(t, Tensor) else float(t) for t in (getattr(loss, n, 0.0) for n in ("beta", "eta"))]
    inputs = (x, layer.weight, layer.bias, *_settings(loss))
    enabled = torch.is_grad_enabled()
    return confusion_loss_operator(
        *inputs,
        *_target_tensors(targets),
        numbers,
        loss.metric,
        loss.average,
        getattr(loss, "on", ""),
        [layer.num_labels, layer.k, layer.label_start],
        reduction,
        [enabled and t is not None and t.requires_grad for t in inputs],
    )[0]


@torch.library.custom_op("sigkernels::confusion_loss", mutates_args=())
def confusion_loss_operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    beta: Tensor | None,
    eta: Tensor | None,
    indices: Tensor | None,
    offsets: Tensor | None,
    dense: Tensor | None,
    numbers: Sequence[float],  # beta and eta, where they are no tensors
    metric: str,
    average: str,
    on: str,  # "": the unbounded loss
    sizes: Sequence[int],  # num_labels, k, label_start
    reduction: str,
    needs: Sequence[bool],  # x, weight, bias, beta, eta
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, and the five gradients; those that are not needed are empty)."""
    loss: ConfusionLoss
    if on:
        loss = SigmoidF1(numbers[0] if beta is None else beta, numbers[1] if eta is None else eta, metric, average, on)
    else:
        loss = UnboundedF1(metric, average)
    layer = Layer(weight, bias, *sizes)
    targets = _targets(indices, offsets, dense, layer.num_labels)
    result = _evaluate(backends.select(x, loss), x, layer, targets, loss, reduction, needs)
    grads = [x.new_empty(0) if grad is None else grad for grad in result[1:]]
    return result.value.to(accumulate_dtype(x.dtype)), grads[0], grads[1], grads[2], grads[3], grads[4]


@confusion_loss_operator.register_fake
def _(x, weight, bias, beta, eta, indices, offsets, dense, numbers, metric, average, on, sizes,
      reduction, needs):  # fmt: skip
    dtype, wide = gradient_dtype(x.dtype), sum_dtype(x.device)
    grads = [
        like.new_empty(like.shape, dtype=kind) if need else x.new_empty(0)
        for like, need, kind in zip((x, weight, bias, beta, eta), needs, (dtype,) * 3 + (wide,) * 2, strict=True)
    ]
    return x.new_empty((), dtype=accumulate_dtype(x.dtype)), *grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[-1]
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:5]]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], *inputs[:3])


def _backward(ctx: Any, grad_output: Tensor, *unused: Any) -> tuple[Any, ...]:
    out = [
        (grad * grad_output).to(dtype) if need else None
        for grad, dtype, need in zip(ctx.saved_tensors[:5], ctx.dtypes, ctx.needs, strict=True)
    ]
    if torch.is_grad_enabled():
        out = _RefuseDoubleBackward.apply(*ctx.saved_tensors[5:], grad_output, *out)
    return (*out, *[None] * 10)


confusion_loss_operator.register_autograd(_backward, setup_context=_setup_context)
