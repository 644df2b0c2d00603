"""Fused loss: logits, the loss and all gradients in one pass over label tiles, without any ``[B, n]`` array.

    z = [W_dft | weight] x + bias
    elementwise:  rows_b = Σ_i f(z_bi, y_bi);   loss = Σ rows / (B·n)  ("mean"),   Σ rows  ("sum"),   rows [B]  ("none")
    of columns:   loss = mean_i or Σ_i of a value per label, which all rows of the batch make
    of rows:      rows_b = f(z_b, y_b), from one ``[B, n]`` array that its own gradient overwrites; the mean is over rows

For a scalar loss the gradients are made in the forward pass, by the same sweep, and the backward pass scales them.
With ``"none"`` every row has its own upstream gradient, so the backward pass sweeps again with these as row weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import backends
from ..backends.interface import Backend, LossCall, LossResult, accumulate_dtype, gradient_dtype, sum_dtype
from ..layer import Layer, LayerMeta
from ..losses import LMLNLL, ColumnLoss, ElementwiseLoss, Loss, RankedRowLoss, SmoothTopKSVM
from .double_backward import refuse_double_backward
from .lml import nll_rows_and_grad_
from .row_loss import Entries, entries, reduce_rows
from .smooth_topk_svm import svm_rows_and_grad_
from .targets import from_target_tensors
from .truncated_topk_entropy import entropy_rows_and_grad_

Arrays = Sequence[Tensor | None]  # x, weight, bias, beta, eta, indices, offsets, dense
Gradients = Sequence[Tensor | None]  # of the first five
ARRAYS, LEARNED = 8, 5


class Spec(NamedTuple):
    """Everything of a call that is not a tensor."""

    backend: Backend
    loss: Loss
    meta: LayerMeta
    reduction: str

    @classmethod
    def of(cls, x: Tensor, loss: Loss, meta: LayerMeta, reduction: str) -> Spec:
        """With the backend for this tensor and this loss."""
        if isinstance(loss, ElementwiseLoss):
            backend = backends.select(x, "fused_loss", loss, meta.codes)
        elif isinstance(loss, ColumnLoss):
            backend = backends.select(x, "column_loss", loss, meta.codes)
        else:
            backend = backends.select(x, "logits", codes=meta.codes)
        return cls(backend, loss, meta, reduction)

    def scale(self, batch: int) -> float:
        """What multiplies the gradients, and a column loss, for an upstream gradient of 1."""
        if self.reduction != "mean" or getattr(self.loss, "average", None) == "pooled":
            return 1.0
        if isinstance(self.loss, ColumnLoss):
            return 1.0 / self.meta.num_labels
        return 1.0 / max(batch * (1 if isinstance(self.loss, RankedRowLoss) else self.meta.num_labels), 1)


def evaluate(
    spec: Spec, arrays: Arrays, row_scale: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and the gradients that are needed, for an upstream gradient of 1 or of ``row_scale [B]``."""
    (x, weight, bias, *_), targets = arrays[:LEARNED], arrays[LEARNED:]
    assert x is not None and weight is not None
    layer = Layer(weight, bias, spec.meta)
    dtype = accumulate_dtype(x.dtype)
    scale = spec.scale(x.shape[0]) if row_scale is None else row_scale.to(dtype).contiguous()
    if isinstance(spec.loss, RankedRowLoss):
        rows, grads = _row_pass(spec, x, layer, targets, scale, needs)
        return reduce_rows(rows, spec.reduction, x.shape[:1]).to(dtype), grads
    y = from_target_tensors(targets[0], targets[1], targets[2], spec.meta.num_labels)
    loss = cast("ElementwiseLoss | ColumnLoss", spec.loss)
    if isinstance(loss, ColumnLoss):
        column = spec.backend.column_loss(LossCall(x, layer, y, loss, scale, tuple(needs)))
        return column.value.to(dtype), list(column[1:])
    result = spec.backend.fused_loss(LossCall(x, layer, y, loss, scale, (needs[0], needs[1], needs[2])))
    return _reduce(result, spec.reduction, spec.meta.num_labels, dtype), [*result.gradients, None, None]


