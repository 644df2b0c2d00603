"""The operations as functions, for people who bring their own modules.

Leading dimensions of ``x`` are free wherever torch's own ``linear`` has them free; shapes below show them as ``...``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import ops, validation
from .losses import BCE, Loss
from .ops import lml, lml_nll, smooth_topk_svm, truncated_topk_entropy

__all__ = [
    "dft_logits",
    "dft_loss",
    "dft_topk",
    "linear_loss",
    "linear_topk",
    "lml",
    "lml_nll",
    "smooth_topk_svm",
    "truncated_topk_entropy",
]


def dft_logits(
    x: Tensor,  # [..., 2k+1+s]
    slack_weight: Tensor,  # [n, s]
    num_labels: int,
    k: int,
) -> Tensor:
    """Logits ``[W_dft | slack_weight] x``, ``[..., n]``, in the dtype of x."""
    flat, layer = validation.check_dft_layer(x, slack_weight, num_labels, k)
    return ops.logits(flat, layer).reshape(*x.shape[:-1], num_labels)


def dft_loss(
    x: Tensor,  # [..., 2k+1+s]
    slack_weight: Tensor,  # [n, s]
    targets: Any,
    num_labels: int,
    k: int,
    loss: Loss = BCE(),  # noqa: B008 (frozen)
    reduction: str = "mean",
    *,
    grad_into: Tensor | None = None,  # [n, s]
) -> Tensor:
    """The loss of ``[W_dft | slack_weight] x`` against ``targets``, fused: no ``[B, n]`` array is made.

    Args:
        targets: LabelSets, a dense ``[..., n]`` tensor or array in [0, 1], a sparse CSR matrix or a list of lists.
        loss: what is measured, with all its settings. ``LMLNLL`` and ``TruncatedTopKEntropy`` need all logits of a
            row and make one ``[B, n]`` array.
        reduction: ``"mean"`` over all B·n terms, ``"sum"``, or ``"none"``: the loss of each row, ``[...]``. Losses of
            columns (``SigmoidF1``, …) average over labels, losses of rows over rows.
        grad_into: adds the gradient of ``slack_weight`` straight into this buffer during the forward pass
            (for an upstream gradient of 1; the backward pass corrects any other) and leaves
            ``slack_weight.grad`` alone. Saves a fresh ``[n, s]`` array per step where n is very large.

    Returns:
        float32 (float64 for float64 inputs), ``[]`` or ``[...]``.
    """
    flat, layer = validation.check_dft_layer(x, slack_weight, num_labels, k)
    return _loss(x, flat, layer, targets, loss, reduction, grad_into)


def linear_loss(
    x: Tensor,  # [..., d]
    weight: Tensor,  # [n, d]
    targets: Any,
    bias: Tensor | None = None,  # [n]
    loss: Loss = BCE(),  # noqa: B008 (frozen)
    reduction: str = "mean",
    *,
    grad_into: Tensor | None = None,  # [n, d]
) -> Tensor:
    """The loss of ``x weightᵀ + bias``, fused: takes the place of ``F.linear`` and BCE-with-logits.

    Arguments as for ``dft_loss``.
    """
    flat, layer = validation.check_linear_layer(x, weight, bias)
    return _loss(x, flat, layer, targets, loss, reduction, grad_into)


def dft_topk(
    x: Tensor,  # [..., 2k+1+s]
    slack_weight: Tensor,  # [n, s]
    num_labels: int,
    k: int,
    m: int,
) -> tuple[Tensor, Tensor]:
    """The m highest logits and their labels, ``[..., m]`` each, highest first; ties go to the lower label."""
    flat, layer = validation.check_dft_layer(x, slack_weight, num_labels, k)
    return _topk(x, flat, layer, m)


def linear_topk(
    x: Tensor,  # [..., d]
    weight: Tensor,  # [n, d]
    m: int,
    bias: Tensor | None = None,  # [n]
) -> tuple[Tensor, Tensor]:
    """The m highest of ``x weightᵀ + bias`` and their labels, ``[..., m]`` each; ties go to the lower label."""
    flat, layer = validation.check_linear_layer(x, weight, bias)
    return _topk(x, flat, layer, m)


def _loss(
    x: Tensor, flat: Tensor, layer: Any, targets: Any, loss: Loss, reduction: str, grad_into: Tensor | None
) -> Tensor:
    validation.check_reduction(reduction)
    validation.check_loss(loss, layer.num_labels, x.device)
    validation.check_grad_into(grad_into, layer.weight)
    y = validation.check_targets(targets, x.shape[:-1], layer.num_labels, x.device)
    if isinstance(y, Tensor) and layer.num_rows < layer.num_labels:  # sets keep global labels, arrays do not
        y = y[:, layer.label_start : layer.label_start + layer.num_rows]
    value = ops.layer_loss(flat, layer, y, loss, reduction, grad_into)
    return value.reshape(x.shape[:-1]) if reduction == "none" else value


def _topk(x: Tensor, flat: Tensor, layer: Any, m: int) -> tuple[Tensor, Tensor]:
    m = validation.check_m(m, layer.num_labels)
    values, labels = ops.topk(flat, layer, m)
    if x.ndim == 2:  # no view: FSDP warns of modules that return one
        return values, labels
    return values.reshape(*x.shape[:-1], m), labels.reshape(*x.shape[:-1], m)
