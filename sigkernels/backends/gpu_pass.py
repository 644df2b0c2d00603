"""The fused pass of the GPU backends on the host side: buffers, launches, and the slabs that are added after each.

Both backends run it on persistent blocks. A block owns a range of labels: it reads their rows of the weight, writes
their gradient, and keeps its part of ``grad_x`` in a private slab. A second kernel adds the slabs in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..labels import LabelSets
from ..losses import ConfusionParams, ElementwiseParams
from ..losses.kernel_params import UNBOUNDED
from ..partial_labels import PartialTargets
from . import torch_columns
from .gpu_kernels import Columns, Elementwise, GPUKernels, Gradients, Targets
from .gpu_tiles import Chunk, SparseTargets, gradient_factors, label_chunks
from .interface import (
    ColumnResult,
    LossCall,
    LossResult,
    accumulate_dtype,
    cast_all,
    gradient_dtype,
    label_vector,
    like_setting,
)
from .torch_tiled import without_autocast

_SLAB_BYTES = 64 * 2**20  # of private grad_x slabs: bounds the rows of one launch
_COLUMN_SLAB_BYTES = 256 * 2**20  # where all rows must be in one launch: bounds the blocks
_LAUNCH_ELEMENTS = 2**26  # rows · labels of one launch: bounds the table of where targets enter each tile
_DENSE_ELEMENTS = 2**24  # of a launch whose dense targets are converted: bounds the copy
_FLOAT16_HEADROOM = 256.0  # of the confusion losses, whose ∂loss/∂z is below 2β, inside a float16 kernel


class _Pass:
    """The buffers of one pass over all labels, and the launches that fill them."""

    def __init__(self, call: LossCall, kernels: GPUKernels) -> None:
        x, layer, targets, needs = call.x, call.layer, call.targets, call.needs
        assert not isinstance(targets, PartialTargets)  # refused
        self.kernels, self.x, self.layer, self.needs = kernels, x, layer, needs
        self.acc, self.out_dtype = accumulate_dtype(x.dtype), gradient_dtype(x.dtype)
        self.sparse = SparseTargets(targets) if isinstance(targets, LabelSets) else None
        self.dense = None if isinstance(targets, LabelSets) else targets
        self.whole = Chunk.of(x, layer, kernels.tile)
        self.empty = not x.shape[0] or not layer.num_rows
        make = torch.zeros if self.empty else torch.empty
        self.grad_x = make(x.shape, dtype=self.acc, device=x.device) if needs[0] else None
        self.grad_bias = make(layer.num_rows, dtype=self.acc, device=x.device) if needs[2] else None

    def grad_weight(self, launches_of_rows: int) -> Tensor | None:
        """Where the kernel puts grad_weight: in 16 bits while one launch has all rows, so that it is written once."""
        if not self.needs[1]:
            return None
        narrow = launches_of_rows == 1 and self.out_dtype == self.x.dtype
        make = torch.zeros if self.empty else torch.empty
        return make(self.layer.weight.shape, dtype=self.out_dtype if narrow else self.acc, device=self.x.device)

    def rows_per_launch(self) -> int:
        """Rows whose private slabs fit the budget, in whole groups."""
        group = self.kernels.rows(self.x)
        slab_bytes = self.kernels.blocks(self.x) * max(self.x.shape[1], 1) * self.acc.itemsize
        return max(_SLAB_BYTES // slab_bytes // group, 1) * group

    def chunks(self, rows: int) -> Iterator[Chunk]:
        """Chunks of rows, and of labels within each."""
        if self.empty:
            return
        converted = self.dense is not None and self.dense.dtype != self.acc
        elements = _DENSE_ELEMENTS if converted else _LAUNCH_ELEMENTS
        for row in range(0, self.x.shape[0], rows):
            here = slice(row, min(row + rows, self.x.shape[0]))
            for first, count in label_chunks(self.layer, self.kernels.tile, here.stop - row, elements):
                yield self.whole.part(here, first, count)

    def targets(self, chunk: Chunk) -> Targets:
        if self.sparse is None:
            assert self.dense is not None
            part = self.dense[chunk.rows, chunk.labels].to(self.acc)
            return Targets(None, None, part if part.stride(1) == 1 else part.contiguous())
        return Targets(self.sparse.indices, self.sparse.at(chunk.layer, self.kernels.tile, chunk.rows), None)

    def buffer(self, blocks: int, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """Scratch for a tile of every block: ``[blocks, rows, tile]``."""
        group = self.kernels.rows(self.x)
        rows = -(-chunk.batch // group) * group
        return torch.empty(blocks, rows, self.kernels.tile, dtype=dtype, device=self.x.device)

    def gradients(self, chunk: Chunk, blocks: int, grad_weight: Tensor | None, out_scale: Tensor | None) -> Gradients:
        slab_shape = (blocks, chunk.batch, self.x.shape[1])
        return Gradients(
            torch.empty(slab_shape, dtype=self.acc, device=self.x.device) if self.needs[0] else None,
            None if grad_weight is None else grad_weight[chunk.labels],
            None if self.grad_bias is None else self.grad_bias[chunk.labels],
            chunk.rows.start > 0,
            out_scale,
            self.buffer(blocks, chunk, self.x.dtype) if any(self.needs[:2]) else None,
        )

    def add_grad_x(self, chunk: Chunk, gradients: Gradients) -> None:
        if self.grad_x is not None and gradients.slabs is not None:
            out = self.grad_x[chunk.rows]
            self.kernels.add_slabs(gradients.slabs, out, gradients.out_scale, chunk.labels.start > 0)

    def finish(self, grad_weight: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias in the dtype in which they are handed out."""
        return cast_all(self.out_dtype, self.grad_x, grad_weight, self.grad_bias)


