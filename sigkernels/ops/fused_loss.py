"""Fused loss: logits, f(z, y) and all gradients in one pass over label tiles, without any ``[B, n]`` array.

    rows_b = Σ_i f(z_bi, y_bi),   z = [W_dft | weight] x + bias
    loss   = Σ_b rows_b / (B·n)  ("mean"),   Σ_b rows_b  ("sum"),   rows [B]  ("none")

For a scalar loss the gradients are made in the forward pass, by the same sweep, and the backward pass scales them.
With ``"none"`` every row has its own upstream gradient, so the backward pass sweeps again with these as row weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.interface import LossResult, accumulate_dtype, gradient_dtype
from ..labels import LabelSets
from ..layer import Layer
from ..losses import Loss
from ..operator_dispatch import by_operator

DOUBLE_BACKWARD = (
    "the fused loss has no second derivative: it never keeps the logits that one would need. "
    "For double backward take the logits, head(h) or functional.dft_logits, and torch's own loss on them"
)
GRAD_INTO = (
    "grad_into and accumulate_grad write to a buffer while the loss is computed, which torch.compile and tracing do not "
    "follow: leave them out there, or keep this call outside of the compiled function"
)


def fused_loss(
    x: Tensor,  # [B, D]
    layer: Layer,
    targets: LabelSets | Tensor,  # B sets, or [B, m]
    loss: Loss,
    reduction: str,
    grad_weight_into: Tensor | None = None,  # [m, s]
) -> Tensor:
    """The loss, ``[]`` or ``[B]``, in float32 (float64 for float64 inputs). Arguments were checked."""
    if by_operator(x, layer.weight, layer.bias, *_target_tensors(targets), *loss.tensors()):
        if grad_weight_into is not None:
            raise ValueError(GRAD_INTO)
        return _call_operator(x, layer, targets, loss, reduction)
    return FusedLoss.apply(
        x,
        layer.weight,
        layer.bias,
        layer,
        targets,
        loss,
        reduction,
        torch.is_grad_enabled(),
        grad_weight_into,
    )


def _scale(reduction: str, batch: int, num_labels: int) -> float:
    return 1.0 / max(batch * num_labels, 1) if reduction == "mean" else 1.0


def _reduce(result: LossResult, reduction: str, num_labels: int, dtype: torch.dtype) -> Tensor:
    rows = result.rows
    if reduction == "none":
        return rows.to(dtype)
    count = rows.shape[0] * num_labels if reduction == "mean" else 1
    if result.total is not None and count:
        return torch.scalar_tensor(result.total / count, dtype=dtype)
    return (rows.sum() / count).to(dtype)


def _target_tensors(targets: LabelSets | Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(indices, offsets, dense): the tensors of either form of targets."""
    if isinstance(targets, LabelSets):
        return targets.indices, targets.offsets, None
    return None, None, targets


def _targets(
    indices: Tensor | None, offsets: Tensor | None, dense: Tensor | None, num_labels: int
) -> LabelSets | Tensor:
    """The inverse of ``_target_tensors``."""
    if indices is None or offsets is None:
        assert dense is not None
        return dense
    return LabelSets.from_sorted(indices, offsets, num_labels)


