"""The loss of a layer against targets, whatever kind of loss it is.

A loss over labels is fused with the layer (``fused_loss``), so is one over columns (``confusion_loss``). A loss of
whole rows needs all of their logits: one ``[B, n]`` array, which is then overwritten by its own gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import torch_tiled
from ..backends.interface import accumulate_dtype
from ..labels import LabelSets
from ..layer import Layer
from ..losses import LMLNLL, ConfusionLoss, Loss, RowLoss, TruncatedTopKEntropy
from ..operator_dispatch import by_operator
from .confusion_loss import confusion_loss
from .fused_loss import _RefuseDoubleBackward, _target_tensors, fused_loss
from .lml import lml_nll, nll_rows_and_grad_
from .logits import logits
from .row_loss import entries, reduce_rows
from .truncated_topk_entropy import entropy_rows_and_grad_, truncated_topk_entropy

_ROWS_AND_GRAD = {LMLNLL: nll_rows_and_grad_, TruncatedTopKEntropy: entropy_rows_and_grad_}
_PUBLIC = {LMLNLL: lml_nll, TruncatedTopKEntropy: truncated_topk_entropy}


def layer_loss(
    x: Tensor,  # [B, D]
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: Loss,
    reduction: str,
    grad_weight_into: Tensor | None = None,
) -> Tensor:
    """The loss, ``[]`` or ``[B]``. Arguments were checked."""
    if not isinstance(loss, (ConfusionLoss, RowLoss)):
        return fused_loss(x, layer, targets, loss, reduction, grad_weight_into)
    if grad_weight_into is not None:
        raise ValueError(
            f"{type(loss).__name__} cannot add its gradient into a buffer; leave out grad_into and accumulate_grad"
        )
    if isinstance(loss, ConfusionLoss):
        return confusion_loss(x, layer, targets, loss, reduction)
    if by_operator(x, layer.weight, layer.bias, *_target_tensors(targets)):
        return _PUBLIC[type(loss)](logits(x, layer), targets, loss.k, reduction)
    return LayerRowLoss.apply(x, layer.weight, layer.bias, layer, targets, loss, reduction, torch.is_grad_enabled())


class LayerRowLoss(torch.autograd.Function):
    """Row losses: with a scalar result the gradients are made in the forward pass, while the logits are there."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
        targets: LabelSets | Tensor,
        loss: RowLoss,
        reduction: str,
        grad_enabled: bool,
    ) -> Tensor:
        ctx.needs = ctx.needs_input_grad[:3] if grad_enabled else (False, False, False)
        ctx.meta, ctx.loss, ctx.reduction = layer[2:], loss, reduction
        ctx.scale = 1.0 / max(x.shape[0], 1) if reduction == "mean" else 1.0
        saved = (x, weight, bias, *_target_tensors(targets))
        ctx.save_for_backward(*saved)
        scale = x.new_full((x.shape[0],), ctx.scale, dtype=accumulate_dtype(x.dtype))
        now = any(ctx.needs) and reduction != "none"
        rows, ctx.grads = _row_pass(ctx, saved, scale, now)
        return reduce_rows(rows, reduction, x.shape[:1]).to(accumulate_dtype(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        with torch.no_grad():
            if ctx.grads is not None:
                grads, ctx.grads = [g if g is None else g.mul_(grad_output) for g in ctx.grads], None
            else:
                scale = (grad_output * ctx.scale).expand(ctx.saved_tensors[0].shape[0])
                grads = _row_pass(ctx, ctx.saved_tensors, scale, True)[1]
            grads = [g if g is None else g.to(ctx.saved_tensors[0].dtype) for g in grads]
        if torch.is_grad_enabled():
            grads = _RefuseDoubleBackward.apply(*ctx.saved_tensors[:3], grad_output, *grads)
        return (*grads, None, None, None, None, None)


def _row_pass(ctx: Any, saved: tuple[Any, ...], scale: Tensor, with_grads: bool) -> tuple[Tensor, Any]:
    """(the rows' losses, the gradients of x, weight and bias): all that a single ``[B, n]`` array serves for."""
    x, weight, bias, *targets = saved
    real = accumulate_dtype(x.dtype)
    layer = Layer(weight, bias, *ctx.meta)
    z = backends.by_name(backends.select(x)).logits(x, layer)
    z = z.to(real)
    rows = _ROWS_AND_GRAD[type(ctx.loss)](z, entries(*targets), ctx.loss.k, scale if with_grads else None)
    if not with_grads:
        return rows, None
    slack = x[:, layer.dft_columns :].to(real)
    return rows, [
        torch_tiled.logits_adjoint(z, layer).to(real) if ctx.needs[0] else None,
        z.T @ slack if ctx.needs[1] else None,
        z.sum(0) if bias is not None and ctx.needs[2] else None,
    ]
