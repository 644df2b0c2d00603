"""The labels whose logit is above a threshold, as LabelSets, without ``[B, n]``. Not differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..labels import LabelSets
from ..layer import Layer, LayerMeta
from ..operator_dispatch import by_operator, refuse_mapped


def predict(x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
    """``[B, D] →`` B label sets; ``threshold`` is a logit, or one for each label, ``[m]``. Arguments were checked."""
    refuse_mapped("sets, which differ in size; call predict on all rows at once", x, layer.weight, layer.bias)
    number, per_label = (0.0, threshold) if isinstance(threshold, Tensor) else (threshold, None)
    # The first call of any operator imports the compiler, which takes a second: not for a call that needs none.
    traced = by_operator(x, layer.weight, layer.bias, per_label) or torch._C._are_functorch_transforms_active()
    with torch.no_grad():
        indices, offsets = (predict_operator if traced else _predict)(x, *layer, number, per_label)
    return LabelSets.from_sorted(indices, offsets, layer.num_labels)


def _predict(
    x: Tensor, weight: Tensor, bias: Tensor | None, meta: Sequence[int], threshold: float, per_label: Tensor | None
) -> tuple[Tensor, Tensor]:
    layer = Layer(weight, bias, LayerMeta(*meta))
    sets = backends.select(x, "predict", codes=layer.codes).predict(
        x, layer, threshold if per_label is None else per_label
    )
    return sets.indices, sets.offsets


predict_operator: Any = torch.library.custom_op("sigkernels::predict", _predict, mutates_args=())


@predict_operator.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, meta: Sequence[int], threshold: float, per_label: Tensor | None
) -> tuple[Tensor, Tensor]:
    active = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(active, dtype=torch.int64), x.new_empty(x.shape[0] + 1, dtype=torch.int64)