class FusedLoss(torch.autograd.Function):
    """The eager path."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Layer,
        targets: LabelSets | Tensor,
        loss: Loss,
        reduction: str,
        grad_enabled: bool,
        grad_weight_into: Tensor | None,
    ) -> Tensor:
        ctx.backend = backends.select(x, loss)
        needs = tuple(ctx.needs_input_grad[:3]) if grad_enabled else (False, False, False)
        ctx.now = any(needs) and reduction != "none"
        ctx.scale = _scale(reduction, x.shape[0], layer.num_labels)
        ctx.into = grad_weight_into if needs[1] else None
        result = backends.by_name(ctx.backend).fused_loss(
            x,
            layer,
            targets,
            loss,
            ctx.scale,
            needs if ctx.now else (False, False, False),
            ctx.into if ctx.now else None,
        )
        ctx.grads = result if ctx.now else None
        ctx.meta, ctx.loss, ctx.needs, ctx.dtype = layer[2:], loss, needs, x.dtype
        ctx.save_for_backward(x, weight, bias, *_target_tensors(targets))
        return _reduce(result, reduction, layer.num_labels, accumulate_dtype(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                grads = _gradients(ctx, grad_output)
            x, weight, bias = ctx.saved_tensors[:3]
            grads = _RefuseDoubleBackward.apply(x, weight, bias, grad_output, *grads)
        else:
            grads = _gradients(ctx, grad_output)
        return (*grads, None, None, None, None, None, None)


def _gradients(ctx: Any, grad_output: Tensor) -> list[Tensor | None]:
    if ctx.grads is not None:
        # Handed out once, so that autograd can keep them as .grad without a copy. A second backward
        # through a retained graph makes them anew.
        result, ctx.grads = ctx.grads, None
        grads = _scaled(result, grad_output, ctx)
    else:  # by another sweep, with the true row weights
        grads = list(_sweep(ctx, grad_output * ctx.scale, ctx.needs, ctx.into).gradients)
    if ctx.into is not None:
        grads[1] = None
    return [grad if grad is None or grad.dtype == ctx.dtype else grad.to(ctx.dtype) for grad in grads]


def _scaled(result: LossResult, grad_output: Tensor, ctx: Any) -> list[Tensor | None]:
    """The gradients of the forward pass times a scalar, in place: nobody else holds them."""
    grads: list[Tensor | None] = list(result.gradients)
    if ctx.into is not None:
        grads[1] = None
    if grad_output.device.type == "cpu" and grad_output.item() == 1.0:
        return grads
    for grad in grads:
        if grad is not None:
            grad.mul_(grad_output)
    if ctx.into is not None:
        # The forward pass has added the gradient for an upstream gradient of 1: add what is missing.
        _sweep(ctx, (grad_output - 1) * ctx.scale, (False, True, False), ctx.into)
    return grads


def _sweep(ctx: Any, row_scale: Tensor, needs: tuple[bool, bool, bool], into: Tensor | None) -> LossResult:
    x, weight, bias, indices, offsets, dense = ctx.saved_tensors
    layer = Layer(weight, bias, *ctx.meta)
    y = _targets(indices, offsets, dense, layer.num_labels)
    row_scale = row_scale.expand(x.shape[0]).to(accumulate_dtype(x.dtype)).contiguous()
    return backends.by_name(ctx.backend).fused_loss(x, layer, y, ctx.loss, row_scale, needs, into)


class _RefuseDoubleBackward(torch.autograd.Function):
    """Hands gradients through, and says why when somebody differentiates them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad_output: Tensor, *grads: Any) -> Any:  # type: ignore[override]
        return grads

    @staticmethod
    def backward(ctx: Any, *grad_grads: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(DOUBLE_BACKWARD)


# -- torch.library: the same operation, kept whole by torch.compile ------------------------------------------------


@torch.library.custom_op("sigkernels::fused_loss", mutates_args=())
def fused_loss_operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    offsets: Tensor | None,
    dense: Tensor | None,
    row_scale: Tensor | None,
    kind: str,
    numbers: Sequence[float],
    tensors: Sequence[Tensor | None],
    num_labels: int,
    k: int,
    label_start: int,
    reduction: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, grad_x, grad_weight, grad_bias); gradients that are not needed are empty."""
    loss = Loss.unflatten(kind, numbers, tensors)
    layer = Layer(weight, bias, num_labels, k, label_start)
    targets = _targets(indices, offsets, dense, num_labels)
    module = backends.by_name(backends.select(x, loss))
    scale = row_scale if row_scale is not None else _scale(reduction, x.shape[0], num_labels)
    result = module.fused_loss(x, layer, targets, loss, scale, _made(needs, reduction, row_scale))
    value = _reduce(result, reduction, num_labels, accumulate_dtype(x.dtype))
    grads = [x.new_empty(0) if grad is None else grad for grad in result.gradients]
    return value, grads[0], grads[1], grads[2]


def _made(needs: Sequence[bool], reduction: str, row_scale: Tensor | None) -> tuple[bool, bool, bool]:
    """The gradients that a call makes: none where the upstream gradients of the rows are not known yet."""
    known = reduction != "none" or row_scale is not None
    return (known and needs[0], known and needs[1], known and needs[2])


@fused_loss_operator.register_fake
def _(x, weight, bias, indices, offsets, dense, row_scale, kind, numbers, tensors, num_labels, k, label_start,
      reduction, needs):  # fmt: skip
    value = x.new_empty(x.shape[:1] if reduction == "none" else (), dtype=accumulate_dtype(x.dtype))
    dtype = gradient_dtype(x.dtype)
    shapes = (x.shape, weight.shape, weight.shape[:1])
    grads = [
        x.new_empty(shape, dtype=dtype) if need else x.new_empty(0)
        for shape, need in zip(shapes, _made(needs, reduction, row_scale), strict=True)
    ]
    return value, *grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arrays, kind, numbers, tensors, num_labels, k, label_start, reduction, needs = inputs
    ctx.call = (kind, numbers, num_labels, k, label_start)
    ctx.needs, ctx.dtype, ctx.scalar = needs, inputs[0].dtype, reduction != "none"
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*arrays[:3], *(output[1:] if ctx.scalar else (*arrays[3:6], *tensors)))


def _operator_backward(ctx: Any, grad_output: Tensor, *unused: Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        if ctx.scalar:
            grads = [grad * grad_output for grad in ctx.saved_tensors[3:6]]
        else:
            grads = _operator_sweep(ctx, grad_output)
        out = [grad.to(ctx.dtype) if need else None for grad, need in zip(grads, ctx.needs, strict=True)]
    if torch.is_grad_enabled():  # create_graph=True
        out = _RefuseDoubleBackward.apply(*ctx.saved_tensors[:3], grad_output, *out)
    return (*out, *[None] * 12)


def _operator_sweep(ctx: Any, row_scale: Tensor) -> list[Tensor]:
    """The gradients with the true row weights, by another pass."""
    kind, numbers, num_labels, k, label_start = ctx.call
    arrays, tensors = ctx.saved_tensors[:6], list(ctx.saved_tensors[6:])
    return list(
        fused_loss_operator(*arrays, row_scale, kind, numbers, tensors, num_labels, k, label_start, "none", ctx.needs)[
            1:
        ]
    )


fused_loss_operator.register_autograd(_operator_backward, setup_context=_setup_context)


def _call_operator(x: Tensor, layer: Layer, targets: LabelSets | Tensor, loss: Loss, reduction: str) -> Tensor:
    kind, numbers, tensors = loss.flatten()
    enabled = torch.is_grad_enabled()
    inputs = (x, layer.weight, layer.bias)
    needs = [enabled and t is not None and t.requires_grad for t in inputs]
    return fused_loss_operator(
        x,
        layer.weight,
        layer.bias,
        *_target_tensors(targets),
        None,
        kind,
        numbers,
        tensors,
        layer.num_labels,
        layer.k,
        layer.label_start,
        reduction,
        needs,
    )[0]
