"""The step of an optimizer on a chunk of labels in plain torch operations: the twin of ``csrc/cpu/update_tile.h``.

The random bits of stochastic rounding are the same as there, for every label and column.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..layer_update import ADAGRAD, MOMENTUM, SGD, ParameterUpdate

_LOW = 0xFFFFFFFF


def apply_update(update: ParameterUpdate, grad: Tensor, start: int, label: int) -> None:
    """Steps the rows from ``start`` on, which are labels from ``label`` on, by ``grad [c, s]`` or ``[c]``; grad is used up."""
    rows = slice(start, start + grad.shape[0])
    weight = update.parameter.detach()[rows]
    w = weight.to(grad.dtype, copy=True)
    lost = None if update.compensation is None else update.compensation[rows]
    if lost is not None:
        w += lost
    first = None if update.first is None else update.first[rows]
    _step_(update, w, grad, first, rows)
    if lost is not None:
        weight.copy_(w)
        lost.copy_(w - weight)
    elif update.rounding == "stochastic" and weight.dtype == torch.bfloat16:
        weight.copy_(_round_at_random(w, random_bits(update.key, label, w)))
    else:
        weight.copy_(w)


def _step_(update: ParameterUpdate, w: Tensor, g: Tensor, first: Tensor | None, rows: slice) -> None:
    """Changes ``w`` and the state."""
    lr = update.lr
    if update.kind in (SGD, MOMENTUM, ADAGRAD) and update.weight_decay:
        g.add_(w, alpha=update.weight_decay)
    if update.kind == SGD:
        w.sub_(g, alpha=lr)
        return
    assert first is not None
    if update.kind == MOMENTUM:
        first.mul_(update.momentum).add_(g)
        w.sub_(first, alpha=lr)
    elif update.kind == ADAGRAD:
        first += g.square() if g.ndim == 1 else g.square().mean(1)
        scale = torch.where(first == 0, 0, lr / (first.sqrt() + update.eps))
        w.sub_(g * (scale if g.ndim == 1 else scale[:, None]))
    else:
        assert update.second is not None
        second = update.second[rows]
        first.lerp_(g, 1 - update.beta1)
        second.mul_(update.beta2).addcmul_(g, g, value=1 - update.beta2)
        correction1, correction2 = 1 - update.beta1**update.step, 1 - update.beta2**update.step
        w.mul_(1 - lr * update.weight_decay)
        w.addcdiv_(first, (second.sqrt() / math.sqrt(correction2)).add_(update.eps), value=-lr / correction1)


def random_bits(key: int, label: int, like: Tensor) -> Tensor:
    """32 random bits for every entry of ``like [c, s]`` or ``[c]``, int64; csrc/core/optim.h has the same."""
    at = torch.arange(label, label + like.shape[0], device=like.device)
    folded = (at & _LOW) ^ (((at >> 32) * 0x85EBCA6B) & _LOW)
    start = _mix(folded ^ (key & _LOW))
    middle = _mix((folded + (key >> 32)) & _LOW)
    if like.ndim == 1:
        return _second_half(_first_half(start) ^ middle)
    column = torch.arange(like.shape[1], device=like.device) * 0x9E3779B9
    return _second_half(_first_half((start[:, None] + column) & _LOW) ^ middle[:, None])


def _mix(x: Tensor) -> Tensor:
    return _second_half(_first_half(x))


def _first_half(x: Tensor) -> Tensor:
    return ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW


def _second_half(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _LOW
    return x ^ (x >> 15)


def _round_at_random(w: Tensor, random: Tensor) -> Tensor:
    """``w``, float32, to bfloat16: up or down, so that the mean of the result is w."""
    bits = w.view(torch.int32)
    up = ((bits.to(torch.int64) & _LOW) + (random & 0xFFFF)) & 0xFFFF0000
    rounded = torch.where(up >= 2**31, up - 2**32, up).to(torch.int32).view(torch.float32)
    return torch.where(w.isfinite(), rounded, w).to(torch.bfloat16)
