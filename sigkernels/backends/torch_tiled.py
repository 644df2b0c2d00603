"""The torch backend: one pass over label chunks in plain torch operations, on any device and in any dtype.

A chunk of labels is finished completely, loss and all gradients, before the next is touched (see ``dft_plan.py`` for the
DFT part), so no ``[B, n]`` array exists: a few ``[B, chunk]`` buffers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..dft_plan import plan
from ..labels import LabelSets
from ..layer import Layer
from ..losses import Loss
from .interface import LossResult, accumulate_dtype, gradient_dtype, sum_dtype

F = TypeVar("F", bound=Callable[..., Any])
_CHUNK_ELEMENTS = 2**19  # B · chunk: the working buffers stay near the cache
_MIN_CHUNK, _MAX_CHUNK = 256, 8192


def available() -> str | None:
    return None


def devices() -> tuple[str, ...] | None:
    return None


def supports(loss: Loss) -> str | None:
    return None


def _as_they_are(operation: F) -> F:
    """Keeps autocast out: inputs come in their final dtype, and sums stay wide."""

    @functools.wraps(operation)
    def run(x: Tensor, *args: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return operation(x, *args)

    return cast(F, run)


class _Chunk(NamedTuple):
    start: int  # first row of the layer
    stop: int
    weight: Tensor  # [c, s] in the accumulation dtype
    z: Tensor  # [B, c]


@functools.lru_cache(maxsize=8)
def _plan_tensors(
    num_labels: int, k: int, size: int, label_start: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u ``[c, r]``, v ``[r, 2k+1]``, and cos and sin ``[chunks, k]``: the plan where the pass needs it, never written."""
    made = plan(num_labels, k, size, _eps(dtype))
    arrays = (made.u, made.v, *made.rotations(made.centres(label_start, num_rows)))
    with torch.inference_mode(False):  # what is kept outlives the mode it was made in
        u, v, cos, sin = (torch.tensor(array, dtype=dtype, device=device) for array in arrays)
    return u, v, cos, sin


