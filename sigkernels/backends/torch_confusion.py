"""Confusion-matrix losses in plain torch: one pass over label chunks, each of which holds all rows of its labels.

``average="pooled"`` needs the sums of all labels before any gradient: it walks over the labels twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..losses import ConfusionLoss, SigmoidF1
from .interface import gradient_dtype, sum_dtype
from .torch_tiled import _add_grad_x, _ChunkTargets, _Pass


class ConfusionResult(NamedTuple):
    """The outcome of one call; a gradient that nobody asked for is None. dtypes as for LossResult."""

    value: Tensor  # [] float64
    grad_x: Tensor | None  # [B, D]
    grad_weight: Tensor | None  # [m, s]
    grad_bias: Tensor | None  # [m]
    grad_beta: Tensor | None  # float64, [] or [m] as beta is
    grad_eta: Tensor | None


class _Columns(NamedTuple):
    """A chunk of labels: everything that the loss needs of it."""

    number: int
    start: int
    stop: int
    weight: Tensor  # [c, s]
    score: Tensor  # [B, c]: S, or 1-S for a mirrored metric
    slope: Tensor  # [B, c]: ∂score/∂z
    t: Tensor | None  # [B, c]: u + η
    steep: Tensor | None  # [B, c]: ∂score/∂(β(u + η))
    y: Tensor  # [B, c]: y, or 1-y, above `least`
    least: Tensor | float  # [c] float64: the smallest target of each label where targets are not just 0 and 1
    tp: Tensor  # [c] float64: sums of score · y
    s: Tensor  # [c]
    p: Tensor  # [c]


def confusion_loss(
    x: Tensor,  # [B, D]
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: ConfusionLoss,
    reduction: str,
    needs: tuple[bool, bool, bool, bool, bool],  # x, weight, bias, beta, eta
) -> ConfusionResult:
    """The loss and its gradients; ``reduction`` is "mean" or "sum"."""
    walk = _Pass(x, layer)
    wide, out_dtype = sum_dtype(x.device), gradient_dtype(x.dtype)
    tiny = torch.finfo(walk.x.dtype).tiny
    scale = 1 / layer.num_labels if reduction == "mean" and loss.average == "label" else 1.0
    value = torch.zeros((), dtype=wide, device=x.device)
    pooled = None
    if loss.average == "pooled":
        sums = torch.zeros(3, dtype=wide, device=x.device)
        for c in _columns(walk, layer, targets, loss, False):
            sums += torch.stack([c.tp.sum(), c.s.sum(), c.p.sum()])
        fraction, pooled = loss.fraction(sums[0], sums[1], sums[2], x.shape[0] * layer.num_rows, tiny)
        value = 1 - fraction
        if not any(needs):
            return ConfusionResult(value, None, None, None, None, None)
    grad_x = torch.zeros_like(walk.x) if needs[0] else None
    grad_weight = torch.empty(layer.weight.shape, dtype=out_dtype, device=x.device) if needs[1] else None
    grad_bias = torch.empty(layer.num_rows, dtype=out_dtype, device=x.device) if needs[2] else None
    grad_beta = torch.zeros(layer.num_rows if needs[3] else 0, dtype=wide, device=x.device)
    grad_eta = torch.zeros(layer.num_rows if needs[4] else 0, dtype=wide, device=x.device)
    for c in _columns(walk, layer, targets, loss, any(needs)):
        slopes = pooled
        if slopes is None:
            fraction, slopes = loss.fraction(c.tp, c.s, c.p, x.shape[0], tiny, c.least)
            value += (1 - fraction).sum() * scale
        if not any(needs):
            continue
        here = slice(c.start, c.stop)
        # ∂loss/∂S, [B, c]: the sign of 1 - value
        by_score = (c.y * (-scale * slopes.on_y).to(c.y.dtype)).add_((-scale * slopes.on_all).to(c.y.dtype))
        if c.t is not None and c.steep is not None and (needs[3] or needs[4]):
            by_t = by_score * c.steep  # ∂loss/∂(β(u + η))
            if needs[3]:
                grad_beta[here] = (by_t * c.t).sum(0, dtype=wide)
            if needs[4]:
                grad_eta[here] = by_t.sum(0, dtype=wide) * _setting(loss, "beta", layer, here, wide, x.device)
        g = by_score.mul_(c.slope)
        if grad_x is not None:
            _add_grad_x(grad_x, g, walk, c.number, c.weight)
        if grad_weight is not None:
            grad_weight[here] = g.T @ walk.slack
        if grad_bias is not None:
            grad_bias[here] = g.sum(0)
    return ConfusionResult(
        value,
        None if grad_x is None else grad_x.to(out_dtype),
        grad_weight,
        grad_bias,
        _like_setting(loss, "beta", grad_beta) if needs[3] else None,
        _like_setting(loss, "eta", grad_eta) if needs[4] else None,
    )


def _columns(
    walk: _Pass, layer: Layer, targets: LabelSets | Tensor, loss: ConfusionLoss, slopes: bool
) -> Iterator[_Columns]:
    chunk_targets = _ChunkTargets(targets, layer, walk)
    wide = sum_dtype(walk.x.device)
    soft = isinstance(targets, Tensor) and loss.average == "label" and walk.x.shape[0] > 0
    for index, (start, stop, weight, z) in enumerate(walk):
        y = chunk_targets(start, stop)
        if loss.mirrored:
            y = 1 - y
        p = y.sum(0).to(wide)
        least: Tensor | float = 0.0
        if soft:
            lowest = y.amin(0)
            y, least = y - lowest, lowest.to(wide)
        t = steep = None
        if isinstance(loss, SigmoidF1):
            here = slice(start, stop)
            beta, eta = (_setting(loss, name, layer, here, z.dtype, z.device) for name in ("beta", "eta"))
            # Each line is a walk over [B, c]: those that would change nothing are left out.
            u = torch.sigmoid(z) if loss.on == "probability" else z
            t = u if isinstance(eta, float) and eta == 0 else u + eta
            turned = _times(t, -beta if loss.mirrored else beta)
            score = torch.sigmoid(turned)
            slope = score
            if slopes:
                steep = torch.sigmoid(-turned).mul_(score)  # S (1-S) without the cancellation of 1-S
                if loss.mirrored:
                    steep.neg_()
                slope = _times(steep, beta)
                if loss.on == "probability":
                    slope = slope * torch.sigmoid(-z).mul_(u)
        else:
            score = 1 - z if loss.mirrored else z
            slope = torch.full((), -1.0 if loss.mirrored else 1.0, dtype=z.dtype, device=z.device)
        yield _Columns(
            index,
            start,
            stop,
            weight,
            score,
            slope,
            t,
            steep,
            y,
            least,
            tp=(score * y).sum(0).to(wide),
            s=score.sum(0).to(wide),
            p=p,
        )


def _times(a: Tensor, factor: Tensor | float) -> Tensor:
    return a if isinstance(factor, float) and factor == 1 else a * factor


def _setting(
    loss: ConfusionLoss, name: str, layer: Layer, here: slice, dtype: torch.dtype, device: torch.device
) -> Tensor | float:
    """β or η: a number, or its entries for the labels ``here`` of the layer."""
    setting = getattr(loss, name)
    if not isinstance(setting, Tensor):
        return float(setting)
    if setting.ndim:
        setting = setting[layer.label_start + here.start : layer.label_start + here.stop]
    return setting.detach().to(dtype=dtype, device=device)


def _like_setting(loss: ConfusionLoss, name: str, grad: Tensor) -> Tensor:
    """The gradient of β or η, ``[m]``, in the form that the setting has."""
    return grad if getattr(loss, name).ndim else grad.sum()