def _fewest(tiles: int, blocks: int) -> int:
    """As few blocks as keep the busiest one as short: fewer slabs, the same time."""
    return -(-tiles // -(-tiles // blocks))


@without_autocast
def fused_loss(call: LossCall, params: ElementwiseParams, kernels: GPUKernels) -> LossResult:
    """An elementwise loss and its gradients."""
    run, x = _Pass(call, kernels), call.x
    scale = gradient_factors(x, call.scale, params)
    step = run.rows_per_launch() if call.needs[0] else max(x.shape[0], 1)
    grad_weight = run.grad_weight(-(-x.shape[0] // step))
    rows = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    for chunk in run.chunks(step):
        blocks = _fewest(chunk.tiles, kernels.blocks(x))
        gradients = run.gradients(chunk, blocks, grad_weight, scale.out)
        launch = Elementwise(
            params,
            label_vector(params.weight, chunk.layer, run.acc),
            label_vector(params.pos_weight, chunk.layer, run.acc),
            scale.row[chunk.rows],
            torch.empty(blocks, chunk.batch, dtype=torch.float64, device=x.device),
        )
        kernels.fused_loss(chunk, run.targets(chunk), gradients, launch)
        kernels.add_slabs(launch.row_sums, rows[chunk.rows], None, True)
        run.add_grad_x(chunk, gradients)
    return LossResult(rows, *run.finish(grad_weight))


@without_autocast
def column_loss(call: LossCall, params: ConfusionParams, kernels: GPUKernels) -> ColumnResult:
    """A confusion-matrix loss and its gradients; torch does a pooled one: its sums take a pass of their own."""
    if params.pooled:
        return torch_columns.column_loss(call)
    run, x, scale = _Pass(call, kernels), call.x, float(call.scale)
    batch, labels, device = x.shape[0], call.layer.num_rows, x.device
    # float16: ∂loss/∂z keeps to the middle of its range, and the rest of the factor waits for the sums.
    bounded = x.dtype == torch.float16 and params.form != UNBOUNDED
    inside = _FLOAT16_HEADROOM if bounded else (1.0 if x.dtype == torch.float16 else scale)
    out_scale = None if inside == scale else torch.full((), scale / inside, dtype=run.acc, device=device)
    grad_weight = run.grad_weight(1)
    value = torch.zeros(1, dtype=torch.float64, device=device)
    if not batch:
        value += labels  # every denominator is 0: value 0, loss 1
    grad_beta, grad_eta = (
        torch.zeros(labels, dtype=torch.float64, device=device) if need else None for need in call.needs[3:]
    )
    slab_bytes = max(batch * x.shape[1] * run.acc.itemsize, 1)
    most = min(kernels.blocks(x), max(_COLUMN_SLAB_BYTES // slab_bytes, 1))
    for chunk in run.chunks(max(batch, 1)):
        blocks = _fewest(chunk.tiles, most)
        gradients = run.gradients(chunk, blocks, grad_weight, out_scale)
        beta, eta = (s if isinstance(s, Tensor) else None for s in (params.beta, params.eta))
        launch = Columns(
            params,
            inside,
            label_vector(beta, chunk.layer, run.acc),
            label_vector(eta, chunk.layer, run.acc),
            run.buffer(blocks, chunk, run.acc),
            torch.empty(blocks, dtype=torch.float64, device=device),
            None if grad_beta is None else grad_beta[chunk.labels],
            None if grad_eta is None else grad_eta[chunk.labels],
        )
        kernels.confusion_loss(chunk, run.targets(chunk), gradients, launch)
        kernels.add_slabs(launch.values, value, None, True)
        run.add_grad_x(chunk, gradients)
    for grad in (grad_beta, grad_eta):
        if grad is not None:
            grad *= scale / inside
    settings = like_setting(params.beta, grad_beta), like_setting(params.eta, grad_eta)
    return ColumnResult(value[0] * scale, *run.finish(grad_weight), *settings)
