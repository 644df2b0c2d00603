"""One pass over label chunks in plain torch operations, on any device and in any dtype.

A chunk of labels is finished completely, loss and all gradients, before the next is touched (see ``dft_plan.py`` for the
DFT part), so no ``[B, n]`` array exists: a few ``[B, chunk]`` buffers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..bounded_cache import BoundedCache
from ..codes import code_adjoint, code_logits
from ..dft_plan import plan
from ..label_forms import checked_rows
from ..labels import LabelSets
from ..layer import Layer
from ..layer_update import LayerUpdate
from ..losses import ElementwiseLoss
from ..partial_labels import PartialTargets
from .interface import LossCall, LossResult, accumulate_dtype, gradient_dtype, sum_dtype
from .torch_update import apply_update

F = TypeVar("F", bound=Callable[..., Any])
_CHUNK_ELEMENTS = 2**19  # B · chunk: the working buffers stay near the cache
_MIN_CHUNK, _MAX_CHUNK = 256, 8192


def without_autocast(operation: F) -> F:
    """Keeps autocast out of a function of a tensor or a ``LossCall``: inputs have their final dtype, sums stay wide."""

    @functools.wraps(operation)
    def run(first: Tensor | LossCall, *args: Any) -> Any:
        x = first if isinstance(first, Tensor) else first.x
        with torch.autocast(x.device.type, enabled=False):
            return operation(first, *args)

    return cast(F, run)


class Chunk(NamedTuple):
    start: int  # first row of the layer
    stop: int
    weight: Tensor  # [c, s] in the accumulation dtype
    z: Tensor  # [B, c]


_plans: BoundedCache[list[Tensor]] = BoundedCache(64 * 2**20, lambda tensors: sum(t.nbytes for t in tensors))


def _plan_tensors(layer: Layer, size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """u ``[c, r]``, v ``[r, 2k+1]``, and cos and sin ``[chunks, k]``: the plan where the pass needs it, never written."""

    def work_out() -> list[Tensor]:
        shared = plan(layer.num_labels, layer.k, size, _eps(dtype))
        arrays = (shared.u, shared.v, *shared.rotations(shared.centres(layer.label_start, layer.num_rows)))
        with torch.inference_mode(False):  # what is kept outlives the mode it was made in
            return [torch.tensor(array, dtype=dtype, device=device) for array in arrays]

    return _plans.get((layer.meta, layer.num_rows, size, dtype, device), work_out)


class LabelChunks:
    """The walk over label chunks: logits going forward, and the adjoint of the DFT part."""

    x: Tensor
    dft: Tensor
    slack: Tensor
    codes: Tensor
    size: int
    u: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, x: Tensor, layer: Layer) -> None:
        self.layer = layer
        self.x = x.to(accumulate_dtype(x.dtype))
        self.dft, self.slack = self.x[:, : layer.dft_columns], self.x[:, layer.fixed_columns :]
        self.codes = self.x[:, layer.dft_columns : layer.fixed_columns]
        size = min(max(_CHUNK_ELEMENTS // max(x.shape[0], 1), _MIN_CHUNK), _MAX_CHUNK)
        if layer.codes:  # whole blocks of codes
            size = max(size // layer.codes, 1) * layer.codes
        self.size = min(size, max(layer.num_rows, 1))
        if layer.k >= 0:
            self.u, self.v, self.cos, self.sin = _plan_tensors(layer, self.size, self.x.dtype, self.x.device)

    def coefficients(self, chunk: int) -> Tensor:
        """The DFT features seen from the centre of a chunk, through V: ``[B, r]``."""
        return _rotate(self.dft, self.cos[chunk], self.sin[chunk]) @ self.v.T

    def coefficients_adjoint(self, chunk: int, g: Tensor) -> Tensor:
        """``[B, r]`` → its contribution to the gradient of the DFT features, ``[B, 2k+1]``."""
        return _rotate(g @ self.v, self.cos[chunk], -self.sin[chunk])

    def __iter__(self) -> Iterator[Chunk]:
        layer = self.layer
        for index, start in enumerate(range(0, layer.num_rows, self.size)):
            stop = min(start + self.size, layer.num_rows)
            weight = layer.weight[start:stop].to(self.x.dtype)
            z = self.slack @ weight.T
            if layer.k >= 0:
                z.addmm_(self.coefficients(index), self.u[: stop - start].T)
            if layer.codes:
                z += code_logits(self.codes, layer.label_start + start, layer.label_start + stop)
            if layer.bias is not None:
                z += layer.bias[start:stop].to(z.dtype)
            yield Chunk(start, stop, weight, z)


@without_autocast
def logits(x: Tensor, layer: Layer) -> Tensor:
    z = x.new_empty(x.shape[0], layer.num_rows)
    for chunk in LabelChunks(x, layer):
        z[:, chunk.start : chunk.stop] = chunk.z
    return z


@without_autocast
def logits_adjoint(g: Tensor, layer: Layer) -> Tensor:
    """``g W``: the gradient of x for a gradient ``g [B, m]`` of the logits, ``[B, D]``."""
    x = g.new_zeros(g.shape[0], layer.in_columns)
    walk = LabelChunks(x, layer)
    grad = torch.zeros_like(walk.x)
    for index, start in enumerate(range(0, layer.num_rows, walk.size)):
        stop = min(start + walk.size, layer.num_rows)
        add_grad_x(grad, g[:, start:stop].to(grad.dtype), walk, index, layer.weight[start:stop].to(grad.dtype))
    return grad.to(g.dtype)


class GradientSums:
    """The gradients of a walk over label chunks, from those of the logits of each."""

    walk: LabelChunks
    out_dtype: torch.dtype
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, walk: LabelChunks, needs: tuple[bool, ...], out_dtype: torch.dtype) -> None:
        layer, device = walk.layer, walk.x.device
        self.walk, self.out_dtype = walk, out_dtype
        self.x = torch.zeros_like(walk.x) if needs[0] else None
        self.weight = torch.empty(layer.weight.shape, dtype=out_dtype, device=device) if needs[1] else None
        self.bias = torch.empty(layer.num_rows, dtype=out_dtype, device=device) if needs[2] else None

    def add(self, index: int, chunk: Chunk, g: Tensor) -> None:
        """Takes in ``g [B, c]``, the gradient of the logits of the chunk ``index``."""
        if self.x is not None:
            add_grad_x(self.x, g, self.walk, index, chunk.weight)
        if self.weight is not None:
            self.weight[chunk.start : chunk.stop] = g.T @ self.walk.slack
        if self.bias is not None:
            self.bias[chunk.start : chunk.stop] = g.sum(0)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, weight and bias."""
        return None if self.x is None else self.x.to(self.out_dtype), self.weight, self.bias


