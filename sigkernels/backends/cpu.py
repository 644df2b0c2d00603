"""The cpu backend: the compiled tile loop of ``csrc/cpu`` on torch tensors.

This module owns all memory and turns tensors into the pointers, sizes and strides of one ``_C.Call``; ``docs/kernels.md``
explains what the loop does with them. ``SIGKERNELS_ISA`` forces an instruction set.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch  # before _C: the extension then shares torch's OpenMP runtime
from torch import Tensor

from ..bounded_cache import BoundedCache
from ..dft_plan import plan
from ..labels import LabelSets
from ..layer import Layer, LayerMeta
from ..losses import ColumnLoss, ElementwiseLoss, ElementwiseParams
from ..losses.kernel_params import BCE_KIND
from . import missing_kernels, torch_tiled
from .gradient_memory import empty_gradient
from .interface import (
    Backend,
    ColumnResult,
    LMLSteps,
    LossCall,
    LossResult,
    Operation,
    accumulate_dtype,
    cast_all,
    gradient_dtype,
    label_vector,
)

try:
    from .. import _C  # type: ignore[attr-defined]
except ImportError as error:
    _C = None
    _why: str | None = f"its compiled core could not be loaded ({error}); {missing_kernels.REMEDY}"
else:
    _why = None

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4, torch.bool: 4}
_LOSS, _LOGITS, _TOPK, _PREDICT = range(4)

_CHUNK = 256  # rows that a tile holds at a time
_SHARE_UNIT = 24  # labels: threads split the labels in these units (kShareUnit in csrc/cpu/job.h)
_TILE_BYTES = 256 * 1024  # of weight and logits that a tile keeps in the second-level cache
_SMALL = 200_000  # multiplications below which a second thread costs more than it brings
_CACHE_BYTES = 64 * 2**20


class CPUBackend(Backend):
    """The compiled tile loop."""

    name = "cpu"

    def unavailable(self) -> str | None:
        return _why

    def devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def refuses(self, operation: Operation, loss: ElementwiseLoss | ColumnLoss | None = None) -> str | None:
        return self.refuses_loss(loss)

    def fused_loss(self, call: LossCall) -> LossResult:
        return fused_loss(call)

    def column_loss(self, call: LossCall) -> ColumnResult:
        from . import cpu_confusion

        return cpu_confusion.column_loss(call)

    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        return logits(x, layer)

    def logits_adjoint(self, g: Tensor, layer: Layer) -> Tensor:
        return torch_tiled.logits_adjoint(g, layer)

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        return topk(x, layer, m)

    def predict(self, x: Tensor, layer: Layer, threshold: float) -> LabelSets:
        return predict(x, layer, threshold)

    def lml(self) -> LMLSteps:
        from . import cpu_lml

        return cpu_lml.STEPS


def isa() -> str:
    """The instruction set that calls use now."""
    return _C.isa()


def fused_loss(call: LossCall) -> LossResult:
    """An elementwise loss and its gradients, in one pass of the tile loop."""
    x, layer, targets, loss, scale, (needs_x, needs_weight, needs_bias) = call
    params = loss.kernel_params()
    assert isinstance(params, ElementwiseParams)
    real, batch, labels = accumulate_dtype(x.dtype), x.shape[0], layer.num_rows
    new = torch.empty if batch and labels else torch.zeros
    rows = new(batch, dtype=torch.float64)
    grad_x = new(x.shape, dtype=real) if needs_x else None
    grad_bias = None
    if needs_bias:  # added to; numpy's zeros start no OpenMP threads, which a forked child has lost
        grad_bias = torch.from_numpy(np.zeros(labels, np.float64 if real == torch.float64 else np.float32))
    grad_weight = weight_gradient(x, layer) if needs_weight else None
    total = 0.0
    if batch and labels:
        loop = _Call(x, layer, _LOSS)
        loop.set_targets(targets)
        loop.set_loss(params, layer, real)
        if isinstance(scale, Tensor):
            loop.c.row_scale = loop.keep(scale.to(real).contiguous())
        else:
            loop.c.scale_of_all = scale
        loop.set_results(rows, grad_x, grad_bias, grad_weight)
        total = loop.run()
    elif grad_weight is not None:
        grad_weight.zero_()
    out = gradient_dtype(x.dtype)
    if out != real:
        grad_x, grad_weight, grad_bias = cast_all(out, grad_x, grad_weight, grad_bias)
    return LossResult(rows, grad_x, grad_weight, grad_bias, total)


def logits(x: Tensor, layer: Layer) -> Tensor:
    out = torch.empty(x.shape[0], layer.num_rows, dtype=x.dtype)
    if out.numel():
        call = _Call(x, layer, _LOGITS)
        call.c.out, call.c.out_stride = out.data_ptr(), out.stride(0)
        call.run()
    return out


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape[0], m, dtype=accumulate_dtype(x.dtype))
    labels = torch.empty(x.shape[0], m, dtype=torch.int64)
    if values.numel():
        call = _Call(x, layer, _TOPK)
        call.c.keep, call.c.top_values, call.c.top_labels = m, values.data_ptr(), labels.data_ptr()
        call.run()
    return values.to(x.dtype), labels


def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    batch = x.shape[0]
    offsets = torch.zeros(batch + 1, dtype=torch.int64)
    if not batch or not layer.num_rows:
        return LabelSets.from_sorted(torch.empty(0, dtype=torch.int64), offsets, layer.num_labels)
    call = _Call(x, layer, _PREDICT)
    call.c.threshold = threshold
    found = _C.predict(call.c)
    indices = torch.empty(found.total, dtype=torch.int64)
    found.write(batch, offsets.data_ptr(), indices.data_ptr())
    return LabelSets.from_sorted(indices, offsets, layer.num_labels)


class _Call:
    """A ``_C.Call`` with the input and the layer filled in, and whatever it points to kept alive."""

    def __init__(self, x: Tensor, layer: Layer, consumer: int, rows_at_once: bool = False) -> None:
        x, weight = _unit_stride(x), _unit_stride(layer.weight)
        shape, plan = _shape(x.dtype, x.shape[0], weight.shape, layer.meta, consumer, rows_at_once)
        self.kept: list[Any] = [x, weight, plan]
        self.c = shape.with_inputs(x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0))
        if layer.bias is not None:
            self.c.bias = self.keep(layer.bias.to(accumulate_dtype(x.dtype)).contiguous())

    def keep(self, tensor: Tensor | None) -> int:
        """The address of a tensor that lives as long as this call."""
        if tensor is None:
            return 0
        self.kept.append(tensor)
        return tensor.data_ptr()

    def set_targets(self, targets: LabelSets | Tensor) -> None:
        if isinstance(targets, LabelSets):
            indices, offsets = targets.indices.contiguous(), targets.offsets.contiguous()
            self.c.sparse_targets(
                self.keep(indices), indices.numel(), self.keep(offsets), offsets.numel(), targets.num_labels
            )
            return
        if targets.dtype not in _DTYPES:
            targets = targets.to(torch.float32)
        self.c.dense, self.c.dense_dtype = self.keep(targets), _DTYPES[targets.dtype]
        self.c.dense_stride, self.c.dense_step = targets.stride()

    def set_loss(self, params: ElementwiseParams, layer: Layer, real: torch.dtype) -> None:
        c = self.c
        c.loss_kind = params.kind
        if params.kind == BCE_KIND:
            c.label_smoothing = params.label_smoothing
        else:
            c.gamma_pos, c.gamma_neg = params.gamma_pos, params.gamma_neg
            c.alpha_pos, c.alpha_neg = params.alpha_pos, params.alpha_neg
            c.clip, c.eps, c.detach_focus = params.clip, params.eps, int(params.detach_focus)
        if params.weight is not None:
            c.label_weight = self.keep(label_vector(params.weight, layer, real))
        if params.pos_weight is not None:
            c.pos_weight = self.keep(label_vector(params.pos_weight, layer, real))

    def set_results(
        self, rows: Tensor, grad_x: Tensor | None, grad_bias: Tensor | None, grad_weight: Tensor | None
    ) -> None:
        """Where the loss of each row and the gradients go."""
        self.c.results(
            self.keep(rows),
            self.keep(grad_x),
            self.keep(grad_bias),
            self.keep(grad_weight),
            0 if grad_weight is None else grad_weight.stride(0),
            0 if grad_weight is None else _DTYPES[grad_weight.dtype],
            False,
        )

    def run(self) -> float:
        """The sum of the rows' losses; 0 for calls that have none."""
        return _C.run(self.c)


