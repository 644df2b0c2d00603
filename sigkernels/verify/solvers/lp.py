"""The Chebyshev radius by linear programming: cutting planes around scipy's HiGHS.

``max eps  s.t.  y_i(w_i·x + c_i) ≥ eps‖w_i‖, |x_j| ≤ R`` on a few rows; all rows are priced, the violated ones are
added, until none is. The solver's status is never believed: what comes back are two vectors, a point and multipliers,
to be proved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.linalg import lapack

ROUNDS = 30
SMALL = 60_000  # entries of a matrix that is given to the solver whole
MEDIUM = 1_000_000  # … that is given whole when cutting planes have not closed the interval
BOX = 1e4  # of the programs that the solver is given
INDEPENDENT = 1e-9  # of the largest pivot: the least one of columns that are not called dependent
STEPS = 20  # of the simplex method, for each row and column: where rows of all sizes meet, HiGHS may cycle for ever
TOLERANCE = 1e-10  # HiGHS's own minimum; its default of 1e-7 calls empty regions "optimal"


def chebyshev(
    rows: ndarray,  # [n, d]: unit rows of W
    offset: ndarray | None,  # [n]: c_i/‖w_i‖
    active: ndarray,
    box: float,
    start: ndarray | None = None,  # [d]: a point whose worst rows come first
    gap: float = 2e-7,
    whole: bool = False,  # give the solver all rows at once
) -> tuple[ndarray, ndarray, ndarray] | None:
    """The centre x [d], the support and its multipliers (of unit rows), or None when HiGHS gave nothing usable."""
    n, d = rows.shape
    y = np.full(n, -1.0)
    y[active] = 1.0
    shift = y * offset if offset is not None else np.zeros(n)
    x = np.zeros(d) if start is None else start
    margins = y * (rows @ x) + shift
    work = np.full(n, whole or n * d <= SMALL)
    work[np.argpartition(margins, min(n, 3 * d) - 1)[: 3 * d]] = True
    work[active[: 4 * d]] = True
    best: tuple[ndarray, ndarray, ndarray] | None = None
    best_value = -np.inf
    for iteration in range(ROUNDS):
        index = np.flatnonzero(work)
        a = np.concatenate([-y[index, None] * rows[index], np.ones((len(index), 1))], axis=1)
        result = _by_highs(a, shift[index], box)
        if result is None:
            return best
        x = np.clip(result.x[:-1], -box, box)
        margins = y * (rows @ x) + shift
        value = float(margins.min())
        multipliers = np.maximum(-result.ineqlin.marginals, 0.0)
        used = multipliers > 0
        if used.any() and (best is None or value > best_value):
            best, best_value = (x, index[used], multipliers[used]), value
        elif used.any() and best is not None:
            best = (best[0], index[used], multipliers[used])  # later multipliers bound tighter
        claimed = float(result.x[-1])
        if value >= claimed - gap * max(abs(claimed), 1e-3):
            break
        outside = np.flatnonzero(~work)
        if not np.any(margins[outside] < claimed):
            break
        if iteration < 4:  # rows far from tight are let go, at first; later none is, so that this ends
            work[index[margins[index] > claimed + 0.3 * abs(claimed)]] = False
        # Not only what is violated: what is nearly so would be next.
        count = min(len(outside), d + 10)
        work[outside[np.argpartition(margins[outside], count - 1)[:count]]] = True
    return best


def _by_highs(a: ndarray, b: ndarray, box: float) -> Any:
    """``max eps  s.t.  a (x, eps) ≤ b, |x_j| ≤ box``; without presolve first, and None where both end in trouble."""
    from scipy.optimize import linprog

    d = a.shape[1] - 1
    objective = np.append(np.zeros(d), -1.0)
    bounds = [(-box, box)] * d + [(None, None)]
    options = {
        "primal_feasibility_tolerance": TOLERANCE,
        "dual_feasibility_tolerance": TOLERANCE,
        "maxiter": STEPS * sum(a.shape),
    }
    for presolve in (False, True):
        result = linprog(objective, a, b, bounds=bounds, method="highs-ds", options={**options, "presolve": presolve})
        if result.x is not None:
            return result
    return None


def polish(
    rows: ndarray, offset: ndarray | None, active: ndarray, box: float, x: ndarray, support: ndarray, weights: ndarray
) -> tuple[ndarray, ndarray, ndarray]:
    """Sharpen a vertex beyond the solver's tolerance: solve again for what is tight there, residuals in long double.

    At the optimum the rows of the support have one common margin, and their weighted sum vanishes in every coordinate
    that is not at the edge of the box.
    """
    if not len(support):
        return x, support, weights
    sign = np.full(len(support), -1.0)
    sign[np.isin(support, active)] = 1.0
    a = (sign[:, None] * rows[support]).astype(np.longdouble)
    shift = np.zeros(len(support)) if offset is None else sign * offset[support]
    free = np.abs(x) < box * (1 - 1e-7)
    wide = x.astype(np.longdouble)
    wide[~free] = np.sign(x[~free]) * box
    lam = weights.astype(np.longdouble) / weights.sum()
    system = np.concatenate([a[:, free].astype(np.float64), -np.ones((len(support), 1))], axis=1)
    solve, solve_transposed = _solvers(system)
    goal = np.zeros(system.shape[1])
    goal[-1] = -1.0
    level = np.longdouble((a @ wide + shift).mean())
    for _ in range(2):
        step = solve((level - shift - a @ wide).astype(np.float64))
        wide[free] += step[:-1]
        level += step[-1]
        residual = goal - np.append(a[:, free].T @ lam, -lam.sum()).astype(np.float64)
        lam += solve_transposed(residual)
    keep = np.asarray(lam > 0)
    return np.clip(wide.astype(np.float64), -box, box), support[keep], lam.astype(np.float64)[keep]


def _solvers(system: ndarray) -> tuple[Callable[[ndarray], ndarray], Callable[[ndarray], ndarray]]:
    """``S v = r`` and ``Sᵀ v = r``: by one factorisation where S is square (a vertex), in least squares elsewhere."""
    rows, columns = system.shape
    if rows == columns:
        lu, pivots, failed = lapack.dgetrf(system)
        if not failed:
            return (lambda r: lapack.dgetrs(lu, pivots, r)[0]), (lambda r: lapack.dgetrs(lu, pivots, r, trans=1)[0])
    q, r = np.linalg.qr(system if rows >= columns else system.T)
    pivots = np.abs(np.diag(r))
    if pivots.min() < INDEPENDENT * pivots.max():
        inverse = np.linalg.pinv(system)
        return (lambda v: inverse @ v), (lambda v: v @ inverse)

    def fit(v: ndarray) -> ndarray:
        return lapack.dtrtrs(r, q.T @ v)[0]

    def least(v: ndarray) -> ndarray:
        return q @ lapack.dtrtrs(r, v, trans=1)[0]

    return (fit, least) if rows >= columns else (least, fit)


def closed(
    rows: ndarray, offset: ndarray | None, active: ndarray, box: float, x: ndarray, support: ndarray, weights: ndarray
) -> bool:
    """Whether the point and the multipliers agree on the radius, as far as float64 can tell."""
    y = np.full(rows.shape[0], -1.0)
    y[active] = 1.0
    shift = np.zeros(rows.shape[0]) if offset is None else y * offset
    low = float((y * (rows @ x) + shift).min())
    total = box * np.abs((y[support] * weights) @ rows[support]).sum() + weights @ shift[support]
    high = float(total / weights.sum()) if len(support) else np.inf
    return high - low <= 1e-6 * abs(high) + 1e-10


def programs(
    rows: ndarray, offset: ndarray | None, active: ndarray, box: float, start: ndarray | None
) -> list[tuple[ndarray, ndarray, ndarray]]:
    """All (point, support, multipliers) worth proving for one set: sharpened, and the solver's own."""
    unit = box / BOX  # the solver's tolerances are numbers, so it is given the same program whatever the box
    start = None if start is None else start / unit
    with np.errstate(over="ignore"):
        offset = None if offset is None else np.nan_to_num(offset / unit)
    out: list[tuple[ndarray, ndarray, ndarray]] = []
    for whole in (False, True):
        answer = chebyshev(rows, offset, active, BOX, start, whole=whole)
        if answer is not None:
            out += [polish(rows, offset, active, BOX, *answer), answer]
        if any(closed(rows, offset, active, BOX, *a) for a in out) or rows.size > MEDIUM or rows.size <= SMALL:
            break
    return [(np.clip(x * unit, -box, box), support, multipliers) for x, support, multipliers in out]