class UpdatingSums(GradientSums):
    """The same with a step of weight and bias in the place of their gradients: those of one chunk at a time exist."""

    def __init__(self, walk: LabelChunks, needs: tuple[bool, ...], out_dtype: torch.dtype, update: LayerUpdate) -> None:
        super().__init__(walk, (needs[0], False, False), out_dtype)
        self.update = update

    def add(self, index: int, chunk: Chunk, g: Tensor) -> None:
        super().add(index, chunk, g)
        label = self.walk.layer.label_start + chunk.start
        if self.update.weight is not None:
            apply_update(self.update.weight, g.T @ self.walk.slack, chunk.start, label)
        if self.update.bias is not None:
            apply_update(self.update.bias, g.sum(0), chunk.start, label)


@without_autocast
def fused_loss(call: LossCall, update: LayerUpdate | None = None) -> LossResult:
    """An elementwise loss, by its own formula."""
    x, layer, loss = call.x, call.layer, cast(ElementwiseLoss, call.loss)
    walk = LabelChunks(x, layer)
    rows = torch.zeros(x.shape[0], dtype=sum_dtype(x.device), device=x.device)
    out = gradient_dtype(x.dtype)
    sums = GradientSums(walk, call.needs, out) if update is None else UpdatingSums(walk, call.needs, out, update)
    scale = call.scale.to(walk.x.dtype)[:, None] if isinstance(call.scale, Tensor) else call.scale
    chunk_targets = ChunkTargets(call.targets, layer, walk)
    for index, chunk in enumerate(walk):
        start, stop, _, z = chunk
        part = loss.at_labels(z, layer.label_start + start, layer.label_start + stop)
        y = chunk_targets(start, stop)
        missing = y.isnan() if isinstance(call.targets, PartialTargets) else None
        f, g = part.tile(z, y if missing is None else y.masked_fill(missing, 0), any(call.needs))
        if missing is not None:
            f, g = f.masked_fill(missing, 0), None if g is None else g.masked_fill(missing, 0)
        rows += f.sum(1, dtype=rows.dtype)
        if any(call.needs) and g is not None:
            sums.add(index, chunk, g * scale)
    return LossResult(rows, *sums.finish())


