"""Gradient clipping for models with sharded heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .validation import check_number, is_distributed


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of a whole model of which some parameters are DTensors and others are not.

    torch's function takes parameters of one kind and one device mesh, and refuses an encoder of plain tensors with a
    sharded head behind it. This one counts every parameter once, and every rank gets the same norm. All ranks have to
    call it.

    Args:
        model: whose gradients are clipped, in place.
        max_norm: the largest norm that they may have together.
        norm_type: the order of the norm; ``math.inf`` for the largest entry.
        error_if_nonfinite: raise a ``RuntimeError`` where the norm is NaN or infinite.

    Returns:
        The norm before clipping, ``[]``, the same on every rank.

    Example:
        >>> head = sk.DFTHead(16, 50, k=2, slack=3)
        >>> head(torch.randn(4, 16), [[1], [], [2, 3], [4]], reduction="sum").backward()
        >>> norm = sk.clip_grad_norm_(head, max_norm=1.0)
        >>> norm.shape
        torch.Size([])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}: give the model, not its parameters"
        )
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if value != math.inf and check_number(name, value) < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if norm_type == 0:
        raise ValueError(
            "norm_type must be positive, got 0: it would count tensors; give 2.0, or math.inf for the largest"
        )
    parameters = list(model.parameters())
    groups: dict[Any, list[Tensor]] = {None: []}  # by device mesh
    for p in parameters:
        if p.grad is not None:
            groups.setdefault(getattr(p.grad, "device_mesh", None), []).append(p.grad)
    device = parameters[0].device if parameters else None
    norms = [_whole(nn.utils.get_total_norm(grads, norm_type)).to(device) for grads in groups.values()]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(total)}; nothing was clipped")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grads in groups.values():
        for grad in grads:
            own = grad.to_local() if is_distributed(grad) else grad  # type: ignore[attr-defined]
            own.mul_(factor.to(own.device))
    return total


def _whole(norm: Any) -> Tensor:
    """The norm of gradients that are DTensors is one itself."""
    return norm.full_tensor() if is_distributed(norm) else norm
