"""The cpu backend: the compiled tile loop of ``csrc/cpu`` on torch tensors.

This module cuts a layer into shares and tiles and hands tensors to the core, which reads them and makes the results
(``csrc/call.h``); ``docs/kernels.md`` explains what the loop does. ``SIGKERNELS_ISA`` forces an instruction set.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bounded_cache import BoundedCache
from ..codes import sign_bits
from ..dft_spans import span_plan
from ..labels import LabelSets
from ..layer import Layer, LayerMeta
from ..layer_update import ROUNDINGS, LayerUpdate, ParameterUpdate
from ..losses import ColumnLoss, ElementwiseLoss, ElementwiseParams
from ..partial_labels import PartialTargets
from . import library_scans
from .compiled_core import core as _C
from .compiled_core import why as _why
from .interface import (
    ColumnResult,
    LMLSteps,
    LossCall,
    LossResult,
    Operation,
    PlainLoss,
    WholeBackend,
    accumulate_dtype,
    gradient_dtype,
    label_vector,
)

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of Dtype in csrc/cpu/job.h
_TARGET_DTYPES = (*_DTYPES, torch.uint8, torch.bool)

_CHUNK = 256  # rows that a tile holds at a time
_SHARE_UNIT = _C.SHARE_UNIT if _C else 1  # labels: they are cut into shares in these units
_SHARE_LABELS = 1400  # of a share, where there are no columns but slack
_FEW_SHARES, _FEW_SHARE_LABELS = 4, 350  # so many are made of fewer labels, at least of so many each
_MOST_SHARES = 64
_TILE_BYTES = 256 * 1024  # of weight and logits that a tile keeps in the second-level cache
_SMALL = 200_000  # multiplications below which a second thread costs more than it brings
_CACHE_BYTES = 64 * 2**20


class CPUBackend(WholeBackend):
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

    def plain_loss(self, loss: ElementwiseLoss, meta: LayerMeta, reduction: str, slack: int) -> PlainLoss | None:
        return plain_loss(loss, meta, reduction, slack)

    def fused_update(self, call: LossCall, update: LayerUpdate) -> LossResult:
        return fused_loss(call, update)

    def column_loss(self, call: LossCall) -> ColumnResult:
        from . import cpu_confusion

        return cpu_confusion.column_loss(call)

    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        return logits(x, layer)

    def logits_adjoint(self, g: Tensor, layer: Layer) -> Tensor:
        return library_scans.logits_adjoint(g, layer)

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        return topk(x, layer, m)

    def predict(self, x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
        return predict(x, layer, threshold)

    def lml(self) -> LMLSteps:
        from . import cpu_lml

        return cpu_lml.STEPS


def isa() -> str:
    """The instruction set that calls use now."""
    return _C.isa()


def fused_loss(call: LossCall, update: LayerUpdate | None = None) -> LossResult:
    """An elementwise loss and its gradients, in one pass of the tile loop."""
    x, layer, targets, loss, scale, needs, _ = call
    if update is not None:
        needs = (needs[0], False, False)
    if not (x.shape[0] and layer.num_rows):
        return _no_terms(x, layer, needs)
    params = loss.kernel_params()
    assert isinstance(params, ElementwiseParams)
    real = accumulate_dtype(x.dtype)
    loop = new_call(x, layer, rows_at_once=update is not None)
    set_targets(loop, targets)
    if update is not None:
        loop.set_updates(_update(update.weight), _update(update.bias))
    of_all, of_rows = (1.0, scale.to(real)) if isinstance(scale, Tensor) else (scale, None)
    rows, grad_x, grad_weight, grad_bias, total = _C.fused_loss(
        loop,
        _loss_numbers(params[:-2]),
        needs,
        scale=of_all,
        row_scale=of_rows,
        label_weight=label_vector(params.weight, layer, real),
        pos_weight=label_vector(params.pos_weight, layer, real),
    )
    return LossResult(rows, grad_x, grad_weight, grad_bias, total)


def _no_terms(x: Tensor, layer: Layer, needs: tuple[bool, ...]) -> LossResult:
    """The loss of no rows, or of no labels."""
    return LossResult(torch.zeros(x.shape[0], dtype=torch.float64), *zero_gradients(x, layer, needs), 0.0)


def zero_gradients(
    x: Tensor, layer: Layer, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of x, weight and bias that are needed."""
    a, b, c = (
        torch.zeros(like.shape, dtype=gradient_dtype(x.dtype)) if need and like is not None else None
        for like, need in zip((x, layer.weight, layer.bias), needs, strict=False)
    )
    return a, b, c