@without_autocast
def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    best_values, best_labels = x.new_empty(x.shape[0], 0), x.new_empty(x.shape[0], 0, dtype=torch.int64)
    for start, stop, _, z in LabelChunks(x, layer):
        labels = torch.arange(start, stop, device=x.device) + layer.label_start
        values, picked = _top(z.to(x.dtype), min(m, stop - start))
        # Kept labels are lower than all that follow and stand first, so that a stable sort breaks ties rightly.
        values, order = torch.sort(torch.cat([best_values, values], 1), dim=1, descending=True, stable=True)
        best_labels = torch.cat([best_labels, labels[picked]], 1).gather(1, order[:, :m])
        best_values = values[:, :m]
    return best_values, best_labels


@without_autocast
def predict(x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
    rows, labels = [], []
    for start, stop, _, z in LabelChunks(x, layer):
        bound = threshold[start:stop].to(x.dtype) if isinstance(threshold, Tensor) else threshold
        row, label = (z.to(x.dtype) > bound).nonzero(as_tuple=True)
        rows.append(row)
        labels.append(label + (layer.label_start + start))
    row = torch.cat(rows)
    counts = torch.bincount(row, minlength=x.shape[0])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return LabelSets.from_sorted(torch.cat(labels)[torch.argsort(row, stable=True)], offsets, layer.num_labels)


class ChunkTargets:
    """Dense targets ``[B, chunk]`` one chunk at a time, unknown ones NaN; sparse sets are put in order of label once."""

    dtype: torch.dtype
    batch: int
    dense: Tensor | None
    labels: Tensor
    rows: Tensor
    values: Tensor | None  # of the entries of sets; None: all are 1
    edges: list[int]
    size: int

    def __init__(self, targets: LabelSets | Tensor | PartialTargets, layer: Layer, walk: LabelChunks) -> None:
        unknown = None
        if isinstance(targets, PartialTargets):
            targets, unknown = targets.for_kernels()
        self.dtype, self.batch = walk.x.dtype, walk.x.shape[0]
        self.dense = None if isinstance(targets, LabelSets) else targets
        if isinstance(targets, LabelSets):
            rows = checked_rows(*targets.unchecked(), targets.num_labels)
            labels, order = torch.sort(targets.indices - layer.label_start)
            self.labels, self.rows = labels, rows[order]
            self.values = None if unknown is None else torch.where(unknown[order], torch.nan, 1.0).to(self.dtype)
            edges = torch.arange(0, layer.num_rows + walk.size, walk.size, device=labels.device)
            self.edges = torch.searchsorted(labels, edges.clamp_(max=layer.num_rows)).tolist()
            self.size = walk.size

    def __call__(self, start: int, stop: int) -> Tensor:
        if self.dense is not None:
            return self.dense[:, start:stop].to(self.dtype)
        y = torch.zeros(self.batch, stop - start, dtype=self.dtype, device=self.labels.device)
        inside = slice(*self.edges[start // self.size : start // self.size + 2])
        at = self.rows[inside], self.labels[inside] - start
        y[at] = 1 if self.values is None else self.values[inside]
        return y


def add_grad_x(grad_x: Tensor, g: Tensor, walk: LabelChunks, index: int, weight: Tensor) -> None:
    """Adds ``g W_chunk`` for the chunk ``index``."""
    columns, fixed = walk.layer.dft_columns, walk.layer.fixed_columns
    grad_x[:, fixed:].addmm_(g, weight)
    if columns:
        grad_x[:, :columns] += walk.coefficients_adjoint(index, g @ walk.u[: g.shape[1]])
    if walk.layer.codes:
        grad_x[:, columns:fixed] += code_adjoint(g, walk.layer.codes, walk.layer.label_start + index * walk.size)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (cosine, sine feature) of ``x [B, 2k+1]`` by the angles of ``cos, sin [k]``."""
    even, odd = x[:, 1::2], x[:, 2::2]
    rotated = torch.empty_like(x)
    rotated[:, 0] = x[:, 0]
    rotated[:, 1::2] = cos * even + sin * odd
    rotated[:, 2::2] = cos * odd - sin * even
    return rotated


def _top(z: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The m highest of each row and where they are; ties go to the lower position, NaN counts as highest."""
    if z.dtype == torch.float64 or z.device.type == "mps":
        values, order = torch.sort(z, dim=1, descending=True, stable=True)
        return values[:, :m], order[:, :m]
    # One integer that orders by value, then by position: unique, so that the choice among equals is decided.
    bits = (z.float() + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 and 0.0 are equal
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    ordered = torch.where(z.isnan(), 0x7FFFFFFF, ordered)
    width = z.shape[1]
    _, picked = torch.topk(ordered * width + torch.arange(width - 1, -1, -1, device=z.device), m, dim=1)
    return z.gather(1, picked), picked


def _eps(dtype: torch.dtype) -> float:
    """Where the singular values of a tile are cut: below the rounding of the dtype."""
    return 1e-16 if dtype == torch.float64 else 2e-9
