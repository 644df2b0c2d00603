"""The Chebyshev radius by linear programming: cutting planes around scipy's HiGHS.

``max eps  s.t.  y_i(w_i·x + c_i) ≥ eps‖w_i‖, |x_j| ≤ R`` on a few rows; all rows are priced, the violated ones are
added, until none is. The solver's status is never believed: what comes back are two vectors, a point and multipliers,
to be proved.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

ROUNDS = 30
SMALL = 60_000  # entries of a matrix that is given to the solver whole
MEDIUM = 1_000_000  # … that is given whole when cutting planes have not closed the interval
TOLERANCE = 1e-10  # HiGHS's own minimum; its default of 1e-7 calls empty regions "optimal"


def chebyshev(
    rows: ndarray,  # [n, d]: unit rows of W
    offset: ndarray | None,  # [n]: c_i/‖w_i‖
    active: ndarray,
    box: float,
    start: ndarray | None = None,  # [d]: a point whose worst rows come first
    gap: float = 1e-9,
    whole: bool = False,  # give the solver all rows at once
) -> tuple[ndarray, ndarray, ndarray] | None:
    """The centre x [d], the support and its multipliers (of unit rows), or None when HiGHS gave nothing usable."""
    from scipy.optimize import linprog

    n, d = rows.shape
    y = np.full(n, -1.0)
    y[active] = 1.0
    shift = y * offset if offset is not None else np.zeros(n)
    x = np.zeros(d) if start is None else start
    margins = y * (rows @ x) + shift
    work = np.full(n, whole or n * d <= SMALL)
    work[np.argpartition(margins, min(n, 3 * d) - 1)[: 3 * d]] = True
    work[active[: 4 * d]] = True
    objective = np.zeros(d + 1)
    objective[-1] = -1.0
    bounds = [(-box, box)] * d + [(None, None)]
    best: tuple[ndarray, ndarray, ndarray] | None = None
    best_value = -np.inf
    for _ in range(ROUNDS):
        index = np.flatnonzero(work)
        a = np.concatenate([-y[index, None] * rows[index], np.ones((len(index), 1))], axis=1)
        for presolve in (False, True):  # the second when the first ends in numerical trouble
            options = {
                "primal_feasibility_tolerance": TOLERANCE,
                "dual_feasibility_tolerance": TOLERANCE,
                "presolve": presolve,
            }
            result = linprog(objective, a, shift[index], bounds=bounds, method="highs-ds", options=options)
            if result.x is not None:
                break
        if result.x is None:
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
        outside = np.flatnonzero(~work & (margins < claimed))
        if outside.size == 0:
            break
        work[outside[np.argsort(margins[outside])[: 2 * d + 10]]] = True
    return best


def polish(
    rows: ndarray, offset: ndarray | None, active: ndarray, box: float, x: ndarray, support: ndarray, weights: ndarray
) -> tuple[ndarray, ndarray, ndarray]:
    """Sharpen a vertex beyond the solver's tolerance: solve again for what is tight there, residuals in long double.

    At the optimum the rows of the support have one common margin, and their weighted sum vanishes in every coordinate
    that is not at the edge of the box.
    """
    sign = np.full(len(support), -1.0)
    sign[np.isin(support, active)] = 1.0
    a = (sign[:, None] * rows[support]).astype(np.longdouble)
    shift = np.zeros(len(support)) if offset is None else sign * offset[support]
    free = np.abs(x) < box * (1 - 1e-9)
    wide = x.astype(np.longdouble)
    wide[~free] = np.sign(x[~free]) * box
    lam = weights.astype(np.longdouble)
    tight = a[:, free].astype(np.float64)
    system = np.concatenate([tight, -np.ones((len(support), 1))], axis=1)
    for _ in range(3):
        margins = a @ wide + shift
        step = np.linalg.lstsq(system, (margins.mean() - margins).astype(np.float64), rcond=None)[0]
        wide[free] += step[:-1]
        residual = (a[:, free].T @ lam).astype(np.float64)
        lam -= np.linalg.lstsq(tight.T, residual, rcond=None)[0]
    keep = np.asarray(lam > 0)
    return np.clip(wide.astype(np.float64), -box, box), support[keep], lam.astype(np.float64)[keep]


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
    """All (point, support, multipliers) worth proving for one set: the solver's own, and sharpened."""
    out: list[tuple[ndarray, ndarray, ndarray]] = []
    for whole in (False, True):
        answer = chebyshev(rows, offset, active, box, start, whole=whole)
        if answer is not None:
            out += [answer, polish(rows, offset, active, box, *answer)]
        if any(closed(rows, offset, active, box, *a) for a in out) or rows.size > MEDIUM or rows.size <= SMALL:
            break
    return out
