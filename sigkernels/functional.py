"""The operations as functions, for people who bring their own modules.

Leading dimensions of ``x`` are free wherever torch's own ``linear`` has them free; shapes below show them as ``...``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import ops, validation
from .labels import LabelSets
from .layer import Layer
from .layer_update import LayerUpdate
from .losses import BCE, ColumnLoss, ElementwiseLoss, Loss, Reduction
from .ops import lml, lml_nll, smooth_topk_svm, truncated_topk_entropy
from .partial_labels import check_partial_targets
from .sharding import LabelShard

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
    x: Tensor,  # [..., 2k+1+codes+s]
    slack_weight: Tensor,  # [n, s]
    num_labels: int,
    k: int,
    *,
    bias: Tensor | None = None,  # [n]
    codes: int = 0,
) -> Tensor:
    """Logits ``[W_dft | C | slack_weight] x + bias``, ``[..., n]``, in the dtype of x.

    Args:
        x: ``[..., 2k+1+codes+s]``: the features of the DFT, of the codes and of the slack. float16, bfloat16, float32 or
            float64, the same as the weight and the bias.
        slack_weight: ``[n, s]``, the learned columns.
        num_labels: n, at least 2k+1.
        k: the highest frequency of the DFT; 0 leaves the constant column.
        bias: ``[n]``, added to the logits.
        codes: how many columns of codes stand between those of the DFT and the slack: 0, 16, 64, 256, 1024 or 4096.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes differ, or something is no tensor.

    Example:
        >>> n, k, s = 100, 3, 4
        >>> x = torch.randn(2, 2 * k + 1 + s)
        >>> sk.functional.dft_logits(x, torch.randn(n, s), n, k).shape
        torch.Size([2, 100])
    """
    flat, layer = validation.check_dft_layer(x, slack_weight, num_labels, k, bias, codes)
    return ops.logits(flat, layer).reshape(*x.shape[:-1], num_labels)


def dft_loss(
    x: Tensor,  # [..., 2k+1+codes+s]
    slack_weight: Tensor,  # [n, s]
    targets: Any,
    num_labels: int,
    k: int,
    loss: Loss = BCE(),  # noqa: B008 (frozen)
    reduction: Reduction = "mean",
    *,
    bias: Tensor | None = None,  # [n]
    codes: int = 0,
    unknown: Any = None,
) -> Tensor:
    """The loss of ``[W_dft | C | slack_weight] x + bias`` against ``targets``, fused: no ``[B, n]`` array is made.

    Args:
        x, slack_weight, num_labels, k, bias: as for ``dft_logits``.
        targets: LabelSets, a dense ``[..., n]`` tensor or array in [0, 1], a sparse CSR matrix or a list of lists.
        loss: which loss, with all its settings. ``LMLNLL``, ``SmoothTopKSVM`` and ``TruncatedTopKEntropy`` need all logits of a
            row and make one ``[B, n]`` array.
        reduction: ``"mean"`` over all B·n terms, ``"sum"``, or ``"none"``: the loss of each row, ``[...]``. Losses of
            columns (``SigmoidF1``, …) average over labels, losses of rows over rows.
        codes: how many columns of codes stand between those of the DFT and the slack.
        unknown: labels of each row that are not annotated, in any form of label sets, or a mask ``[..., n]``: they have
            no part in the loss, the mean or the gradients. Their targets may be anything, NaN too. Only losses of
            single labels (``BCE``, ``Focal``, …) take them.

    Returns:
        float32 (float64 for float64 inputs), ``[]`` or ``[...]``.

    Example:
        >>> n, k, s = 100, 3, 4
        >>> x = torch.zeros(2, 2 * k + 1 + s)
        >>> sk.functional.dft_loss(x, torch.zeros(n, s), [[3, 17], []], n, k)  # log 2: all logits are 0
        tensor(0.6931)
    """
    if unknown is None and type(num_labels) is type(k) is type(codes) is int:
        value = ops.plain_loss(x, slack_weight, bias, num_labels, k, codes, -1, targets, loss, reduction)
        if value is not None:
            return value
    flat, layer = validation.check_dft_layer(x, slack_weight, num_labels, k, bias, codes)
    return layer_loss(x, flat, layer, targets, loss, reduction, unknown)


def linear_loss(
    x: Tensor,  # [..., d]
    weight: Tensor,  # [n, d]
    targets: Any,
    bias: Tensor | None = None,  # [n]
    loss: Loss = BCE(),  # noqa: B008 (frozen)
    reduction: Reduction = "mean",
    *,
    unknown: Any = None,
) -> Tensor:
    """The loss of ``x weightᵀ + bias``, fused: takes the place of ``F.linear`` and BCE-with-logits.

    Args:
        x: ``[..., d]``, float16, bfloat16, float32 or float64, the same as the weight and the bias.
        weight: ``[n, d]``.
        targets, loss, reduction, unknown: as for ``dft_loss``.
        bias: ``[n]``, added to the logits.

    Returns:
        float32 (float64 for float64 inputs), ``[]`` or ``[...]``.

    Example:
        >>> x, weight = torch.randn(4, 8), torch.randn(100, 8, requires_grad=True)
        >>> loss = sk.functional.linear_loss(x, weight, [[3, 17], [], [5], [99]], loss=sk.Focal())
        >>> loss.backward()
        >>> weight.grad.shape
        torch.Size([100, 8])
    """
    if unknown is None and type(targets) is LabelSets:
        value = ops.plain_loss(x, weight, bias, targets.num_labels, -1, 0, -1, targets, loss, reduction)
        if value is not None:
            return value
    flat, layer = validation.check_linear_layer(x, weight, bias)
    return layer_loss(x, flat, layer, targets, loss, reduction, unknown)


def dft_topk(
    x: Tensor,  # [..., 2k+1+codes+s]
    slack_weight: Tensor,  # [n, s]
    num_labels: int,
    k: int,
    m: int,
    *,
    bias: Tensor | None = None,  # [n]
    codes: int = 0,
) -> tuple[Tensor, Tensor]:
    """The m highest logits and their labels, ``[..., m]`` each, highest first; ties go to the lower label.

    Args:
        x, slack_weight, num_labels, k, bias, codes: as for ``dft_logits``.
        m: how many labels, 1 … n.

    Returns:
        Logits in the dtype of x, with gradients as through ``torch.topk``, and labels, int64.

    Example:
        >>> n, k, s = 100, 3, 4
        >>> x = torch.randn(2, 2 * k + 1 + s)
        >>> values, labels = sk.functional.dft_topk(x, torch.randn(n, s), n, k, m=5)
        >>> labels.shape
        torch.Size([2, 5])
    """
    flat, layer = validation.check_dft_layer(x, slack_weight, num_labels, k, bias, codes)
    return layer_topk(x, flat, layer, m)


def linear_topk(
    x: Tensor,  # [..., d]
    weight: Tensor,  # [n, d]
    m: int,
    bias: Tensor | None = None,  # [n]
) -> tuple[Tensor, Tensor]:
    """The m highest of ``x weightᵀ + bias`` and their labels, ``[..., m]`` each; ties go to the lower label.

    Args:
        x, weight, bias: as for ``linear_loss``.
        m: how many labels, 1 … n.

    Returns:
        Logits in the dtype of x, with gradients as through ``torch.topk``, and labels, int64.

    Example:
        >>> sk.functional.linear_topk(torch.tensor([[1.0]]), torch.tensor([[3.0], [1.0], [2.0]]), m=2)
        (tensor([[3., 2.]]), tensor([[0, 2]]))
    """
    flat, layer = validation.check_linear_layer(x, weight, bias)
    return layer_topk(x, flat, layer, m)


def layer_loss(
    x: Tensor,
    flat: Tensor,
    layer: Layer,
    targets: Any,
    loss: Loss,
    reduction: Reduction,
    unknown: Any = None,
    shard: LabelShard | None = None,
) -> Tensor:
    """The loss of a layer whose input ``x [..., D]`` was checked, and flattened to ``flat [B, D]``.

    ``shard``: the layer holds the labels of this rank, and the loss is that of all ranks' labels.
    """
    validation.check_reduction(reduction)
    validation.check_loss(loss, layer.num_labels, x.device)
    if unknown is not None:
        value = _partial_loss(x, flat, layer, targets, loss, reduction, unknown)
        return value if shard is None else shard.sum(value)
    y = validation.check_targets(targets, x.shape[:-1], layer.num_labels, x.device)
    if isinstance(y, Tensor) and layer.num_rows < layer.num_labels:  # sets keep global labels, arrays do not
        y = y[:, layer.labels]
    value = ops.layer_loss(flat, layer, y, loss, reduction, shard)
    return value.reshape(x.shape[:-1]) if reduction == "none" else value


def layer_update(
    x: Tensor,
    flat: Tensor,
    layer: Layer,
    targets: Any,
    loss: Loss,
    reduction: Reduction,
    unknown: Any,
    upstream: float,
    update: LayerUpdate,
    shard: LabelShard | None = None,
) -> Tensor:
    """The loss of such a layer, whose parameters are stepped in the same pass as for an upstream gradient of ``upstream``."""
    if not isinstance(loss, ElementwiseLoss):
        validation.check_loss(loss, layer.num_labels, x.device)
        raise ValueError(
            f"update= steps a tile of labels as soon as its gradient is there, and {type(loss).__name__} is made of whole "
            f"{'columns' if isinstance(loss, ColumnLoss) else 'rows'}; use a loss of single labels such as BCE(), or an "
            "ordinary optimizer"
        )
    if validation.check_reduction(reduction) == "none":
        raise ValueError("update= needs one loss for the whole batch: use reduction='mean' or 'sum', not 'none'")
    validation.check_loss(loss, layer.num_labels, x.device)
    y: Any
    count: float
    if unknown is None:
        y = validation.check_targets(targets, x.shape[:-1], layer.num_labels, x.device)
        if isinstance(y, Tensor) and layer.num_rows < layer.num_labels:
            y = y[:, layer.labels]
        count = flat.shape[0] * layer.num_labels
    else:
        partial, known = check_partial_targets(targets, unknown, x.shape[:-1], layer.num_labels, x.device)
        y, count = partial.at_labels(layer.labels), float(known)
    if not flat.shape[0] or not count:
        raise ValueError("update= needs at least one row with a known label: a mean of nothing has no gradient")
    return ops.updated_loss(flat, layer, y, loss, 1.0 / count if reduction == "mean" else 1.0, upstream, update, shard)


def _partial_loss(
    x: Tensor, flat: Tensor, layer: Layer, targets: Any, loss: Loss, reduction: Reduction, unknown: Any
) -> Tensor:
    """The same where some entries of the targets are unknown."""
    if not isinstance(loss, ElementwiseLoss):
        raise ValueError(
            f"{type(loss).__name__} is made of whole {'columns' if isinstance(loss, ColumnLoss) else 'rows'} and takes no "
            "unknown labels; use a loss of single labels such as BCE()"
        )
    partial, known = check_partial_targets(targets, unknown, x.shape[:-1], layer.num_labels, x.device)
    value = ops.partial_loss(flat, layer, partial.at_labels(layer.labels), loss, reduction != "none")
    if reduction == "none":
        return value.reshape(x.shape[:-1])
    return value / known if reduction == "mean" else value


def layer_topk(x: Tensor, flat: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """The m highest logits of such a layer, ``[..., m]`` each."""
    m = validation.check_m(m, layer.num_labels)
    values, labels = ops.topk(flat, layer, m)
    if x.ndim == 2:  # no view: FSDP warns of modules that return one
        return values, labels
    return values.reshape(*x.shape[:-1], m), labels.reshape(*x.shape[:-1], m)
