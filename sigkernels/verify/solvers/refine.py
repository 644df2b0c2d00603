"""A vertex of the Chebyshev program in twice the precision, for regions thinner than float64 can tell.

At a vertex as many rows and edges of the box are tight as there are unknowns: the tight rows have one margin, in units
of their norms, and their multipliers cancel in every free coordinate. Both are square systems. They are solved in
float64, and again for what the answer leaves over, which is summed exactly: each pass adds as many digits as the first.

A solver may have ended at a vertex next to the best one. Its multipliers are positive there, but some row has a smaller
margin: that row comes in and another leaves, as in the dual simplex method, until none has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from scipy.linalg import lapack

from ..question import Question
from ..rounding import exact_dots, gamma, two_sum

TURNS = 12
PIVOTS = 30
CANDIDATES = 256  # rows whose margins are summed exactly to find the smallest


class Solution(NamedTuple):
    """A vertex: its point x [d] and the multipliers of its support, exact sums of two floats, and the common margin."""

    point: ndarray
    multipliers: ndarray
    parts: tuple[ndarray, ndarray]  # x as high + low, each [d]
    level: float


def vertices(question: Question, active: ndarray, x: ndarray, support: ndarray) -> Iterator[tuple[ndarray, Solution]]:
    """The support and the solution of the vertex near x with these tight rows, then of each one the pivots lead to."""
    free = np.abs(x) < question.box * (1 - 1e-9)
    edge = np.where(free, 0.0, np.sign(x) * question.box)
    for _ in range(PIVOTS):
        vertex = Vertex(question, active, edge, free, support)
        solution = vertex.solve()
        if solution is None:
            return
        yield support, solution
        entering = vertex.worst_row(active, solution)
        if entering is None or not all(m > 0 for m in solution.multipliers):
            return
        support, free = vertex.pivot(solution, entering, entering in active)
        edge = np.where(free, 0.0, edge)


class Vertex:
    """The tight rows ``support`` of a set, with the coordinates of x that are not at the edge of the box."""

    question: Question
    support: np.ndarray
    edge: np.ndarray
    free: np.ndarray
    sign: np.ndarray
    rows: np.ndarray
    norms: np.ndarray
    bias: np.ndarray
    system: np.ndarray
    solve_transposed: Callable[[np.ndarray], np.ndarray]

    def __init__(self, question: Question, active: ndarray, edge: ndarray, free: ndarray, support: ndarray):
        self.question, self.support, self.edge, self.free = question, support, edge, free
        self.sign = np.where(np.isin(support, active), 1.0, -1.0)
        self.rows = self.sign[:, None] * _both_parts(question, support)
        self.norms = question.norms[1][support]
        self.bias = np.zeros(len(support)) if question.bias is None else self.sign * question.bias[support]
        self.system = np.concatenate([self.rows[:, : question.d][:, free], -self.norms[:, None]], axis=1)

    def _solvers(self) -> tuple[Callable[[ndarray], ndarray], Callable[[ndarray], ndarray]] | None:
        """``S v = r`` and ``Sᵀ v = r`` for the system S, if the tight rows determine the vertex."""
        if self.system.shape[0] != self.system.shape[1]:
            return None
        # Equilibrated, so that neither small rows nor the column of norms decide the pivots.
        row = np.max(np.abs(self.system), axis=1)
        scaled = self.system / row[:, None]
        column = np.max(np.abs(scaled), axis=0)
        if not np.all(column > 0):
            return None
        lu, pivots, failed = lapack.dgetrf(scaled / column)
        if failed:
            return None
        return (
            lambda r: lapack.dgetrs(lu, pivots, r / row)[0] / column,
            lambda r: lapack.dgetrs(lu, pivots, r / column, trans=1)[0] / row,
        )

    def _both(self, x: ndarray) -> ndarray:
        return np.concatenate([x, x[: self.question.dft_columns]])

    def solve(self) -> Solution | None:
        """The point and the multipliers; None if rounding wins, or if the point is outside the box."""
        solvers = self._solvers()
        if solvers is None:
            return None
        solve, self.solve_transposed = solvers
        primal = self._refined(solve, self._primal_residual, self.system.shape[1])
        weights = self._refined(self.solve_transposed, self._dual_residual, len(self.support))
        if primal is None or weights is None:
            return None
        high, low = self.edge.copy(), np.zeros(self.question.d)
        high[self.free], low[self.free] = primal[0][:-1], primal[1][:-1]
        point = _sum(high, low)
        if max(map(abs, point)) > Fraction(self.question.box):
            return None
        return Solution(point, _sum(*weights), (high, low), float(primal[0][-1]))

    def worst_row(self, active: ndarray, solution: Solution) -> int | None:
        """The label with the smallest margin at the vertex, in units of its norm, if that is below the common one."""
        question, (high, low) = self.question, solution.parts
        norms = question.norms[1]
        logits = question.logits(high[None, :])[0]
        margins = -logits
        margins[active] = logits[active]
        error = 4 * (
            gamma(question.d + 3) * float(np.linalg.norm(high)) * norms + question.entry_error * np.abs(high).sum()
        )
        if question.bias is not None:
            error += 4 * gamma(question.d + 3) * np.abs(question.bias)
        lower = margins - error - solution.level * norms
        lower[self.support] = np.inf
        lower[norms == 0] = np.inf
        labels = np.argpartition(lower, min(CANDIDATES, question.n) - 1)[:CANDIDATES]
        labels = labels[lower[labels] < 0]
        if not labels.size:
            return None
        rows = _both_parts(question, labels)
        bias = None if question.bias is None else question.bias[labels]
        sums = exact_dots(
            np.concatenate([rows, rows], axis=1), np.concatenate([self._both(high), self._both(low)]), bias
        )
        if sums is None:
            return None
        least = np.where(np.isin(labels, active), sums, -sums) / norms[labels]
        worst = int(np.argmin(least))
        return int(labels[worst]) if least[worst] < solution.level - 1e-9 * abs(solution.level) else None

    def pivot(self, solution: Solution, entering: int, is_active: bool) -> tuple[ndarray, ndarray]:
        """The support and the free coordinates after this label has come in: whose multiplier vanishes first leaves.

        Raising the entering multiplier to t changes the others to ``λ - t μ`` with ``Sᵀμ`` the entering row, and so the
        sums at the edge of the box, whose signs say which edge: one that vanishes frees its coordinate.
        """
        question = self.question
        row = (1.0 if is_active else -1.0) * question.rows(np.array([entering]))[0]
        change = self.solve_transposed(np.append(row[self.free], -question.norms[1][entering]))
        multipliers = solution.multipliers.astype(np.float64)
        at_edge = ~self.free
        rows = self.rows[:, : question.d][:, at_edge]
        value = np.concatenate([multipliers, np.abs(multipliers @ rows)])
        falls = np.concatenate([change, np.sign(multipliers @ rows) * (change @ rows - row[at_edge])])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(falls > 0, value / falls, np.inf)
        first = int(np.argmin(ratio))
        support, free = np.append(self.support, entering), self.free.copy()
        if first < len(multipliers):
            support = np.delete(support, first)
        else:
            free[np.flatnonzero(at_edge)[first - len(multipliers)]] = True
        return support, free

    def _refined(
        self, solve: Callable[[ndarray], ndarray], residual: Callable[..., ndarray | None], size: int
    ) -> tuple[ndarray, ndarray] | None:
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
        x, rest = self.edge.copy(), np.zeros(self.question.d)
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
        dft = free < self.question.dft_columns
        rest[: len(free)][dft] = self.rows[:, self.question.d + free[dft]].T
        goal = np.zeros(len(whole))
        goal[-1] = 1.0  # -Σ λ_i‖w_i‖ + 1
        sums = exact_dots(
            np.concatenate([whole, rest, whole, rest], axis=1), np.concatenate([high, high, low, low]), goal
        )
        return None if sums is None else -sums


def _both_parts(question: Question, labels: ndarray) -> ndarray:
    """Rows of W [p, d + 2k+1]: the float64 entries, and what the DFT ones lack."""
    return np.concatenate([question.rows(labels), question.low(labels)], axis=1)


def _sum(high: ndarray, low: ndarray) -> ndarray:
    return np.array([Fraction(h) + Fraction(r) for h, r in zip(high.tolist(), low.tolist(), strict=True)], dtype=object)
