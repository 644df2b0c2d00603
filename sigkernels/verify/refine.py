"""A vertex of the Chebyshev program in twice the precision, for regions thinner than float64 can tell.

At a vertex as many rows and edges of the box are tight as there are unknowns: the tight rows have one margin, in units
of their norms, and their multipliers cancel in every free coordinate. Both are square systems. They are solved in
float64, and again for what the answer leaves over, which is summed exactly: each turn adds as many digits as the first.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy import ndarray
from scipy.linalg import lapack

from .problem import Problem
from .rounding import exact_dots, two_sum

TURNS = 12


class Vertex:
    """The tight rows ``support`` of a set, with the coordinates of x that are not at the edge of the box."""

    def __init__(self, problem: Problem, active: ndarray, x: ndarray, support: ndarray):
        self.problem, self.support = problem, support
        self.sign = np.where(np.isin(support, active), 1.0, -1.0)
        high, low = problem.rows(support), problem.low(support)
        # Columns: the float64 entries, and what the DFT ones lack.
        self.rows = self.sign[:, None] * np.concatenate([high, low], axis=1)
        self.norms = problem.norms[1][support]
        self.bias = np.zeros(len(support)) if problem.bias is None else self.sign * problem.bias[support]
        self.free = np.abs(x) < problem.box * (1 - 1e-9)
        self.edge = np.where(self.free, 0.0, np.sign(x) * problem.box)
        self.system = np.concatenate([self.rows[:, : problem.d][:, self.free], -self.norms[:, None]], axis=1)

    def is_square(self) -> bool:
        """Whether the tight rows determine the vertex."""
        return self.system.shape[0] == self.system.shape[1]

    def _both(self, x: ndarray) -> ndarray:
        return np.concatenate([x, x[: self.problem.dft_columns]])

    def solve(self) -> tuple[ndarray, ndarray] | None:
        """The point [d] and the multipliers of the support, as exact sums of two floats; None if rounding wins."""
        # Equilibrated, so that neither small rows nor the column of norms decide the pivots.
        row = np.max(np.abs(self.system), axis=1)
        scaled = self.system / row[:, None]
        column = np.max(np.abs(scaled), axis=0)
        lu, pivots, failed = lapack.dgetrf(scaled / column)
        if failed or not np.all(column > 0):
            return None

        def solve(r: ndarray) -> ndarray:
            return lapack.dgetrs(lu, pivots, r / row)[0] / column

        def solve_transposed(r: ndarray) -> ndarray:
            return lapack.dgetrs(lu, pivots, r / column, trans=1)[0] / row

        point = self._refined(solve, self._primal_residual, self.system.shape[1])
        weights = self._refined(solve_transposed, self._dual_residual, len(self.support))
        if point is None or weights is None:
            return None
        x = np.array([Fraction(v) for v in self.edge.tolist()], dtype=object)
        box = Fraction(self.problem.box)
        x[self.free] = [min(max(v, -box), box) for v in _sum(*point)[:-1]]
        return x, _sum(*weights)

    def _refined(self, solve, residual, size: int) -> tuple[ndarray, ndarray] | None:
        high, low = np.zeros(size), np.zeros(size)
        before = np.inf
        for _ in range(TURNS):
            left = residual(high, low)
            if left is None:
                return None
            step = solve(left)
            length = float(np.max(np.abs(step)))
            if not np.isfinite(length) or length >= 0.5 * before:
                break
            before = length
            low = low + step
            high, low = two_sum(high, low)
            if length <= 1e-30 * float(np.max(np.abs(high))):
                break
        return (high, low) if before <= 1e-18 * float(np.max(np.abs(high), initial=0.0)) else None

    def _primal_residual(self, high: ndarray, low: ndarray) -> ndarray | None:
        x, rest = self.edge.copy(), np.zeros(self.problem.d)
        x[self.free], rest[self.free] = high[:-1], low[:-1]
        rows = np.concatenate([self.rows, -self.norms[:, None], self.rows, -self.norms[:, None]], axis=1)
        point = np.concatenate([self._both(x), high[-1:], self._both(rest), low[-1:]])
        sums = exact_dots(rows, point, self.bias)
        return None if sums is None else -sums

    def _dual_residual(self, high: ndarray, low: ndarray) -> ndarray | None:
        free = np.flatnonzero(self.free)
        columns = [self.rows[:, free].T, -self.norms[None, :]]
        whole = np.concatenate(columns)
        rest = np.zeros(whole.shape)
        dft = free < self.problem.dft_columns
        rest[: len(free)][dft] = self.rows[:, self.problem.d + free[dft]].T
        goal = np.zeros(len(whole))
        goal[-1] = 1.0  # -Σ λ_i‖w_i‖ + 1
        sums = exact_dots(
            np.concatenate([whole, rest, whole, rest], axis=1), np.concatenate([high, high, low, low]), goal
        )
        return None if sums is None else -sums


def _sum(high: ndarray, low: ndarray) -> ndarray:
    return np.array([Fraction(h) + Fraction(r) for h, r in zip(high.tolist(), low.tolist(), strict=True)], dtype=object)
