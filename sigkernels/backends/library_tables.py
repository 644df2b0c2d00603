"""How the library path walks over the labels of a layer, and the tables of its fixed columns: the same at every step.

The DFT part of several chunks, or of the runs of a pointwise kernel, is one factor ``U`` that all of them share, and an
``M = V · Rot`` of each (``dft_plan.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codes import hadamard, sign_bits
from ..dft import dft_rows
from ..dft_plan import DFTPlan, plan
from ..layer import Layer, LayerMeta
from .device_tables import DeviceTables
from .interface import accumulate_dtype

_CPU_ELEMENTS = 2**19  # B · chunk: the working buffers stay near the cache
_CPU_LABELS = (256, 8192)  # the least and the most of a chunk
_L2_SHARE, _LEAST_L2 = 0.6, 2**25  # of the cache for a chunk; bytes, where a device has less or does not say
_ALIGNED = 128  # labels: chunks are multiples of it, so that rows of the buffers are aligned
_MOST_LABELS = 2**16  # of a chunk that has a factor U: it is worked out by an SVD
_MOST_TABLE = 2**26  # bytes of the DFT's columns as they are
RUN_RANK = 16  # columns of the factor of a run
_RUN_UNIT, _LEAST_RUN = 16, 64  # labels
_ROW = 16  # numbers: rows of the buffers are multiples of it, for loads of 16 bytes


class Tables(NamedTuple):
    """What a layer's fixed columns are made of, on the device, in the dtype of the products; never written."""

    basis: Tensor  # [chunk, r]: U, or the DFT's columns themselves; of runs [run, 16]
    rotation: Tensor | None  # [chunks · r, 2k+1]: M of every chunk, or run; None: the coefficients are the features
    forward: Tensor | None  # [2k+1, chunks · r]: a view of it, without the constant feature where that is added apart
    signs: Tensor | None  # [blocks, c]: of the codes, over √c
    hadamard: Tensor | None  # [c, c]
    rank: int  # coefficients of a chunk
    group: int  # chunks whose coefficients are made at a time: as many as take the memory of the logits of one
    together: int  # coefficients of a group, or of all chunks

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.basis, self.rotation, self.signs, self.hadamard) if t is not None)


_tables: DeviceTables[Tables] = DeviceTables(256 * 2**20)


class Shape(NamedTuple):
    """How the labels of a layer are walked over."""

    size: int  # labels of a chunk
    run: int  # labels of a run, whose DFT part the pointwise kernel adds; 0: products do
    rotated: bool  # the DFT part goes through a factor that chunks, or runs, share
    codes: bool  # the columns of codes are used as such
    eps: float  # of the factor
    operand: torch.dtype
    device: torch.device
    apart: bool  # the constant feature is left out of products
    constant: float  # what it is multiplied by there; else 0
    fixed: tuple[int, ...]  # widths of x before its slack: what is apart, the other waves, the codes if there are any
    width: int  # of a buffer for the labels of a chunk


