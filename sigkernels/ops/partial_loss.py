"""The fused loss where some labels of a row say nothing: their terms and gradients are 0, whatever their logits are.

It sums: a mean is divided outside by the number of known entries. Eager calls and torch.func go the way of the fused
loss; the operator is for calls that are traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.interface import Backend, accumulate_dtype, gradient_dtype
from ..layer import Layer, LayerMeta
from ..losses import ElementwiseLoss, Loss
from ..operator_dispatch import by_operator
from ..partial_labels import PartialTargets
from .fused_loss import NO_NEEDS, FusedLoss, Spec, evaluate
from .missing_derivatives import refuse_double_backward
from .targets import from_target_tensors, target_tensors
from .transforms import TransformedLoss

_ARRAYS, _LEARNED = 7, 3  # x, weight, bias, indices, offsets, dense, unknown; the first three take gradients


def partial_loss(
    x: Tensor,  # [B, D]
    layer: Layer,
    targets: PartialTargets,
    loss: ElementwiseLoss,
    total: bool,
) -> Tensor:
    """The sum ``[]`` over all known entries, or that of each row ``[B]``. Arguments were checked."""
    inputs = (x, layer.weight, layer.bias)
    arrays = target_tensors(targets.targets)
    if by_operator(*inputs, *arrays, targets.unknown, *loss.tensors()):
        needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
        call = (*inputs, *arrays, targets.unknown, None, *loss.flatten(), layer.meta, total, needs)
        return partial_loss_operator(*call)[0]
    spec = _spec(x, loss, layer.meta, targets.unknown, total)
    if torch._C._are_functorch_transforms_active():
        return TransformedLoss.apply([spec], *inputs, None, None, *arrays)
    if not torch.is_grad_enabled():
        return evaluate(spec, inputs, targets.targets, None, NO_NEEDS)[0]
    return FusedLoss.apply(None, spec, targets.targets, *inputs)


def _spec(x: Tensor, loss: Loss, meta: LayerMeta, unknown: Tensor, total: bool) -> Spec:
    return Spec(_backend(x, loss, meta.codes), loss, meta, "sum" if total else "none", unknown=unknown)


def _backend(x: Tensor, loss: Loss, codes: int) -> Backend:
    """The one that is selected if it knows unknown labels; else torch, unless the other was asked for."""
    chosen = backends.select(x, "fused_loss", loss, codes)
    reason = chosen.refuses_unknown()
    if reason is None:
        return chosen
    if backends.forced_name() != "auto":
        raise backends.BackendError(f"backend '{chosen.name}' was asked for, but {reason}")
    return backends.by_name("torch")


@torch.library.custom_op("sigkernels::partial_loss", mutates_args=())
def partial_loss_operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    indices: Tensor | None,
    offsets: Tensor | None,
    dense: Tensor | None,
    unknown: Tensor,
    row_scale: Tensor | None,
    loss: str,
    numbers: Sequence[float],
    tensors: Sequence[Tensor],
    meta: Sequence[int],
    total: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradients of x, weight and bias; those that are not needed, or not known yet, are empty)."""
    spec = _spec(x, Loss.unflatten(loss, numbers, tensors), LayerMeta(*meta), unknown, total)
    targets = from_target_tensors((indices, offsets, dense), spec.meta.num_labels)
    wanted = _forward_gradients(needs, total, row_scale)
    value, grads = evaluate(spec, (x, weight, bias), targets, row_scale, wanted)
    a, b, c = [x.new_empty(0) if grad is None else grad for grad in grads[:_LEARNED]]
    return value, a, b, c


def _forward_gradients(needs: Sequence[bool], total: bool, row_scale: Tensor | None) -> list[bool]:
    """The gradients that a call makes: none where the upstream gradients of the rows are not known yet."""
    return [need and (total or row_scale is not None) for need in needs]


@partial_loss_operator.register_fake
def _(x, weight, bias, indices, offsets, dense, unknown, row_scale, loss, numbers, tensors, meta, total, needs):  # type: ignore[no-untyped-def]
    value = x.new_empty(() if total else x.shape[:1], dtype=accumulate_dtype(x.dtype))
    a, b, c = [
        x.new_empty(like.shape, dtype=gradient_dtype(x.dtype)) if need and like is not None else x.new_empty(0)
        for like, need in zip((x, weight, bias), _forward_gradients(needs, total, row_scale), strict=True)
    ]
    return value, a, b, c


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arrays, _, loss, numbers, tensors, meta, ctx.total, ctx.needs = inputs
    ctx.call, ctx.tensors = (loss, numbers, meta), len(tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*arrays, *(output[1:] if ctx.total else tensors))


def _gradients(ctx: Any, arrays: Sequence[Tensor | None], rest: Sequence[Tensor], upstream: Tensor) -> list[Any]:
    if ctx.total:
        grads = [grad * upstream for grad in rest]
    else:
        loss, numbers, meta = ctx.call
        grads = partial_loss_operator(*arrays, upstream, loss, numbers, list(rest), meta, False, ctx.needs)[1:]
    pairs = zip(grads, arrays[:_LEARNED], ctx.needs, strict=True)
    return [grad.to(array.dtype) if need and array is not None else None for grad, array, need in pairs]


def _backward(ctx: Any, upstream: Tensor, *unused: Any) -> tuple[Any, ...]:
    arrays, rest = ctx.saved_tensors[:_ARRAYS], ctx.saved_tensors[_ARRAYS:]
    if torch.is_grad_enabled():  # create_graph=True
        with torch.no_grad():
            grads = _gradients(ctx, arrays, rest, upstream)
        grads = refuse_double_backward([*arrays[:_LEARNED], upstream], grads)
    else:
        grads = _gradients(ctx, arrays, rest, upstream)
    numbers: list[None] | None = None if ctx.call[1] else []  # torch takes an empty list for one of tensors
    return (*grads, *[None] * 6, numbers, [None] * ctx.tensors, None, None, None)


partial_loss_operator.register_autograd(_backward, setup_context=_setup_context)
