"""The Triton backend, for NVIDIA and AMD GPUs; needs no compiler at install time.

The fused pass is one kernel on persistent programs, and a small one that adds their slabs of ``grad_x``
(``backends/gpu_pass.py``): no ``[B, n]`` array, no atomics, the same bits every run.

With ``TRITON_INTERPRET=1`` in the environment before the first import the same kernels run on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from ...losses import ColumnLoss, ElementwiseLoss
from ..gpu_backend import GPUBackend
from ..gpu_kernels import GPUKernels
from ..interface import LMLSteps, Operation


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


class TritonBackend(GPUBackend):
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

    def kernels(self) -> GPUKernels:
        from . import launch

        return launch.TritonKernels()

    def lml(self) -> LMLSteps:
        from . import lml

        return lml.STEPS
