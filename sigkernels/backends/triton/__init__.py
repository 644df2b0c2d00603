"""The Triton backend, for NVIDIA and AMD GPUs; needs no compiler at install time.

An elementwise loss of a narrow layer takes the flash kernel (``flash.py``) where the table of paths says so. Everything else is
the library path (``backends/library_pass.py``), with one kernel from logits to loss and ``∂loss/∂z`` between the vendor's matrix
products. No ``[B, n]`` array, no float atomics, the same bits every run.

With ``TRITON_INTERPRET=1`` in the environment before the first import the same kernels run on CPU tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from ...layer import Layer
from ...losses import ColumnLoss, ElementwiseLoss
from .. import flash_pass
from ..gpu_paths import LossShape, choose_path
from ..interface import ColumnResult, LMLSteps, LossCall, LossResult, Operation
from ..library_backend import LibraryBackend
from ..library_pass import Pointwise


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


class TritonBackend(LibraryBackend):
    """The kernels of this package. triton is imported at the first launch: nothing is compiled, or parsed, before."""

    name = "triton"

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "the triton package is not installed; pip install 'triton>=3.7'"
        if interpreted() or torch.cuda.is_available():
            return None
        return (
            "torch sees no GPU; install a CUDA or ROCm build of torch and a driver "
            "(TRITON_INTERPRET=1 runs it on the CPU)"
        )

    def devices(self) -> tuple[str, ...]:
        return ("cuda", "cpu") if interpreted() else ("cuda",)

    def refuses(self, operation: Operation, loss: ElementwiseLoss | ColumnLoss | None = None) -> str | None:
        return self.refuses_loss(loss)

    def fused_loss(self, call: LossCall) -> LossResult:
        """The flash kernel where it is the faster path and applies, else the library path."""
        shape = LossShape.of(call.x, call.layer.weight, call.layer.meta)
        if choose_path(shape, ("flash", "library")).path == "flash":
            kernels = _flash().kernels_for(call, shape)
            if not isinstance(kernels, str):
                return flash_pass.fused_loss(call, kernels)
        return super().fused_loss(call)

    def pointwise(self) -> Pointwise:
        return _pointwise()

    def column_loss(self, call: LossCall) -> ColumnResult:
        from . import columns

        return columns.column_loss(call)

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        from . import topk

        return topk.topk(x, layer, m)

    def lml(self) -> LMLSteps:
        from . import lml

        return lml.STEPS


@functools.cache
def _flash() -> Any:
    return importlib.import_module(f"{__name__}.flash")


@functools.cache
def _pointwise() -> Pointwise:
    from .pointwise import TritonPointwise

    return TritonPointwise()
