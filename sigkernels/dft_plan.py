"""Plans: what all tiles of a DFT layer share, worked out once per (n, k, tile, eps).

For labels ``i0+δ`` around a centre ``i0`` the DFT is a rotation by ``j·t_{i0}`` of the DFT around label 0, so every
tile of labels uses the same small matrix once the coefficients are rotated. A tile sees only a sliver of each wave, so
that matrix has a tiny numerical rank ``r ≈ 2k·tile/n + O(10)`` and factors as ``U [tile, r] · V [r, 2k+1]``::

    z_tile = U · (V · Rot(i0) · x_dft)

The centre is the middle of the tile, a label or half-way between two. Around it cosines are even and sines odd: the two
halves are factored apart, and what U makes of one side of the tile it makes of the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bounded_cache import BoundedCache
from .dft import angles, check_dft, dft_rows

_ROTATION_BLOCK = 4096  # tiles whose angles are formed at a time


class DFTPlan(NamedTuple):
    """The shared factors of one (n, k, tile, eps). All arrays are float64 and read-only."""

    num_labels: int
    k: int
    tile: int
    u: NDArray[np.float64]  # [tile, r]; row d is the label centre + d - (tile-1)/2
    v: NDArray[np.float64]  # [r, 2k+1]; the even rows touch only column 0 and cosines, the odd rows only sines
    even_rank: int  # the first even_rank columns of u and rows of v are the even half

    @property
    def rank(self) -> int:
        """r: how many columns the DFT part costs per tile."""
        return self.v.shape[0]

    def starts(self, label_start: int, num_rows: int) -> NDArray[np.int64]:
        """The first label of each tile that covers ``label_start … label_start + num_rows - 1``."""
        return label_start + np.arange(0, num_rows, self.tile, dtype=np.int64)

    def rotations(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``cos(j·t_c)`` and ``sin(j·t_c)`` for the centre c of each tile and j = 1 … k, ``[len(starts), k]`` each."""
        cos, sin = np.empty((2, len(starts), self.k))
        for at in range(0, len(starts), _ROTATION_BLOCK):
            block = slice(at, at + _ROTATION_BLOCK)
            angle = angles(2 * self.num_labels, self.k, 2 * starts[block] + self.tile - 1)
            np.cos(angle, out=cos[block])
            np.sin(angle, out=sin[block])
        return cos, sin

    @property
    def nbytes(self) -> int:
        return self.u.nbytes + self.v.nbytes


_plans: BoundedCache[DFTPlan] = BoundedCache(64 * 2**20, lambda plan: plan.nbytes)


def plan(num_labels: int, k: int, tile: int, eps: float, constant: bool = True) -> DFTPlan:
    """The plan for tiles of ``tile`` labels whose factors are right to ``eps`` of the tile matrix's norm; cached.

    ``constant=False`` leaves column 0 out, for kernels that carry it with more digits than the waves.
    """
    return _plans.get((num_labels, k, tile, eps, constant), lambda: _work_out(num_labels, k, tile, eps, constant))


def _work_out(num_labels: int, k: int, tile: int, eps: float, constant: bool) -> DFTPlan:
    check_dft(num_labels, k)
    # Twice as many labels, half as far from each other: the centre may lie between two.
    rows = math.sqrt(2) * dft_rows(2 * num_labels, k, 2 * np.arange(tile) - (tile - 1))
    even = np.r_[np.zeros(int(constant), np.int64), np.arange(1, 2 * k + 1, 2)]
    odd = np.arange(2, 2 * k + 1, 2)
    factors = [_factor(rows[:, columns], columns, 2 * k + 1, eps) for columns in (even, odd)]
    u = np.ascontiguousarray(np.hstack([f[0] for f in factors]))
    v = np.ascontiguousarray(np.vstack([f[1] for f in factors]))
    for array in (u, v):
        array.setflags(write=False)
    return DFTPlan(num_labels, k, tile, u, v, even_rank=factors[0][1].shape[0])


def _factor(
    half: NDArray[np.float64], columns: NDArray[np.int64], width: int, eps: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Truncated SVD of one parity: (``[tile, r]``, ``[r, width]`` with zeros outside ``columns``)."""
    if not columns.size:
        return np.empty((half.shape[0], 0)), np.empty((0, width))
    u, sigma, vt = np.linalg.svd(half, full_matrices=False)
    rank = max(1, int((sigma > eps * sigma[0]).sum()))
    v = np.zeros((rank, width))
    v[:, columns] = vt[:rank]
    # √σ on both sides keeps the rotated coefficients and the tile factor on one scale.
    root = np.sqrt(sigma[:rank])
    return u[:, :rank] * root, v * root[:, None]
