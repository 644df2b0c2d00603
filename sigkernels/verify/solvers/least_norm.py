"""The largest margin on the l2 ball by an active set: the point of least norm of a hull (Wolfe), with offsets.

On the simplex ``λ ≥ 0, Σ λ_i = 1`` it minimises ``f(λ) = R‖Aᵀλ‖₂ + c·λ`` over unit rows a_i with offsets c_i. For
independent rows S the least value with ``λ`` on S of any sign has a closed form: their margins are equal,
``a_i·x + c_i = e``, at a point x of norm R in their span, so with ``A_Sᵀ = Q T``, ``x = Q z``, ``Tᵀz = e·1 - c``, ``‖z‖ = R``
is a quadratic equation in e, and ``λ ~ T⁻¹z``. Where that λ is not positive, the way to it ends at the first row that
vanishes, which leaves S (as it does where f falls for ever); where it is, the row with the smallest margin at x joins.
One that is a combination of S takes the place of another, as in the simplex method. Every step lowers f, so this ends.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from scipy.linalg import lapack, qr, solve_triangular

INDEPENDENT = 1e-13  # of the largest entry of T: a smaller diagonal entry means dependent rows
DEPENDENT = 1e-9  # what a unit row has beside the span of others, where it is a combination of them
CLOSED = 1e-12  # of the margin: no row lies lower than this, as far as float64 can tell


class Corner(NamedTuple):
    """A point x [d] at which the rows of the support have one margin, and their multipliers, which sum to 1."""

    x: ndarray
    support: ndarray
    multipliers: ndarray
    margin: float
    triangle: ndarray  # [p, p], T


class HullProblem(NamedTuple):
    """The rows of one label set: ``sign_i·rows_i`` [n, d] with offsets ``sign_i·offset_i``, inputs up to ``size`` long."""

    rows: ndarray
    sign: ndarray
    offset: ndarray | None
    size: float

    @classmethod
    def of(cls, rows: ndarray, offset: ndarray | None, active: ndarray, size: float) -> HullProblem:
        """Of the unit rows [n, d] of a classifier, for the set of ``active`` rows."""
        sign = np.full(len(rows), -1.0)
        sign[active] = 1.0
        return cls(rows, sign, offset, size)

    def part(self, support: ndarray) -> tuple[ndarray, ndarray]:
        """The signed rows [p, d] and offsets [p] of the support."""
        sign = self.sign[support]
        shift = np.zeros(len(support)) if self.offset is None else sign * self.offset[support]
        return sign[:, None] * self.rows[support], shift

    def margins(self, x: ndarray) -> ndarray:
        """Of all rows at x [n]."""
        reach = self.rows @ x
        return self.sign * (reach if self.offset is None else reach + self.offset)


def corner(problem: HullProblem, support: ndarray, multipliers: ndarray) -> Corner | None:
    """The best point of the rows that are left of the support, once every multiplier is positive.

    Starts at the ``multipliers`` [p] of the support. None where the rows have no such point (dependent rows).
    """
    weights = multipliers / multipliers.sum()
    while len(support):
        a, shift = problem.part(support)
        t, chosen = _triangle(a)
        if len(chosen) < len(support):
            support, weights = support[chosen], weights[chosen]
            weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(support), 1.0 / len(support))
            a, shift = a[chosen], shift[chosen]
        found = _equal_margins(a, t, shift, problem.size)
        if found is not None and np.all(found[1] > 0):
            return Corner(found[0], support, found[1], found[2], t)
        change = _recession(t, shift) if found is None else found[1] - weights
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(change < 0, weights / -change, np.inf)
        step = float(np.min(ratio))
        if not math.isfinite(step):
            return None
        weights = np.maximum(weights + step * change, 0.0)
        stays = (ratio > step) & (weights > 0)
        support, weights = support[stays], weights[stays]
    return None


def active_set(problem: HullProblem, support: ndarray, multipliers: ndarray, steps: int) -> Corner | None:
    """The best point of all rows, from multipliers of some; the best one found where the steps do not suffice."""
    best = None
    for _ in range(steps):
        now = corner(problem, support, multipliers)
        if now is None or (best is not None and not now.margin < best.margin):
            return best
        best = now
        margins = problem.margins(now.x)
        margins[now.support] = np.inf
        entering = int(np.argmin(margins))
        if margins[entering] >= now.margin - CLOSED * abs(now.margin):
            return best
        joined = _joined(problem, now, entering)
        if joined is None:
            return best
        support, multipliers = joined
    return best


def _joined(problem: HullProblem, now: Corner, entering: int) -> tuple[ndarray, ndarray] | None:
    """The support and the multipliers after this row has come in.

    With ``a_j = Σ μ_i a_i`` its multiplier can be raised to t while those of the support change to ``λ - t μ``: the sum
    of the weighted rows stays, and the first multiplier that vanishes leaves. None where none does: then weighted rows
    cancel, and the best input lies inside the ball (or the set is impossible).
    """
    a, _ = problem.part(now.support)
    row = problem.part(np.array([entering]))[0][0]
    change = _solve_twice(now.triangle, a @ row)
    if np.linalg.norm(row - change @ a) > DEPENDENT:
        return np.append(now.support, entering), np.append(now.multipliers, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(change > 0, now.multipliers / change, np.inf)
    leaving = int(np.argmin(ratio))
    if not math.isfinite(ratio[leaving]):
        return None
    weights = np.maximum(now.multipliers - ratio[leaving] * change, 0.0)
    return np.append(np.delete(now.support, leaving), entering), np.append(np.delete(weights, leaving), ratio[leaving])


def _triangle(a: ndarray) -> tuple[ndarray, ndarray]:
    """The triangle T of ``aᵀ = Q T`` for rows a [p, d] that are independent, and which ones those are."""
    everything = np.arange(len(a))
    if len(a) <= a.shape[1]:
        t = qr(a.T, mode="r", check_finite=False)[0][: len(a)]
        size = np.abs(np.diagonal(t))
        if size.min() > INDEPENDENT * size.max():
            return t, everything
    t, order = qr(a.T, mode="r", pivoting=True, check_finite=False)
    size = np.abs(np.diagonal(t))
    rank = int(np.sum(size > INDEPENDENT * size[0]))
    chosen = np.sort(order[:rank])
    return qr(a[chosen].T, mode="r", check_finite=False)[0][:rank], chosen


def _equal_margins(a: ndarray, t: ndarray, shift: ndarray, size: float) -> tuple[ndarray, ndarray, float] | None:
    """The point x of norm ``size`` in the span of the rows where their margins are equal, λ with sum 1, the margin."""
    ones, offsets = (solve_triangular(t, v, trans=1, check_finite=False) for v in (np.ones(len(a)), shift))
    square, mixed = float(ones @ ones), float(ones @ offsets)
    inside = mixed * mixed - square * (float(offsets @ offsets) - size * size)
    if not inside > 0:
        return None
    margin = (mixed + math.sqrt(inside)) / square
    weights = _corrected(a, t, margin - shift)
    total = float(weights.sum())
    if not (math.isfinite(total) and total > 0):
        return None
    return weights @ a, weights / total, margin


def _recession(t: ndarray, shift: ndarray) -> ndarray:
    """The direction [p] with sum 0 in which f falls for ever, where no margin of the ball is common to all rows."""
    ones, offsets = (solve_triangular(t, v, trans=1, check_finite=False) for v in (np.ones(len(shift)), shift))
    across = offsets - (float(offsets @ ones) / float(ones @ ones)) * ones
    return -solve_triangular(t, across, check_finite=False)


def _corrected(a: ndarray, t: ndarray, goal: ndarray) -> ndarray:
    """λ with ``a aᵀλ = goal`` by the triangle, and once more for what that left over."""
    weights = _solve_twice(t, goal)
    return weights + _solve_twice(t, goal - a @ (weights @ a))


def _solve_twice(t: ndarray, r: ndarray) -> ndarray:
    """``(TᵀT)⁻¹ r``."""
    return lapack.dtrtrs(t, lapack.dtrtrs(t, r, trans=1)[0])[0]
