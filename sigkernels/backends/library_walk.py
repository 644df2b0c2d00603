"""The walk of the library path: the logits of one chunk of labels after another, by the vendor's matrix products.

A chunk is finished completely, loss and all gradients, before the next is touched, so no ``[B, n]`` array exists: a few
``[B, chunk]`` buffers do, which every chunk uses again. On an accelerator they stay in its L2 cache, and nothing waits
for the device. 16-bit inputs are multiplied in 16 bits there, with float32 sums.

The DFT part is extra columns of a chunk. One chunk of all labels has them as they are. Several chunks share one factor
``U [chunk, r]`` (``dft_plan.py``): ``z = U c``, and the coefficients ``c = M x_dft`` of many chunks come from one product.
Codes are extra columns, too; on the CPU a fast transform is less work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..codes import code_adjoint, code_logits, hadamard, sign_bits
from ..dft import dft_rows
from ..dft_plan import DFTPlan, plan
from ..layer import Layer
from .device_tables import DeviceTables
from .interface import LossCall, accumulate_dtype

F = TypeVar("F", bound=Callable[..., Any])
_CPU_ELEMENTS = 2**19  # B · chunk: the working buffers stay near the cache
_CPU_LABELS = (256, 8192)  # the least and the most of a chunk
_L2_SHARE, _LEAST_L2 = 0.3, 2**25  # of the cache for the logits; bytes, where a device has less or does not say
_ALIGNED = 128  # labels: chunks are multiples of it, so that rows of the buffers are aligned
_MOST_LABELS = 2**16  # of a chunk that has a factor U: it is worked out by an SVD
_MOST_TABLE = 2**26  # bytes of the DFT's columns as they are
_ROW = 16  # numbers: rows of the buffers are multiples of it, for loads of 16 bytes
_NARROW = (torch.float16, torch.bfloat16)


def without_autocast(operation: F) -> F:
    """Keeps autocast out of a function of a tensor or a ``LossCall``: inputs have their final dtype, sums stay wide.
    Autograd, too: its gradients are made by hand, in buffers that are used again."""

    @functools.wraps(operation)
    def run(first: Tensor | LossCall, *args: Any) -> Any:
        x = first if isinstance(first, Tensor) else first.x
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return operation(first, *args)

    return cast(F, run)


# -- products ----------------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """``out = a b``, or that added to ``out``, which may be wider than the operands."""
    if a.dtype == out.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif multiplies_narrow(a.device):
        if not add:
            torch.mm(a, b, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
        elif adds_narrow(a.device):
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
        else:
            out.add_(torch.mm(a, b, out_dtype=out.dtype))  # type: ignore[call-overload]
    else:
        wide = torch.promote_types(a.dtype, out.dtype)
        made = torch.mm(a.to(wide), b.to(wide))
        _ = out.add_(made) if add else out.copy_(made)


@functools.cache
def multiplies_narrow(device: torch.device) -> bool:
    """Whether torch multiplies 16-bit matrices with float32 sums and results there."""
    return _works(torch.mm, device)


@functools.cache
def adds_narrow(device: torch.device) -> bool:
    """Whether it adds such a product to a float32 matrix in the same launch."""
    return _works(lambda a, b, **kw: torch.addmm(kw["out"], a, b, **kw), device)


def _works(operation: Callable[..., Any], device: torch.device) -> bool:
    if device.type not in ("cuda", "xpu"):
        return False
    a, out = torch.zeros(16, 16, dtype=torch.bfloat16, device=device), torch.zeros(16, 16, device=device)
    try:
        operation(a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):  # such as on ROCm
        return False
    return True


def tf32_allowed() -> bool:
    """Whether torch lets float32 products run as tf32, by whichever of its settings the user has chosen."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # it resolves what it inherits; older torch has no such thing
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


