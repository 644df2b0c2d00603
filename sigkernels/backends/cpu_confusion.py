"""Confusion-matrix losses by the compiled tile loop; ``csrc/cpu/confusion_tile.h`` has the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layer import Layer
from ..losses import ConfusionLoss, ConfusionParams
from ..losses.kernel_params import UNBOUNDED
from .cpu import _LOSS, _Call, weight_gradient
from .interface import ColumnResult, LossCall, accumulate_dtype, cast_all, gradient_dtype, label_vector, like_setting

_CONFUSION = 3  # LossKind in csrc/core/losses.h


def column_loss(call: LossCall) -> ColumnResult:
    """A confusion-matrix loss and its gradients."""
    loss, scale = call.loss, float(call.scale)
    assert isinstance(loss, ConfusionLoss)
    params = loss.kernel_params()
    assert params is not None
    if not params.pooled:
        sums, result = _sweep(call, params)
        return result._replace(value=sums[0] * scale)
    # Pooled: the sums of all labels first, then the gradients with slopes that all labels share.
    sums, result = _sweep(call._replace(needs=(False,) * 5), params)
    tiny = torch.finfo(accumulate_dtype(call.x.dtype)).tiny
    fraction, slopes = loss.fraction(sums[1], sums[2], sums[3], call.x.shape[0] * call.layer.num_rows, tiny)
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
    loop = _Call(x, layer, _LOSS, rows_at_once=True)
    c = loop.c
    sums = torch.zeros(c.threads, 4, dtype=torch.float64)
    if batch == 0 or labels == 0:
        sums[0, 0] = labels  # every denominator is 0: value 0, loss 1
        if grad_weight is not None:
            grad_weight.zero_()
    else:
        loop.set_targets(call.targets)
        _set_confusion(loop, params, layer, real)
        c.loss_kind, c.scale, c.tiny = _CONFUSION, float(call.scale), torch.finfo(real).tiny
        if slopes is not None:
            c.slopes_known, (c.on_y, c.on_all) = True, slopes
        c.sums = sums.data_ptr()
        loop.set_results(torch.empty(batch, dtype=torch.float64), grad_x, grad_bias, grad_weight)
        c.grad_beta, c.grad_eta = loop.keep(grad_beta), loop.keep(grad_eta)
        loop.run()
    out = gradient_dtype(x.dtype)
    grads = cast_all(out, grad_x, grad_weight, grad_bias)
    settings = like_setting(params.beta, grad_beta), like_setting(params.eta, grad_eta)
    return sums.sum(0), ColumnResult(sums[0, 0], *grads, *settings)


def _set_confusion(loop: _Call, params: ConfusionParams, layer: Layer, real: torch.dtype) -> None:
    c = loop.c
    for name in ("n_tp", "n_s", "n_p", "n_rows", "d_s", "d_p", "d_rows", "mirrored"):
        setattr(c, name, getattr(params, name))
    c.confusion_form = params.form
    if params.form == UNBOUNDED:
        return
    for name, setting in (("beta", params.beta), ("eta", params.eta)):
        if isinstance(setting, Tensor) and setting.ndim:
            setattr(c, name + "s", loop.keep(label_vector(setting, layer, real)))
        else:
            setattr(c, name, float(setting))
