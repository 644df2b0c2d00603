"""Margins on the unit l2 ball: ``verify(..., ball="l2", radius=True)`` against quadratic programming solvers.

The peers solve the hard-margin support vector machine of one label set, ``min ½‖u‖² s.t. y_i w_i·u/‖w_i‖ ≥ 1`` on all
rows; the margin is ``1/‖u‖``. Their point and multipliers are measured as certificates like ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import scipy.sparse

from sigkernels.verify import verify


def clarabel_margin(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u [d] and the multipliers [n] of the program on the rows ``a`` [n, d], by Clarabel's interior-point method."""
    import clarabel

    n, d = a.shape
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    cones = [clarabel.NonnegativeConeT(n)]
    identity = scipy.sparse.identity(d, format="csc")
    solver = clarabel.DefaultSolver(identity, np.zeros(d), scipy.sparse.csc_matrix(-a), -np.ones(n), cones, settings)
    solution = solver.solve()
    return np.array(solution.x), np.maximum(np.array(solution.z), 0.0)


def highs_margin(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by HiGHS's active-set method for quadratic programs."""
    import highspy

    n, d = a.shape
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = d, n
    program.col_cost_ = np.zeros(d)
    program.col_lower_, program.col_upper_ = np.full(d, -highspy.kHighsInf), np.full(d, highspy.kHighsInf)
    program.row_lower_, program.row_upper_ = np.ones(n), np.full(n, highspy.kHighsInf)
    columns = scipy.sparse.csc_matrix(a)
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_, program.a_matrix_.index_ = columns.indptr, columns.indices
    program.a_matrix_.value_ = columns.data
    solver.passModel(program)
    hessian = highspy.HighsHessian()
    hessian.dim_, hessian.format_ = d, highspy.HessianFormat.kTriangular
    hessian.start_, hessian.index_, hessian.value_ = np.arange(d + 1), np.arange(d), np.ones(d)
    solver.passHessian(hessian)
    solver.run()
    solution = solver.getSolution()
    return np.array(solution.col_value), np.maximum(np.array(solution.row_dual), 0.0)


PEERS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "clarabel": clarabel_margin,
    "highs": highs_margin,
}


def relative_gap(a: np.ndarray, u: np.ndarray, multipliers: np.ndarray) -> float:
    """How far apart the bounds are that a point and multipliers give, in units of the upper one."""
    low = float((a @ u).min()) / float(np.linalg.norm(u))
    high = float(np.linalg.norm(multipliers @ a)) / float(multipliers.sum())
    return (high - low) / high


def peer_run(solve: Callable, W: np.ndarray, active: np.ndarray) -> tuple[float, float]:
    """Seconds of processor time for one set, and the gap that the solver leaves."""
    y = np.full(len(W), -1.0)
    y[active] = 1.0
    a = (y / np.linalg.norm(W, axis=1))[:, None] * W
    began = time.process_time()
    answer = solve(a)
    return time.process_time() - began, relative_gap(a, *answer)


def compare_margins(name: str, W: np.ndarray, sets: list, baseline: int, peers: list[str]) -> dict:
    """Time per set of all sides, interleaved: half of the peers' sets before the verifier, half after."""
    verify(W, sets[:2], ball="l2", radius=True)  # page in
    half = (baseline + 1) // 2
    runs = {who: [peer_run(PEERS[who], W, s) for s in sets[:half]] for who in peers}
    began = time.process_time()
    report = verify(W, sets, ball="l2", radius=True)
    seconds = (time.process_time() - began) / len(sets)
    for who in peers:
        runs[who] += [peer_run(PEERS[who], W, s) for s in sets[half:baseline]]
    gap = float(np.max((report.radius_hi - report.radius_lo) / report.radius_hi))
    row = {"case": name, "sets": len(sets), "ms per set": 1e3 * seconds, "gap": gap, "checked": bool(report.check())}
    for who, results in runs.items():
        row |= {f"{who} ms": 1e3 * float(np.median([t for t, _ in results])), f"{who} gap": max(g for _, g in results)}
    row["ratio"] = min(row[f"{who} ms"] for who in peers) / row["ms per set"]  # to the fastest
    print(
        ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    )
    return row
