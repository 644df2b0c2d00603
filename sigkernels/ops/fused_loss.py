"""Fused loss: logits, the loss and all gradients in one pass over label tiles, without any ``[B, n]`` array.

    z = [W_dft | weight] x + bias
    elementwise:  rows_b = Σ_i f(z_bi, y_bi);   loss = Σ rows / (B·n)  ("mean"),   Σ rows  ("sum"),   rows [B]  ("none")
    of columns:   loss = mean_i or Σ_i of a value per label, which all rows of the batch make
    of rows:      rows_b = f(z_b, y_b), from one ``[B, n]`` array that its own gradient overwrites; the mean is over rows

For a scalar loss the gradients are made in the forward pass, by the same sweep, and the backward pass scales them.
With ``"none"`` every row has its own upstream gradient, so the backward pass sweeps again with these as row weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends
from ..backends.gpu_paths import LossShape
from ..backends.interface import Backend, LossCall, LossResult, accumulate_dtype, gradient_dtype, sum_dtype
from ..labels import LabelSets
from ..layer import Layer, LayerMeta
from ..losses import LMLNLL, ColumnLoss, ElementwiseLoss, Loss, RankedRowLoss, SmoothTopKSVM
from ..partial_labels import PartialTargets
from ..sharding import LabelShard
from .lml import nll_rows_and_grad_
from .missing_derivatives import ReverseModeOnly, refuse_double_backward
from .row_loss import Entries, entries, reduce_rows
from .smooth_topk_svm import svm_rows_and_grad_
from .targets import from_target_tensors, target_tensors
from .truncated_topk_entropy import entropy_rows_and_grad_

Arrays = Sequence[Tensor | None]  # x, weight, bias, beta, eta, indices, offsets, dense
Gradients = Sequence[Tensor | None]  # of the first five
ARRAYS, LEARNED = 8, 5
TARGETS = 3
_CALL = 3  # arguments of FusedLoss before the arrays
_FLOAT_MAX = torch.finfo(torch.float32).max
NO_NEEDS = (False,) * LEARNED
NO_GRADIENTS = (None,) * LEARNED
_transformed = torch._C._are_functorch_transforms_active


class Spec(NamedTuple):
    """Everything of a call that is not a tensor."""

    backend: Backend
    loss: Loss
    meta: LayerMeta
    reduction: str
    shard: LabelShard | None = None  # the layer holds the labels of this rank alone
    unknown: Tensor | None = None  # which targets say nothing, as in PartialTargets

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, loss: Loss, meta: LayerMeta, reduction: str, recurs: bool = False) -> Spec:
        """With the backend for these tensors and this loss. ``recurs``: the loss is one of numbers, and remembered."""
        forced = backends.forced_name()
        shape = LossShape.of(x, weight, meta) if x.is_cuda else None
        if recurs:
            kind: Any = type(loss)
            return _known_spec(forced, x.device, kind, tuple(vars(loss).values()), meta, reduction, shape)
        return new_spec(forced, x.device, loss, meta, reduction, shape)

    def scale(self, batch: int) -> float:
        """What multiplies the gradients, and a column loss, for an upstream gradient of 1."""
        if self.reduction != "mean":
            return 1.0
        if isinstance(self.loss, ElementwiseLoss):
            return 1.0 / max(batch * self.meta.num_labels, 1)
        if isinstance(self.loss, ColumnLoss):
            return 1.0 if self.loss.is_pooled else 1.0 / self.meta.num_labels
        return 1.0 / max(batch, 1)


def new_spec(
    forced: str, device: torch.device, loss: Loss, meta: LayerMeta, reduction: str, shape: LossShape | None
) -> Spec:
    if isinstance(loss, ElementwiseLoss):
        backend = backends.choose(forced, device, "fused_loss", loss, meta.codes, shape)
    elif isinstance(loss, ColumnLoss):
        backend = backends.choose(forced, device, "column_loss", loss, meta.codes)
    else:
        backend = backends.choose(forced, device, "logits", codes=meta.codes)
    return Spec(backend, loss, meta, reduction)


@functools.lru_cache(maxsize=256)
def _known_spec(
    forced: str,
    device: torch.device,
    kind: Any,
    settings: tuple[Any, ...],
    meta: LayerMeta,
    reduction: str,
    shape: LossShape | None,
) -> Spec:
    """Found again at every step: to choose a backend anew takes a twentieth of the time of a small one."""
    return new_spec(forced, device, kind(*settings), meta, reduction, shape)


def evaluate(
    spec: Spec, inputs: Arrays, targets: LabelSets | Tensor, row_scale: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Gradients]:
    """The loss and the gradients that are needed, for an upstream gradient of 1 or of ``row_scale [B]``."""
    x, weight, bias = inputs[0], inputs[1], inputs[2]
    assert x is not None and weight is not None
    layer, loss = Layer(weight, bias, spec.meta), spec.loss
    dtype = accumulate_dtype(x.dtype)
    scale = spec.scale(x.shape[0]) if row_scale is None else row_scale.to(dtype).contiguous()
    if isinstance(loss, ElementwiseLoss):
        known = targets if spec.unknown is None else PartialTargets(targets, spec.unknown)
        result = spec.backend.fused_loss(LossCall(x, layer, known, loss, scale, tuple(needs[:3])))
        if spec.shard is not None and row_scale is None:
            result = _over_shards(result, spec.reduction, spec.shard)
        value = _reduce(result, spec.reduction, spec.meta.num_labels, dtype)
        return value, (*result[1:4], None, None)
    if isinstance(loss, ColumnLoss):
        return _column_pass(spec, LossCall(x, layer, targets, loss, scale, tuple(needs)))
    rows, grads = _row_pass(spec, x, layer, targets, scale, needs)
    return reduce_rows(rows, spec.reduction, x.shape[:1]).to(dtype), grads


def _column_pass(spec: Spec, call: LossCall) -> tuple[Tensor, Gradients]:
    dtype, shard = accumulate_dtype(call.x.dtype), spec.shard
    if shard is None:
        column = spec.backend.column_loss(call)
        return column.value.to(dtype), column[1:]
    pooled = cast(ColumnLoss, call.loss).is_pooled
    column = spec.backend.column_loss(call._replace(pool=shard.all_reduce) if pooled else call)
    value = column.value if pooled else shard.all_reduce(column.value)
    # Settings with an entry per label have all n of them on every rank: those of other labels take their gradients there.
    settings = (
        grad if grad is None or grad.ndim == 0 else F.pad(grad, (shard.start, shard.num_labels - shard.stop))
        for grad in column[4:]
    )
    return value.to(dtype), (*column[1:4], *settings)


def _over_shards(result: LossResult, reduction: str, shard: LabelShard) -> LossResult:
    """The same with the sums over all ranks' labels."""
    if reduction == "none":
        return result._replace(rows=shard.all_reduce(result.rows))
    total = result.rows.sum() if result.total is None else result.rows.new_tensor(result.total)
    total = shard.all_reduce(total)
    return result._replace(total=total.item() if total.is_cpu else total, value=None)


