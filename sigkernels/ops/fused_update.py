"""A fused loss whose pass also steps the label weights and biases: ``head.loss(h, targets, update=optimizer)``.

    loss = Σ_bi f(z_bi, y_bi) · scale        grad_x: of the weights before the step; the gradients of weight and bias are
                                             made a tile of labels at a time, used for the step, and forgotten

The step is made in the forward pass, when the upstream gradient is not known yet: it is taken to be ``upstream``, and the
backward pass raises where it is another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.interface import LossCall, accumulate_dtype
from ..labels import LabelSets
from ..layer import Layer
from ..layer_update import LayerUpdate
from ..losses import ElementwiseLoss
from ..operator_dispatch import by_operator
from ..partial_labels import PartialTargets
from ..sharding import LabelShard
from .missing_derivatives import refuse_double_backward
from .targets import target_tensors


def updated_loss(
    x: Tensor,  # [B, D]
    layer: Layer,
    targets: LabelSets | Tensor | PartialTargets,
    loss: ElementwiseLoss,
    scale: float,
    upstream: float,
    update: LayerUpdate,
    shard: LabelShard | None = None,
) -> Tensor:
    """``scale · Σ f``, ``[]``, after one step of the parameters of ``update``. Arguments were checked.

    ``shard``: layer, parameters and dense targets are those of this rank's labels, the loss that of all ranks together.
    """
    known = targets.targets if isinstance(targets, PartialTargets) else targets
    if by_operator(x, layer.weight, layer.bias, *target_tensors(known), *loss.tensors()):
        raise ValueError(
            "update= changes weights in memory, and here is none to change: fake and meta tensors and tensor subclasses "
            "are for tracing; call the loss without update="
        )
    _check_finite(x)
    return _UpdatedLoss.apply(
        (layer, targets, loss, scale, upstream, update, shard), x, *(p.parameter for p in update.parts())
    )


class _UpdatedLoss(torch.autograd.Function):
    """Parameters are inputs so that the loss has a backward pass even where x needs no gradient; theirs is None."""

    @staticmethod
    def forward(ctx: Any, call: Any, x: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        layer, targets, loss, scale, ctx.upstream, update, shard = call
        chosen = backends.select(x, "fused_update", loss, layer.codes)
        needs = (ctx.needs_input_grad[1], update.weight is not None, update.bias is not None)
        result = chosen.fused_update(LossCall(x, layer, targets, loss, scale * ctx.upstream, needs), update)
        for parameter in parameters:  # a graph that still needs the weights of before says so instead of using these
            torch.autograd.graph.increment_version(parameter)
        ctx.save_for_backward(x, result.grad_x)
        total = result.rows.sum()
        return ((total if shard is None else shard.all_reduce(total)) * scale).to(accumulate_dtype(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        _check_upstream(grad_output, ctx.upstream)
        x, grad_x = ctx.saved_tensors
        if torch.is_grad_enabled() and grad_x is not None:  # create_graph=True
            (grad_x,) = refuse_double_backward([x, grad_output], [grad_x])
        return None, grad_x, *[None] * (len(ctx.needs_input_grad) - 2)


def _check_finite(x: Tensor) -> None:
    """One NaN in x would be in every weight after the step, which no check of the loss can undo."""
    if not x.is_cpu or math.isfinite(x.detach().sum().item()):  # no accelerator is waited for
        return
    wrong = (~x.detach().isfinite().all(1)).nonzero().flatten()
    if len(wrong):  # and not a sum of large numbers
        raise ValueError(
            f"the features hold NaN or infinite numbers ({len(wrong)} of {len(x)} rows, the first is row {int(wrong[0])}), "
            "and the step of update= would put them into every label weight; nothing was changed. Leave such rows out, "
            "or look for what made them in the layers before"
        )


def _check_upstream(grad_output: Tensor, upstream: float) -> None:
    wrong = (
        f"the label weights were stepped with an upstream gradient of {upstream}, and backward brings another{{}}: the "
        "loss was scaled or averaged after head.loss(…, update=opt). Set opt.grad_scale to that factor before the loss, or "
        "scale lr; a GradScaler is not for fused optimizers (bfloat16 needs none)"
    )
    if not grad_output.is_cpu:  # no accelerator is waited for: its own check fails the stream
        torch._assert_async(grad_output == upstream, wrong.format(""))
    elif grad_output.item() != upstream:
        raise RuntimeError(wrong.format(f", {grad_output.item()}"))
