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
from ..labels import LabelSets
from ..layer import Layer
from ..losses import ConfusionLoss, SigmoidF1, UnboundedF1
from .fused_loss import _RefuseDoubleBackward


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
    sparse, dense = (targets, None) if isinstance(targets, LabelSets) else (None, targets)
    beta, eta = getattr(loss, "beta", None), getattr(loss, "eta", None)
    tensors = [t if isinstance(t, Tensor) else None for t in (beta, eta)]
    numbers = [0.0 if t is None or isinstance(t, Tensor) else float(t) for t in (beta, eta)]
    inputs = (x, layer.weight, layer.bias, *tensors)
    enabled = torch.is_grad_enabled()
    return confusion_loss_operator(
        *inputs,
        None if sparse is None else sparse.indices,
        None if sparse is None else sparse.offsets,
        dense,
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
    if dense is not None:
        targets: LabelSets | Tensor = dense
    else:
        assert indices is not None and offsets is not None
        targets = LabelSets._trusted(indices, offsets, layer.num_labels)
    module = backends.by_name(backends.select(x, loss))
    make = getattr(module, "confusion_loss", torch_confusion.confusion_loss)
    result = make(x, layer, targets, loss, reduction, (needs[0], needs[1], needs[2], needs[3], needs[4]))
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