@functools.lru_cache(maxsize=1024)
def walk_shape(
    meta: LayerMeta, rows: int, batch: int, narrow: bool, dtype: torch.dtype, rounded: bool, device: torch.device,
    limits: tuple[int, ...], runs: Callable[[int, int, torch.device], int] | None,
) -> Shape:  # fmt: skip
    """The same at every step: worked out once."""
    out = accumulate_dtype(dtype)
    operand = dtype if narrow else out
    eps = 1e-5 if rounded else 1e-16 if out == torch.float64 else 2e-9  # below the rounding of the operands
    size = _chunk_labels(meta, rows, batch, dtype, out.itemsize + (operand.itemsize if operand != out else 0), limits)
    run = 0
    if runs is not None and rounded and meta.k > 0 and batch:
        run = _run_labels(meta, size, runs(batch, size, device), eps)
        if run and size < rows:
            size = min(round_up(size, run), rows)
    # What a factor would save of a single chunk is known from its rank, about 2k·m/n + 12
    rotated = size < rows or run > 0 or 2 * meta.k * size / meta.num_labels + 12 < meta.k
    # The constant feature carries the prior of all labels: rounded operands would take half of its bits, so it is
    # left out of such products and added in full, as the bias is.
    apart = rounded and meta.k >= 0
    fixed = (int(apart), meta.dft_columns - int(apart), meta.codes) if meta.fixed_columns else ()
    return Shape(
        size, run, rotated, narrow or device.type != "cpu", eps, operand, device, apart,
        1 / math.sqrt(meta.num_labels) if apart else 0.0, fixed if meta.codes else fixed[:2], round_up(size, _ROW if narrow else 1),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def columns_shape(meta: LayerMeta, rows: int, slack: int, dtype: torch.dtype, device: torch.device) -> Shape | None:
    """Of a layer whose fixed columns are laid beside its weight, in chunks that stay in the L2 cache of an accelerator;
    ``None`` where those of the DFT take too much memory to be kept."""
    if rows * meta.dft_columns * dtype.itemsize > _MOST_TABLE:
        return None
    size = rows
    if meta.fixed_columns:
        most = max(_device_bytes(device) // ((meta.fixed_columns + slack) * dtype.itemsize), 1)
        size = -(-rows // max(-(-rows // most), 1))  # all about as long
    return Shape(max(size, 1), 0, False, True, 0.0, dtype, device, False, 0.0, (), 0)


def _run_labels(meta: LayerMeta, size: int, wanted: int, eps: float) -> int:
    """As many labels as are wanted, or fewer, so that their factor has few columns; 0 where too few would be left."""
    run = min(round_up(wanted, _RUN_UNIT), round_up(size, _RUN_UNIT), meta.num_labels // _RUN_UNIT * _RUN_UNIT)
    while run >= _LEAST_RUN:
        if plan(meta.num_labels, meta.k, run, eps).rank <= RUN_RANK:
            return run
        run -= max(run // 4 // _RUN_UNIT, 1) * _RUN_UNIT
    return 0


def tables_of(layer: Layer, shape: Shape) -> Tables:
    """Worked out once, in float64."""
    return _tables.get((layer.meta, layer.weight.shape[0], shape), shape.device, lambda: _work_out(layer, shape))


def _work_out(layer: Layer, shape: Shape) -> Tables:
    def tensor(array: np.ndarray) -> Tensor:
        with torch.inference_mode(False):  # what is kept outlives the mode it was made in
            return torch.tensor(array, dtype=torch.float64).to(shape.operand).to(shape.device)

    basis, rotation, signs, matrix = np.empty((shape.size, 0)), None, None, None
    if layer.k >= 0 and shape.rotated:
        shared = plan(layer.num_labels, layer.k, shape.run or shape.size, shape.eps)
        columns = RUN_RANK if shape.run else shared.rank
        basis = np.zeros((len(shared.u), columns))
        basis[:, : shared.rank] = _to_tf32(shared.u) if shape.run and shape.operand == torch.float32 else shared.u
        rotation = tensor(_rotations(shared, columns, layer))
    elif layer.k >= 0:
        basis = dft_rows(layer.num_labels, layer.k, np.arange(layer.labels.start, layer.labels.stop))
    if layer.codes and shape.codes:
        blocks = range(layer.labels.start // layer.codes, -(-layer.labels.stop // layer.codes))
        signs = tensor((1 - 2 * sign_bits(layer.codes, blocks).astype(np.float64)) / math.sqrt(layer.codes))
        matrix = tensor(hadamard(layer.codes))
    with torch.inference_mode(False):
        forward = None if rotation is None else rotation[:, int(shape.apart) :].T
    rank = basis.shape[1] * (-(-shape.size // shape.run) if shape.run else 1)
    group = max(shape.size // max(rank, 1), 1)
    together = 0 if rotation is None else min(group * rank, rotation.shape[0])
    return Tables(tensor(basis), rotation, forward, signs, matrix, rank, group, together)


def code_columns(layer: Layer, tables: Tables, start: int, stop: int) -> Tensor | None:
    """Those of the rows ``start … stop-1`` of a layer, ``[c, codes]``; ``None`` where there are none, or a transform serves."""
    signs, codes = tables.signs, layer.codes
    if signs is None or tables.hadamard is None:
        return None
    before = layer.label_start // codes  # blocks of codes before the table's
    start, stop = layer.label_start + start, layer.label_start + stop
    signs = signs[start // codes - before : -(-stop // codes) - before]
    return (signs[:, None, :] * tables.hadamard).flatten(0, 1)[start % codes :][: stop - start]


def _to_tf32(array: np.ndarray) -> np.ndarray:
    """To the nearest, for hardware that cuts the other bits off."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _rotations(shared: DFTPlan, columns: int, layer: Layer) -> np.ndarray:
    """``M = V · Rot(chunk)`` of every chunk, or run, ``[chunks · columns, 2k+1]``."""
    cos, sin = shared.rotations(shared.starts(layer.label_start, layer.num_rows))
    cos, sin = cos[:, None, :], sin[:, None, :]
    even, odd = shared.v[:, 1::2], shared.v[:, 2::2]
    m, rank = np.zeros((len(cos), columns, shared.v.shape[1])), shared.rank
    m[:, :rank, 0] = shared.v[:, 0]
    m[:, :rank, 1::2] = even * cos - odd * sin
    m[:, :rank, 2::2] = even * sin + odd * cos
    return m.reshape(-1, shared.v.shape[1])


def chunk_limits(x: Tensor) -> tuple[int, ...]:
    """Of a chunk for inputs ``x``: on the CPU its elements, and the least and most labels; elsewhere its bytes."""
    return (_CPU_ELEMENTS, *_CPU_LABELS) if x.is_cpu else (_device_bytes(x.device),)


def _chunk_labels(
    meta: LayerMeta, rows: int, batch: int, dtype: torch.dtype, nbytes: int, limits: tuple[int, ...]
) -> int:
    """How many labels a chunk has, whose logits and slopes take ``nbytes`` a row and label."""
    batch, rows, codes = max(batch, 1), max(rows, 1), meta.codes
    if len(limits) > 1:
        elements, least, greatest = limits
        size = min(max(elements // batch, least), greatest)
        if codes:  # whole blocks of the transform
            size = max(size // codes, 1) * codes
        return min(size, rows)
    most = limits[0] // nbytes
    size = most // batch
    if codes:  # whose columns are made for a chunk at a time
        size = min(size, 2 * most // codes)
    if meta.k >= 0 and rows * meta.dft_columns * dtype.itemsize > _MOST_TABLE:
        size = min(size, _MOST_LABELS, rows // 2)
    chunks = -(-rows // max(size, _ALIGNED))
    return min(round_up(-(-rows // chunks), _ALIGNED), rows)  # all about as long


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@functools.cache
def _device_bytes(device: torch.device) -> int:
    """For the logits and slopes of a chunk on an accelerator."""
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0
    return int(_L2_SHARE * max(l2, _LEAST_L2))