def _reduce(result: LossResult, reduction: str, num_labels: int, dtype: torch.dtype) -> Tensor:
    rows = result.rows
    if reduction == "none":
        return rows.to(dtype)
    count = rows.shape[0] * num_labels if reduction == "mean" else 1
    if result.total is not None and count:
        return torch.tensor(result.total / count, dtype=dtype)  # beyond its range: inf
    return (rows.sum() / count).to(dtype)


def _row_pass(
    spec: Spec, x: Tensor, layer: Layer, targets: Arrays, scale: float | Tensor, needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The rows' losses and the gradients: all that a single ``[B, n]`` array serves for."""
    loss, real = cast(RankedRowLoss, spec.loss), accumulate_dtype(x.dtype)
    z = spec.backend.logits(x, layer).to(real)
    if not any(needs):
        return _rows_and_grad_(loss, z, entries(*targets), None), [None] * LEARNED
    row_scale = scale if isinstance(scale, Tensor) else x.new_full((x.shape[0],), scale, dtype=real)
    rows = _rows_and_grad_(loss, z, entries(*targets), row_scale)
    out = gradient_dtype(x.dtype)
    return rows, [
        spec.backend.logits_adjoint(z, layer).to(out) if needs[0] else None,
        (z.T @ x[:, layer.fixed_columns :].to(real)).to(out) if needs[1] else None,
        z.sum(0).to(out) if needs[2] else None,
        None,
        None,
    ]


def _rows_and_grad_(loss: RankedRowLoss, z: Tensor, at: Entries, row_scale: Tensor | None) -> Tensor:
    """The loss of each row of ``z [B, n]``, which is used up: ``row_scale [B]`` turns it into the gradient."""
    if isinstance(loss, SmoothTopKSVM):
        return svm_rows_and_grad_(z, at, loss.k, loss.tau, row_scale)
    if isinstance(loss, LMLNLL):
        return nll_rows_and_grad_(z, at, loss.k, row_scale)
    return entropy_rows_and_grad_(z, at, loss.k, row_scale)


# -- one context and one backward for the eager Function and for the operator --------------------------------------


class FusedLoss(torch.autograd.Function):
    """The eager path: (loss, the five gradients or None)."""

    @staticmethod
    def forward(spec: Spec, needs: tuple[bool, ...], *arrays: Tensor | None) -> Any:  # type: ignore[override]
        now = any(needs) and spec.reduction != "none"
        value, grads = evaluate(spec, arrays, None, needs if now else (False,) * LEARNED)
        return value, *grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.spec, ctx.needs, *arrays = inputs
        ctx.backend = ctx.spec.backend
        # Not saved but held, so that they are handed out once and autograd can keep them as .grad without a copy.
        ctx.grads = output[1:] if any(ctx.needs) and ctx.spec.reduction != "none" else None
        if ctx.grads is not None:
            ctx.mark_non_differentiable(*[grad for grad in ctx.grads if grad is not None])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *unused: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if grad_output is None:
            return (None,) * (2 + ARRAYS)
        return None, None, *_backward(ctx, grad_output, _eager_gradients)


def _eager_gradients(ctx: Any, grad_output: Tensor) -> Gradients:
    transformed = torch._C._are_functorch_transforms_active()  # such as vmap over upstream gradients
    if ctx.spec.reduction == "none":
        if transformed:
            raise RuntimeError(
                "batched upstream gradients need the loss itself inside the transform: use torch.func.vjp or jacrev"
            )
        return evaluate(ctx.spec, ctx.saved_tensors, grad_output, ctx.needs)[1]
    grads = ctx.grads
    if transformed and grads is not None:
        return [None if grad is None else grad * grad_output for grad in grads]
    if grads is None:  # a second backward pass through a retained graph makes them anew
        grads = evaluate(ctx.spec, ctx.saved_tensors, None, ctx.needs)[1]
    ctx.grads = None
    if grad_output.device.type != "cpu" or grad_output.item() != 1.0:
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_output)  # in place: nobody else holds them
    return grads


