"""The Triton backend, for NVIDIA and AMD GPUs; needs no compiler at install time.

``fused_loss`` walks the labels in chunks that fit the L2 cache. Per chunk one kernel makes logits, loss and ∂loss/∂z,
and the library's matrix product makes the gradients from it: no ``[B, n]`` array, no atomics, the same bits every run.

With ``TRITON_INTERPRET=1`` in the environment before the first import the same kernels run on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ...labels import LabelSets
from ...layer import Layer
from ...losses import Loss
from ..interface import LossResult

__all__ = ["available", "devices", "fused_loss", "logits", "predict", "supports", "topk"]


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


def available() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed; pip install 'triton>=3.2'"
    if interpreted() or torch.cuda.is_available():
        return None
    return (
        "torch sees no GPU; install a CUDA or ROCm build of torch and a driver (TRITON_INTERPRET=1 runs it on the CPU)"
    )


def devices() -> tuple[str, ...]:
    return ("cuda", "cpu") if interpreted() else ("cuda",)


def supports(loss: Loss) -> str | None:
    if type(loss).__name__ in ("BCE", "Focal", "Asymmetric"):
        return None
    return f"the triton backend has no kernel for {type(loss).__name__}; it has BCE, Focal and Asymmetric"


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


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    from . import launch

    return launch.topk(x, layer, m)


def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    from . import launch

    return launch.predict(x, layer, threshold)
