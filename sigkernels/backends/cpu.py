"""The cpu backend: the compiled tile loop of ``csrc/cpu`` on torch tensors.

This module owns all memory and turns tensors into the pointers, sizes and strides of one ``_C.Call``; ``docs/kernels.md``
explains what the loop does with them. ``SIGKERNELS_ISA`` forces an instruction set.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch  # before _C: the extension then shares torch's OpenMP runtime
from torch import Tensor

from ..dft_plan import plan
from ..labels import LabelSets
from ..layer import Layer
from ..losses import ConfusionLoss, Loss
from . import missing_kernels
from .buffers import gradient_of
from .interface import LossResult, accumulate_dtype, gradient_dtype

try:
    from .. import _C  # type: ignore[attr-defined]
except ImportError as error:
    _C = None
    _why: str | None = f"its compiled core could not be loaded ({error}); {missing_kernels.REMEDY}"
else:
    _why = None

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4, torch.bool: 4}
_LOSS, _LOGITS, _TOPK, _PREDICT = range(4)
_KINDS = {"BCE": 0, "Focal": 1, "Asymmetric": 2}

_CHUNK = 256  # rows that a tile holds at a time
_SHARE_UNIT = 24  # labels: threads split the labels in these units (kShareUnit in csrc/cpu/job.h)
_TILE_BYTES = 256 * 1024  # of weight and logits that a tile keeps in the second-level cache
_SMALL = 200_000  # multiplications below which a second thread costs more than it brings
_CACHE_BYTES = 64 * 2**20


def available() -> str | None:
    return _why


def devices() -> tuple[str, ...] | None:
    return ("cpu",)


def supports(loss: Loss) -> str | None:
    name = type(loss).__name__
    if name in _KINDS or isinstance(loss, ConfusionLoss):
        return None
    return f"it has no kernel for {name}; it has {', '.join(_KINDS)} and the confusion-matrix losses"


def isa() -> str:
    """The instruction set that calls use now."""
    return _C.isa()


def fused_loss(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: Loss,
    row_scale: float | Tensor,
    needs: tuple[bool, bool, bool],
    grad_weight_into: Tensor | None = None,
) -> LossResult:
    needs_x, needs_weight, needs_bias = needs
    real, batch, labels = accumulate_dtype(x.dtype), x.shape[0], layer.num_rows
    new = torch.empty if batch and labels else torch.zeros
    rows = new(batch, dtype=torch.float64)
    grad_x = new(x.shape, dtype=real) if needs_x else None
    grad_bias = None
    if needs_bias:  # added to; numpy's zeros start no OpenMP threads, which a forked child has lost
        grad_bias = torch.from_numpy(np.zeros(labels, np.float64 if real == torch.float64 else np.float32))
    grad_weight, fresh = _weight_gradient(x, layer, grad_weight_into) if needs_weight else (None, False)
    total = 0.0
    if batch and labels:
        call = _Call(x, layer, _LOSS)
        call.set_targets(targets)
        call.set_loss(loss, layer, real)
        if isinstance(row_scale, Tensor):
            call.c.row_scale = call.keep(row_scale.to(real).contiguous())
        else:
            call.c.scale_of_all = row_scale
        call.set_results(rows, grad_x, grad_bias, grad_weight, fresh)
        total = call.run()
    elif fresh and grad_weight is not None:
        grad_weight.zero_()
    if grad_weight is not None and grad_weight_into is not None and grad_weight is not grad_weight_into:
        grad_weight = grad_weight_into.add_(grad_weight)
    out = gradient_dtype(x.dtype)
    if out == real:
        return LossResult(rows, grad_x, grad_weight, grad_bias, total)
    return LossResult(
        rows,
        None if grad_x is None else grad_x.to(out),
        grad_weight if grad_weight is None or grad_weight_into is not None else grad_weight.to(out),
        None if grad_bias is None else grad_bias.to(out),
        total,
    )


def confusion_loss(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: ConfusionLoss,
    reduction: str,
    needs: tuple[bool, bool, bool, bool, bool],
) -> Any:
    from . import cpu_confusion

    return cpu_confusion.confusion_loss(x, layer, targets, loss, reduction, needs)


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
        (batch, _), (labels, slack), (num_labels, k, label_start) = x.shape, weight.shape, layer[2:]
        shape, plan = _shape(x.dtype, batch, labels, slack, num_labels, k, label_start, consumer, rows_at_once)
        self.kept: list[Any] = [x, weight, plan]
        self.c = shape.with_inputs(x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0))
        if layer.bias is not None:
            self.c.bias = self.keep(layer.bias.to(accumulate_dtype(x.dtype)).contiguous())

    def keep(self, tensor: Tensor) -> int:
        """The address of a tensor that lives as long as this call."""
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

    def set_loss(self, loss: Any, layer: Layer, real: torch.dtype) -> None:
        c, kind = self.c, _KINDS[type(loss).__name__]
        c.loss_kind = kind
        if kind == 0:
            c.label_smoothing = loss.label_smoothing
        elif kind == 1:
            c.gamma_pos = c.gamma_neg = loss.gamma
            c.alpha_pos, c.alpha_neg = (1.0, 1.0) if loss.alpha is None else (loss.alpha, 1 - loss.alpha)
        else:
            c.gamma_pos, c.gamma_neg, c.clip, c.eps = loss.gamma_pos, loss.gamma_neg, loss.clip, loss.eps
            c.detach_focus = int(loss.detach_focus)
        here = slice(layer.label_start, layer.label_start + layer.num_rows)
        if loss.weight is not None:
            c.label_weight = self.keep(loss.weight[here].to(real).contiguous())
        if loss.pos_weight is not None:
            c.pos_weight = self.keep(loss.pos_weight[here].to(real).contiguous())

    def set_results(
        self, rows: Tensor, grad_x: Tensor | None, grad_bias: Tensor | None, grad_weight: Tensor | None, fresh: bool
    ) -> None:
        """Where the loss of each row and the gradients go; gradients that are not ``fresh`` are added to."""
        self.c.results(
            self.keep(rows),
            0 if grad_x is None else self.keep(grad_x),
            0 if grad_bias is None else self.keep(grad_bias),
            0 if grad_weight is None else self.keep(grad_weight),
            0 if grad_weight is None else grad_weight.stride(0),
            0 if grad_weight is None else _DTYPES[grad_weight.dtype],
            grad_weight is not None and not fresh,
        )

    def run(self) -> float:
        """The sum of the rows' losses; 0 for calls that have none."""
        return _C.run(self.c)


