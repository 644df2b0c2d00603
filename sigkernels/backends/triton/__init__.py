"""The Triton backend, for NVIDIA and AMD GPUs; needs no compiler at install time.

The fused pass is one kernel on persistent programs, and a small one that adds their slabs of ``grad_x``
(``backends/fused_pass.py``): no ``[B, n]`` array, no atomics, the same bits every run.

With ``TRITON_INTERPRET=1`` in the environment before the first import the same kernels run on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ...labels import LabelSets
from ...layer import Layer
from ...losses import ConfusionLoss, Loss
from ..interface import LossResult
from ..torch_confusion import ConfusionResult

__all__ = ["available", "confusion_loss", "devices", "fused_loss", "logits", "predict", "supports", "topk"]


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


def available() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed; pip install 'triton>=3.7'"
    if interpreted() or torch.cuda.is_available():
        return None
    return (
        "torch sees no GPU; install a CUDA or ROCm build of torch and a driver (TRITON_INTERPRET=1 runs it on the CPU)"
    )


def devices() -> tuple[str, ...]:
    return ("cuda", "cpu") if interpreted() else ("cuda",)


def supports(loss: Loss) -> str | None:
    if isinstance(loss, ConfusionLoss) or type(loss).__name__ in ("BCE", "Focal", "Asymmetric"):
        return None
    return (
        f"the triton backend has no kernel for {type(loss).__name__}; it has BCE, Focal, Asymmetric and the "
        "confusion-matrix losses"
    )


# triton is imported at the first launch, not with sigkernels: nothing is compiled, or even parsed, before that.


def logits(x: Tensor, layer: Layer) -> Tensor:
    from . import launch

    return launch.logits(x, layer)


def fused_loss(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: Loss,
    row_scale: float | Tensor,
    needs: tuple[bool, bool, bool],
    grad_weight_into: Tensor | None = None,
) -> LossResult:
    from . import launch

    return launch.fused_loss(x, layer, targets, loss, row_scale, needs, grad_weight_into)


def confusion_loss(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: ConfusionLoss,
    reduction: str,
    needs: tuple[bool, bool, bool, bool, bool],
) -> ConfusionResult:
    from . import launch

    return launch.confusion_loss(x, layer, targets, loss, reduction, needs)


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    from . import launch

    return launch.topk(x, layer, m)


def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    from . import launch

    return launch.predict(x, layer, threshold)