# -- tables ------------------------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """What a layer's fixed columns are made of, on the device, in the dtype of the products; never written."""

    basis: Tensor  # [chunk, r]: U, or the DFT's columns themselves
    rotation: Tensor | None  # [chunks · r, 2k+1]: M of every chunk; None: the coefficients are the features
    signs: Tensor | None  # [blocks, c]: of the codes, over √c
    hadamard: Tensor | None  # [c, c]

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self if t is not None)


_tables: DeviceTables[Tables] = DeviceTables(256 * 2**20)


def _work_out(
    layer: Layer, size: int, rotated: bool, codes: bool, eps: float, dtype: torch.dtype, device: torch.device
) -> Tables:
    """``rotated``: several chunks share a factor of the DFT; ``codes``: the columns of codes are used as such."""

    def tensor(array: np.ndarray) -> Tensor:
        with torch.inference_mode(False):  # what is kept outlives the mode it was made in
            return torch.tensor(array, dtype=torch.float64).to(dtype).to(device)

    basis, rotation, signs, matrix = np.empty((size, 0)), None, None, None
    if layer.k >= 0 and rotated:
        shared = plan(layer.num_labels, layer.k, size, eps)
        basis, rotation = shared.u, tensor(_rotations(shared, layer))
    elif layer.k >= 0:
        basis = dft_rows(layer.num_labels, layer.k, np.arange(layer.labels.start, layer.labels.stop))
    if layer.codes and codes:
        blocks = range(layer.labels.start // layer.codes, -(-layer.labels.stop // layer.codes))
        signs = tensor((1 - 2 * sign_bits(layer.codes, blocks).astype(np.float64)) / math.sqrt(layer.codes))
        matrix = tensor(hadamard(layer.codes))
    return Tables(tensor(basis), rotation, signs, matrix)


def _rotations(shared: DFTPlan, layer: Layer) -> np.ndarray:
    """``M = V · Rot(chunk)`` of every chunk, ``[chunks · r, 2k+1]``."""
    cos, sin = shared.rotations(shared.centres(layer.label_start, layer.num_rows))
    cos, sin = cos[:, None, :], sin[:, None, :]
    even, odd = shared.v[:, 1::2], shared.v[:, 2::2]
    m = np.empty((len(cos), *shared.v.shape))
    m[:, :, 0] = shared.v[:, 0]
    m[:, :, 1::2] = even * cos - odd * sin
    m[:, :, 2::2] = even * sin + odd * cos
    return m.reshape(-1, shared.v.shape[1])


def _chunk_labels(x: Tensor, layer: Layer) -> int:
    """How many labels a chunk has."""
    batch, rows, codes = max(x.shape[0], 1), max(layer.num_rows, 1), layer.codes
    if x.device.type == "cpu":
        size = min(max(_CPU_ELEMENTS // batch, _CPU_LABELS[0]), _CPU_LABELS[1])
        if codes:  # whole blocks of the transform
            size = max(size // codes, 1) * codes
        return min(size, rows)
    size = _device_elements(x.device) // batch
    if codes:  # whose columns are made for a chunk at a time
        size = min(size, 2 * _device_elements(x.device) // codes)
    if layer.k >= 0 and rows * layer.dft_columns * x.dtype.itemsize > _MOST_TABLE:
        size = min(size, _MOST_LABELS, rows // 2)
    chunks = -(-rows // max(size, _ALIGNED))
    return min(_up(-(-rows // chunks), _ALIGNED), rows)  # all about as long


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


@functools.cache
def _device_elements(device: torch.device) -> int:
    """Logits of a chunk on an accelerator."""
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0
    return int(_L2_SHARE * max(l2, _LEAST_L2)) // 4


# -- the walk ----------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    number: int  # from 0
    start: int  # first row of the layer
    stop: int
    weight: Tensor  # [c, s] in the dtype of the products
    codes: Tensor | None  # [c, codes]: their columns; None: there are none, or a transform serves
    z: Tensor  # [B, c] in the accumulation dtype: overwritten by the next chunk


class LabelWalk:
    """Logits going forward; the adjoint of the fixed columns. ``narrow``: products take 16-bit operands as they are."""

    layer: Layer
    batch: int
    out: torch.dtype  # of sums
    operand: torch.dtype  # of what is multiplied
    x: Tensor
    dft: Tensor
    codes: Tensor
    slack: Tensor
    apart: bool  # whether the constant feature is added apart from the products
    size: int  # labels of a chunk
    tables: Tables
    rank: int
    group: int

    def __init__(self, x: Tensor, layer: Layer, narrow: bool) -> None:
        self.layer, self.batch, self.out = layer, x.shape[0], accumulate_dtype(x.dtype)
        self.operand = x.dtype if narrow else self.out
        self.x = x.to(self.operand)
        columns, fixed = layer.dft_columns, layer.fixed_columns
        self.dft, self.codes, self.slack = self.x[:, :columns], self.x[:, columns:fixed], self.x[:, fixed:]
        # The constant feature carries the prior of all labels: rounded operands would take half of its bits, so it is
        # left out of such products and added in full, as the bias is.
        rounded = self.operand in _NARROW or (self.out == torch.float32 and x.is_cuda and tf32_allowed())
        self.apart = rounded and layer.k >= 0
        self.size = _chunk_labels(x, layer)
        one = self.size >= layer.num_rows
        # What a factor would save of a single chunk is known from its rank, about 2k·m/n + 12
        rotated = not one or 2 * layer.k * self.size / layer.num_labels + 12 < layer.k
        eps = 1e-5 if rounded else 1e-16 if self.out == torch.float64 else 2e-9  # below the rounding of the operands
        kind = (self.size, rotated, narrow or x.device.type != "cpu", eps, self.operand, x.device)
        self.tables = _tables.get((layer.meta, layer.num_rows, kind), x.device, lambda: _work_out(layer, *kind))
        self.rank = self.tables.basis.shape[1]
        # Chunks whose coefficients are made at a time: as many as take the memory of the logits of one.
        self.group = max(self.size // max(self.rank, 1), 1)
        self._aligned = _ROW if narrow else 1
        self._z = self.buffer(self.out)
        self._coefficients: Tensor | None = None

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """Memory for a number of every row and label of a chunk."""
        return self.x.new_empty(self.batch * _up(self.size, self._aligned), dtype=dtype)

    def view(self, buffer: Tensor, labels: int) -> Tensor:
        """``[B, labels]`` in it."""
        width = _up(labels, self._aligned)
        return buffer[: self.batch * width].view(self.batch, width)[:, :labels]

    @property
    def constant(self) -> float:
        """What the constant feature is multiplied by where it is left out of the products; else 0."""
        return 1 / math.sqrt(self.layer.num_labels) if self.apart else 0.0

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks whose logits lack the bias, and the constant feature where that is apart."""
        for chunk in self.parts():
            self._fill(chunk)
            yield chunk

    def parts(self) -> Iterator[Chunk]:
        """Chunks whose logits nobody needs."""
        layer = self.layer
        for index, start in enumerate(range(0, layer.num_rows, self.size)):
            stop = min(start + self.size, layer.num_rows)
            weight = layer.weight[start:stop].to(self.operand)
            yield Chunk(index, start, stop, weight, self._codes_of(start, stop), self.view(self._z, stop - start))

    def _fill(self, chunk: Chunk) -> None:
        """The products that make ``chunk.z``, the DFT's last: what comes after a large constant is rounded with it."""
        layer, z, first = self.layer, chunk.z, int(self.apart)
        started = bool(chunk.weight.shape[1]) or layer.in_columns == 0
        if started:
            product(self.slack, chunk.weight.T, z)
        if chunk.codes is not None:
            product(self.codes, chunk.codes.T, z, add=started)
        elif layer.codes:
            at = layer.label_start + chunk.start
            made = code_logits(self.codes.to(self.out), at, at + z.shape[1])
            _ = z.add_(made) if started else z.copy_(made)
        started = started or layer.codes > 0
        if layer.k >= 0:
            basis = self.tables.basis[: chunk.stop - chunk.start]
            if self.tables.rotation is not None:
                product(self._coefficients_of(chunk.number, first), basis.T, z, add=started)
            elif layer.k or not (first and started):
                product(self.dft[:, first:], basis[:, first:].T, z, add=started)

    def add_bias_(self, chunk: Chunk) -> Tensor:
        """The complete logits of a chunk, in place."""
        if self.apart:
            chunk.z.add_(self.dft[:, :1].to(self.out), alpha=self.constant)
        if self.layer.bias is not None:
            chunk.z.add_(self.layer.bias[chunk.start : chunk.stop].to(self.out))
        return chunk.z

    def _coefficients_of(self, index: int, first: int) -> Tensor:
        """The DFT features seen from the centre of a chunk, through V: ``[B, r]``."""
        place = index % self.group
        if place == 0:
            assert self.tables.rotation is not None
            m = self.tables.rotation[index * self.rank : (index + self.group) * self.rank]
            self._coefficients = self.dft[:, first:] @ m[:, first:].T
        assert self._coefficients is not None
        return self._coefficients[:, place * self.rank : (place + 1) * self.rank]

    def _codes_of(self, start: int, stop: int) -> Tensor | None:
        """Their columns for the rows of a chunk, ``[c, codes]``, where they are used as such."""
        signs, codes = self.tables.signs, self.layer.codes
        if signs is None or self.tables.hadamard is None:
            return None
        before = self.layer.label_start // codes  # blocks of codes before the table's
        start, stop = self.layer.label_start + start, self.layer.label_start + stop
        signs = signs[start // codes - before : -(-stop // codes) - before]
        return (signs[:, None, :] * self.tables.hadamard).flatten(0, 1)[start % codes :][: stop - start]


class GradientOfX:
    """``Σ g W`` over the chunks, ``[B, D]``: in one sum of the accumulation dtype, or at once where there is one chunk."""

    walk: LabelWalk
    dtype: torch.dtype
    grad: Tensor

    def __init__(self, walk: LabelWalk, dtype: torch.dtype) -> None:
        self.walk, self.dtype = walk, dtype
        one = walk.size >= walk.layer.num_rows and walk.tables.rotation is None and walk.layer.num_rows > 0
        make = torch.empty if one else torch.zeros
        self.grad = make(walk.x.shape, dtype=dtype if one else walk.out, device=walk.x.device)
        self._add = not one
        self._coefficients: Tensor | None = None

    def add(self, chunk: Chunk, g: Tensor) -> None:
        """Takes in ``g [B, c]``, the gradient of the logits of a chunk."""
        walk, layer, add = self.walk, self.walk.layer, self._add
        columns, fixed = layer.dft_columns, layer.fixed_columns
        if chunk.weight.shape[1]:
            product(g, chunk.weight, self.grad[:, fixed:], add)
        if chunk.codes is not None:
            product(g, chunk.codes, self.grad[:, columns:fixed], add)
        elif layer.codes:
            made = code_adjoint(g.to(walk.out), layer.codes, layer.label_start + chunk.start)
            part = self.grad[:, columns:fixed]
            _ = part.add_(made) if add else part.copy_(made)
        if layer.k < 0:
            return
        basis = walk.tables.basis[: chunk.stop - chunk.start]
        if walk.tables.rotation is None:
            product(g, basis, self.grad[:, :columns], add)
            return
        place, rank = chunk.number % walk.group, walk.rank
        if self._coefficients is None:
            count = min(walk.group, -(-layer.num_rows // walk.size))
            self._coefficients = torch.empty(walk.batch, count * rank, dtype=walk.operand, device=g.device)
        product(g, basis, self._coefficients[:, place * rank : (place + 1) * rank])
        if place == walk.group - 1 or chunk.stop == layer.num_rows:
            m = walk.tables.rotation[(chunk.number - place) * rank : (chunk.number + 1) * rank]
            product(self._coefficients[:, : (place + 1) * rank], m, self.grad[:, :columns], add=True)

    def finish(self) -> Tensor:
        return self.grad.to(self.dtype)
