"""Gradient clipping for models with sharded heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .head_base import Head
from .validation import is_distributed


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of a whole model whose heads may be sharded over processes.

    A rank holds the gradients of its own labels only, so that torch's function finds another norm on every rank and
    scales the ranks' copies of the encoder apart. This one counts every label once. Every rank of the heads' process
    groups has to call it.

    Returns:
        The norm before clipping, ``[]``, the same on every rank.

    Example:
        >>> head = sk.DFTHead(16, 50, k=2, slack=3)
        >>> head(torch.randn(4, 16), [[1], [], [2, 3], [4]], reduction="sum").backward()
        >>> norm = sk.clip_grad_norm_(head, max_norm=1.0)
        >>> norm.shape
        torch.Size([])
    """
    parameters = list(model.parameters())
    heads = [module for module in model.modules() if isinstance(module, Head)]
    sharded = [(head.shard, head.sharded_parameters()) for head in heads if head.shard is not None]
    own = {id(p) for _, part in sharded for p in part}
    norms = [_norm([p for p in parameters if id(p) not in own], norm_type)]
    norms += [shard.norm(_norm(part, norm_type), norm_type) for shard, part in sharded]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[-1].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {float(total)}; nothing was clipped")
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _norm(parameters: list[nn.Parameter], order: float) -> Tensor:
    """The norm of all their gradients; a DTensor's is that of the whole tensor."""
    norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], order)
    norm = norm.full_tensor() if is_distributed(norm) else norm
    return norm.to(parameters[0].device) if parameters else norm
