"""What the GPU backends share: tile factors on the device, chunks, targets by tile, and the merging of candidates.

The DFT part of a tile of labels is ``U · (V · Rot(tile) · x_dft)`` (``plan.py``). ``V · Rot(tile)`` of all tiles,
stacked, is one small matrix ``M [tiles·r, 2k+1]``: r/tile of the dense DFT matrix, about a twelfth. So the rotated
coefficients of a chunk of tiles are one library matrix product ``x_dft Mᵀ``, and a kernel sees a tile as
``[S_tile | U]`` times ``[x_slack | c_tile]``. The gradient goes back the same way.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..losses import Loss
from ..plan import plan
from .interface import accumulate_dtype

_CACHE_BYTES = 256 * 2**20
_MAX_LABELS = 2**31 - 1  # a label fits an int32 inside the kernels; memory offsets are 64-bit


F = TypeVar("F", bound=Callable[..., Any])


def without_autocast(operation: F) -> F:
    """Inputs come in their final dtype: autocast must not round the library products between the kernels."""

    @functools.wraps(operation)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return operation(x, *args, **kwargs)

    return cast(F, run)


class TileFactors(NamedTuple):
    """The DFT part of every tile of a layer, on a device; ``rank`` 0 for a layer without one."""

    rank: int  # r
    u: Tensor  # [tile, r]: shared by all tiles
    m: Tensor  # [tiles·r, 2k+1]: V · Rot(tile)

    def coefficients(self, x: Tensor, first: int, count: int) -> Tensor:
        """``x [B, D]`` → the coefficients of tiles ``first … first+count-1``, ``[B, count·r]``, accumulation dtype."""
        return x[:, : self.m.shape[1]].to(self.m.dtype) @ self._rows(first, count).T

    def coefficients_adjoint(self, grad: Tensor, first: int, count: int) -> Tensor:
        """``[B, count·r]`` → the contribution to the gradient of the DFT features, ``[B, 2k+1]``."""
        return grad @ self._rows(first, count)

    def _rows(self, first: int, count: int) -> Tensor:
        return self.m[first * self.rank : (first + count) * self.rank]


_cache: OrderedDict[tuple[object, ...], TileFactors] = OrderedDict()
_lock = threading.Lock()


def tile_factors(layer: Layer, tile: int) -> TileFactors:
    """The factors for tiles of ``tile`` labels from the layer's first label on, in the accumulation dtype.

    Cached: they are worked out in float64 and copied to the device once, before any CUDA graph is captured.
    """
    dtype, device = accumulate_dtype(layer.weight.dtype), layer.weight.device
    if layer.k < 0:
        empty = torch.empty(0, 0, dtype=dtype, device=device)
        return TileFactors(0, empty, empty)
    key = (layer.num_labels, layer.k, layer.label_start, layer.num_rows, tile, dtype, device)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    made = _make(layer, tile, dtype, device)
    with _lock:
        _cache[key] = made
        while len(_cache) > 1 and sum(f.m.nbytes for f in _cache.values()) > _CACHE_BYTES:
            _cache.popitem(last=False)
    return made


def _make(layer: Layer, tile: int, dtype: torch.dtype, device: torch.device) -> TileFactors:
    shared = plan(layer.num_labels, layer.k, tile, 1e-14 if dtype == torch.float64 else 2e-8)
    cos, sin = shared.rotations(shared.centres(layer.label_start, layer.num_rows))
    cosines, sines = shared.v[:, 1::2], shared.v[:, 2::2]  # [r, k]
    m = np.empty((len(cos), *shared.v.shape), np.float32 if dtype == torch.float32 else np.float64)
    m[:, :, 0] = shared.v[:, 0]
    m[:, :, 1::2] = cosines * cos[:, None] - sines * sin[:, None]
    m[:, :, 2::2] = cosines * sin[:, None] + sines * cos[:, None]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.tensor(array, dtype=dtype, device=device)

    return TileFactors(shared.rank, tensor(shared.u), tensor(m.reshape(-1, m.shape[-1])))


def check_size(layer: Layer) -> None:
    """Refuses more labels than the kernels can number."""
    if layer.num_labels > _MAX_LABELS:
        raise ValueError(
            f"the GPU kernels number labels with 32 bits: num_labels = {layer.num_labels} is above {_MAX_LABELS}; "
            "shard the labels, or use backend 'torch'"
        )


def label_chunks(layer: Layer, tile: int, batch: int, elements: int) -> Iterator[tuple[int, int]]:
    """(first tile, tiles) of chunks of about ``elements = batch · labels`` each: it bounds the working memory."""
    tiles = -(-layer.num_rows // tile)
    step = max(elements // (tile * max(batch, 1)), 1)
    for first in range(0, tiles, step):
        yield first, min(step, tiles - first)


def chunk_of(layer: Layer, tile: int, first: int, count: int) -> Layer:
    """The part of a layer that lies in tiles ``first … first+count-1``."""
    rows = slice(first * tile, (first + count) * tile)
    return layer._replace(
        weight=layer.weight[rows],
        bias=None if layer.bias is None else layer.bias[rows],
        label_start=layer.label_start + first * tile,
    )


def slack_features(x: Tensor, layer: Layer) -> Tensor:
    """The slack part of ``x``, ``[B, s]``, packed so that its rows are aligned whenever s allows."""
    return x[:, layer.dft_columns :].contiguous()


class SparseTargets:
    """Label sets, ready to be looked up by tile without a sync or a sort."""

    def __init__(self, targets: LabelSets) -> None:
        nnz = targets.indices.numel()
        if nnz > 2**31 - 1:
            raise ValueError(f"targets hold {nnz} positive labels, above 2^31-1 in one batch; split the batch")
        self.indices = targets.indices
        self._width = targets.num_labels + 1
        self._keys = targets.rows() * self._width + targets.indices  # ascending: rows in order, labels within

    def at(self, layer: Layer, tile: int, first_row: int, rows: int) -> Tensor:
        """Where the positives of each row enter each tile of the layer: int32 ``[tiles+1, rows]``.

        Row b has the positives ``indices[at[t, b] : at[t+1, b]]`` in tile t.
        """
        device = self.indices.device
        tiles = -(-layer.num_rows // tile)
        edges = (torch.arange(tiles + 1, device=device) * tile).clamp_(max=layer.num_rows) + layer.label_start
        row = torch.arange(first_row, first_row + rows, device=device)
        return torch.searchsorted(self._keys, row * self._width + edges[:, None], out_int32=True)


class Factors(NamedTuple):
    """How gradients are scaled: ``row [B]`` inside the kernel, ``out`` (a scalar or None) on the sums."""

    row: Tensor
    out: Tensor | None


def gradient_factors(x: Tensor, row_scale: float | Tensor, loss: Loss) -> Factors:
    """Splits ``row_scale`` so that ∂f/∂z keeps to the range of float16 inside the tensor-core products.

    Other dtypes have the exponent range to carry the whole factor in the kernel.
    """
    dtype = accumulate_dtype(x.dtype)
    if isinstance(row_scale, Tensor):
        row = row_scale.to(dtype=dtype, device=x.device).contiguous()
    else:
        row = torch.full((x.shape[0],), row_scale, dtype=dtype, device=x.device)
    if x.dtype != torch.float16 or not x.shape[0]:
        return Factors(row, None)
    out = row.abs().amax()
    for name in ("weight", "pos_weight"):
        factor = getattr(loss, name, None)
        if factor is not None:
            out = out * factor.to(dtype).abs().amax().clamp(min=1.0 if name == "pos_weight" else 0.0)
    out = torch.where((out > 0) & torch.isfinite(out), out, torch.ones_like(out))
    return Factors(row / out, out)


def label_vector(values: Tensor | None, layer: Layer, dtype: torch.dtype) -> Tensor | None:
    """The entries of a per-label vector ``[n]`` that belong to this layer, ``[m]``."""
    if values is None:
        return None
    return values[layer.label_start : layer.label_start + layer.num_rows].to(dtype).contiguous()


# --- top-m and prediction: from what the kernels emit to the result -----------------------------------------


def merge_candidates(keys: Tensor, labels: Tensor, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The m best of ``keys, labels [B, candidates]``: by key, ties to the lower label; keys become logits again.

    A key is the bit pattern of a logit, bent so that integers order as the numbers do (NaN highest).
    """
    order = labels.argsort(dim=1, stable=True)
    keys, labels = keys.gather(1, order), labels.gather(1, order)
    keys, order = keys.sort(dim=1, descending=True, stable=True)
    keys, labels = keys[:, :m].contiguous(), labels.gather(1, order[:, :m])
    bits = torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys)
    values = bits.view(torch.float64 if keys.dtype == torch.int64 else torch.float32)
    return values.to(dtype), labels.to(torch.int64)


def sort_logits(z: Tensor, m: int, label_start: int) -> tuple[Tensor, Tensor]:
    """The m highest of ``z [B, c]`` and their labels, by a stable sort: for an m too large for the kernels' lists."""
    values, order = torch.sort(z, dim=1, descending=True, stable=True)
    return values[:, :m], order[:, :m] + label_start


def set_offsets(counts: Tensor) -> tuple[Tensor, Tensor]:
    """``counts [parts, B]`` of predicted labels → (``offsets [B+1]``, start of every part of a row ``[parts, B]``)."""
    sizes = counts.sum(0, dtype=torch.int64)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    before = counts.cumsum(0, dtype=torch.int64) - counts
    return offsets, (before + offsets[:-1]).contiguous()
