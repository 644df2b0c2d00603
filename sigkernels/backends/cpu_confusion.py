"""Confusion-matrix losses by the compiled tile loop; ``csrc/cpu/confusion_tile.h`` has the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layer import Layer
from ..losses import ConfusionLoss, ConfusionParams
from .compiled_core import core as _C
from .cpu import _Call, weight_gradient
from .interface import ColumnResult, LossCall, accumulate_dtype, cast_all, gradient_dtype, label_vector, like_setting


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
    real, batch, labels = accumulate_dtype(x.dtype), x.shape[0], layer.num_rows
    grad_x = torch.zeros(x.shape, dtype=real) if needs[0] else None
    grad_weight = weight_gradient(x, layer, rows_at_once=True) if needs[1] else None
    grad_bias = torch.zeros(labels, dtype=real) if needs[2] else None
    grad_beta, grad_eta = (torch.zeros(labels, dtype=torch.float64) if need else None for need in needs[3:])
    loop = _Call(x, layer, rows_at_once=True)
    sums = torch.zeros(loop.shape.shares, 4, dtype=torch.float64)
    if batch == 0 or labels == 0:
        sums[0, 0] = labels  # every denominator is 0: value 0, loss 1
        if grad_weight is not None:
            grad_weight.zero_()
    else:
        loop.set_targets(call.targets)
        loop.set_gradients(grad_x, grad_bias, grad_weight)
        rows = torch.empty(batch, dtype=torch.float64)
        _C.confusion_loss(
            loop.c,
            **params.numbers(),
            tiny=torch.finfo(real).tiny,
            scale=float(call.scale),
            **_setting(loop, "beta", params.beta, layer, real),
            **_setting(loop, "eta", params.eta, layer, real),
            slopes=slopes,
            row_loss=rows.data_ptr(),
            sums=sums.data_ptr(),
            grad_beta=loop.keep(grad_beta),
            grad_eta=loop.keep(grad_eta),
        )
    out = gradient_dtype(x.dtype)
    grads = cast_all(out, grad_x, grad_weight, grad_bias)
    settings = like_setting(params.beta, grad_beta), like_setting(params.eta, grad_eta)
    return sums.sum(0), ColumnResult(sums[0, 0], *grads, *settings)


def _setting(
    loop: _Call, name: str, setting: float | Tensor, layer: Layer, real: torch.dtype
) -> dict[str, float | int]:
    """β or η as one number, or as the address of one per label."""
    if isinstance(setting, Tensor) and setting.ndim:
        return {name: 0.0, name + "s": loop.keep(label_vector(setting, layer, real))}
    return {name: float(setting), name + "s": 0}
