"""A loss of rows as operators: of its values, and of their gradient, which the logits' own memory becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.interface import accumulate_dtype, sum_dtype
from .differentiable import Differentiable
from .row_loss import entries, finish_rows, split_targets


class RowLossOperator:
    """``sigkernels::name`` for eager and compiled calls, differentiable to any order.

    Args:
        name: of the operator; that of its gradient ends in ``_backward``.
        rows_and_grad_: ``(z [B, n], entries, k, *settings, row_scale [B] or None)`` → the loss of each row ``[B]``;
            z is used up, and becomes the gradient times ``row_scale`` where that is given.
        reference: ``(z, entries, k, *settings)`` → the same in plain differentiable torch, for second derivatives.
    """

    def __init__(self, name: str, rows_and_grad_: Callable[..., Tensor], reference: Callable[..., Tensor]) -> None:
        def values(
            z: Tensor,  # [B, n]
            indices: Tensor | None,
            offsets: Tensor | None,
            dense: Tensor | None,
            k: int,
            settings: Sequence[float],
        ) -> Tensor:  # [B]
            work = z.to(accumulate_dtype(z.dtype), copy=True)
            return rows_and_grad_(work, entries(indices, offsets, dense, z.shape[1]), k, *settings, None)

        def gradient(
            row_scale: Tensor,  # [B]
            z: Tensor,
            indices: Tensor | None,
            offsets: Tensor | None,
            dense: Tensor | None,
            k: int,
            settings: Sequence[float],
        ) -> Tensor:  # [B, n]
            work = z.to(accumulate_dtype(z.dtype), copy=True)
            rows_and_grad_(work, entries(indices, offsets, dense, z.shape[1]), k, *settings, row_scale)
            return work.to(z.dtype)

        def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            *arrays, ctx.k, ctx.settings = inputs
            ctx.save_for_backward(*arrays)

        def pull(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
            return self.gradient(grad, *ctx.saved_tensors, ctx.k, ctx.settings), *[None] * 5

        def pull_again(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
            row_scale, z, indices, offsets, dense = ctx.saved_tensors
            at = entries(indices, offsets, dense, z.shape[1])

            def formula(row_scale: Tensor, z: Tensor) -> Tensor:
                rows, pulled, *_ = torch.func.vjp(lambda z: reference(z, at, ctx.k, *ctx.settings), z)
                return pulled(row_scale.to(rows.dtype))[0]

            return *torch.func.vjp(formula, row_scale, z)[1](gg), *[None] * 5

        def operator(suffix: str, forward: Callable[..., Tensor]) -> Any:
            return torch.library.custom_op(f"sigkernels::{name}{suffix}", forward, mutates_args=())

        self.values = Differentiable(operator("", values), values, save, pull)
        self.gradient = Differentiable(operator("_backward", gradient), gradient, save, pull_again)
        self.values.operator.register_fake(lambda z, *_: z.new_empty(z.shape[0], dtype=sum_dtype(z.device)))
        self.gradient.operator.register_fake(lambda row_scale, z, *_: z.new_empty(z.shape))

    def __call__(self, z: Tensor, targets: Any, k: int, settings: Sequence[float], reduction: str) -> Tensor:
        """The reduced loss of checked logits ``z [..., n]``."""
        flat = z.reshape(-1, z.shape[-1])
        return finish_rows(self.values(flat, *split_targets(targets, z), k, settings), reduction, z)