def _reduce(result: LossResult, reduction: str, num_labels: int, dtype: torch.dtype) -> Tensor:
    rows = result.rows
    if reduction == "none":
        return rows.to(dtype)
    count = rows.shape[0] * num_labels if reduction == "mean" else 1
    if result.value is not None and count:
        return result.value
    if result.total is not None and count:
        if not isinstance(result.total, Tensor):
            return _scalar(result.total / count, dtype)
        return torch.div(result.total, count, out=result.total.new_empty((), dtype=dtype))  # one launch, in float64
    return (rows.sum() / count).to(dtype)


def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """``[]`` on the CPU, by way of numpy, which takes a quarter of the time of torch.tensor; inf beyond the range."""
    if dtype == torch.float32 and abs(value) > _FLOAT_MAX:
        value = math.copysign(math.inf, value)
    return torch.from_numpy(np.array(value, np.float32 if dtype == torch.float32 else np.float64))


def _row_pass(
    spec: Spec, x: Tensor, layer: Layer, targets: LabelSets | Tensor, scale: float | Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Gradients]:
    """The rows' losses and the gradients: all that a single ``[B, n]`` array serves for."""
    loss, real = cast(RankedRowLoss, spec.loss), accumulate_dtype(x.dtype)
    z = spec.backend.logits(x, layer).to(real)
    active = entries(*target_tensors(targets), layer.num_labels)
    if spec.shard is not None and isinstance(targets, LabelSets):
        active = active.at_labels(layer.labels)
    if not any(needs):
        return _rows_and_grad_(loss, z, active, None, spec.shard), NO_GRADIENTS
    row_scale = scale if isinstance(scale, Tensor) else x.new_full((x.shape[0],), scale, dtype=real)
    rows = _rows_and_grad_(loss, z, active, row_scale, spec.shard)
    out = gradient_dtype(x.dtype)
    return rows, (
        spec.backend.logits_adjoint(z, layer).to(out) if needs[0] else None,
        (z.T @ x[:, layer.fixed_columns :].to(real)).to(out) if needs[1] else None,
        z.sum(0).to(out) if needs[2] else None,
        None,
        None,
    )


