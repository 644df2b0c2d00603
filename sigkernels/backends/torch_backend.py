"""The torch backend: every operation in plain torch, on any device and in any dtype, with any loss."""

from __future__ import annotations

from . import torch_columns, torch_lml
from .interface import ColumnResult, LMLSteps, LossCall, Operation
from .library_backend import LibraryBackend
from .pointwise_torch import TorchPointwise


class TorchBackend(LibraryBackend):
    """The library path with torch operations between its matrix products: the fallback of all others."""

    name = "torch"

    def unavailable(self) -> str | None:
        return None

    def devices(self) -> tuple[str, ...] | None:
        return None

    def refuses(self, operation: Operation, loss: object = None) -> str | None:
        return None

    def pointwise(self) -> TorchPointwise:
        return TorchPointwise()

    def column_loss(self, call: LossCall) -> ColumnResult:
        return torch_columns.column_loss(call)

    def lml(self) -> LMLSteps:
        return torch_lml.STEPS
