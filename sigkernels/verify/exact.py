"""Gordan's alternative in exact rational arithmetic: a simplex method on Python integers.

Over rows a_i (integers: floating-point numbers scaled by powers of two) it solves

    min ‖Σ λ_i a_i‖₁   s.t.   Σ λ_i = 1,  λ ≥ 0.

At 0, λ is an exact Gordan vector: no x has all ``a_i·x > 0``. Above 0, the dual solution is an exact x that has.
The inverse of the basis is kept as integers over one common denominator (Edmonds), so nothing is ever rounded;
floating point only proposes which column enters.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy import ndarray

MAX_WIDTH = 64  # columns: the integers grow with the determinant of a (d+1) × (d+1) matrix
ALL_ROWS = 3000


class Alternative(NamedTuple):
    """Exactly one of the two: a point x [D] with every ``a_i·x > 0``, or multipliers on a support with sum zero."""

    point: list[Fraction] | None
    support: ndarray | None
    multipliers: list[Fraction] | None


def integer_row(row: ndarray) -> tuple[list[int], int]:
    """Integers r and an exponent e with ``row = r·2^e`` exactly."""
    ratios = [float(v).as_integer_ratio() for v in row]
    largest = max(den for _, den in ratios)
    ints = [num * (largest // den) for num, den in ratios]
    shift = min(((v & -v).bit_length() - 1 for v in ints if v), default=0)
    return [v >> shift for v in ints], shift - (largest.bit_length() - 1)


class _Simplex:
    def __init__(self, rows: list[list[int]], floats: ndarray):
        self.rows, self.floats = rows, floats  # floats: the same rows, each scaled to at most 1 in magnitude
        self.width = len(rows[0])
        w = self.width
        first = rows[0]
        # λ_0 = 1 and, for each column, the one of u_j, v_j that takes up the residual: a basis with determinant ±1.
        self.inverse = [[0] * (w + 1) for _ in range(w + 1)]
        self.basis: list[int] = []  # i ≥ 0: λ_i; -1-j: u_j; -1-w-j: v_j
        for j in range(w):
            sign = -1 if first[j] > 0 else 1
            self.inverse[j][j] = sign
            self.inverse[j][w] = -sign * first[j]
            self.basis.append(-1 - j if sign > 0 else -1 - w - j)
        self.inverse[w][w] = 1
        self.basis.append(0)
        self.denominator = 1

    def prices(self) -> list[int]:
        """The dual vector times the denominator [width+1]."""
        out = [0] * (self.width + 1)
        for r, b in enumerate(self.basis):
            if b < 0:
                for c, v in enumerate(self.inverse[r]):
                    out[c] += v
        return out

    def value_of(self, prices: list[int], i: int) -> int:
        """``π·(a_i, 1)`` times the denominator: positive means that λ_i improves the objective."""
        return sum(p * a for p, a in zip(prices, self.rows[i], strict=False)) + prices[-1]

    def entering(self, prices: list[int], lowest: bool) -> int | None:
        """A column that improves, the lowest-numbered one if asked (Bland), or None at the optimum."""
        w, den = self.width, self.denominator
        basic = set(self.basis)
        if not lowest:
            scale = max(map(abs, prices)) or 1
            as_float = np.array([p / scale for p in prices])
            score = self.floats @ as_float
            for i in np.argsort(-score)[: 2 * w + 10].tolist():
                if i not in basic and self.value_of(prices, i) > 0:
                    return i
        for i in range(len(self.rows)):
            if i not in basic and self.value_of(prices, i) > 0:
                return i
        for j in range(w):
            if prices[j] > den and -1 - j not in basic:
                return -1 - j
            if -prices[j] > den and -1 - w - j not in basic:
                return -1 - w - j
        return None

    def direction(self, column: int) -> list[int]:
        """``B⁻¹`` times the column, times the denominator."""
        w = self.width
        if column >= 0:
            row = self.rows[column]
            return [sum(a * b for a, b in zip(inv, row, strict=False)) + inv[w] for inv in self.inverse]
        j = -1 - column
        return [inv[j] for inv in self.inverse] if j < w else [-inv[j - w] for inv in self.inverse]

    def pivot(self, column: int, lowest: bool) -> bool:
        """Bring this column into the basis; whether the step was degenerate."""
        w = self.width
        step = self.direction(column)
        best: tuple[int, int] | None = None  # the least ratio, as numerator and denominator
        at = -1
        for r, s in enumerate(step):
            if s <= 0:
                continue
            value = self.inverse[r][w]
            less = best is None or value * best[1] < best[0] * s
            tie = best is not None and value * best[1] == best[0] * s
            if less or (tie and lowest and self._order(self.basis[r]) < self._order(self.basis[at])):
                best, at = (value, s), r
        assert best is not None, "the objective is bounded below by 0"
        pivot, old = step[at], self.denominator
        row = self.inverse[at]
        for r, s in enumerate(step):
            if r == at:
                continue
            mine = self.inverse[r]
            if s:
                self.inverse[r] = [(a * pivot - b * s) // old for a, b in zip(mine, row, strict=True)]
            else:
                self.inverse[r] = [a * pivot // old for a in mine]
        self.denominator = pivot
        self.basis[at] = column
        return best[0] == 0

    def _order(self, column: int) -> int:
        return column if column >= 0 else len(self.rows) - 1 - column

    def solve(self, limit: int) -> Alternative | None:
        degenerate = 0
        for _ in range(limit):
            lowest = degenerate > 2 * self.width  # Bland's rule ends any cycle
            w = self.width
            if all(b >= 0 or self.inverse[r][w] == 0 for r, b in enumerate(self.basis)):
                chosen = [(b, self.inverse[r][w]) for r, b in enumerate(self.basis) if b >= 0 and self.inverse[r][w]]
                chosen.sort()
                support = np.array([b for b, _ in chosen], dtype=np.int64)
                return Alternative(None, support, [Fraction(v, self.denominator) for _, v in chosen])
            prices = self.prices()
            column = self.entering(prices, lowest)
            if column is None:
                return Alternative([Fraction(-p, self.denominator) for p in prices[:-1]], None, None)
            degenerate = degenerate + 1 if self.pivot(column, lowest) else 0
        return None


def gordan_alternative(signed: ndarray, hint: ndarray | None = None) -> Alternative | None:
    """Decide the signed rows ``y_i w_i`` [n, D] exactly, or None when that would take too long.

    ``hint`` [n]: margins at some point. Of many rows only those with small margins are used at first; every other row
    is then tested at the exact point, and the violated ones join.
    """
    n, width = signed.shape
    if width > MAX_WIDTH:
        return None
    chosen = np.arange(n)
    if n > ALL_ROWS:
        order = np.argsort(hint, kind="stable") if hint is not None else chosen
        chosen = np.sort(order[: 8 * width + 200])
    for _ in range(20):
        pairs = [integer_row(signed[i]) for i in chosen]
        size = np.max(np.abs(signed[chosen]), axis=1, keepdims=True)
        floats = np.column_stack([signed[chosen] / size, np.zeros(len(chosen))])
        answer = _Simplex([r for r, _ in pairs], floats).solve(60 * width + 400)
        if answer is None:
            return None
        if answer.multipliers is not None and answer.support is not None:
            # a_i = signed_i·2^-e, so λ_i of a_i is λ_i·2^-e of the row itself
            scaled = [m * Fraction(2) ** -pairs[i][1] for m, i in zip(answer.multipliers, answer.support, strict=True)]
            return Alternative(None, chosen[answer.support], scaled)
        assert answer.point is not None
        violated = _violated(signed, answer.point, chosen)
        if violated.size == 0:
            return answer
        chosen = np.union1d(chosen, violated[: 4 * width + 50])
    return None


def _violated(signed: ndarray, point: list[Fraction], known: ndarray) -> ndarray:
    """The rows without ``a·x > 0`` at this exact point, worst first."""
    scale = max(map(abs, point)) or Fraction(1)
    approx = np.array([float(p / scale) for p in point])
    rest = np.setdiff1d(np.arange(signed.shape[0]), known)
    values = signed[rest] @ approx
    error = 1e-13 * (np.abs(signed[rest]) @ np.abs(approx)) + 1e-300
    bad = values < -error
    for at in np.flatnonzero(np.abs(values) <= error):
        exact = sum((Fraction(float(a)) * p for a, p in zip(signed[rest[at]], point, strict=True)), Fraction(0))
        bad[at] = exact <= 0
    order = np.argsort(values[bad])
    return rest[bad][order]
