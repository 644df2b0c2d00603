"""The walk of the library path: the logits of one chunk of labels after another, by the vendor's matrix products.

A chunk is finished completely, loss and all gradients, before the next is touched, so no ``[B, n]`` array exists: a few
``[B, chunk]`` buffers do, which every chunk uses again. On an accelerator they stay in its L2 cache, and nothing waits
for the device. 16-bit inputs are multiplied in 16 bits there, with float32 sums.

The DFT part is extra columns of a chunk. One chunk of all labels has them as they are. Several chunks share one factor
``U [chunk, r]`` (``dft_plan.py``): ``z = U c``, and the coefficients ``c = M x_dft`` of many chunks come from one product.
Where a pointwise kernel adds the DFT part itself, it does so in runs of a few hundred labels, whose factor has at most 16
columns: two products and two sweeps over the chunk less. Codes are extra columns, too; on the CPU a fast transform is less work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..codes import code_adjoint, code_logits
from ..layer import Layer
from .interface import LossCall, accumulate_dtype
from .library_tables import Tables, chunk_limits, code_columns, tables_of, walk_shape

F = TypeVar("F", bound=Callable[..., Any])
_NARROW = (torch.float16, torch.bfloat16)
_autocast = torch._C._is_any_autocast_enabled
_precision = torch._C._get_fp32_precision_getter  # of torch.backends, which take five times as long


def without_autocast(operation: F) -> F:
    """Keeps autocast out of a function of a tensor or a ``LossCall``: inputs have their final dtype, sums stay wide.
    Autograd, too: its gradients are made by hand, in buffers that are used again."""

    @functools.wraps(operation)
    def run(first: Tensor | LossCall, *args: Any) -> Any:
        if not torch.is_grad_enabled() and not _autocast():  # inside an autograd.Function: contexts take time
            return operation(first, *args)
        kind = (first if isinstance(first, Tensor) else first.x).device.type
        with torch.no_grad(), torch.autocast(kind, enabled=False):
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


def rounds_float32(x: Tensor) -> bool:
    """Whether products of float32 matrices round their operands where this one is."""
    return x.is_cuda and tf32_allowed()


def tf32_allowed() -> bool:
    """Whether torch lets float32 products run as tf32, by whichever of its settings the user has chosen."""
    return _precision("cuda", "matmul") == "tf32"  # it resolves what it inherits


# -- the walk ----------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    number: int  # from 0
    start: int  # first row of the layer
    stop: int
    weight: Tensor  # [c, s] in the dtype of the products
    codes: Tensor | None  # [c, codes]: their columns; None: there are none, or a transform serves
    z: Tensor  # [B, c] in the accumulation dtype: overwritten by the next chunk


class LabelWalk:
    """Logits going forward; the adjoint of the fixed columns. ``narrow``: products take 16-bit operands as they are.

    ``runs``: a pointwise kernel adds the DFT part itself. From the rows and the labels of a chunk and the device it says of how many
    labels a run should be. Where ``walk.run`` is not 0 the logits of a chunk lack that part; ``coefficients`` are what
    the kernel multiplies ``tables.basis`` by, and it puts their gradient into their place.
    """

    layer: Layer
    rows: int  # labels of the layer
    batch: int
    out: torch.dtype  # of sums
    operand: torch.dtype  # of what is multiplied
    x: Tensor
    slack: Tensor
    apart: bool  # whether the constant feature is added apart from the products
    constant: float  # what it is multiplied by there; else 0
    size: int  # labels of a chunk
    run: int  # labels of a run; 0: the logits of a chunk have their DFT part
    tables: Tables
    rank: int  # coefficients of a chunk
    group: int

    def __init__(
        self,
        x: Tensor,
        layer: Layer,
        narrow: bool,
        runs: Callable[[int, int, torch.device], int] | None = None,
        logits: bool = True,
    ) -> None:
        """``logits``: whether they are made; else nothing but its tables limits a chunk, which is as long as for one row."""
        self.layer, self.batch, self.out = layer, x.shape[0], accumulate_dtype(x.dtype)
        self.operand = x.dtype if narrow else self.out
        self.x = x if x.dtype == self.operand else x.to(self.operand)
        device, (self.rows, slack) = x.device, layer.weight.shape
        rounded = self.operand in _NARROW or (self.operand == torch.float32 and rounds_float32(x))
        batch = self.batch if logits else 1
        shape = walk_shape(layer.meta, self.rows, batch, narrow, x.dtype, rounded, device, chunk_limits(x), runs)
        self.slack, self._waves = self.x, self.x
        if shape.fixed:
            _, self._waves, *_, self.slack = self.x.split_with_sizes((*shape.fixed, slack), 1)
        self.size, self.run, self.apart, self.tables = shape.size, shape.run, shape.apart, tables_of(layer, shape)
        self.rank, self.group = self.tables.rank, self.tables.group
        self.constant, self._width = shape.constant, shape.width
        self._z = self.buffer(self.out) if logits else self.x[:, :0]
        self._coefficients: Tensor | None = None

    @property
    def dft(self) -> Tensor:
        """Features ``[B, 2k+1]``."""
        return self.x[:, : self.layer.dft_columns]

    @property
    def codes(self) -> Tensor:
        """Features ``[B, codes]``."""
        return self.x[:, self.layer.dft_columns : self.layer.fixed_columns]

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """Memory for a number of every row and label of a chunk."""
        return self.x.new_empty(self.batch, self._width, dtype=dtype)

    def view(self, buffer: Tensor, labels: int) -> Tensor:
        """``[B, labels]`` in it."""
        return buffer if labels == buffer.shape[1] else buffer[:, :labels]

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks whose logits lack the bias, and the constant feature where that is apart."""
        for chunk in self.parts():
            self._fill(chunk)
            yield chunk

    def parts(self) -> Iterator[Chunk]:
        """Chunks whose logits nobody needs."""
        whole, rows = self.layer.weight, self.rows
        for index, start in enumerate(range(0, rows, self.size)):
            stop = min(start + self.size, rows)
            weight = whole if self.size >= rows else whole[start:stop]
            weight = weight if weight.dtype == self.operand else weight.to(self.operand)
            yield Chunk(
                index,
                start,
                stop,
                weight,
                code_columns(self.layer, self.tables, start, stop),
                self.view(self._z, stop - start),
            )

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
        if self.run:
            if not started:
                z.zero_()
        elif layer.k >= 0:
            basis = self.tables.basis[: chunk.stop - chunk.start]
            if self.tables.rotation is not None:
                product(self.coefficients(chunk), basis.T, z, add=started)
            elif layer.k or not (first and started):
                product(self._waves, basis[:, first:].T, z, add=started)

    def add_bias_(self, chunk: Chunk) -> Tensor:
        """The complete logits of a chunk, in place."""
        if self.apart:
            chunk.z.add_(self.dft[:, :1].to(self.out), alpha=self.constant)
        if self.layer.bias is not None:
            chunk.z.add_(self.layer.bias[chunk.start : chunk.stop].to(self.out))
        return chunk.z

    def coefficients(self, chunk: Chunk) -> Tensor:
        """The DFT features seen from the centre of a chunk, or of each of its runs, through V: ``[B, r]``."""
        if chunk.number % self.group == 0:
            m = self.tables.forward
            assert m is not None
            if m.shape[1] > self.tables.together:
                m = m[:, chunk.number * self.rank : (chunk.number + self.group) * self.rank]
            product(self._waves, m, self._columns(0, m.shape[1]))
        return self.coefficients_of(chunk)

    def coefficients_of(self, chunk: Chunk) -> Tensor:
        """The same, once they are made; their gradient takes their place."""
        first = chunk.number % self.group * self.rank
        return self._columns(first, first + self.rank)

    def _columns(self, start: int, stop: int) -> Tensor:
        """Some of the coefficients of a group."""
        if self._coefficients is None:
            self._coefficients = self.x.new_empty(self.batch, self.tables.together)
        return self._coefficients if start == 0 and stop >= self.tables.together else self._coefficients[:, start:stop]

    def add_dft_gradient(self, chunk: Chunk, grad: Tensor) -> None:
        """Adds ``M`` times the gradients of all coefficients of a group to ``grad [B, 2k+1]``, after its last chunk."""
        place = chunk.number % self.group
        if chunk.stop != self.rows and place + 1 != self.group:
            return
        first, m = (chunk.number - place) * self.rank, self.tables.rotation
        assert m is not None
        if m.shape[0] > self.tables.together:
            m = m[first : first + (place + 1) * self.rank]
        product(self._columns(0, m.shape[0]), m, grad, add=first > 0)


