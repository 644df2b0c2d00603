"""How an operation without second or forward-mode derivatives says so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

DOUBLE_BACKWARD = (
    "the fused loss has no second derivative: it never keeps the logits that one would need. "
    "For double backward take the logits, head(h) or functional.dft_logits, and torch's own loss on them"
)
FORWARD_MODE = (
    "heads and fused losses have no forward-mode derivatives (torch.func.jvp, jacfwd, hessian); use torch.func.vjp, grad or "
    "jacrev, or the same layers in plain torch, head.to_linear(), and torch's own loss on their logits"
)


class ReverseModeOnly(torch.autograd.Function):
    """A function that says so when it is asked for forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:  # type: ignore[override]
        raise NotImplementedError(FORWARD_MODE)


def refuse_double_backward(inputs: list[Tensor | None], grads: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients, tied to the inputs by a function that explains itself when they are differentiated again."""
    kept = [grad for grad in grads if grad is not None]
    tied = iter(_Refuse.apply(len(kept), *kept, *[t for t in inputs if t is not None]))
    return [None if grad is None else next(tied) for grad in grads]


class _Refuse(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> Any:  # type: ignore[override]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(DOUBLE_BACKWARD)
