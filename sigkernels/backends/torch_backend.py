"""The torch backend: every operation in plain torch, on any device and in any dtype, with any loss."""

from __future__ import annotations

from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..layer_update import LayerUpdate
from . import library_pass, library_scans, torch_columns, torch_lml
from .interface import ColumnResult, LMLSteps, LossCall, LossResult, Operation, WholeBackend
from .pointwise_torch import TorchPointwise


class TorchBackend(WholeBackend):
    """The library path with torch operations between its matrix products: the fallback of all others."""

    name = "torch"
    pointwise: TorchPointwise = TorchPointwise()

    def unavailable(self) -> str | None:
        return None

    def devices(self) -> tuple[str, ...] | None:
        return None

    def refuses(self, operation: Operation, loss: object = None) -> str | None:
        return None

    def fused_loss(self, call: LossCall) -> LossResult:
        return library_pass.fused_loss(call, self.pointwise)

    def fused_update(self, call: LossCall, update: LayerUpdate) -> LossResult:
        return library_pass.fused_loss(call, self.pointwise, update)

    def column_loss(self, call: LossCall) -> ColumnResult:
        return torch_columns.column_loss(call)

    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        return library_scans.logits(x, layer)

    def logits_adjoint(self, g: Tensor, layer: Layer) -> Tensor:
        return library_scans.logits_adjoint(g, layer)

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        return library_scans.topk(x, layer, m)

    def predict(self, x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
        return library_scans.predict(x, layer, threshold)

    def lml(self) -> LMLSteps:
        return torch_lml.STEPS
