"""Semismooth Newton on the squared hinge, for many label sets at once.

``f(x) = ½ Σ_i (1 - a_i·x)₊²`` with ``a_i = y_i w_i/‖w_i‖``. It is piecewise quadratic, so Newton's method ends after finitely many steps:
either at f = 0, where x is a witness, or at a minimum f > 0, where ``λ = (1 - Ax)₊`` has ``Aᵀλ = -∇f = 0``: Gordan's vector.
One run answers both ways.

A label set of a sparse problem is decided by few of the n rows: Newton works on a set of rows (the active labels and the rows
with the smallest margins), all rows are priced with one matrix product, and the worst are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array, concat, matvec, mT, smallest, solve, to_numpy
from .cone import Cone, Found
from .problem import Sets

MAX_STEPS = 60
MAX_ROUNDS = 8
PROX = 1e-10  # of the mean curvature: makes the Hessian definite, and does not move the minimum


class Hinge(NamedTuple):
    """Where Newton stopped: ``x`` [B, d], the hinge ``s = 1 - Ax`` [B, m], and which ended with every ``a_i·x > 0``."""

    x: Array
    s: Array
    feasible: Array  # [B] bool
    stalled: Array  # [B] bool: the step limit was reached


def _step_length(xp: Any, s: Array, q: Array) -> Array:
    """The t > 0 that minimises ``½ Σ (s - t q)₊²`` for each row: Newton in one dimension inside a shrinking bracket."""
    t = xp.ones(s.shape[0], dtype=s.dtype)
    low = xp.zeros(s.shape[0], dtype=s.dtype)
    high = xp.full(s.shape[0], float("inf"), dtype=s.dtype)
    for _ in range(12):
        r = s - t[:, None] * q
        rq = xp.where(r > 0, q, xp.zeros_like(q))
        slope = -xp.sum(r * rq, axis=1)
        curvature = xp.sum(rq * rq, axis=1)
        low = xp.where(slope < 0, t, low)
        high = xp.where(slope > 0, t, high)
        proposal = t - slope / xp.where(curvature > 0, curvature, xp.ones_like(curvature))
        middle = xp.where(high < float("inf"), 0.5 * (low + high), 2.0 * t)
        inside = (proposal > low) & (proposal < high) & (curvature > 0)
        new = xp.where(slope == 0, t, xp.where(inside, proposal, middle))
        if bool(xp.all(xp.abs(new - t) <= 1e-3 * t)):
            return new
        t = new
    return t


def hinge_newton(xp: Any, a: Array, x: Array, steps: int = MAX_STEPS) -> Hinge:
    """Minimise the squared hinge of ``a`` [B, m, d] from ``x`` [B, d]; entries that finish leave the batch."""
    batch, _, d = a.shape
    lanes = xp.arange(batch)
    finished = []
    eye = xp.eye(d, dtype=x.dtype)
    s = 1.0 - matvec(xp, a, x)
    for step in range(steps + 1):
        hinge = xp.where(s > 0, s, xp.zeros_like(s))
        g = matvec(xp, mT(a), hinge)  # -∇f
        yes = xp.max(s, axis=1) < 0.9  # every a_i·x is clearly positive: a witness, if not yet the minimum
        no = xp.max(xp.abs(g), axis=1) <= 3e-15 * xp.sum(hinge, axis=1)
        done = yes | no if step < steps else xp.ones_like(yes)
        if bool(xp.any(done)):
            at = xp.nonzero(done)[0]
            go = xp.nonzero(~done)[0]
            taken = [xp.take(v, at, axis=0) for v in (lanes, x, s, yes, ~(yes | no))]
            finished.append(taken)
            if go.shape[0] == 0:
                break
            a, x, s, g, lanes = (xp.take(v, go, axis=0) for v in (a, x, s, g, lanes))
        masked = xp.where((s > 0)[:, :, None], a, xp.zeros_like(a))
        h = xp.matmul(mT(masked), a)
        trace = xp.sum(h * eye[None, :, :], axis=(1, 2))
        h = h + ((PROX / d) * trace + 1e-30)[:, None, None] * eye[None, :, :]
        direction = solve(xp, h, g)
        t = _step_length(xp, s, matvec(xp, a, direction))
        x = x + t[:, None] * direction
        s = 1.0 - matvec(xp, a, x)
    parts = [concat(xp, column) for column in zip(*finished, strict=True)]
    order = xp.argsort(parts[0])
    return Hinge(*(xp.take(v, order, axis=0) for v in parts[1:]))


def weighted_ridge(cone: Cone, actives: list[np.ndarray], emphasis: float = 0.3) -> Array:
    """Least squares for ``a_i·x = 1`` [B, D], the few active rows weighted up to match the many others: where to start."""
    xp = cone.xp
    longest = max((len(a) for a in actives), default=0)
    index = np.zeros((len(actives), max(1, longest)), dtype=np.int64)
    weight = np.zeros(index.shape)
    for row, active in enumerate(actives):
        index[row, : len(active)] = active
        weight[row, : len(active)] = max(1.0, emphasis * cone.size / max(1, len(active)))
    w = xp.asarray(weight)
    rows = xp.reshape(xp.take(cone.rows, xp.asarray(index.ravel()), axis=0), (*index.shape, cone.width))
    present = xp.where(w > 0, xp.ones_like(w), xp.zeros_like(w))
    h = cone.gram[None, :, :] + xp.matmul(mT(rows), rows * (w - present)[:, :, None])
    g = matvec(xp, mT(rows), w + present) - cone.total[None, :]
    eye = xp.eye(cone.width, dtype=h.dtype)[None, :, :]
    return solve(xp, h + (1e-6 * cone.size / cone.width) * eye, g)


def motzkin(cone: Cone, sets: Sets, which: np.ndarray, steps: int = 30) -> Iterator[Found]:
    """Weighted ridge, then projections onto the most violated row: finds witnesses of wide regions and nothing else."""
    xp = cone.xp
    for part in _chunks(sets, which, max(1, min(128, 4_000_000 // cone.size))):
        actives = cone.actives(sets, part)
        y = cone.signs(actives)
        x = weighted_ridge(cone, actives)
        left = xp.arange(len(part))
        for step in range(steps + 1):
            margins = y * xp.matmul(x, mT(cone.rows))
            worst = xp.argmin(margins, axis=1)
            low = xp.min(margins, axis=1)
            scale = xp.sqrt(xp.sum(x * x, axis=1))
            done = low > 1e-9 * scale
            if bool(xp.any(done)):
                at = xp.nonzero(done)[0]
                yield Found(part[to_numpy(xp.take(left, at))], cone.inputs(xp.take(x, at, axis=0)), [], [])
                go = xp.nonzero(~done)[0]
                if go.shape[0] == 0:
                    break
                x, y, left, worst, low = (xp.take(v, go, axis=0) for v in (x, y, left, worst, low))
            if step == steps:
                break
            rows = xp.take(cone.rows, worst, axis=0)
            sign = xp.take_along_axis(y, worst[:, None], axis=1)[:, 0]
            aim = 0.05 * xp.sqrt(xp.sum(x * x, axis=1) / cone.width)  # a little beyond the hyperplane
            x = x + (sign * (aim - low))[:, None] * rows


def newton(cone: Cone, sets: Sets, which: np.ndarray, all_rows: bool = False) -> Iterator[Found]:
    """Decide the sets ``which`` by semismooth Newton on growing sets of rows (or on all rows at once)."""
    xp, width = cone.xp, cone.width
    limit = 12_000_000  # entries of the gathered rows [B, m, D]
    first = cone.size if all_rows else min(cone.size, 3 * width)
    for part in _chunks(sets, which, max(1, min(32, limit // (first * width)))):
        actives = cone.actives(sets, part)
        y = cone.signs(actives)
        x = weighted_ridge(cone, actives)
        m = cone.size if all_rows else min(cone.size, 2 * width + min(2 * width, max(map(len, actives))))
        margins = y * xp.matmul(x, mT(cone.rows))
        # The active labels always belong to the working rows (when they are few: they are what is hard to satisfy).
        chosen = xp.where(y > 0, xp.full_like(y, -float("inf")), margins)
        lanes = np.arange(len(part))
        for _ in range(MAX_ROUNDS):
            work = smallest(xp, chosen, m)
            rows = xp.reshape(xp.take(cone.rows, xp.reshape(work, (-1,)), axis=0), (*work.shape, width))
            a = rows * xp.take_along_axis(y, work, axis=1)[:, :, None]
            hinge = hinge_newton(xp, a, x)
            x = hinge.x
            margins = y * xp.matmul(x, mT(cone.rows))
            solved = xp.min(margins, axis=1) > 0
            open_ = ~solved & hinge.feasible
            yield _collect(cone, part[lanes], work, hinge, to_numpy(solved), to_numpy(~solved & ~hinge.feasible))
            go = xp.nonzero(open_)[0]
            if go.shape[0] == 0 or m == cone.size:
                break
            lanes = lanes[to_numpy(go)]
            x, y, margins, work, s = (xp.take(v, go, axis=0) for v in (x, y, margins, work, hinge.s))
            # Rows in play stay, the worst of the others come in.
            chosen = _keep(xp, margins, work, s)
            m = min(cone.size, m + width)


def _keep(xp: Any, margins: Array, work: Array, s: Array) -> Array:
    """Scores for the next working rows: those in use get -∞, the others their margins."""
    used = xp.zeros(margins.shape, dtype=margins.dtype)
    infinite = xp.full(work.shape, -float("inf"), dtype=margins.dtype)
    if hasattr(xp, "put_along_axis"):
        used = xp.asarray(margins, copy=True)
        xp.put_along_axis(used, work, infinite, axis=1)
        return used
    place = xp.arange(margins.shape[1])[None, :]
    member = xp.any(work[:, :, None] == place[:, None, :], axis=1)
    return xp.where(member, xp.full_like(margins, -float("inf")), margins)


def _collect(cone: Cone, part: np.ndarray, work: Array, hinge: Hinge, yes: np.ndarray, no: np.ndarray) -> Found:
    at = np.flatnonzero(yes)
    x = cone.inputs(cone.xp.take(hinge.x, cone.xp.asarray(at), axis=0)) if at.size else np.zeros((0, cone.problem.d))
    rows, s = (to_numpy(work), to_numpy(hinge.s)) if no.any() else (None, None)
    losers = np.flatnonzero(no)
    dependencies = [cone.dependency(rows[i], np.maximum(s[i], 0.0)) for i in losers] if rows is not None else []
    return Found(part[at], x, part[losers].tolist(), dependencies)


def _chunks(sets: Sets, which: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Parts of ``which``, sets of similar size together: fewer padded rows."""
    ordered = which[np.argsort(sets.sizes[which], kind="stable")]
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]