class _Pass:
    """The walk over label chunks: logits going forward, and the adjoint of the DFT part."""

    def __init__(self, x: Tensor, layer: Layer) -> None:
        self.layer = layer
        self.x = x.to(accumulate_dtype(x.dtype))
        self.dft, self.slack = self.x[:, : layer.dft_columns], self.x[:, layer.dft_columns :]
        self.size = min(max(_CHUNK_ELEMENTS // max(x.shape[0], 1), _MIN_CHUNK), _MAX_CHUNK, max(layer.num_rows, 1))
        if layer.k >= 0:
            sizes = (layer.num_labels, layer.k, self.size, layer.label_start, layer.num_rows)
            self.u, self.v, self.cos, self.sin = _plan_tensors(*sizes, self.x.dtype, self.x.device)

    def coefficients(self, chunk: int) -> Tensor:
        """The DFT features seen from the centre of a chunk, through V: ``[B, r]``."""
        return _rotate(self.dft, self.cos[chunk], self.sin[chunk]) @ self.v.T

    def coefficients_adjoint(self, chunk: int, g: Tensor) -> Tensor:
        """``[B, r]`` → its contribution to the gradient of the DFT features, ``[B, 2k+1]``."""
        return _rotate(g @ self.v, self.cos[chunk], -self.sin[chunk])

    def __iter__(self) -> Iterator[_Chunk]:
        layer = self.layer
        for index, start in enumerate(range(0, layer.num_rows, self.size)):
            stop = min(start + self.size, layer.num_rows)
            weight = layer.weight[start:stop].to(self.x.dtype)
            z = self.slack @ weight.T
            if layer.k >= 0:
                z.addmm_(self.coefficients(index), self.u[: stop - start].T)
            if layer.bias is not None:
                z += layer.bias[start:stop].to(z.dtype)
            yield _Chunk(start, stop, weight, z)


@_as_they_are
def logits(x: Tensor, layer: Layer) -> Tensor:
    z = x.new_empty(x.shape[0], layer.num_rows)
    for chunk in _Pass(x, layer):
        z[:, chunk.start : chunk.stop] = chunk.z
    return z


@_as_they_are
def logits_adjoint(g: Tensor, layer: Layer) -> Tensor:
    """``g W``: the gradient of x for a gradient ``g [B, m]`` of the logits, ``[B, D]``."""
    x = g.new_zeros(g.shape[0], layer.in_columns)
    walk = _Pass(x, layer)
    grad = torch.zeros_like(walk.x)
    for index, start in enumerate(range(0, layer.num_rows, walk.size)):
        stop = min(start + walk.size, layer.num_rows)
        _add_grad_x(grad, g[:, start:stop].to(grad.dtype), walk, index, layer.weight[start:stop].to(grad.dtype))
    return grad.to(g.dtype)


@_as_they_are
def fused_loss(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: Loss,
    row_scale: float | Tensor,
    needs: tuple[bool, bool, bool],
    grad_weight_into: Tensor | None = None,
) -> LossResult:
    walk = _Pass(x, layer)
    out_dtype = gradient_dtype(x.dtype)
    rows = torch.zeros(x.shape[0], dtype=sum_dtype(x.device), device=x.device)
    grad_x = torch.zeros_like(walk.x) if needs[0] else None
    grad_weight = grad_weight_into
    if needs[1] and grad_weight is None:
        grad_weight = torch.empty(layer.weight.shape, dtype=out_dtype, device=x.device)
    grad_bias = torch.empty(layer.num_rows, dtype=out_dtype, device=x.device) if needs[2] else None
    scale = row_scale.to(walk.x.dtype)[:, None] if isinstance(row_scale, Tensor) else row_scale
    chunk_targets = _ChunkTargets(targets, layer, walk)
    for index, (start, stop, weight, z) in enumerate(walk):
        here = loss.at_labels(z, layer.label_start + start, layer.label_start + stop)
        f, g = here.value_and_grad(z, chunk_targets(start, stop))
        rows += f.sum(1, dtype=rows.dtype)
        if not any(needs):
            continue
        g *= scale
        if grad_x is not None:
            _add_grad_x(grad_x, g, walk, index, weight)
        if needs[1] and grad_weight is not None:
            if grad_weight_into is None:
                grad_weight[start:stop] = g.T @ walk.slack
            else:
                grad_weight[start:stop] += (g.T @ walk.slack).to(grad_weight.dtype)
        if grad_bias is not None:
            grad_bias[start:stop] = g.sum(0)
    return LossResult(
        rows, None if grad_x is None else grad_x.to(out_dtype), grad_weight if needs[1] else None, grad_bias
    )


@_as_they_are
def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    best_values, best_labels = x.new_empty(x.shape[0], 0), x.new_empty(x.shape[0], 0, dtype=torch.int64)
    for start, stop, _, z in _Pass(x, layer):
        labels = torch.arange(start, stop, device=x.device) + layer.label_start
        values, picked = _top(z.to(x.dtype), min(m, stop - start))
        # Kept labels are lower than all that follow and stand first, so that a stable sort breaks ties rightly.
        values, order = torch.sort(torch.cat([best_values, values], 1), dim=1, descending=True, stable=True)
        best_labels = torch.cat([best_labels, labels[picked]], 1).gather(1, order[:, :m])
        best_values = values[:, :m]
    return best_values, best_labels


@_as_they_are
def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    rows, labels = [], []
    for start, _, _, z in _Pass(x, layer):
        row, label = (z.to(x.dtype) > threshold).nonzero(as_tuple=True)
        rows.append(row)
        labels.append(label + (layer.label_start + start))
    row = torch.cat(rows)
    counts = torch.bincount(row, minlength=x.shape[0])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return LabelSets.from_sorted(torch.cat(labels)[torch.argsort(row, stable=True)], offsets, layer.num_labels)


class _ChunkTargets:
    """Dense targets ``[B, chunk]`` one chunk at a time; sparse sets are put in order of label once."""

    def __init__(self, targets: LabelSets | Tensor, layer: Layer, walk: _Pass) -> None:
        self.dtype, self.batch = walk.x.dtype, walk.x.shape[0]
        self.dense = None if isinstance(targets, LabelSets) else targets
        if isinstance(targets, LabelSets):
            labels, order = torch.sort(targets.indices - layer.label_start)
            self.labels, self.rows = labels, targets.rows()[order]
            edges = torch.arange(0, layer.num_rows + walk.size, walk.size, device=labels.device)
            self.edges = torch.searchsorted(labels, edges.clamp_(max=layer.num_rows)).tolist()
            self.size = walk.size

    def __call__(self, start: int, stop: int) -> Tensor:
        if self.dense is not None:
            return self.dense[:, start:stop].to(self.dtype)
        y = torch.zeros(self.batch, stop - start, dtype=self.dtype, device=self.labels.device)
        here = slice(*self.edges[start // self.size : start // self.size + 2])
        y[self.rows[here], self.labels[here] - start] = 1
        return y


def _add_grad_x(grad_x: Tensor, g: Tensor, walk: _Pass, index: int, weight: Tensor) -> None:
    """Adds ``g W_chunk`` for the chunk ``index``."""
    columns = walk.layer.dft_columns
    grad_x[:, columns:].addmm_(g, weight)
    if columns:
        grad_x[:, :columns] += walk.coefficients_adjoint(index, g @ walk.u[: g.shape[1]])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (cosine, sine feature) of ``x [B, 2k+1]`` by the angles of ``cos, sin [k]``."""
    even, odd = x[:, 1::2], x[:, 2::2]
    turned = torch.empty_like(x)
    turned[:, 0] = x[:, 0]
    turned[:, 1::2] = cos * even + sin * odd
    turned[:, 2::2] = cos * odd - sin * even
    return turned


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