def _unit_stride(a: Tensor) -> Tensor:
    """The same matrix with its rows contiguous; a copy only where they are not."""
    return a if a.stride(1) == 1 or a.shape[1] <= 1 else a.contiguous()


# Calls without tensors, by shape: training repeats one shape, and filling one in takes longer than a small layer.
_shapes: dict[tuple[Any, ...], tuple[Any, _Prepared | None]] = {}
_MOST_SHAPES = 256


def _shape(
    dtype: torch.dtype,
    batch: int,
    labels: int,
    slack: int,
    num_labels: int,
    k: int,
    label_start: int,
    consumer: int,
    rows_at_once: bool,
) -> tuple[Any, _Prepared | None]:
    """(a ``_C.Call`` without tensors, the plan that it points to); cached."""
    key = (dtype, batch, labels, slack, num_labels, k, label_start, consumer, rows_at_once, torch.get_num_threads())
    found = _shapes.get(key)
    if found is not None:
        return found
    real = accumulate_dtype(dtype)
    threads = min(torch.get_num_threads(), -(-labels // _SHARE_UNIT) or 1)
    if batch * labels * (slack + 16) < _SMALL:
        threads = 1
    chunk = max(batch, 1) if rows_at_once else _CHUNK
    tile = _tile(labels, slack, min(batch, chunk), threads, real.itemsize)
    made = None
    call = _C.Call()
    call.shape(consumer, _DTYPES[dtype], threads, tile, chunk, batch, labels, slack, label_start, k)
    if k >= 0:
        made = _prepare(num_labels, k, label_start, labels, tile, threads, real)
        call.plan(made.rank, made.even_rank, *made.pointers)
    if len(_shapes) >= _MOST_SHAPES:
        _shapes.clear()
    _shapes[key] = call, made
    return call, made


def _tile(labels: int, slack: int, rows: int, threads: int, itemsize: int) -> int:
    """Labels per tile: what fits in the cache, and no more than a thread has."""
    fitting = _TILE_BYTES // (itemsize * (slack + rows))
    tile = max(48, min(240, fitting // _SHARE_UNIT * _SHARE_UNIT))
    share = max(-(-labels // (threads * _SHARE_UNIT)), 1) * _SHARE_UNIT
    tiles = -(-share // tile)
    return min(tile, -(-share // (tiles * _SHARE_UNIT)) * _SHARE_UNIT)


def _weight_gradient(x: Tensor, layer: Layer, into: Tensor | None, rows_at_once: bool = False) -> tuple[Tensor, bool]:
    """(the buffer that the loop writes, whether it is fresh).

    A 16-bit buffer takes the sum over one chunk of rows only: more would be rounded in between.
    """
    real = accumulate_dtype(x.dtype)
    one_chunk = rows_at_once or x.shape[0] <= _CHUNK
    if into is not None and (into.stride(1) == 1 or into.shape[1] <= 1):
        half = into.dtype in (torch.bfloat16, torch.float16) and real == torch.float32
        if into.dtype == real or (half and one_chunk):
            return into, False
    dtype = gradient_dtype(x.dtype) if one_chunk and into is None else real
    return gradient_of(layer.weight, dtype), True


class _Prepared(NamedTuple):
    """A DFT plan in the dtype and for the tiles of a call."""

    arrays: tuple[np.ndarray, ...]  # u [T, r], v_even [r_e, k+1], v_odd [r_o, k], cos [tiles, k], sin [tiles, k]
    pointers: tuple[int, ...]
    rank: int
    even_rank: int

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


_cache: OrderedDict[tuple[Any, ...], _Prepared] = OrderedDict()
_lock = threading.Lock()


def _prepare(
    num_labels: int, k: int, label_start: int, labels: int, tile: int, threads: int, real: torch.dtype
) -> _Prepared:
    """Cached; the least recently used go when the cache passes 64 MiB."""
    key = (num_labels, k, label_start, labels, tile, threads, real)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    double = real == torch.float64
    made = plan(num_labels, k, tile, 1e-16 if double else 2e-8)
    starts = _tile_starts(labels, tile, threads)
    cos, sin = made.rotations(label_start + starts + tile // 2)
    even = made.even_rank
    dtype = np.float64 if double else np.float32
    parts = (made.u, made.v[:even, np.r_[0, 1 : 2 * k + 1 : 2]], made.v[even:, 2::2], cos, sin)
    arrays = tuple(np.ascontiguousarray(a, dtype=dtype) for a in parts)
    prepared = _Prepared(arrays, tuple(a.ctypes.data for a in arrays), made.rank, even)
    with _lock:
        _cache[key] = prepared
        while len(_cache) > 1 and sum(p.nbytes for p in _cache.values()) > _CACHE_BYTES:
            _cache.popitem(last=False)
            _shapes.clear()  # they hold what the cache lets go
    return prepared


def _tile_starts(labels: int, tile: int, threads: int) -> np.ndarray:
    """The first label of every tile, thread by thread (share_of in csrc/cpu/job.h)."""
    units = -(-labels // _SHARE_UNIT)
    bounds = [min(units * t // threads * _SHARE_UNIT, labels) for t in range(threads)] + [labels]
    return np.concatenate([np.arange(a, b, tile, dtype=np.int64) for a, b in itertools.pairwise(bounds)])
