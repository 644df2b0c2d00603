"""Confusion-matrix losses by the compiled tile loop; ``csrc/cpu/confusion_tile.h`` has the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..losses import ConfusionLoss, SigmoidF1
from .cpu import _LOSS, _Call, _weight_gradient
from .interface import accumulate_dtype, gradient_dtype
from .torch_confusion import ConfusionResult, _like_setting

_CONFUSION = 3  # LossKind in csrc/core/losses.h
_FORMS = {"logits": 0, "probability": 1}
_UNBOUNDED = 2


def confusion_loss(
    x: Tensor,  # [B, D]
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: ConfusionLoss,
    reduction: str,
    needs: tuple[bool, bool, bool, bool, bool],  # x, weight, bias, beta, eta
) -> ConfusionResult:
    """As ``torch_confusion.confusion_loss``."""
    scale = 1 / layer.num_labels if reduction == "mean" and loss.average == "label" else 1.0
    if loss.average == "label":
        sums, result = _sweep(x, layer, targets, loss, needs, scale=scale)
        return result._replace(value=sums[0] * scale)
    # Pooled: the sums of all labels first, then the gradients with slopes that all labels share.
    sums, result = _sweep(x, layer, targets, loss, (False,) * 5)
    tiny = torch.finfo(accumulate_dtype(x.dtype)).tiny
    fraction, slopes = loss.fraction(sums[1], sums[2], sums[3], x.shape[0] * layer.num_rows, tiny)
    if any(needs):
        known = (-float(slopes.on_y), -float(slopes.on_all))
        result = _sweep(x, layer, targets, loss, needs, slopes=known)[1]
    return result._replace(value=1 - fraction)


def _sweep(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: ConfusionLoss,
    needs: tuple[bool, ...],
    scale: float = 1.0,
    slopes: tuple[float, float] | None = None,
) -> tuple[Tensor, ConfusionResult]:
    """One pass: the sums over labels of (1 - value, tp, s, p), float64 ``[4]``, and the gradients."""
    real, batch, labels = accumulate_dtype(x.dtype), x.shape[0], layer.num_rows
    grad_x = torch.zeros(x.shape, dtype=real) if needs[0] else None
    grad_weight, fresh = _weight_gradient(x, layer, None, rows_at_once=True) if needs[1] else (None, False)
    grad_bias = torch.zeros(labels, dtype=real) if needs[2] else None
    grad_beta, grad_eta = (torch.zeros(labels if need else 0, dtype=torch.float64) for need in needs[3:])
    call = _Call(x, layer, _LOSS, rows_at_once=True)
    c = call.c
    sums = torch.zeros(c.threads, 4, dtype=torch.float64)
    if batch == 0 or labels == 0:
        sums[0, 0] = labels  # every denominator is 0: value 0, loss 1
        if grad_weight is not None:
            grad_weight.zero_()
    else:
        call.set_targets(targets)
        _set_confusion(call, loss, layer, real)
        c.loss_kind, c.scale, c.tiny = _CONFUSION, scale, torch.finfo(real).tiny
        if slopes is not None:
            c.slopes_known, (c.on_y, c.on_all) = True, slopes
        c.sums = sums.data_ptr()
        rows = torch.empty(batch, dtype=torch.float64)
        call.set_results(rows, grad_x, grad_bias, grad_weight, fresh)
        if needs[3]:
            c.grad_beta = grad_beta.data_ptr()
        if needs[4]:
            c.grad_eta = grad_eta.data_ptr()
        call.run()
    out = gradient_dtype(x.dtype)
    result = ConfusionResult(
        sums[0, 0],
        None if grad_x is None else grad_x.to(out),
        None if grad_weight is None else grad_weight.to(out),
        None if grad_bias is None else grad_bias.to(out),
        _like_setting(loss, "beta", grad_beta) if needs[3] else None,
        _like_setting(loss, "eta", grad_eta) if needs[4] else None,
    )
    return sums.sum(0), result


def _set_confusion(call: _Call, loss: ConfusionLoss, layer: Layer, real: torch.dtype) -> None:
    c = call.c
    (c.n_tp, c.n_s, c.n_p, c.n_rows), (c.d_s, c.d_p, c.d_rows) = loss.coefficients
    c.mirrored = loss.mirrored
    if not isinstance(loss, SigmoidF1):
        c.confusion_form = _UNBOUNDED
        return
    c.confusion_form = _FORMS[loss.on]
    here = slice(layer.label_start, layer.label_start + layer.num_rows)
    for name in ("beta", "eta"):
        setting = getattr(loss, name)
        if isinstance(setting, Tensor) and setting.ndim:
            setattr(c, name + "s", call.keep(setting.detach()[here].to(real).contiguous()))
        else:
            setattr(c, name, float(setting))
