"""The pointwise part of the library path in torch operations: any loss, by its own formula, on any device."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..label_forms import checked_rows
from ..labels import LabelSets
from ..layer import Layer
from ..losses import ElementwiseLoss, ElementwiseParams
from ..partial_labels import PartialTargets
from .interface import LossCall, sum_dtype
from .library_pass import Rows, Slopes
from .library_walk import Chunk, LabelWalk, multiplies_narrow


class TorchPointwise:
    """For every elementwise loss."""

    def narrow(self, device: torch.device) -> bool:
        return multiplies_narrow(device)

    def runs(self, dtype: torch.dtype) -> None:
        return None

    def elementwise(
        self, call: LossCall, walk: LabelWalk, params: ElementwiseParams | None, row_scale: float | Tensor
    ) -> TorchElementwise:
        return TorchElementwise(call, walk, row_scale)


class TorchElementwise:
    """The losses of the rows of one call, chunk after chunk."""

    def __init__(self, call: LossCall, walk: LabelWalk, row_scale: float | Tensor) -> None:
        x = call.x
        self._loss, self._walk = cast(ElementwiseLoss, call.loss), walk
        self._needed, self._partial = any(call.needs), isinstance(call.targets, PartialTargets)
        self._scale = row_scale.to(walk.out)[:, None] if isinstance(row_scale, Tensor) else row_scale
        self._targets = ChunkTargets(call.targets, call.layer, walk)
        self._rows = torch.zeros(x.shape[0], dtype=sum_dtype(x.device), device=x.device)
        self._g = walk.buffer(walk.operand) if self._needed else None

    def __call__(self, chunk: Chunk) -> Slopes | None:
        z, first = self._walk.add_bias_(chunk), self._walk.layer.label_start
        y = self._targets(chunk.start, chunk.stop)
        missing = y.isnan() if self._partial else None
        part = self._loss.at_labels(z, first + chunk.start, first + chunk.stop)
        f, g = part.tile(z, y if missing is None else y.masked_fill(missing, 0), self._needed)
        if missing is not None:
            f, g = f.masked_fill(missing, 0), None if g is None else g.masked_fill(missing, 0)
        self._rows += f.sum(1, dtype=self._rows.dtype)
        if g is None or self._g is None:
            return None
        return Slopes(torch.mul(g, self._scale, out=self._walk.view(self._g, g.shape[1])))

    def finish(self, wide: Tensor | None, narrow: Tensor | None) -> Rows:
        if wide is not None and narrow is not None:
            narrow.copy_(wide)
        return Rows(self._rows)


class ChunkTargets:
    """Dense targets ``[B, chunk]`` one chunk at a time, unknown ones NaN.

    On the CPU sets are put in order of label once, so that a chunk finds its own. Elsewhere that would wait for the
    device: every chunk looks at all entries, and those of other labels go to a column of their own.
    """

    dtype: torch.dtype
    batch: int
    size: int  # labels of a chunk
    dense: Tensor | None
    edges: list[int] | None
    labels: Tensor
    rows: Tensor
    values: Tensor | None  # of the entries; None: all are 1

    def __init__(self, targets: LabelSets | Tensor | PartialTargets, layer: Layer, walk: LabelWalk) -> None:
        unknown = None
        if isinstance(targets, PartialTargets):
            targets, unknown = targets.for_kernels()
        self.dtype, self.batch, self.size = walk.out, walk.batch, walk.size
        self.dense = self.edges = None
        if not isinstance(targets, LabelSets):
            self.dense = targets
            return
        rows = checked_rows(*targets.unchecked(), targets.num_labels)
        labels = targets.indices - layer.label_start
        if labels.device.type == "cpu":
            labels, order = torch.sort(labels)
            rows, unknown = rows[order], None if unknown is None else unknown[order]
            edges = torch.arange(0, layer.num_rows + self.size, self.size).clamp_(max=layer.num_rows)
            self.edges = torch.searchsorted(labels, edges).tolist()
        self.labels, self.rows = labels, rows
        self.values = None if unknown is None else torch.where(unknown, torch.nan, 1.0).to(self.dtype)

    def __call__(self, start: int, stop: int) -> Tensor:
        if self.dense is not None:
            return self.dense[:, start:stop].to(self.dtype)
        if self.edges is None:
            return self._of_all_entries(start, stop)
        y = torch.zeros(self.batch, stop - start, dtype=self.dtype)
        inside = slice(*self.edges[start // self.size : start // self.size + 2])
        at = self.rows[inside], self.labels[inside] - start
        y[at] = 1 if self.values is None else self.values[inside]
        return y

    def _of_all_entries(self, start: int, stop: int) -> Tensor:
        width = stop - start + 1  # with the column of the others
        y = torch.zeros(self.batch * width, dtype=self.dtype, device=self.labels.device)
        column = torch.where((self.labels >= start) & (self.labels < stop), self.labels - start, width - 1)
        place = self.rows * width + column
        _ = y.scatter_(0, place, 1.0) if self.values is None else y.scatter_(0, place, self.values)
        return y.view(self.batch, width)[:, :-1]