def _rows_and_grad_(
    loss: RankedRowLoss, z: Tensor, at: Entries, row_scale: Tensor | None, shard: LabelShard | None
) -> Tensor:
    """The loss of each row of ``z [B, m]``, which is used up: ``row_scale [B]`` turns it into the gradient."""
    if isinstance(loss, SmoothTopKSVM):
        return svm_rows_and_grad_(z, at, loss.k, loss.tau, row_scale, shard)
    if isinstance(loss, LMLNLL):
        return nll_rows_and_grad_(z, at, loss.k, row_scale, shard)
    return entropy_rows_and_grad_(z, at, loss.k, row_scale, shard)


# -- the eager path ------------------------------------------------------------------------------------------------


class FusedLoss(ReverseModeOnly):
    """The loss of a call whose gradients are recorded. What it costs counts: small layers take some 30 µs in all."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        outcome: tuple[Tensor, Gradients] | None,  # where it is known already
        spec: Spec,
        targets: LabelSets | Tensor,
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.spec = spec
        ctx.save_for_backward(*inputs, *target_tensors(targets))
        # Gradients are not saved but held, so that they are handed out once and autograd can keep them as .grad without a
        # copy.
        if outcome is not None:
            value, ctx.grads = outcome
            return value
        needs = ctx.needs_input_grad[_CALL:]
        now = spec.reduction != "none" and True in needs
        value, grads = evaluate(spec, inputs, targets, None, needs if now else NO_NEEDS)
        ctx.grads = grads[: len(inputs)] if now else None
        return value

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grads = ctx.grads
        if grads is not None and not torch.is_grad_enabled() and not _transformed():
            # The ordinary step, which needs none of the saved tensors: unpacking them costs as much as all of this.
            # Gradients that are wider than their input, of float16, β and η, are rounded by autograd itself.
            ctx.grads = None
            return None, None, None, *_scaled(grads, grad_output)
        arrays = ctx.saved_tensors
        return None, None, None, *_finished(arrays, grad_output, lambda: _eager_gradients(ctx, arrays, grad_output))


def _eager_gradients(ctx: Any, arrays: Arrays, grad_output: Tensor) -> Gradients:
    transformed = _transformed()  # such as by vmap over upstream gradients
    if ctx.spec.reduction == "none":
        if transformed:
            raise RuntimeError(
                "batched upstream gradients need the loss itself inside the transform: use torch.func.vjp or jacrev"
            )
        return _again(ctx, arrays, grad_output)
    grads = ctx.grads
    if transformed and grads is not None:
        return [None if grad is None else grad * grad_output for grad in grads]
    if grads is None:  # a second backward pass through a retained graph makes them anew
        grads = _again(ctx, arrays, None)
    ctx.grads = None
    return _scaled(grads, grad_output)


def _scaled(grads: Gradients, grad_output: Tensor) -> Gradients:
    """The gradients times a scalar, in place: nobody else holds them."""
    if grad_output.is_cpu and grad_output.item() == 1.0:  # nearly always
        return grads
    present = [grad for grad in grads if grad is not None]
    if not grad_output.is_cpu:  # no accelerator is waited for
        backends.scale_on_device(present, grad_output)
    else:
        for grad in present:
            grad.mul_(grad_output)
    return grads


def _again(ctx: Any, arrays: Arrays, row_scale: Tensor | None) -> Gradients:
    targets = from_target_tensors(arrays[-TARGETS:], ctx.spec.meta.num_labels)
    needs = ctx.needs_input_grad[_CALL:]
    return evaluate(ctx.spec, arrays[:-TARGETS], targets, row_scale, needs)[1][: len(arrays) - TARGETS]


def _finished(arrays: Arrays, grad_output: Tensor, make: Callable[[], Gradients]) -> Gradients:
    """The gradients that ``make`` gives, in the dtypes of the arrays, and refusing to be differentiated again."""
    if not torch.is_grad_enabled():
        return _like(arrays, make())
    with torch.no_grad():  # create_graph=True
        grads = _like(arrays, make())
    return refuse_double_backward([*arrays[: len(grads)], grad_output], grads)


def _like(arrays: Arrays, grads: Gradients) -> list[Tensor | None]:
    return [
        grad if grad is None or array is None or grad.dtype == array.dtype else grad.to(array.dtype)
        for grad, array in zip(grads, arrays, strict=False)  # targets follow the inputs
    ]


# -- the operator, for calls that are traced -----------------------------------------------------------------------


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
    spec = Spec.of(x, weight, measured, LayerMeta(*meta), reduction)
    targets = from_target_tensors((indices, offsets, dense), spec.meta.num_labels)
    value, grads = evaluate(
        spec, (x, weight, bias, beta, eta), targets, row_scale, _forward_gradients(needs, reduction, row_scale)
    )
    a, b, c, d, e = [x.new_empty(0) if grad is None else grad for grad in grads]
    return value, a, b, c, d, e


def _forward_gradients(needs: Sequence[bool], reduction: str, row_scale: Tensor | None) -> list[bool]:
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
        for (like, kind), need in zip(likes, _forward_gradients(needs, reduction, row_scale), strict=True)
    ]
    return value, *grads


def _setup_operator_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arrays, _, loss, numbers, tensors, meta, ctx.reduction, ctx.needs = inputs
    ctx.call, ctx.tensors = (loss, numbers, meta), len(tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*arrays, *(tensors if ctx.reduction == "none" else output[1:]))


def _operator_gradients(ctx: Any, arrays: Arrays, rest: Sequence[Tensor], grad_output: Tensor) -> Gradients:
    if ctx.reduction == "none":
        loss, numbers, meta = ctx.call
        grads = fused_loss_operator(*arrays, grad_output, loss, numbers, list(rest), meta, "none", ctx.needs)[1:]
    else:
        grads = [grad * grad_output for grad in rest]
    return [grad if need else None for grad, need in zip(grads, ctx.needs, strict=True)]


def _operator_backward(ctx: Any, grad_output: Tensor, *unused: Any) -> tuple[Any, ...]:
    numbers: list[None] | None = None if ctx.call[1] else []  # torch takes an empty list for one of tensors
    arrays, rest = ctx.saved_tensors[:ARRAYS], ctx.saved_tensors[ARRAYS:]
    grads = _finished(arrays, grad_output, lambda: _operator_gradients(ctx, arrays, rest, grad_output))
    return (*grads, None, None, None, None, None, numbers, [None] * ctx.tensors, None, None, None)


fused_loss_operator.register_autograd(_operator_backward, setup_context=_setup_operator_context)
