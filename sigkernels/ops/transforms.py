"""The fused loss under torch.func: grad, vjp, jacrev, and vmap, which is folded into the rows of the batch.

A transform decides late which gradients it wants, so the forward pass makes none here; the backward pass sweeps again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..losses import ElementwiseLoss
from .differentiable import one_by_one
from .fused_loss import LEARNED, NO_NEEDS, Arrays, Gradients, Spec, evaluate
from .missing_derivatives import ReverseModeOnly, refuse_double_backward
from .targets import from_target_tensors

_X, _DENSE = 0, 7  # among the arrays: what a mapped dimension may be folded into
_SPARSE = slice(5, 7)


class TransformedLoss(ReverseModeOnly):
    """The loss alone."""

    @staticmethod
    def forward(spec: list[Spec], *arrays: Tensor | None) -> Tensor:  # type: ignore[override]
        return _evaluate(spec[0], arrays, None, NO_NEEDS)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.spec, *arrays = inputs
        ctx.save_for_backward(*arrays)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        arrays, needs = ctx.saved_tensors, tuple(ctx.needs_input_grad[1 : 1 + LEARNED])
        with torch.no_grad():
            remaining = iter(TransformedGradients.apply(ctx.spec, needs, grad_output, *arrays))
            grads = [
                next(remaining).to(array.dtype) if need else None for need, array in zip(needs, arrays, strict=False)
            ]
        return None, *refuse_double_backward([*arrays[:LEARNED], grad_output], grads), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], spec: list[Spec], *arrays: Tensor | None) -> tuple[Tensor, int]:
        dims = in_dims[1:]
        if not _folds(spec[0], dims):
            return one_by_one(lambda *item: TransformedLoss.apply(spec, *item), info, dims, arrays)
        rows = TransformedLoss.apply([spec[0]._replace(reduction="none")], *_fold(info.batch_size, dims, arrays))
        rows = rows.reshape(info.batch_size, -1)
        if spec[0].reduction == "none":
            return rows, 0
        return rows.sum(1) * (spec[0].scale(rows.shape[1])), 0


class TransformedGradients(torch.autograd.Function):
    """The gradients that are needed, for an upstream gradient ``[]`` or, with reduction="none", ``[B]``."""

    @staticmethod
    def forward(spec: list[Spec], needs: tuple[bool, ...], upstream: Tensor, *arrays: Tensor | None) -> Any:  # type: ignore[override]
        if spec[0].reduction == "none":
            grads = _evaluate(spec[0], arrays, upstream, needs)[1]
        else:
            grads = [None if g is None else g * upstream for g in _evaluate(spec[0], arrays, None, needs)[1]]
        return tuple(grad for grad in grads if grad is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        return None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], spec: list[Spec], needs: tuple[bool, ...], *mapped: Any
    ) -> tuple[Any, Any]:
        dims = in_dims[2:]
        if not _folds(spec[0], dims[1:]) or any(needs[1:]):  # every sample has its own gradient of the weight

            def one(*item: Any) -> Any:
                return TransformedGradients.apply(spec, needs, *item)

            return one_by_one(one, info, dims, mapped)
        arrays: list[Any] = _fold(info.batch_size, dims[1:], mapped[1:])
        upstream, batch = mapped[0], arrays[_X].shape[0] // info.batch_size
        upstream = upstream.movedim(dims[0], 0) if dims[0] is not None else upstream[None]
        if spec[0].reduction != "none":
            upstream = upstream[:, None] * spec[0].scale(batch)
        rows = upstream.expand(info.batch_size, batch).reshape(-1)
        (grad_x,) = TransformedGradients.apply([spec[0]._replace(reduction="none")], needs, rows, *arrays)
        return (grad_x.reshape(info.batch_size, batch, -1),), (0,)


def _evaluate(spec: Spec, arrays: Arrays, row_scale: Tensor | None, needs: Sequence[bool]) -> tuple[Tensor, Gradients]:
    targets = from_target_tensors(arrays[LEARNED:], spec.meta.num_labels)
    return evaluate(spec, arrays[:LEARNED], targets, row_scale, needs)


def _folds(spec: Spec, dims: Sequence[int | None]) -> bool:
    """Whether the mapped dimension can be more rows: the loss is one of single logits, and only rows are mapped."""
    others = [dim for at, dim in enumerate(dims) if at not in (_X, _DENSE)]
    return isinstance(spec.loss, ElementwiseLoss) and spec.unknown is None and all(dim is None for dim in others)


def _fold(size: int, dims: Sequence[int | None], arrays: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The arrays with ``size`` times as many rows."""
    folded = list(arrays)
    for at in (_X, _DENSE):
        array, dim = arrays[at], dims[at]
        if array is not None:
            mapped = array.expand(size, *array.shape) if dim is None else array.movedim(dim, 0)
            folded[at] = mapped.flatten(0, 1)
    indices, offsets = arrays[_SPARSE]
    if indices is not None and offsets is not None:
        starts = torch.arange(size, device=offsets.device) * indices.shape[0]
        ends = (offsets[1:] + starts[:, None]).flatten()
        folded[_SPARSE] = [indices.repeat(size), torch.cat([offsets[:1], ends])]
    return folded
