"""Column losses in plain torch: one pass over label chunks, each of which holds all rows of its labels.

``average="pooled"`` needs the sums of all labels before any gradient: it walks over the labels twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..layer import Layer
from ..losses import ColumnLoss, ConfusionLoss, ConfusionParams
from ..losses.base import tile_gradients, tile_value
from ..losses.kernel_params import SIGMOID_OF_PROBABILITY, UNBOUNDED
from .interface import BackendError, ColumnResult, LossCall, gradient_dtype, like_setting, sum_dtype
from .library_pass import GradientSums, Slopes
from .library_walk import Chunk, LabelWalk, without_autocast
from .pointwise_torch import ChunkTargets

_SETTINGS = ("beta", "eta")


class _Columns(NamedTuple):
    """A chunk of labels: everything that the loss needs of it."""

    chunk: Chunk
    score: Tensor  # [B, c]: S, or 1-S for a mirrored metric
    slope: Tensor  # [B, c]: ∂score/∂z
    t: Tensor | None  # [B, c]: u + η
    steep: Tensor | None  # [B, c]: ∂score/∂(β(u + η))
    y: Tensor  # [B, c]: y, or 1-y, above `least`
    least: Tensor | float  # [c] float64: the smallest target of each label where targets are not just 0 and 1
    tp: Tensor  # [c] float64: sums of score · y
    s: Tensor  # [c]
    p: Tensor  # [c]


@without_autocast
def column_loss(call: LossCall) -> ColumnResult:
    """A column loss and its gradients: in closed form where the loss has one, else by autograd of each chunk."""
    loss = cast(ColumnLoss, call.loss)
    params = cast(ConfusionParams | None, loss.kernel_params())
    return _by_autograd(call, loss) if params is None else _confusion_loss(call, cast(ConfusionLoss, loss), params)


def _by_autograd(call: LossCall, loss: ColumnLoss) -> ColumnResult:
    x, layer = call.x, call.layer
    if loss.is_pooled:
        raise BackendError(
            f"{type(loss).__name__} with average='pooled' needs the sums of all labels, which only SigmoidF1 and "
            "UnboundedF1 themselves have a pass for; use average='label'"
        )
    walk = LabelWalk(x, layer, False)
    wide = sum_dtype(x.device)
    sums = GradientSums(walk, call.needs, gradient_dtype(x.dtype))
    settings = {name: getattr(loss, name) for name, need in zip(_SETTINGS, call.needs[3:], strict=True) if need}
    grads = {n: torch.zeros(layer.num_rows if s.ndim else (), dtype=wide, device=x.device) for n, s in settings.items()}
    value = torch.zeros((), dtype=wide, device=x.device)
    targets = ChunkTargets(call.targets, layer, walk)
    for chunk in walk:
        start, stop, z = chunk.start, chunk.stop, walk.add_bias_(chunk)
        part = loss.at_labels(z, layer.label_start + start, layer.label_start + stop)
        leaves = {name: getattr(part, name).detach().requires_grad_() for name in settings}
        part = dataclasses.replace(part, **leaves) if leaves else part
        f, leaf = tile_value(part.column_values, z, targets(start, stop), z.shape[1:], type(loss).__name__)
        value += f.detach().sum(dtype=wide) * call.scale
        if not any(call.needs):
            continue
        g, *others = tile_gradients(
            f, torch.full_like(f, float(call.scale)), [leaf, *leaves.values()], type(loss).__name__
        )
        sums.add(chunk, Slopes(g))
        for name, grad in zip(leaves, others, strict=True):
            if grad.ndim:
                grads[name][start:stop] = grad
            else:
                grads[name] += grad
    return ColumnResult(value, *sums.finish(), grads.get("beta"), grads.get("eta"))


def _confusion_loss(call: LossCall, loss: ConfusionLoss, params: ConfusionParams) -> ColumnResult:
    x, layer, needs, scale = call.x, call.layer, call.needs, float(call.scale)
    walk = LabelWalk(x, layer, False)
    wide = sum_dtype(x.device)
    tiny = torch.finfo(walk.out).tiny
    value = torch.zeros((), dtype=wide, device=x.device)
    pooled = None
    if params.pooled:
        totals = torch.zeros(3, dtype=wide, device=x.device)
        for c in _columns(walk, call, params, False):
            totals += torch.stack([c.tp.sum(), c.s.sum(), c.p.sum()])
        tp, s, p = totals if call.pool is None else call.pool(totals)
        fraction, pooled = loss.fraction(tp, s, p, x.shape[0] * layer.num_labels, tiny)
        value = (1 - fraction) * scale
        if not any(needs):
            return ColumnResult(value, None, None, None)
    sums = GradientSums(walk, needs, gradient_dtype(x.dtype))
    grad_beta, grad_eta = (
        torch.zeros(layer.num_rows, dtype=wide, device=x.device) if need else None for need in needs[3:]
    )
    for c in _columns(walk, call, params, any(needs)):
        slopes = pooled
        if slopes is None:
            fraction, slopes = loss.fraction(c.tp, c.s, c.p, x.shape[0], tiny, c.least)
            value += (1 - fraction).sum() * scale
        if not any(needs):
            continue
        inside = slice(c.chunk.start, c.chunk.stop)
        # ∂loss/∂S, [B, c]: the sign of 1 - value
        by_score = (c.y * (-scale * slopes.on_y).to(c.y.dtype)).add_((-scale * slopes.on_all).to(c.y.dtype))
        if c.t is not None and c.steep is not None and (grad_beta is not None or grad_eta is not None):
            by_t = by_score * c.steep  # ∂loss/∂(β(u + η))
            if grad_beta is not None:
                grad_beta[inside] = (by_t * c.t).sum(0, dtype=wide)
            if grad_eta is not None:
                beta = _setting(params.beta, layer, inside, wide, x.device)
                grad_eta[inside] = by_t.sum(0, dtype=wide) * _finite(beta)
        sums.add(c.chunk, Slopes(by_score.mul_(c.slope)))
    settings = like_setting(params.beta, grad_beta), like_setting(params.eta, grad_eta)
    return ColumnResult(value, *sums.finish(), *settings)


def _columns(walk: LabelWalk, call: LossCall, params: ConfusionParams, slopes: bool) -> Iterator[_Columns]:
    chunk_targets = ChunkTargets(call.targets, call.layer, walk)
    wide = sum_dtype(walk.x.device)
    soft = isinstance(call.targets, Tensor) and not params.pooled and walk.x.shape[0] > 0
    for chunk in walk:
        start, stop, z = chunk.start, chunk.stop, walk.add_bias_(chunk)
        y = chunk_targets(start, stop)
        if params.mirrored:
            y = 1 - y
        p = y.sum(0).to(wide)
        least: Tensor | float = 0.0
        if soft:
            lowest = y.amin(0)
            y, least = y - lowest, lowest.to(wide)
        t = steep = None
        if params.form != UNBOUNDED:
            inside = slice(start, stop)
            beta, eta = (_setting(s, call.layer, inside, z.dtype, z.device) for s in (params.beta, params.eta))
            # Each line is a walk over [B, c]: those that would change nothing are left out.
            u = torch.sigmoid(z) if params.form == SIGMOID_OF_PROBABILITY else z
            t = u if isinstance(eta, float) and eta == 0 else u + eta
            signed = _times(t, -beta if params.mirrored else beta)
            score = torch.sigmoid(signed)
            slope = score
            if slopes:
                steep = torch.sigmoid(-signed).mul_(score)  # S (1-S) without the cancellation of 1-S
                if params.mirrored:
                    steep.neg_()
                slope = _times(steep, _finite(beta))
                if params.form == SIGMOID_OF_PROBABILITY:
                    slope = slope * torch.sigmoid(-z).mul_(u)
        else:
            score = 1 - z if params.mirrored else z
            slope = torch.full((), -1.0 if params.mirrored else 1.0, dtype=z.dtype, device=z.device)
        tp, s = (score * y).sum(0).to(wide), score.sum(0).to(wide)
        yield _Columns(chunk, score, slope, t, steep, y, least, tp, s, p)


def _times(a: Tensor, factor: Tensor | float) -> Tensor:
    return a if isinstance(factor, float) and factor == 1 else a * factor


def _finite(beta: Tensor | float) -> Tensor | float:
    """β for slopes: an infinite one makes a step of S, whose slope is 0, and 0·β must be, too."""
    return torch.nan_to_num(beta, nan=torch.nan) if isinstance(beta, Tensor) else beta


def _setting(
    setting: float | Tensor, layer: Layer, inside: slice, dtype: torch.dtype, device: torch.device
) -> Tensor | float:
    """β or η: a number, or its entries for the labels ``inside`` the layer."""
    if not isinstance(setting, Tensor):
        return float(setting)
    if setting.ndim:
        setting = setting[layer.label_start + inside.start : layer.label_start + inside.stop]
    return setting.detach().to(dtype=dtype, device=device)