class GradientOfX:
    """``Σ g W`` over the chunks, ``[B, D]``: in one sum of the accumulation dtype, or at once where there is one chunk."""

    walk: LabelWalk
    dtype: torch.dtype
    grad: Tensor

    def __init__(self, walk: LabelWalk, dtype: torch.dtype) -> None:
        self.walk, self.dtype, slack, meta = walk, dtype, walk.layer.weight.shape[1], walk.layer.meta
        make = walk.x.new_empty if walk.rows else walk.x.new_zeros  # the first chunk writes, the others add
        one = walk.size >= walk.rows
        self.grad = make(walk.batch, walk.x.shape[1], dtype=dtype if one else walk.out)
        self._dft, self._codes, self._slack = self.grad, self.grad, self.grad
        if meta.codes:
            self._dft, self._codes, self._slack = self.grad.split_with_sizes((meta.dft_columns, meta.codes, slack), 1)
        elif meta.k >= 0:
            self._dft, self._slack = self.grad.split_with_sizes((meta.dft_columns, slack), 1)

    def add(self, chunk: Chunk, g: Tensor) -> None:
        """Takes in ``g [B, c]``, the gradient of the logits of a chunk."""
        walk, meta, add = self.walk, self.walk.layer.meta, chunk.number > 0
        if chunk.weight.shape[1]:
            product(g, chunk.weight, self._slack, add)
        if chunk.codes is not None:
            product(g, chunk.codes, self._codes, add)
        elif meta.codes:
            made = code_adjoint(g.to(walk.out), meta.codes, meta.label_start + chunk.start)
            _ = self._codes.add_(made) if add else self._codes.copy_(made)
        if meta.k < 0:
            return
        if walk.tables.rotation is None:
            product(g, walk.tables.basis, self._dft, add)
            return
        if not walk.run:
            product(g, walk.tables.basis[: chunk.stop - chunk.start], walk.coefficients_of(chunk))
        walk.add_dft_gradient(chunk, self._dft)

    def finish(self) -> Tensor:
        return self.grad if self.grad.dtype == self.dtype else self.grad.to(self.dtype)