def plain_loss(loss: ElementwiseLoss, meta: LayerMeta, reduction: str, slack: int) -> PlainLoss | None:
    params = loss.kernel_params()
    if not isinstance(params, ElementwiseParams) or params.weight is not None or params.pos_weight is not None:
        return None
    return _C.PlainLoss(  # type: ignore[no-any-return]
        loss=_loss_numbers(params[:-2]),
        mean=reduction == "mean",
        num_labels=meta.num_labels,
        fixed_columns=meta.fixed_columns,
        slack=slack,
        shape_of=lambda dtype, rows, slack: _shape(_DTYPES[dtype], rows, (meta.num_labels, slack), meta, False),
    )


@functools.lru_cache(maxsize=64)
def _loss_numbers(numbers: tuple[float, ...]) -> Any:
    """All of ``ElementwiseParams`` but the label weights, as the core has them."""
    return _C.LossParams(**ElementwiseParams(*numbers).numbers())  # type: ignore[arg-type]


def _update(update: ParameterUpdate | None) -> Any:
    """A step as the core has it."""
    if update is None:
        return None
    return _C.Update(
        kind=update.kind,
        rounding=ROUNDINGS.index(update.rounding),
        lr=update.lr,
        weight_decay=update.weight_decay,
        momentum=update.momentum,
        beta1=update.beta1,
        beta2=update.beta2,
        correction1=1 - update.beta1**update.step,
        correction2=1 - update.beta2**update.step,
        eps=update.eps,
        key=update.key,
        parameter=update.parameter,
        first=update.first,
        second=update.second,
        compensation=update.compensation,
    )


def logits(x: Tensor, layer: Layer) -> Tensor:
    if not (x.shape[0] and layer.num_rows):
        return torch.empty(x.shape[0], layer.num_rows, dtype=x.dtype)
    return _C.logits(new_call(x, layer))  # type: ignore[no-any-return]


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    if not (x.shape[0] and m):
        return torch.empty(x.shape[0], m, dtype=x.dtype), torch.empty(x.shape[0], m, dtype=torch.int64)
    values, labels = _C.topk(new_call(x, layer), m)
    return values.to(x.dtype), labels


