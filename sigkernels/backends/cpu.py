"""The cpu backend: the compiled tile loop of ``csrc/cpu`` on torch tensors.

This module owns all memory and turns tensors into the pointers, sizes and strides of one ``_C.Call``; ``docs/kernels.md``
explains what the loop does with them. ``SIGKERNELS_ISA`` forces an instruction set.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bounded_cache import BoundedCache
from ..codes import sign_bits
from ..dft_plan import plan
from ..labels import LabelSets
from ..layer import Layer, LayerMeta
from ..layer_update import ROUNDINGS, LayerUpdate, ParameterUpdate
from ..losses import ColumnLoss, ElementwiseLoss, ElementwiseParams
from ..partial_labels import PartialTargets
from . import library_scans
from .compiled_core import core as _C
from .compiled_core import why as _why
from .gradient_memory import empty_gradient
from .interface import (
    ColumnResult,
    LMLSteps,
    LossCall,
    LossResult,
    Operation,
    WholeBackend,
    accumulate_dtype,
    cast_all,
    gradient_dtype,
    label_vector,
)

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4, torch.bool: 4}

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
    x, layer, targets, loss, scale, (needs_x, needs_weight, needs_bias), _ = call
    if update is not None:
        needs_weight = needs_bias = False
    params = loss.kernel_params()
    assert isinstance(params, ElementwiseParams)
    real, (batch, columns), labels = accumulate_dtype(x.dtype), x.shape, layer.num_rows
    new = torch.empty if batch and labels else torch.zeros  # of plain sizes: a torch.Size takes torch 2 µs more
    rows = new(batch, dtype=torch.float64)
    grad_x = new(batch, columns, dtype=real) if needs_x else None
    grad_bias = new(labels, dtype=real) if needs_bias else None
    grad_weight = weight_gradient(x, layer) if needs_weight else None
    total = 0.0
    if batch and labels:
        loop = _Call(x, layer, rows_at_once=update is not None)
        loop.set_targets(targets)
        loop.set_gradients(grad_x, grad_bias, grad_weight)
        if update is not None:
            loop.c.set_updates(_update(update.weight), _update(update.bias))
        given: dict[str, Any] = {"row_loss": rows.data_ptr()}  # what is left out has no part in the loss
        if isinstance(scale, Tensor):
            given["row_scale"] = loop.keep(scale.to(real).contiguous())
        else:
            given["scale"] = scale
        if params.weight is not None:
            given["label_weight"] = loop.keep(label_vector(params.weight, layer, real))
        if params.pos_weight is not None:
            given["pos_weight"] = loop.keep(label_vector(params.pos_weight, layer, real))
        total = _C.fused_loss(loop.c, _loss_numbers(params[:-2]), **given)
    elif grad_weight is not None:
        grad_weight.zero_()
    out = gradient_dtype(x.dtype)
    if out != real:
        grad_x, grad_weight, grad_bias = cast_all(out, grad_x, grad_weight, grad_bias)
    return LossResult(rows, grad_x, grad_weight, grad_bias, total)


@functools.lru_cache(maxsize=64)
def _loss_numbers(numbers: tuple[float, ...]) -> Any:
    """All of ``ElementwiseParams`` but the label weights, as the core has them."""
    return _C.LossParams(**ElementwiseParams(*numbers).numbers())  # type: ignore[arg-type]


def _update(update: ParameterUpdate | None) -> Any:
    """A step as the core has it; the caller keeps its tensors alive."""
    if update is None:
        return None
    states = {name: getattr(update, name) for name in ("first", "second", "compensation")}
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
        parameter=update.parameter.data_ptr(),
        stride=update.parameter.stride(0),
        **{name: state.data_ptr() for name, state in states.items() if state is not None},
    )


def logits(x: Tensor, layer: Layer) -> Tensor:
    out = torch.empty(x.shape[0], layer.num_rows, dtype=x.dtype)
    if out.numel():
        loop = _Call(x, layer)
        _C.logits(loop.c, out=out.data_ptr(), out_stride=out.stride(0))
    return out


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape[0], m, dtype=accumulate_dtype(x.dtype))
    labels = torch.empty(x.shape[0], m, dtype=torch.int64)
    if values.numel():
        loop = _Call(x, layer)
        _C.topk(loop.c, keep=m, values=values.data_ptr(), labels=labels.data_ptr())
    return values.to(x.dtype), labels


def predict(x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
    batch = x.shape[0]
    offsets = torch.zeros(batch + 1, dtype=torch.int64)
    if not batch or not layer.num_rows:
        return LabelSets.from_sorted(torch.empty(0, dtype=torch.int64), offsets, layer.num_labels)
    loop = _Call(x, layer)
    if isinstance(threshold, Tensor):
        own = threshold.to(x.dtype).to(accumulate_dtype(x.dtype)).contiguous()
        found = _C.predict(loop.c, threshold=0.0, thresholds=loop.keep(own))
    else:
        found = _C.predict(loop.c, threshold=threshold)
    indices = torch.empty(found.total, dtype=torch.int64)
    found.write(rows=batch, offsets=offsets.data_ptr(), indices=indices.data_ptr())
    return LabelSets.from_sorted(indices, offsets, layer.num_labels)


class _Call:
    """A ``_C.Call`` with the input and the layer filled in. It keeps alive what that points to: hold it while it runs."""

    def __init__(self, x: Tensor, layer: Layer, rows_at_once: bool = False) -> None:
        (x, x_stride), (weight, weight_stride) = _with_unit_stride(x), _with_unit_stride(layer.weight)
        self.shape, plan = _shape(x.dtype, x.shape[0], weight.shape, layer.meta, rows_at_once)
        self.kept: list[Any] = [x, weight, plan]
        bias = 0
        if layer.bias is not None:
            bias = self.keep(layer.bias.to(accumulate_dtype(x.dtype)).contiguous())
        self.c = _C.Call(
            self.shape,
            x=x.data_ptr(),
            x_stride=x_stride,
            weight=weight.data_ptr(),
            weight_stride=weight_stride,
            bias=bias,
        )

    def keep(self, tensor: Tensor | None) -> int:
        """The address of a tensor that lives as long as this call."""
        self.kept.append(tensor)
        return _address(tensor)

    def set_targets(self, targets: LabelSets | Tensor | PartialTargets) -> None:
        unknown = None
        if isinstance(targets, PartialTargets):
            targets, unknown = targets.for_kernels()
        if isinstance(targets, LabelSets):
            indices, offsets = targets.unchecked()
            indices, offsets = indices.contiguous(), offsets.contiguous()
            self.kept += indices, offsets, unknown
            self.c.set_sparse_targets(
                indices=indices.data_ptr(),
                num_indices=indices.numel(),
                offsets=offsets.data_ptr(),
                num_offsets=offsets.numel(),
                num_labels=targets.num_labels,
                unknown=_address(unknown),
            )
            return
        if targets.dtype not in _DTYPES:
            targets = targets.to(torch.float32)
        stride, step = targets.stride()
        self.c.set_dense_targets(data=self.keep(targets), dtype=_DTYPES[targets.dtype], stride=stride, step=step)

    def set_gradients(self, grad_x: Tensor | None, grad_bias: Tensor | None, grad_weight: Tensor | None) -> None:
        """Where the gradients go, which the caller keeps alive; ``None``: nobody needs it."""
        self.c.set_gradients(
            grad_x=_address(grad_x),
            grad_bias=_address(grad_bias),
            grad_weight=_address(grad_weight),
            grad_weight_stride=0 if grad_weight is None else grad_weight.stride(0),
            grad_weight_dtype=0 if grad_weight is None else _DTYPES[grad_weight.dtype],
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _with_unit_stride(a: Tensor) -> tuple[Tensor, int]:
    """The same matrix with its rows contiguous, a copy only where they are not, and how far apart they are."""
    stride, step = a.stride()
    if step == 1 or a.shape[1] <= 1:
        return a, stride
    return a.contiguous(), a.shape[1]


# Shapes of calls: training repeats one, and filling one in takes longer than a small layer.
_shapes: BoundedCache[tuple[Any, _Plan]] = BoundedCache(_CACHE_BYTES, lambda entry: 1024 + entry[1].nbytes)


def _shape(
    dtype: torch.dtype, batch: int, weight_shape: torch.Size, meta: LayerMeta, rows_at_once: bool
) -> tuple[Any, _Plan]:
    """(a ``_C.Shape``, the arrays that it points to); cached."""
    key = (dtype, batch, weight_shape, meta, rows_at_once, torch.get_num_threads())
    return _shapes.get(key, lambda: _new_shape(*key))


def _new_shape(
    dtype: torch.dtype, batch: int, weight_shape: torch.Size, meta: LayerMeta, rows_at_once: bool, threads: int
) -> tuple[Any, _Plan]:
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
    bits = _code_bits(meta.codes, meta.label_start, labels)
    shape = _C.Shape(
        dtype=_DTYPES[dtype],
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
        code_bits=bits.ctypes.data if meta.codes else 0,
    )
    if meta.k < 0:
        return shape, _Plan((bits,), 0, 0)
    plan = _plan(meta, tile, tuple(shape.tile_starts()), real)
    names = ("u", "v_even", "v_odd", "cos", "sin")
    addresses = {name: array.ctypes.data for name, array in zip(names, plan.arrays, strict=True)}
    shape.set_plan(rank=plan.rank, even_rank=plan.even_rank, **addresses)
    return shape, plan._replace(arrays=(*plan.arrays, bits))


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


def weight_gradient(x: Tensor, layer: Layer, rows_at_once: bool = False) -> Tensor:
    """The memory that the loop writes grad_weight to.

    16 bits take the sum over one chunk of rows only: more would be rounded in between.
    """
    one_chunk, (labels, slack) = rows_at_once or x.shape[0] <= _CHUNK, layer.weight.shape
    return empty_gradient(labels, slack, gradient_dtype(x.dtype) if one_chunk else accumulate_dtype(x.dtype))


class _Plan(NamedTuple):
    """A DFT plan in the dtype and for the tiles of a call."""

    arrays: tuple[np.ndarray, ...]  # u [T, r], v_even [r_e, k+1], v_odd [r_o, k], cos [tiles, k], sin [tiles, k]
    rank: int
    even_rank: int

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


_plans: BoundedCache[_Plan] = BoundedCache(_CACHE_BYTES, lambda plan: plan.nbytes)


def _plan(meta: LayerMeta, tile: int, starts: tuple[int, ...], real: torch.dtype) -> _Plan:
    """The plan of a layer for tiles that begin at ``starts``; cached."""
    key = (meta, tile, starts, real)
    return _plans.get(key, lambda: _new_plan(*key))


def _new_plan(meta: LayerMeta, tile: int, starts: tuple[int, ...], real: torch.dtype) -> _Plan:
    double = real == torch.float64
    shared = plan(meta.num_labels, meta.k, tile, 1e-16 if double else 2e-8)
    cos, sin = shared.rotations(meta.label_start + np.asarray(starts, np.int64) + tile // 2)
    even = shared.even_rank
    dtype = np.float64 if double else np.float32
    parts = (shared.u, shared.v[:even, np.r_[0, 1 : 2 * meta.k + 1 : 2]], shared.v[even:, 2::2], cos, sin)
    return _Plan(tuple(np.ascontiguousarray(a, dtype=dtype) for a in parts), shared.rank, even)
