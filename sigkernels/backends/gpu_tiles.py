"""A problem cut into tiles, for the GPU backends: tile factors on the device, chunks, targets by tile.

The DFT part of a tile of labels is ``U · V · Rot(tile) · x_dft`` (``dft_plan.py``). U and V are the same for all tiles; a
kernel turns V for its tile, ``M = V · Rot(tile)``, and sees the tile as ``[U | S_tile]`` times ``[M x_dft | x_slack]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dft_plan import plan
from ..labels import LabelSets
from ..layer import Layer
from ..losses import ElementwiseParams
from .device_tables import DeviceTables
from .interface import accumulate_dtype

_DFT_ALIGN = 64  # columns: what the widest step of a kernel takes
_MAX_LABELS = 2**31 - 1  # a label fits an int32 inside the kernels; memory offsets are 64-bit


class TileFactors(NamedTuple):
    """The DFT part of every tile of a layer, on a device; ``rank`` 0 for a layer without one.

    A row of V belongs to the cosines (the first ``even`` rows) or to the sines, so one number per frequency says it
    all: ``M[i, column] = v[i, (column+1)//2] · turn[tile, 0 if i < even else 1, column]``.
    """

    rank: int  # r
    even: int
    u: Tensor  # [tile, r]
    v: Tensor  # [r, k+1]
    turn: Tensor  # [tiles, 2, 2k+1]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tables on the device."""
        return self.u, self.v, self.turn


_factors: DeviceTables[TileFactors] = DeviceTables(256 * 2**20)


def tile_factors(layer: Layer, tile: int) -> TileFactors:
    """The factors for tiles of ``tile`` labels from the layer's first label on, in the accumulation dtype.

    Worked out in float64 and copied to the device once, before any CUDA graph is captured.
    """
    dtype, device = accumulate_dtype(layer.weight.dtype), layer.weight.device
    if layer.k < 0:
        empty = torch.empty(0, 0, dtype=dtype, device=device)
        return TileFactors(0, 0, empty, empty, empty)
    key = (layer.meta, layer.num_rows, tile, dtype, device)
    return _factors.get(key, device, lambda: _work_out(layer, tile, dtype, device))


def _work_out(layer: Layer, tile: int, dtype: torch.dtype, device: torch.device) -> TileFactors:
    shared = plan(layer.num_labels, layer.k, tile, 1e-14 if dtype == torch.float64 else 2e-8)
    cos, sin = shared.rotations(shared.centres(layer.label_start, layer.num_rows))
    v = np.empty((shared.rank, layer.k + 1))
    v[:, 0] = shared.v[:, 0]
    v[: shared.even_rank, 1:] = shared.v[: shared.even_rank, 1::2]
    v[shared.even_rank :, 1:] = shared.v[shared.even_rank :, 2::2]
    turn = np.empty((len(cos), 2, 2 * layer.k + 1), np.float32 if dtype == torch.float32 else np.float64)
    turn[:, :, 0] = 1, 0
    turn[:, 0, 1::2], turn[:, 0, 2::2] = cos, sin
    turn[:, 1, 1::2], turn[:, 1, 2::2] = -sin, cos

    def tensor(array: np.ndarray) -> Tensor:
        return torch.tensor(array, dtype=dtype, device=device)

    return TileFactors(shared.rank, shared.even_rank, tensor(shared.u), tensor(v), tensor(turn))


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


class Chunk(NamedTuple):
    """Some rows and some tiles of a problem, as the kernels see them."""

    rows: slice
    labels: slice  # of the layer it was cut from
    dft: Tensor  # [B, a multiple of 64]: the DFT features, zero beyond the last
    slack: Tensor  # [B, s], packed so that its rows are aligned whenever s allows
    layer: Layer  # the labels here
    factors: TileFactors  # turn: of the tiles here
    tile: int  # labels per tile

    @classmethod
    def of(cls, x: Tensor, layer: Layer, tile: int) -> Chunk:
        """All of it."""
        check_size(layer)
        columns = layer.dft_columns
        dft = torch.nn.functional.pad(x[:, :columns], (0, -columns % _DFT_ALIGN)).contiguous()
        slack = x[:, columns:].contiguous()
        layer = layer._replace(
            weight=layer.weight.contiguous(), bias=None if layer.bias is None else layer.bias.contiguous()
        )
        rows, labels = slice(0, x.shape[0]), slice(0, layer.num_rows)
        return cls(rows, labels, dft, slack, layer, tile_factors(layer, tile), tile)

    def part(self, rows: slice, first: int, count: int) -> Chunk:
        """These rows, and tiles ``first … first+count-1``."""
        layer, tile = self.layer, self.tile
        labels = slice(first * tile, min((first + count) * tile, layer.num_rows))
        part = layer.part(labels.start, labels.stop)
        factors = self.factors._replace(turn=self.factors.turn[first : first + count])
        return Chunk(rows, labels, self.dft[rows], self.slack[rows], part, factors, tile)

    @property
    def batch(self) -> int:
        return self.slack.shape[0]

    @property
    def tiles(self) -> int:
        return -(-self.layer.num_rows // self.tile)


class SparseTargets:
    """Label sets, ready to be looked up by tile without a sync or a sort."""

    indices: Tensor

    def __init__(self, targets: LabelSets) -> None:
        nnz = targets.indices.numel()
        if nnz > 2**31 - 1:
            raise ValueError(f"targets hold {nnz} positive labels, above 2^31-1 in one batch; split the batch")
        self.indices = targets.indices
        self._width = targets.num_labels + 1
        self._keys = targets.rows() * self._width + targets.indices  # ascending: rows in order, labels within

    def at(self, layer: Layer, tile: int, rows: slice) -> Tensor:
        """Where the positives of each row enter each tile of the layer: int32 ``[tiles+1, rows]``.

        Row b has the positives ``indices[at[t, b] : at[t+1, b]]`` in tile t.
        """
        device = self.indices.device
        tiles = -(-layer.num_rows // tile)
        edges = (torch.arange(tiles + 1, device=device) * tile).clamp_(max=layer.num_rows) + layer.label_start
        row = torch.arange(rows.start, rows.stop, device=device)
        return torch.searchsorted(self._keys, row * self._width + edges[:, None], out_int32=True)


class Factors(NamedTuple):
    """How gradients are scaled: ``row [B]`` inside the kernel, ``out`` (a scalar or None) on the sums."""

    row: Tensor
    out: Tensor | None


def gradient_factors(x: Tensor, row_scale: float | Tensor, params: ElementwiseParams) -> Factors:
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
    for setting, least in ((params.weight, 0.0), (params.pos_weight, 1.0)):
        if setting is not None:
            factor = torch.as_tensor(setting, dtype=dtype, device=x.device)
            out = out * factor.abs().amax().clamp(min=least)
    out = torch.where((out > 0) & torch.isfinite(out), out, torch.ones_like(out))
    return Factors(row / out, out)
