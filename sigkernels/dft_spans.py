"""DFT plans of two levels, as the cpu backend walks them: tiles, and spans of tiles in a row.

All tiles share the factors ``U · V`` of ``dft_plan.py``, but V and the rotation of the coefficients cost nearly as much
as U. So the coefficients are rotated to the centre of a span, once, and brought down to the few numbers that all of its
labels depend on. What U multiplies in each tile is made of these by a small matrix, the same in every span::

    low = V_span · Rot(span) · x_dft                 coef(tile) = M(tile) · low                 z_tile = U · coef(tile)

Tiles that mirror each other around the centre of the span share their products, as labels of a tile do: what one takes
from the even part of ``low`` plus what it takes from the odd part, or the difference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .dft import angles, dft_rows
from .dft_plan import DFTPlan, plan

_SAMPLES = 512  # labels of a span that its factors are worked out from, and more for each wave in it


class SpanPlan(NamedTuple):
    """The factors of spans of ``tiles`` tiles. All arrays are float64.

    ``even`` and ``odd`` say what tiles take from the even and the odd part of ``low``: a row for each column of U for
    each tile of the later half, from the centre of the span outwards, and then the rows of the tile in the middle if
    there is one, its even ones in ``even`` and its odd ones in ``odd``. A tile of the later half takes the sum of both;
    the one that mirrors it takes even - odd in its even rows and odd - even in its odd rows.
    """

    shared: DFTPlan  # of a tile
    tiles: int
    v_even: NDArray[np.float64]  # [low_even, k+1]; without rows the rotated coefficients themselves are ``low``
    v_odd: NDArray[np.float64]  # [low_odd, k]
    even: NDArray[np.float64]
    odd: NDArray[np.float64]

    def rotations(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``cos(j·t_c)`` and ``sin(j·t_c)`` for the centre c of the span at each start, j = 1 … k."""
        labels = self.tiles * self.shared.tile
        angle = angles(2 * self.shared.num_labels, self.shared.k, 2 * starts + labels - 1)
        return np.cos(angle), np.sin(angle)


def span_plan(num_labels: int, k: int, tile: int, tiles: int, eps: float) -> SpanPlan:
    """The plan of spans of ``tiles`` tiles whose factors are right to ``eps`` of the norms of what they make."""
    shared = plan(num_labels, k, tile, eps)
    even_rank = shared.even_rank
    cosines, sines = np.r_[0, 1 : 2 * k + 1 : 2], np.arange(2, 2 * k + 1, 2)
    v_even, v_odd = shared.v[:even_rank, cosines], shared.v[even_rank:, sines]
    # V of each tile, turned from its own centre to that of the span.
    even, odd = [np.empty((0, k + 1))], [np.empty((0, k))]
    for index in range((tiles + 1) // 2, tiles):
        (angle,) = angles(2 * num_labels, k, np.array([(2 * index + 1 - tiles) * tile]))
        cos, sin = np.cos(angle), np.sin(angle)
        even += [v_even * np.r_[1.0, cos], np.pad(-v_odd * sin, ((0, 0), (1, 0)))]
        odd += [v_even[:, 1:] * sin, v_odd * cos]
    if tiles % 2:
        even.append(v_even)
        odd.append(v_odd)
    direct = SpanPlan(shared, tiles, np.empty((0, k + 1)), np.empty((0, k)), np.vstack(even), np.vstack(odd))

    labels = tiles * tile
    count = min(labels, _SAMPLES + 16 * k * labels // num_labels)
    samples = np.linspace(0, labels - 1, count).astype(np.int64)
    rows = dft_rows(2 * num_labels, k, 2 * samples - (labels - 1))
    low_even, low_odd = (_row_space(rows[:, columns], eps / math.sqrt(tiles)) for columns in (cosines, sines))
    reduced = direct._replace(v_even=low_even, v_odd=low_odd, even=direct.even @ low_even.T, odd=direct.odd @ low_odd.T)
    return reduced if _size(reduced) < _size(direct) else direct


def _size(plan: SpanPlan) -> int:
    """Multiplications for each row of x."""
    return sum(matrix.size for matrix in (plan.v_even, plan.v_odd, plan.even, plan.odd))


def _row_space(rows: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """Orthonormal rows that span ``rows`` but for what is below ``eps`` of their norm."""
    if not rows.shape[1]:
        return np.empty((0, 0))
    _, sigma, vt = np.linalg.svd(rows, full_matrices=False)
    return vt[: max(1, int((sigma > eps * sigma[0]).sum()))]  # type: ignore[no-any-return]