def _backward(ctx: Any, grad_output: Tensor, make: Any) -> list[Tensor | None]:
    """The gradients of all arrays, in the dtypes of these."""
    arrays = ctx.saved_tensors[:ARRAYS]
    with torch.no_grad():
        grads = [
            grad if grad is None or array is None or grad.dtype == array.dtype else grad.to(array.dtype)
            for grad, array in zip(make(ctx, grad_output), arrays[:LEARNED], strict=True)
        ]
    if torch.is_grad_enabled():  # create_graph=True
        grads = refuse_double_backward([*arrays[:LEARNED], grad_output], grads)
    return [*grads, None, None, None]


@torch.library.custom_op("sigkernels::fused_loss", mutates_args=())
def fused_loss_operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    beta: Tensor | None,
    eta: Tensor | None,
    indices: Tensor | None,
    offsets: Tensor | None,
    dense: Tensor | None,
    row_scale: Tensor | None,
    loss: str,
    numbers: Sequence[float],
    tensors: Sequence[Tensor],
    meta: Sequence[int],
    reduction: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, and the five gradients; those that are not needed are empty)."""
    measured = Loss.unflatten(loss, numbers, tensors, (beta, eta))
    spec = Spec.of(x, measured, LayerMeta(*meta), reduction)
    arrays = (x, weight, bias, beta, eta, indices, offsets, dense)
    value, grads = evaluate(spec, arrays, row_scale, _made(needs, reduction, row_scale))
    a, b, c, d, e = [x.new_empty(0) if grad is None else grad for grad in grads]
    return value, a, b, c, d, e


def _made(needs: Sequence[bool], reduction: str, row_scale: Tensor | None) -> list[bool]:
    """The gradients that a call makes: none where the upstream gradients of the rows are not known yet."""
    known = reduction != "none" or row_scale is not None
    return [known and need for need in needs]


@fused_loss_operator.register_fake
def _(x, weight, bias, beta, eta, indices, offsets, dense, row_scale, loss, numbers, tensors, meta, reduction, needs):
    value = x.new_empty(x.shape[:1] if reduction == "none" else (), dtype=accumulate_dtype(x.dtype))
    dtype, wide = gradient_dtype(x.dtype), sum_dtype(x.device)
    likes = zip((x, weight, bias, beta, eta), (dtype,) * 3 + (wide,) * 2, strict=True)
    grads = [
        x.new_empty(like.shape, dtype=kind) if need else x.new_empty(0)
        for (like, kind), need in zip(likes, _made(needs, reduction, row_scale), strict=True)
    ]
    return value, *grads


def _setup_operator_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arrays, _, loss, numbers, tensors, meta, ctx.reduction, ctx.needs = inputs
    ctx.call, ctx.tensors = (loss, numbers, meta), len(tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*arrays, *(tensors if ctx.reduction == "none" else output[1:]))


def _operator_gradients(ctx: Any, grad_output: Tensor) -> Gradients:
    arrays, rest = ctx.saved_tensors[:ARRAYS], ctx.saved_tensors[ARRAYS:]
    if ctx.reduction == "none":
        loss, numbers, meta = ctx.call
        grads = fused_loss_operator(*arrays, grad_output, loss, numbers, list(rest), meta, "none", ctx.needs)[1:]
    else:
        grads = [grad * grad_output for grad in rest]
    return [grad if need else None for grad, need in zip(grads, ctx.needs, strict=True)]


def _operator_backward(ctx: Any, grad_output: Tensor, *unused: Any) -> tuple[Any, ...]:
    numbers: list[None] | None = None if ctx.call[1] else []  # torch takes an empty list for one of tensors
    rest = (None, None, numbers, [None] * ctx.tensors, None, None, None)
    return (*_backward(ctx, grad_output, _operator_gradients), *rest)


fused_loss_operator.register_autograd(_operator_backward, setup_context=_setup_operator_context)
