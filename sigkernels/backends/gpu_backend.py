"""The GPU backends: one host side, two sets of kernels."""

from __future__ import annotations

import abc

from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..losses import ConfusionParams, ElementwiseParams
from . import gpu_pass, gpu_scans, torch_tiled
from .gpu_kernels import GPUKernels
from .interface import Backend, ColumnResult, LossCall, LossResult


class GPUBackend(Backend):
    """Every operation but LML, on the kernels that a backend brings."""

    @abc.abstractmethod
    def kernels(self) -> GPUKernels:
        """Loaded at the first launch."""

    def fused_loss(self, call: LossCall) -> LossResult:
        params = call.loss.kernel_params()
        assert isinstance(params, ElementwiseParams)
        return gpu_pass.fused_loss(call, params, self.kernels())

    def column_loss(self, call: LossCall) -> ColumnResult:
        params = call.loss.kernel_params()
        assert isinstance(params, ConfusionParams)
        return gpu_pass.column_loss(call, params, self.kernels())

    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        return gpu_scans.logits(x, layer, self.kernels())

    def logits_adjoint(self, g: Tensor, layer: Layer) -> Tensor:
        return torch_tiled.logits_adjoint(g, layer)

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        return gpu_scans.topk(x, layer, m, self.kernels())

    def predict(self, x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
        if isinstance(threshold, Tensor):  # the kernels know one for all labels
            return torch_tiled.predict(x, layer, threshold)
        return gpu_scans.predict(x, layer, threshold, self.kernels())
