"""The loss of a layer against targets: which path a call takes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.interface import accumulate_dtype
from ..labels import LabelSets
from ..layer import Layer
from ..losses import ColumnLoss, Loss, RankedRowLoss, Reduction, RowLoss
from ..operator_dispatch import by_operator
from ..sharding import LabelShard
from .fused_loss import NO_NEEDS, FusedLoss, Spec, evaluate, fused_loss_operator
from .logits import logits
from .row_loss import reduce_rows
from .targets import target_tensors
from .transforms import TransformedLoss


def layer_loss(
    x: Tensor,  # [B, D]
    layer: Layer,
    targets: LabelSets | Tensor,  # B sets, or [B, m]
    loss: Loss,
    reduction: Reduction,
    shard: LabelShard | None = None,
) -> Tensor:
    """The loss, ``[]`` or ``[B]``, in float32 (float64 for float64 inputs). Arguments were checked.

    ``shard``: the layer and dense targets are those of this rank's labels, the loss that of all ranks together.
    """
    if isinstance(loss, ColumnLoss) and reduction == "none":
        raise ValueError(
            f"{type(loss).__name__} has one value per label, made of all rows: a row has no loss of its own; "
            "use reduction='mean' or 'sum'"
        )
    if shard is not None:
        return _sharded_loss(x, layer, targets, loss, reduction, shard)
    if isinstance(loss, RowLoss) and not (isinstance(loss, RankedRowLoss) and loss.fused):
        return _own_row_loss(x, layer, targets, loss, reduction)
    weight, bias, meta = layer
    y = target_tensors(targets)
    tensors = loss.tensors()
    if by_operator(x, weight, bias, *y, *tensors):
        inputs = (x, weight, bias, *loss.learned())
        needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
        return fused_loss_operator(*inputs, *y, None, *loss.flatten(), meta, reduction, needs)[0]
    spec = Spec.of(x, weight, loss, meta, reduction, recurs=loss.has_kernel and not tensors)
    if torch._C._are_functorch_transforms_active():
        return TransformedLoss.apply([spec], x, weight, bias, *loss.learned(), *y)
    if not torch.is_grad_enabled():
        return evaluate(spec, (x, weight, bias), targets, None, NO_NEEDS)[0]
    return FusedLoss.apply(
        None, spec, targets, x, weight, bias, *(loss.learned() if isinstance(loss, ColumnLoss) else ())
    )


def _sharded_loss(
    x: Tensor, layer: Layer, targets: LabelSets | Tensor, loss: Loss, reduction: Reduction, shard: LabelShard
) -> Tensor:
    if isinstance(loss, RowLoss) and not (isinstance(loss, RankedRowLoss) and loss.fused):
        raise ValueError(
            f"the formula of {type(loss).__name__} needs all logits of a row in one array, and this head keeps its labels "
            f"on {shard.world} ranks; use LMLNLL, TruncatedTopKEntropy, SmoothTopKSVM or a loss of single labels, or take "
            "the loss of the logits head(h), which gathers them"
        )
    spec = Spec.of(x, layer.weight, loss, layer.meta, reduction)._replace(shard=shard)
    inputs = (x, layer.weight, layer.bias)
    if not torch.is_grad_enabled():
        return evaluate(spec, inputs, targets, None, NO_NEEDS)[0]
    learned = [None if t is None else shard.data_mean(shard.share(t)) for t in loss.learned()]
    return FusedLoss.apply(None, spec, targets, *inputs, *(learned if isinstance(loss, ColumnLoss) else ()))


def _own_row_loss(x: Tensor, layer: Layer, targets: LabelSets | Tensor, loss: RowLoss, reduction: Reduction) -> Tensor:
    """A row loss with a formula of its own, on ``[B, n]`` logits and targets, by autograd."""
    z = logits(x, layer).to(accumulate_dtype(x.dtype))
    y = targets.to_dense(z.dtype) if isinstance(targets, LabelSets) else targets.to(z.dtype)
    rows = loss.at_labels(z).row_values(z, y)
    if not isinstance(rows, Tensor) or rows.shape != z.shape[:1]:
        raise ValueError(f"row_values of {type(loss).__name__} must give the loss of each row, shape [{z.shape[0]}]")
    return reduce_rows(rows, reduction, z.shape[:1])