def _unit_stride(a: Tensor) -> Tensor:
    """The same matrix with its rows contiguous; a copy only where they are not."""
    return a if a.stride(1) == 1 or a.shape[1] <= 1 else a.contiguous()


# Calls without tensors, by shape: training repeats one shape, and filling one in takes longer than a small layer.
_shapes: BoundedCache[tuple[Any, _Prepared | None]] = BoundedCache(
    _CACHE_BYTES, lambda entry: 1024 + (0 if entry[1] is None else entry[1].nbytes)
)


def _shape(
    dtype: torch.dtype, batch: int, weight_shape: torch.Size, meta: LayerMeta, consumer: int, rows_at_once: bool
) -> tuple[Any, _Prepared | None]:
    """(a ``_C.Call`` without tensors, the plan that it points to); cached."""
    threads = torch.get_num_threads()
    key = (dtype, batch, weight_shape, meta, consumer, rows_at_once, threads)
    return _shapes.get(key, lambda: _new_shape(*key))


def _new_shape(
    dtype: torch.dtype,
    batch: int,
    weight_shape: torch.Size,
    meta: LayerMeta,
    consumer: int,
    rows_at_once: bool,
    threads: int,
) -> tuple[Any, _Prepared | None]:
    labels, slack = weight_shape
    real = accumulate_dtype(dtype)
    threads = min(threads, -(-labels // _SHARE_UNIT) or 1)
    if batch * labels * (slack + 16) < _SMALL:
        threads = 1
    chunk = max(batch, 1) if rows_at_once else _CHUNK
    tile = _tile(labels, slack, min(batch, chunk), threads, real.itemsize)
    prepared = None
    call = _C.Call()
    call.shape(consumer, _DTYPES[dtype], threads, tile, chunk, batch, labels, slack, meta.label_start, meta.k)
    if meta.k >= 0:
        prepared = _prepare(meta, labels, tile, threads, real)
        call.plan(prepared.rank, prepared.even_rank, *prepared.pointers)
    return call, prepared


def _tile(labels: int, slack: int, rows: int, threads: int, itemsize: int) -> int:
    """Labels per tile: what fits in the cache, and no more than a thread has."""
    fitting = _TILE_BYTES // (itemsize * (slack + rows))
    tile = max(48, min(240, fitting // _SHARE_UNIT * _SHARE_UNIT))
    share = max(-(-labels // (threads * _SHARE_UNIT)), 1) * _SHARE_UNIT
    tiles = -(-share // tile)
    return min(tile, -(-share // (tiles * _SHARE_UNIT)) * _SHARE_UNIT)


def weight_gradient(x: Tensor, layer: Layer, rows_at_once: bool = False) -> Tensor:
    """The memory that the loop writes grad_weight to.

    16 bits take the sum over one chunk of rows only: more would be rounded in between.
    """
    one_chunk = rows_at_once or x.shape[0] <= _CHUNK
    return empty_gradient(layer.weight.shape, gradient_dtype(x.dtype) if one_chunk else accumulate_dtype(x.dtype))


class _Prepared(NamedTuple):
    """A DFT plan in the dtype and for the tiles of a call."""

    arrays: tuple[np.ndarray, ...]  # u [T, r], v_even [r_e, k+1], v_odd [r_o, k], cos [tiles, k], sin [tiles, k]
    pointers: tuple[int, ...]
    rank: int
    even_rank: int

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


_plans: BoundedCache[_Prepared] = BoundedCache(_CACHE_BYTES, lambda prepared: prepared.nbytes)


def _prepare(meta: LayerMeta, labels: int, tile: int, threads: int, real: torch.dtype) -> _Prepared:
    """The plan of a layer for these tiles; cached."""
    key = (meta, labels, tile, threads, real)
    return _plans.get(key, lambda: _new_plan(*key))


def _new_plan(meta: LayerMeta, labels: int, tile: int, threads: int, real: torch.dtype) -> _Prepared:
    double = real == torch.float64
    shared = plan(meta.num_labels, meta.k, tile, 1e-16 if double else 2e-8)
    cos, sin = shared.rotations(meta.label_start + _tile_starts(labels, tile, threads) + tile // 2)
    even = shared.even_rank
    dtype = np.float64 if double else np.float32
    parts = (shared.u, shared.v[:even, np.r_[0, 1 : 2 * meta.k + 1 : 2]], shared.v[even:, 2::2], cos, sin)
    arrays = tuple(np.ascontiguousarray(a, dtype=dtype) for a in parts)
    return _Prepared(arrays, tuple(a.ctypes.data for a in arrays), shared.rank, even)


def _tile_starts(labels: int, tile: int, threads: int) -> np.ndarray:
    """The first label of every tile, thread by thread (share_of in csrc/cpu/job.h)."""
    units = -(-labels // _SHARE_UNIT)
    bounds = [min(units * t // threads * _SHARE_UNIT, labels) for t in range(threads)] + [labels]
    return np.concatenate([np.arange(a, b, tile, dtype=np.int64) for a, b in itertools.pairwise(bounds)])
