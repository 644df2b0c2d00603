"""Confusion-matrix losses by the compiled tile loop; ``csrc/cpu/confusion_tile.h`` has the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layer import Layer
from ..losses import ConfusionLoss, ConfusionParams
from .compiled_core import core as _C
from .cpu import new_call, set_targets, zero_gradients
from .interface import ColumnResult, LossCall, accumulate_dtype, label_vector, like_setting


def column_loss(call: LossCall) -> ColumnResult:
    """A confusion-matrix loss and its gradients."""
    loss, scale = call.loss, float(call.scale)
    assert isinstance(loss, ConfusionLoss)
    params = loss.kernel_params()
    assert isinstance(params, ConfusionParams)
    if not params.pooled:
        sums, result = _sweep(call, params)
        return result._replace(value=sums[0] * scale)
    # Pooled: the sums of all labels first, then the gradients with slopes that all labels share.
    sums, result = _sweep(call._replace(needs=(False,) * 5), params)
    tiny = torch.finfo(accumulate_dtype(call.x.dtype)).tiny
    tp, s, p = sums[1:] if call.pool is None else call.pool(sums[1:])
    fraction, slopes = loss.fraction(tp, s, p, call.x.shape[0] * call.layer.num_labels, tiny)
    if any(call.needs):
        result = _sweep(call, params, (-float(slopes.on_y), -float(slopes.on_all)))[1]
    return result._replace(value=(1 - fraction) * scale)


def _sweep(
    call: LossCall, params: ConfusionParams, slopes: tuple[float, float] | None = None
) -> tuple[Tensor, ColumnResult]:
    """One pass: the sums over labels of (1 - value, tp, s, p), float64 ``[4]``, and the gradients."""
    x, layer, needs = call.x, call.layer, call.needs
    real = accumulate_dtype(x.dtype)
    if not (x.shape[0] and layer.num_rows):
        return _no_terms(call, params)
    loop = new_call(x, layer, rows_at_once=True)
    set_targets(loop, call.targets)
    sums, grad_x, grad_weight, grad_bias, grad_beta, grad_eta = _C.confusion_loss(
        loop,
        needs[:3],
        *needs[3:],
        **params.numbers(),
        tiny=torch.finfo(real).tiny,
        scale=float(call.scale),
        **_setting("beta", params.beta, layer, real),
        **_setting("eta", params.eta, layer, real),
        slopes=slopes,
    )
    settings = like_setting(params.beta, grad_beta), like_setting(params.eta, grad_eta)
    return sums.sum(0), ColumnResult(sums[0, 0], grad_x, grad_weight, grad_bias, *settings)


def _no_terms(call: LossCall, params: ConfusionParams) -> tuple[Tensor, ColumnResult]:
    """The same of no rows, or of no labels: every denominator is 0, so the value is 0 and the loss 1."""
    layer = call.layer
    sums = torch.tensor([layer.num_rows, 0, 0, 0], dtype=torch.float64)
    grads = zero_gradients(call.x, layer, call.needs)
    grad_beta, grad_eta = (
        like_setting(setting, torch.zeros(layer.num_rows, dtype=torch.float64) if need else None)
        for setting, need in zip((params.beta, params.eta), call.needs[3:], strict=True)
    )
    return sums, ColumnResult(sums[0], *grads, grad_beta, grad_eta)


def _setting(name: str, setting: float | Tensor, layer: Layer, real: torch.dtype) -> dict[str, float | Tensor | None]:
    """β or η as one number, or as one per label."""
    if isinstance(setting, Tensor) and setting.ndim:
        return {name: 0.0, name + "s": label_vector(setting, layer, real)}
    return {name: float(setting), name + "s": None}
