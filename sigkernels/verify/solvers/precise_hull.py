"""The active set of :mod:`.least_norm` in 100 digits, for rows so nearly parallel that float64 cannot tell them apart."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy import ndarray

from .exact import Alternative

DIGITS = 100
NOTHING = Decimal("1e-40")  # of unit rows: what is shorter is rounding
SHORTER = Decimal("1e-60")  # a point is pulled in by this much
STEPS_PER_FEATURE = 12


def precise_hull(signed: ndarray, bias: ndarray | None, size: float, x: ndarray | None) -> Alternative | None:
    """The point of the l2 ball with the largest least margin, and its multipliers, for signed rows [n, D] and biases [n].

    ``x`` [D]: a point whose worst row comes first. None where rounding wins, or the point lies inside the ball.
    """
    with localcontext() as context:
        context.prec = DIGITS
        rows = np.array([[Decimal(v) for v in row] for row in signed.tolist()], dtype=object)
        norms = np.array([sum(v * v for v in row).sqrt() for row in rows], dtype=object)
        a = rows / norms[:, None]
        offsets = np.zeros(len(a)) if bias is None else bias
        shift = np.array([Decimal(v) for v in offsets.tolist()]) / norms
        first = np.zeros(a.shape[1]) if x is None else x
        start = int(np.argmin(a @ np.array([Decimal(v) for v in first.tolist()]) + shift))
        support, weights = [start], np.array([Decimal(1)])
        best: tuple[ndarray, list[int], ndarray, Decimal] | None = None
        for _ in range(STEPS_PER_FEATURE * a.shape[1]):
            corner = _corner(a, shift, Decimal(size), support, weights)
            if corner is None or (best is not None and not corner[3] < best[3]):
                break
            best = point, support, weights, margin = corner
            margins = a @ point + shift
            margins[support] = Decimal("Infinity")
            entering = int(np.argmin(margins))
            if len(margins) == len(support) or margins[entering] >= margin - NOTHING * abs(margin):
                break
            joined = _joined(a, support, weights, entering)
            if joined is None:
                break
            support, weights = joined
        if best is None:
            return None
        point, support, weights, _ = best
        centre = [Fraction(v * (1 - SHORTER)) for v in point]
        order = np.argsort(support)
        multipliers = [Fraction(weights[i] / norms[support[i]]) for i in order]
        return Alternative(centre, np.array(support, dtype=np.int64)[order], multipliers)


def _corner(
    a: ndarray, shift: ndarray, size: Decimal, support: list[int], weights: ndarray
) -> tuple[ndarray, list[int], ndarray, Decimal] | None:
    """The point where the rows of (a part of) the support have one margin, its support, multipliers and margin."""
    while support:
        rows, offsets = a[support], shift[support]
        solved = _solve(rows @ rows.T, np.stack([np.array([Decimal(1)] * len(support)), offsets], axis=1))
        if solved is None:
            return None
        ones, others = solved[:, 0], solved[:, 1]
        # ‖e·p - q‖² = R² in the metric of the rows: a quadratic equation for the margin e.
        square, mixed = ones.sum(), others.sum()
        inside = mixed * mixed - square * (offsets @ others - size * size)
        change = None
        if inside > 0 and square > 0:
            margin = (mixed + inside.sqrt()) / square
            weighted = margin * ones - others
            total = weighted.sum()
            if total > 0:
                if all(v > 0 for v in weighted):
                    return weighted @ rows, support, weighted / total, margin
                change = weighted / total - weights
        if change is None:  # no margin is common to all of them: f falls for ever
            change = -(others - (mixed / square) * ones)
        ratios = [(w / -c, r) for r, (w, c) in enumerate(zip(weights, change, strict=True)) if c < 0]
        if not ratios:
            return None
        step, leaving = min(ratios)
        weights = weights + step * change
        stays = [r for r in range(len(support)) if r != leaving and weights[r] > 0]
        support, weights = [support[r] for r in stays], weights[stays]
    return None


def _joined(a: ndarray, support: list[int], weights: ndarray, entering: int) -> tuple[list[int], ndarray] | None:
    """The support and multipliers with one more row; one that is a combination of the others takes the place of one."""
    rows, row = a[support], a[entering]
    solved = _solve(rows @ rows.T, (rows @ row)[:, None])
    if solved is None:
        return None
    change = solved[:, 0]
    beside = row - change @ rows
    if beside @ beside > NOTHING * NOTHING:
        return [*support, entering], np.array([*weights, Decimal(0)])
    ratios = [(w / c, r) for r, (w, c) in enumerate(zip(weights, change, strict=True)) if c > 0]
    if not ratios:
        return None
    step, leaving = min(ratios)
    kept = [r for r in range(len(support)) if r != leaving]
    weights = weights - step * change
    return [*(support[r] for r in kept), entering], np.array([*weights[kept], step])


def _solve(matrix: ndarray, right: ndarray) -> ndarray | None:
    """``matrix⁻¹ right`` for a definite matrix [p, p] of Decimals, by elimination; None where it is singular."""
    table = np.concatenate([matrix, right], axis=1)
    p = len(matrix)
    for c in range(p):
        if not table[c, c] > NOTHING * NOTHING:
            return None
        table[c] = table[c] / table[c, c]
        for r in range(p):
            if r != c and table[r, c]:
                table[r] = table[r] - table[r, c] * table[c]
    return table[:, p:]
