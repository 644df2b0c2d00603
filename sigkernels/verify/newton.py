"""Semismooth Newton on the squared hinge, for many label sets at once.

``f(x) = ½ Σ_i (1 - a_i·x)₊²`` with ``a_i = y_i w_i/‖w_i‖``. It is piecewise quadratic, so Newton's method ends after finitely many steps:
either at f = 0, where x is a witness, or at a minimum f > 0, where ``λ = (1 - Ax)₊`` has ``Aᵀλ = -∇f = 0``: Gordan's vector.
One run answers both ways.

A label set of a sparse problem is decided by few of the n rows: Newton works on a set of rows (the active labels and the rows
with the smallest margins), all rows are priced with one matrix product, and the worst are added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .arrays import Array, concat, mT, matvec, smallest, solve

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
