"""The LML layer as published: a bracket around ν that is cut into branches, all of them tried at once.

Written from Algorithm 1 of Amos, Koltun, Kolter 2019, with the defaults of its authors: ten branches, a bracket of
±7 around the k-th largest logit, and a final width of 1e-4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BracketingLML(torch.autograd.Function):
    """``[B, n]`` → ``[B, n]``; holds ``B × branch × n`` while it searches."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, k: int, eps: float = 1e-4, branch: int = 10) -> Tensor:  # type: ignore[override]
        top = torch.topk(z, k + 1, dim=1).values
        low, high = -top[:, k - 1] - 7, -top[:, k] + 7
        fractions = torch.linspace(0, 1, branch, dtype=z.dtype, device=z.device)
        for _ in range(100):
            width = high - low
            rows = (width > eps).nonzero()[:, 0]
            if rows.numel() == 0:
                break
            nus = low[rows, None] + width[rows, None] * fractions
            sums = torch.sigmoid(z[rows, None, :] + nus[:, :, None]).sum(2)  # [rows, branch]
            left = ((sums < k).sum(1) - 1).clamp(0, branch - 2)[:, None]
            low[rows] = nus.gather(1, left)[:, 0]
            high[rows] = nus.gather(1, left + 1)[:, 0]
        y = torch.sigmoid(z + ((low + high) / 2)[:, None])
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        h = 1 / (1 / y + 1 / (1 - y))
        mean = (h * grad).sum(1) / h.sum(1)
        return h * (grad - mean[:, None]), None, None, None


def bracketing_lml(z: Tensor, k: int) -> Tensor:
    """The published layer with its published settings."""
    return BracketingLML.apply(z, k)
