"""Gordan's alternative in exact rational arithmetic: a simplex method on Python integers.

Over rows a_i (floating-point numbers scaled by powers of two, so that nothing is rounded) it solves

    min ‖Σ λ_i a_i‖₁   s.t.   Σ λ_i = 1,  λ ≥ 0.

At 0, λ is an exact Gordan vector: no x has all ``a_i·x > 0``. Above 0, the dual solution is an exact x that has. With
``Σ λ_i‖a_i‖ = 1`` instead the two are the centre and the multipliers of the largest ball in a box.
The inverse of the basis is kept as integers over one common denominator (Edmonds); floating point only proposes which
column enters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

MAX_WIDTH = 64  # columns: the integers grow with the determinant of a (d+1) × (d+1) matrix


class Alternative(NamedTuple):
    """A point x [D] with every ``a_i·x > 0``, or None and multipliers on a support with sum zero.

    Beside a point the multipliers are those of the largest least margin, which that point has.
    """

    point: list[Fraction] | None
    support: ndarray
    multipliers: list[Fraction]


def integer_row(row: Sequence) -> tuple[list[int], int]:
    """Integers r and an exponent e with ``row = r·2^e`` exactly, for floats or Fractions of powers of two."""
    ratios = [v.as_integer_ratio() for v in row]
    largest = max(den for _, den in ratios)
    ints = [num * (largest // den) for num, den in ratios]
    shift = min(((v & -v).bit_length() - 1 for v in ints if v), default=0)
    return [v >> shift for v in ints], shift - (largest.bit_length() - 1)


class _Simplex:
    """Columns ``(a_i, weight_i)`` for the rows, u_j and v_j for the residual.

    Without weights, a row counts by the power of two that is just above its largest entry.
    """

    def __init__(
        self, signed: ndarray, order: ndarray, weights: ndarray | None = None, exact: Sequence[Sequence] | None = None
    ):
        self.signed = signed
        self.exact: Any = signed if exact is None else exact  # what ``signed`` rounds, if anything
        self.width = w = signed.shape[1]
        self.exponent = np.frexp(np.max(np.abs(signed), axis=1))[1]
        self.weights = np.ldexp(1.0, self.exponent) if weights is None else weights
        self.scaled = np.ldexp(signed, -self.exponent[:, None])  # for proposals only: may underflow
        self.scaled_weights = np.ldexp(self.weights, -self.exponent)
        self.exponents: dict[int, int] = {}
        self.integers: dict[int, list[int]] = {}  # column i times a power of two, [width + 1]
        self.pool = order[: 2 * w + 10].tolist()  # the columns that are priced at each step
        start = self.pool[0]
        first = self.column(start)
        # λ_start and, for each coordinate, the one of u_j, v_j that takes up the residual.
        self.inverse = [[0] * (w + 1) for _ in range(w + 1)]
        self.basis: list[int] = []  # i ≥ 0: λ_i; -1-j: u_j; -1-w-j: v_j
        for j in range(w):
            sign = -1 if first[j] > 0 else 1
            self.inverse[j][j] = sign * first[w]
            self.inverse[j][w] = -sign * first[j]
            self.basis.append(-1 - j if sign > 0 else -1 - w - j)
        self.inverse[w][w] = 1
        self.basis.append(start)
        self.denominator = first[w]

    def column(self, i: int) -> list[int]:
        """``(a_i, weight_i)`` times the power of two that makes it integer [width + 1]."""
        if i not in self.integers:
            self.integers[i], self.exponents[i] = integer_row([*self.exact[i], self.weights[i]])
        return self.integers[i]

    def prices(self) -> list[int]:
        """The dual vector times the denominator [width + 1]."""
        out = [0] * (self.width + 1)
        for r, b in enumerate(self.basis):
            if b < 0:
                for c, v in enumerate(self.inverse[r]):
                    out[c] += v
        return out

    def improves(self, prices: list[int], i: int) -> bool:
        """Whether λ_i lowers the objective: ``π·(a_i, weight_i) > 0``."""
        return sum(p * a for p, a in zip(prices, self.column(i), strict=True)) > 0

    def entering(self, prices: list[int], lowest: bool) -> int | None:
        """A column that improves, the lowest-numbered one if asked (Bland), or None at the optimum."""
        w, den = self.width, self.denominator
        basic = set(self.basis)
        if lowest:
            rows = (i for i in range(len(self.signed)) if i not in basic and self.improves(prices, i))
            best = next(rows, None)
            if best is not None:
                return best
        else:
            scale = max(map(abs, prices)) or 1
            proposal = np.array([p / scale for p in prices])
            score = self.scaled @ proposal[:w] + self.scaled_weights * proposal[w]
            for everything in (False, True):
                among = np.arange(len(score)) if everything else np.array(self.pool)
                # Whatever floating point does not clearly rule out is tried exactly, best first.
                among = among[score[among] > -1e-12 * w]
                for i in among[np.argsort(-score[among], kind="stable")].tolist():
                    if i not in basic and self.improves(prices, i):
                        if everything:
                            self.pool = sorted({*self.pool, *among[np.argsort(-score[among])[: 2 * w]].tolist()})
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
            mine = self.column(column)
            return [sum(a * b for a, b in zip(row, mine, strict=True)) for row in self.inverse]
        j = -1 - column
        return [row[j] for row in self.inverse] if j < w else [-row[j - w] for row in self.inverse]

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
            order = -1 if best is None else value * best[1] - best[0] * s
            if order < 0 or (order == 0 and lowest and self._number(self.basis[r]) < self._number(self.basis[at])):
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

    def _number(self, column: int) -> int:
        return column if column >= 0 else len(self.signed) - 1 - column

    def multipliers(self) -> tuple[ndarray, list[Fraction]]:
        """The rows in the basis and their multipliers, those that are not zero."""
        w = self.width
        chosen = sorted((b, self.inverse[r][w]) for r, b in enumerate(self.basis) if b >= 0 and self.inverse[r][w])
        # Column i holds integers r with a_i = r·2^e: λ_i of the integers is λ_i·2^-e of the row itself.
        values = [Fraction(v, self.denominator) * Fraction(2) ** -self.exponents[b] for b, v in chosen]
        return np.array([b for b, _ in chosen], dtype=np.int64), values

    def solve(self, limit: int) -> Alternative | None:
        """Pivot until the answer is exact; None when the limit is reached first."""
        w = self.width
        degenerate = 0
        for _ in range(limit):
            if all(b >= 0 or self.inverse[r][w] == 0 for r, b in enumerate(self.basis)):
                return Alternative(None, *self.multipliers())
            prices = self.prices()
            lowest = degenerate > 2 * w  # Bland's rule ends any cycle
            column = self.entering(prices, lowest)
            if column is None:
                return Alternative([Fraction(-p, self.denominator) for p in prices[:-1]], *self.multipliers())
            degenerate = degenerate + 1 if self.pivot(column, lowest) else 0
        return None


def gordan_alternative(signed: ndarray, hint: ndarray | None = None) -> Alternative | None:
    """Decide the signed rows ``y_i w_i`` [n, D] exactly, or None when that would take too long.

    ``hint`` [n]: margins at some point. The rows with the smallest are tried first. No row may be zero.
    """
    width = signed.shape[1]
    if width > MAX_WIDTH:
        return None
    order = np.arange(len(signed)) if hint is None else np.argsort(hint, kind="stable")
    return _Simplex(signed, order).solve(60 * width + 400)


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # of quotients: norms may be as small as numbers get
def largest_ball(
    signed: ndarray, bias: ndarray | None, norms: ndarray, box: float, x: ndarray | None = None
) -> Alternative | None:
    """The exact centre of the largest ball in the box for signed rows [n, D] and biases [n], and its multipliers.

    ``norms`` [n] are taken as the lengths of the rows; ``x`` [D]: a point whose worst rows are tried first. A bias is
    one more entry of each row, ``y_i c_i + K‖w_i‖`` with K so large that all are positive: beside the l1 norm of the
    others, the least ``‖R Σ λ_i a_i‖₁ + Σ λ_i y_i c_i`` is found, and K more.
    """
    width = signed.shape[1]
    margins = np.zeros(len(signed)) if x is None else signed @ x
    if bias is None:
        order = np.argsort(margins / norms, kind="stable")
        found = _Simplex(signed, order, norms).solve(60 * width + 400)
    else:
        order = np.argsort((margins + bias) / norms, kind="stable")
        largest = float(np.max(np.abs(bias) / norms))
        if not math.isfinite(largest):
            return None
        above = Fraction(2) ** (math.frexp(largest)[1] + 1)
        exact = [
            [*(Fraction(v) * Fraction(box) for v in row), Fraction(c) + above * Fraction(length)]
            for row, c, length in zip(signed.tolist(), bias.tolist(), norms.tolist(), strict=True)
        ]
        rounded = np.array([[float(v) for v in row] for row in exact])
        found = _Simplex(rounded, order, norms, exact).solve(60 * width + 400)
    if found is None or found.point is None:
        return None
    return found._replace(point=[v * Fraction(box) for v in found.point[:width]])
