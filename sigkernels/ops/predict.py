"""The labels whose logit is above a threshold, as LabelSets, without ``[B, n]``. Not differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends
from ..labels import LabelSets
from ..layer import Layer


def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    """``[B, D] →`` B label sets; ``threshold`` is a logit. Arguments were checked."""
    with torch.no_grad():
        indices, offsets = predict_operator(x, *layer, threshold)
    return LabelSets.from_sorted(indices, offsets, layer.num_labels)


@torch.library.custom_op("sigkernels::predict", mutates_args=())
def predict_operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_labels: int,
    k: int,
    label_start: int,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    layer = Layer(weight, bias, num_labels, k, label_start)
    sets = backends.by_name(backends.select(x)).predict(x, layer, threshold)
    return sets.indices, sets.offsets


@predict_operator.register_fake
def _(x, weight, bias, num_labels, k, label_start, threshold):
    active = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(active, dtype=torch.int64), x.new_empty(x.shape[0] + 1, dtype=torch.int64)
