"""The Chebyshev radius of many label sets at once: an interior-point method in the box.

In units of the box the program is ``max e  s.t.  s_i = a_i·x + c_i - e ≥ 0, |x_j| ≤ 1`` with unit rows a_i, and its dual

    min ‖Aᵀλ‖₁ + c·λ   s.t.   λ ≥ 0, Σ λ_i = 1.

Both have an obvious interior (shrink x, lower e; any positive λ), so every iterate is a pair of bounds on the radius.
Mehrotra's predictor and corrector close the gap in 10 to 20 steps, each a small definite system per set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .arrays import Array, concat, definite_solver, keep, matvec, mT, smallest

STEPS = 60
EDGE = 0.99  # of the box


class Centre(NamedTuple):
    """Where the method stopped, in units of the box: a point, its radius, the multipliers of the rows, the gap."""

    x: Array  # [B, d]
    e: Array  # [B]
    multipliers: Array  # [B, m]
    slack: Array  # [B, m]
    gap: Array  # [B]


def longest(xp: Any, value: Array, change: Array) -> Array:
    """The largest t ≤ 1 with ``value + t·change ≥ 0`` for each row [B] of positive values."""
    fastest = xp.max(-change / value, axis=1)
    return 1.0 / xp.where(fastest > 1.0, fastest, xp.ones_like(fastest))


def column(v: Array) -> Array:
    return v[:, None]


def interior(
    xp: Any, a: Array, c: Array, x: Array, gap: Array | float, steps: int = STEPS, before: Centre | None = None
) -> Centre:
    """Solve for rows ``a`` [B, m, d], offsets ``c`` [B, m], from points ``x`` [B, d] in the unit box.

    Sets leave the batch when their gap is closed to this part of their radius, or when rounding stops them.
    ``before``: go on from there, where some more rows were.
    """
    batch, m, d = a.shape
    lanes = xp.arange(batch)
    gap = xp.zeros_like(x[:, 0]) + gap
    finished = []
    if before is None:
        x = 0.9 * x
        reach = matvec(xp, a, x) + c
        e = xp.min(reach, axis=1) - (0.05 * xp.mean(xp.abs(reach), axis=1) + 1e-12)
        s = reach - column(e)
        mu = 1.0 / xp.sum(1.0 / s, axis=1)
        lam = column(mu) / s
    else:
        x, e, s = before.x, before.e, before.slack
        lam = before.multipliers / column(xp.sum(before.multipliers, axis=1))
        mu = before.gap / (m + 2 * d)
    v = matvec(xp, mT(a), lam)
    zero = xp.zeros_like(v)
    alpha = xp.where(v > 0, v, zero) + column(mu)
    beta = xp.where(v < 0, -v, zero) + column(mu)
    eye = xp.eye(d, dtype=a.dtype)[None, :, :]
    for step in range(steps + 1):
        p, q = 1.0 - x, 1.0 + x
        now = xp.sum(lam * s, axis=1) + xp.sum(alpha * p + beta * q, axis=1)  # the gap between the two bounds
        weight = lam / s
        mass = xp.sum(weight, axis=1)
        usable = (now > 0) & (mass < float("inf")) & (xp.min(p, axis=1) > 0) & (xp.min(q, axis=1) > 0)
        done = (now <= gap * xp.abs(e)) | ~usable
        if bool(xp.any(done)) or step == steps:
            at = xp.nonzero(done)[0] if step < steps else xp.arange(x.shape[0])
            finished.append([xp.take(u, at, axis=0) for u in (lanes, x, e, lam, s, now)])
            go = xp.nonzero(~done)[0]
            if go.shape[0] == 0 or step == steps:
                break
            state = (lanes, gap, a, c, x, e, s, lam, alpha, beta, p, q, now, weight, mass)
            state = tuple(xp.take(u, go, axis=0) for u in state)
            lanes, gap, a, c, x, e, s, lam, alpha, beta, p, q, now, weight, mass = state
        # e is eliminated: what is left is the Hessian seen from the weighted mean of the rows.
        root = a * xp.sqrt(weight)[:, :, None]
        b = matvec(xp, mT(a), weight)
        h = xp.matmul(mT(root), root) - b[:, :, None] * (b / column(mass))[:, None, :]
        h = h + (alpha / p + beta / q)[:, :, None] * eye
        solve = definite_solver(xp, h)
        point = (s, lam, p, q, alpha, beta)

        # Predictor: straight at the optimum. Corrector: with the second-order term, and as central as that went.
        none = xp.zeros_like(x)
        dx, de = _direction(xp, a, solve, b, mass, point, xp.zeros_like(s), none, none)
        ds, dlam, dalpha, dbeta = _changes(xp, a, weight, point, dx, de, xp.zeros_like(s), none, none)
        tp, td = _step_lengths(xp, point, ds, dx, dlam, dalpha, dbeta)
        then = xp.sum((lam + td * dlam) * (s + tp * ds), axis=1)
        then = then + xp.sum((alpha + td * dalpha) * (p - tp * dx) + (beta + td * dbeta) * (q + tp * dx), axis=1)
        goal = column((then / now) ** 3 * now / (m + 2 * d))
        rs, rp, rq = goal - ds * dlam, goal + dx * dalpha, goal - dx * dbeta
        dx, de = _direction(xp, a, solve, b, mass, point, rs, rp, rq)
        ds, dlam, dalpha, dbeta = _changes(xp, a, weight, point, dx, de, rs, rp, rq)
        tp, td = (0.995 * t for t in _step_lengths(xp, point, ds, dx, dlam, dalpha, dbeta))
        x, e, s = x + tp * dx, e + tp[:, 0] * de, s + tp * ds
        lam, alpha, beta = lam + td * dlam, alpha + td * dalpha, beta + td * dbeta
    parts = [concat(xp, column) for column in zip(*finished, strict=True)]
    order = xp.argsort(parts[0])
    return Centre(*(xp.take(u, order, axis=0) for u in parts[1:]))


def _direction(
    xp: Any, a: Array, solve: Callable, b: Array, mass: Array, point: tuple, rs: Array, rp: Array, rq: Array
) -> tuple[Array, Array]:
    """The steps in x and e that bring the products λ·s, α·p, β·q to rs, rp, rq (to first order)."""
    s, _, p, q, _, _ = point
    gx = matvec(xp, mT(a), rs / s) - rp / p + rq / q
    ge = 1.0 - xp.sum(rs / s, axis=1)
    dx = solve(gx + b * column(ge / mass))
    return dx, (ge + xp.sum(b * dx, axis=1)) / mass


def _changes(
    xp: Any, a: Array, weight: Array, point: tuple, dx: Array, de: Array, rs: Array, rp: Array, rq: Array
) -> tuple[Array, Array, Array, Array]:
    """What these steps change: the slacks s and the multipliers λ, α, β."""
    s, lam, p, q, alpha, beta = point
    ds = matvec(xp, a, dx) - column(de)
    return ds, rs / s - lam - weight * ds, (rp + alpha * dx) / p - alpha, (rq - beta * dx) / q - beta


def _step_lengths(
    xp: Any, point: tuple, ds: Array, dx: Array, dlam: Array, dalpha: Array, dbeta: Array
) -> tuple[Array, Array]:
    """How far primal and dual can go, each [B, 1]."""
    s, lam, p, q, alpha, beta = point
    primal = xp.minimum(longest(xp, s, ds), xp.minimum(longest(xp, p, -dx), longest(xp, q, dx)))
    dual = xp.minimum(longest(xp, alpha, dalpha), longest(xp, beta, dbeta))
    return column(primal), column(xp.minimum(dual, longest(xp, lam, dlam)))


def free_coordinates(xp: Any, x: Array, slope: Array, free: Array | None) -> Array | None:
    """The coordinates [B, f] that may leave the edge of the box: those that are free, and those pushed least towards it.

    ``slope`` [B, d] is how the bound of the multipliers grows with each coordinate.
    """
    push = slope * x
    if free is None:
        before, more = 0, xp.abs(x) < EDGE
    else:
        push = keep(xp, push, free)
        before, more = free.shape[1], (push < 0) & (push > -float("inf"))
    count = before + int(1.25 * float(xp.max(xp.count_nonzero(more, axis=1)))) + 8
    return smallest(xp, push, count) if 4 * count < 3 * x.shape[1] else None


def in_few_coordinates(xp: Any, a: Array, c: Array, x: Array, gap: Array, free: Array) -> Centre:
    """As ``interior``, with the coordinates that are not ``free`` held at the edge of the box.

    In wide regions most of them end there. Whether they belong there is seen from the bound that the multipliers give in
    all coordinates.
    """
    chosen = xp.take(xp.eye(x.shape[1], dtype=a.dtype), xp.reshape(free, (-1,)), axis=0)
    chosen = xp.reshape(chosen, (*free.shape, x.shape[1]))  # [B, f, d]: a row picks one of them
    edge = xp.where(xp.sum(chosen, axis=1) > 0, xp.zeros_like(x), xp.sign(x))
    part = interior(xp, xp.matmul(a, mT(chosen)), c + matvec(xp, a, edge), matvec(xp, chosen, x), gap)
    return part._replace(x=edge + matvec(xp, mT(chosen), part.x))
