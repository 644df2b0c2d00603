"""What the backends share that take the library path: the vendor's matrix products, and between them operations of their own."""

from __future__ import annotations

import abc

from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..layer_update import LayerUpdate
from . import library_pass, library_scans
from .interface import LossCall, LossResult, WholeBackend


class LibraryBackend(WholeBackend):
    """A backend on the library path, which a subclass may leave for kernels of its own."""

    @abc.abstractmethod
    def pointwise(self) -> library_pass.Pointwise:
        """Its operations from logits to loss and ``∂loss/∂z``."""

    def fused_loss(self, call: LossCall) -> LossResult:
        return library_pass.fused_loss(call, self.pointwise())

    def fused_update(self, call: LossCall, update: LayerUpdate) -> LossResult:
        return library_pass.fused_loss(call, self.pointwise(), update)

    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        return library_scans.logits(x, layer)

    def logits_adjoint(self, g: Tensor, layer: Layer) -> Tensor:
        return library_scans.logits_adjoint(g, layer)

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        return library_scans.topk(x, layer, m)

    def predict(self, x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
        return library_scans.predict(x, layer, threshold)