def predict(x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
    if not x.shape[0] or not layer.num_rows:
        indices, offsets = (torch.zeros(count, dtype=torch.int64) for count in (0, x.shape[0] + 1))
        return LabelSets.from_sorted(indices, offsets, layer.num_labels)
    own = None
    if isinstance(threshold, Tensor):
        own, threshold = threshold.to(x.dtype).to(accumulate_dtype(x.dtype)), 0.0
    indices, offsets = _C.predict(new_call(x, layer), threshold, own)
    return LabelSets.from_sorted(indices, offsets, layer.num_labels)


def new_call(x: Tensor, layer: Layer, rows_at_once: bool = False) -> Any:
    """A ``_C.Call`` with the input and the layer."""
    shape = _shape(x.dtype, x.shape[0], tuple(layer.weight.shape), layer.meta, rows_at_once)
    return _C.Call(shape, x, layer.weight, layer.bias)


def set_targets(loop: Any, targets: LabelSets | Tensor | PartialTargets) -> None:
    unknown = None
    if isinstance(targets, PartialTargets):
        targets, unknown = targets.for_kernels()
    if isinstance(targets, LabelSets):
        loop.set_sparse_targets(*targets.unchecked(), targets.num_labels, unknown)
    else:
        loop.set_dense_targets(targets if targets.dtype in _TARGET_DTYPES else targets.to(torch.float32))


# Shapes of calls: training repeats one, and filling one in takes longer than a small layer.
_shapes: BoundedCache[Any] = BoundedCache(_CACHE_BYTES, lambda shape: 1024 + shape.nbytes)


def _shape(dtype: torch.dtype, batch: int, weight_shape: tuple[int, ...], meta: LayerMeta, rows_at_once: bool) -> Any:
    """A ``_C.Shape``; cached."""
    key = (dtype, batch, weight_shape, meta, rows_at_once, torch.get_num_threads())
    return _shapes.get(key, lambda: _new_shape(*key))


def _new_shape(
    dtype: torch.dtype, batch: int, weight_shape: tuple[int, ...], meta: LayerMeta, rows_at_once: bool, threads: int
) -> Any:
    labels, slack = weight_shape
    real = accumulate_dtype(dtype)
    if batch * labels * (slack + 16) < _SMALL:
        threads = 1
    chunk = max(batch, 1) if rows_at_once else _CHUNK
    shares = _shares(labels, slack, meta)
    if meta.codes:
        tile = _code_tile(meta.codes, slack, min(batch, chunk), real.itemsize)
    else:
        tile = _tile(labels, slack, min(batch, chunk), shares, real.itemsize)
    shape = _C.Shape(
        dtype=_DTYPES.index(dtype),
        threads=threads,
        shares=shares,
        tile=tile,
        chunk=chunk,
        rows=batch,
        labels=labels,
        slack=slack,
        label_start=meta.label_start,
        k=meta.k,
        codes=meta.codes,
        code_bits=_code_bits(meta.codes, meta.label_start, labels),
    )
    if meta.k >= 0:
        plan = _plan(meta, tile, shape.tiles_of_span, tuple(shape.span_starts()), real)
        shape.set_plan(**plan.sizes, **plan.arrays)
    return shape


def _shares(labels: int, slack: int, meta: LayerMeta) -> int:
    """Parts of the labels that threads take one by one: by the sizes of the layer alone, and with them all sums.

    Each has a ``grad_x`` of its own, which is written and added up: a small part of the work of so many labels.
    """
    costs, pays = meta.fixed_columns + slack, slack + 16  # columns of a grad_x, and what a label takes
    few = min(labels * pays // (_FEW_SHARE_LABELS * max(costs, 1)), _FEW_SHARES)
    shares = max(labels * pays // (_SHARE_LABELS * max(costs, 1)), few, 1)
    return min(1 << shares.bit_length() - 1, _MOST_SHARES)


def _tile(labels: int, slack: int, rows: int, shares: int, itemsize: int) -> int:
    """Labels per tile: what fits in the cache, and no more than a share has."""
    fitting = _TILE_BYTES // (itemsize * (slack + rows))
    tile = max(48, min(240, fitting // _SHARE_UNIT * _SHARE_UNIT))
    share = max(-(-labels // (shares * _SHARE_UNIT)), 1) * _SHARE_UNIT
    tiles = -(-share // tile)
    return min(tile, -(-share // (tiles * _SHARE_UNIT)) * _SHARE_UNIT)


def _code_tile(codes: int, slack: int, rows: int, itemsize: int) -> int:
    """The same with codes: a power of two. Every tile reads all code features, so many of them want a long one."""
    fitting = _TILE_BYTES // (itemsize * (slack + rows))
    return 256 if codes > 256 or fitting >= 160 else 128 if fitting >= 80 else 64


def _code_bits(codes: int, label_start: int, labels: int) -> np.ndarray:
    """The sign bits of the blocks that these labels touch, uint8 ``[blocks, c / 8]``."""
    if not codes:
        return np.empty(0, np.uint8)
    blocks = range(label_start // codes, math.ceil((label_start + labels) / codes) or 1)
    return np.packbits(sign_bits(codes, blocks), axis=1, bitorder="little")


class _Plan(NamedTuple):
    """A DFT plan in the dtype and for the spans of a call, as ``Shape.set_plan`` takes it."""

    sizes: dict[str, int]
    arrays: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())


_plans: BoundedCache[_Plan] = BoundedCache(_CACHE_BYTES, lambda plan: plan.nbytes)


def _plan(meta: LayerMeta, tile: int, tiles: int, starts: tuple[int, ...], real: torch.dtype) -> _Plan:
    """The plan of a layer for spans of ``tiles`` tiles that begin at ``starts``; cached."""
    key = (meta, tile, tiles, starts, real)
    return _plans.get(key, lambda: _new_plan(*key))


def _new_plan(meta: LayerMeta, tile: int, tiles: int, starts: tuple[int, ...], real: torch.dtype) -> _Plan:
    double = real == torch.float64
    plan = span_plan(meta.num_labels, meta.k, tile, tiles, 1e-16 if double else 2e-8)
    cos, sin = plan.rotations(meta.label_start + np.asarray(starts, np.int64))
    sizes = {
        "rank": plan.shared.rank,
        "even_rank": plan.shared.even_rank,
        "low_even": len(plan.v_even),
        "low_odd": len(plan.v_odd),
    }
    matrices = {"u": plan.shared.u, **{name: getattr(plan, name) for name in ("v_even", "v_odd", "even", "odd")}}
    dtype = np.float64 if double else np.float32
    arrays = {**matrices, "cos": cos, "sin": sin}
    return _Plan(sizes, {name: np.ascontiguousarray(array, dtype=dtype) for name, array in arrays.items()})
