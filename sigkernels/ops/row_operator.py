"""The operator of a row loss that turns its logits into their gradient in place, and the function around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.interface import accumulate_dtype, sum_dtype
from .row_loss import entries, finish_rows, split_targets


class RowLossOperator:
    """``sigkernels::name`` for eager and compiled calls, differentiable to any order.

    Args:
        name: of the operator.
        rows_and_grad_: ``(z [B, n], entries, k, *settings, row_scale [B] or None)`` → the loss of each row ``[B]``;
            z is used up, and becomes the gradient times ``row_scale`` where that is given.
        reference: ``(z, entries, k, *settings)`` → the same in plain differentiable torch, for second derivatives.
    """

    def __init__(self, name: str, rows_and_grad_: Callable[..., Tensor], reference: Callable[..., Tensor]) -> None:
        @torch.library.custom_op(f"sigkernels::{name}", mutates_args=())
        def operator(
            z: Tensor,  # [B, n]
            indices: Tensor | None,
            offsets: Tensor | None,
            dense: Tensor | None,
            k: int,
            settings: Sequence[float],
            row_scale: Tensor | None,  # [B]: make the gradient, times this
        ) -> tuple[Tensor, Tensor]:  # the loss of each row [B], the gradient [B, n] (empty without row_scale)
            work = z.to(accumulate_dtype(z.dtype), copy=True)
            rows = rows_and_grad_(work, entries(indices, offsets, dense, z.shape[1]), k, *settings, row_scale)
            return rows, z.new_empty(0) if row_scale is None else work.to(z.dtype)

        @operator.register_fake
        def _(
            z: Tensor, indices: Any, offsets: Any, dense: Any, k: int, settings: Any, row_scale: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            rows = z.new_empty(z.shape[0], dtype=sum_dtype(z.device))
            return rows, z.new_empty(0) if row_scale is None else z.new_empty(z.shape)

        def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            z, indices, offsets, dense, ctx.k, ctx.settings, _ = inputs
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(z, indices, offsets, dense)

        def pull(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
            z, indices, offsets, dense = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return operator(z, indices, offsets, dense, ctx.k, ctx.settings, grad)[1], *[None] * 6
            # Somebody will differentiate the gradient: take it from the loss in operations that autograd knows.
            rows = reference(z, entries(indices, offsets, dense, z.shape[1]), ctx.k, *ctx.settings)
            (grad_z,) = torch.autograd.grad(rows, z, grad.to(rows.dtype), create_graph=True)
            return grad_z, *[None] * 6

        operator.register_autograd(pull, setup_context=save)
        self.operator = operator

    def __call__(self, z: Tensor, targets: Any, k: int, settings: Sequence[float], reduction: str) -> Tensor:
        """The reduced loss of checked logits ``z [..., n]``."""
        flat = z.reshape(-1, z.shape[-1])
        rows = self.operator(flat, *split_targets(targets, z), k, settings, None)[0]
        return finish_rows(rows, reduction, z)
