"""The largest least margin on the unit l2 ball, for many label sets at once: an interior-point method.

    max e   s.t.   s_i = a_i·x + c_i - e ≥ 0,   ‖x‖₂ ≤ 1

with unit rows a_i, and its dual, the point of least norm of a hull where there is no offset,

    min η + c·λ   s.t.   η ≥ ‖v‖₂, v = Aᵀλ,   λ ≥ 0, Σ λ_i = 1.

Both have an obvious interior, so every iterate is a pair of bounds. ``p = (1, x)`` and ``z = (η, -v)`` lie in the
second-order cone; at the optimum ``λ_i s_i = 0`` and ``p·z = 0``. Mehrotra's predictor and corrector, with the scaling
W of Nesterov and Todd, ``W z = W⁻¹ p``, in which the cone costs no more than a matrix of rank one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .arrays import Array, concat, definite_solver, matvec, mT
from .interior import STEPS, Centre, column, longest

SHORT = 0.95  # of the way to the nearest wall: closer to that of the cone, steps get short
FLOOR = 1e-2  # of the ball: the least room of the start, which may be x = 0
PULL = 0.9  # of the ball: where the start is pulled to


def _dot(xp: Any, a: Array, b: Array) -> Array:
    return xp.sum(a * b, axis=1)


class _Point(NamedTuple):
    """Where the method is, one row per set; also a step from there."""

    x: Array  # [B, d]
    e: Array  # [B]
    s: Array  # [B, m]
    lam: Array  # [B, m]
    v: Array  # [B, d]
    eta: Array  # [B]


class _Scaling:
    """Nesterov and Todd's scaling of the cone at a point: ``W = β(2 u uᵀ - J)``, ``J = diag(1, -1, …)``."""

    def __init__(self, xp: Any, at: _Point):
        self.xp = xp
        x_norm, v_norm = xp.sqrt(_dot(xp, at.x, at.x)), xp.sqrt(_dot(xp, at.v, at.v))
        self.primal = (1.0 - x_norm) * (1.0 + x_norm)  # p·Jp
        self.dual = (at.eta - v_norm) * (at.eta + v_norm)  # z·Jz
        p, z = xp.sqrt(self.primal), xp.sqrt(self.dual)
        self.beta = xp.sqrt(p / z)
        gamma = xp.sqrt(0.5 + 0.5 * (at.eta - _dot(xp, at.x, at.v)) / (p * z))
        self.w0 = (1.0 / p + at.eta / z) / (2.0 * gamma)
        self.w1 = (at.x / column(p) + at.v / column(z)) / column(2.0 * gamma)
        root = xp.sqrt(2.0 * (self.w0 + 1.0))
        self.u0, self.u1 = (self.w0 + 1.0) / root, self.w1 / column(root)
        self.l0, self.l1 = self.divided(xp.ones_like(at.eta), at.x)  # W⁻¹ p

    def hessian(self, eye: Array) -> Array:
        """What the cone adds to the Hessian in x [B, d, d]."""
        square = self.beta * self.beta
        return (eye + 2.0 * self.w1[:, :, None] * self.w1[:, None, :]) / square[:, None, None]

    def divided(self, a0: Array, a1: Array) -> tuple[Array, Array]:
        """``W⁻¹ a``."""
        along = 2.0 * (self.u0 * a0 - _dot(self.xp, self.u1, a1))
        return (along * self.u0 - a0) / self.beta, (a1 - column(along) * self.u1) / column(self.beta)

    def times(self, a0: Array, a1: Array) -> tuple[Array, Array]:
        """``W a``."""
        along = 2.0 * (self.u0 * a0 + _dot(self.xp, self.u1, a1))
        return (along * self.u0 - a0) * self.beta, (a1 + column(along) * self.u1) * column(self.beta)

    def pull(self, r0: Array, r1: Array) -> tuple[Array, Array]:
        """``W⁻¹`` of what multiplied with ``W z`` gives r, in the algebra of the cone."""
        square = self.xp.sqrt(self.primal * self.dual)  # (l·Jl), which W leaves as it is
        first = (self.l0 * r0 - _dot(self.xp, self.l1, r1)) / square
        return self.divided(first, (r1 - column(first) * self.l1) / column(self.l0))

    def second_order(self, by: _Point) -> tuple[Array, Array]:
        """The product of ``W⁻¹ dp`` and ``W dz`` in the algebra of the cone."""
        a0, a1 = self.divided(self.xp.zeros_like(by.eta), by.x)
        b0, b1 = self.times(by.eta, -by.v)
        return a0 * b0 + _dot(self.xp, a1, b1), column(a0) * b1 + column(b0) * a1


def interior_l2(
    xp: Any, a: Array, c: Array, x: Array, gap: Array | float, steps: int = STEPS, before: Centre | None = None
) -> Centre:
    """Solve for rows ``a`` [B, m, d], offsets ``c`` [B, m], from points ``x`` [B, d] of the unit ball.

    Sets leave the batch when the gap between their bounds is closed to this part of their margin, or when rounding stops
    them. ``before``: go on from there, where some more rows were.
    """
    batch, m, d = a.shape
    lanes = xp.arange(batch)
    gap = xp.zeros_like(x[:, 0]) + gap
    at = _start(xp, a, c, x) if before is None else _again(xp, a, before)
    eye = xp.eye(d, dtype=a.dtype)[None, :, :]
    finished = []
    for step in range(steps + 1):
        now = _dot(xp, at.lam, at.s) + at.eta - _dot(xp, at.v, at.x)  # the gap between the two bounds
        weight = at.lam / at.s
        mass = xp.sum(weight, axis=1)
        cone = _Scaling(xp, at)
        usable = (now > 0) & (mass < float("inf")) & (cone.primal > 0) & (cone.dual > 0)
        done = (now <= gap * xp.abs(at.e)) | ~usable
        if bool(xp.any(done)) or step == steps:
            leaving = xp.nonzero(done)[0] if step < steps else xp.arange(now.shape[0])
            finished.append([xp.take(u, leaving, axis=0) for u in (lanes, at.x, at.e, at.lam, at.s, now)])
            go = xp.nonzero(~done)[0]
            if go.shape[0] == 0 or step == steps:
                break
            state = (lanes, gap, a, now, weight, mass)
            lanes, gap, a, now, weight, mass = (xp.take(u, go, axis=0) for u in state)
            at = _Point(*(xp.take(u, go, axis=0) for u in at))
            cone = _Scaling(xp, at)
        # e is eliminated: what is left is the Hessian seen from the weighted mean of the rows.
        root = a * xp.sqrt(weight)[:, :, None]
        b = matvec(xp, mT(a), weight)
        h = xp.matmul(mT(root), root) - b[:, :, None] * (b / column(mass))[:, None, :] + cone.hessian(eye)
        solve = definite_solver(xp, h)

        # Predictor: straight at the optimum. Corrector: with the second-order term, and as central as that went.
        none = xp.zeros_like(at.s), xp.zeros_like(at.e), xp.zeros_like(at.x)
        by = _direction(xp, a, solve, b, weight, mass, at, cone, *none)
        tp, td = _lengths(xp, at, by, cone)
        then = _dot(xp, at.lam + column(td) * by.lam, at.s + column(tp) * by.s)
        then = then + at.eta + td * by.eta - _dot(xp, at.v + column(td) * by.v, at.x + column(tp) * by.x)
        goal = (then / now) ** 3 * now / (m + 1)
        bend, bends = cone.second_order(by)
        by = _direction(xp, a, solve, b, weight, mass, at, cone, column(goal) - by.s * by.lam, goal - bend, -bends)
        tp, td = (SHORT * t for t in _lengths(xp, at, by, cone))
        primal, dual = (at.x, at.e, at.s), (at.lam, at.v, at.eta)
        x, e, s = (u + (tp if u.ndim == 1 else column(tp)) * du for u, du in zip(primal, by[:3], strict=True))
        lam, _, eta = (u + (td if u.ndim == 1 else column(td)) * du for u, du in zip(dual, by[3:], strict=True))
        at = _Point(x, e, s, lam, matvec(xp, mT(a), lam), eta)
    parts = [concat(xp, part) for part in zip(*finished, strict=True)]
    order = xp.argsort(parts[0])
    return Centre(*(xp.take(u, order, axis=0) for u in parts[1:]))


def _start(xp: Any, a: Array, c: Array, x: Array) -> _Point:
    """A point with room on all sides, and multipliers as central as they can be there."""
    x = PULL * x
    reach = matvec(xp, a, x) + c
    e = xp.min(reach, axis=1) - (0.05 * xp.mean(xp.abs(reach), axis=1) + FLOOR)
    s = reach - column(e)
    mu = 1.0 / xp.sum(1.0 / s, axis=1)
    lam = column(mu) / s
    v = matvec(xp, mT(a), lam)
    return _Point(x, e, s, lam, v, xp.sqrt(_dot(xp, v, v)) + mu)


def _again(xp: Any, a: Array, before: Centre) -> _Point:
    lam = before.multipliers / column(xp.sum(before.multipliers, axis=1))
    v = matvec(xp, mT(a), lam)
    mu = _dot(xp, lam, before.slack) / a.shape[1]
    return _Point(before.x, before.e, before.slack, lam, v, xp.sqrt(_dot(xp, v, v)) + mu)


def _direction(
    xp: Any,
    a: Array,
    solve: Callable[[Array], Array],
    b: Array,
    weight: Array,
    mass: Array,
    at: _Point,
    cone: _Scaling,
    rs: Array,
    r0: Array,
    r1: Array,
) -> _Point:
    """The step that brings the products λ·s to rs, and that of ``W⁻¹ p`` and ``W z`` to r (to first order)."""
    z0, z1 = cone.pull(r0, r1)
    gx = matvec(xp, mT(a), rs / at.s) + z1
    ge = 1.0 - xp.sum(rs / at.s, axis=1)
    dx = solve(gx + b * column(ge / mass))
    de = (ge + _dot(xp, b, dx)) / mass
    ds = matvec(xp, a, dx) - column(de)
    dlam = rs / at.s - at.lam - weight * ds
    deta = z0 - at.eta + 2.0 * cone.w0 * _dot(xp, cone.w1, dx) / (cone.beta * cone.beta)
    return _Point(dx, de, ds, dlam, matvec(xp, mT(a), dlam), deta)


def _lengths(xp: Any, at: _Point, by: _Point, cone: _Scaling) -> tuple[Array, Array]:
    """How far primal and dual can go, at most 1, each [B]."""
    zero = xp.zeros_like(at.eta)
    primal = _to_the_wall(xp, cone.primal, -_dot(xp, at.x, by.x), -_dot(xp, by.x, by.x))
    along = at.eta * by.eta - _dot(xp, at.v, by.v)
    dual = _to_the_wall(xp, cone.dual, along, by.eta * by.eta - _dot(xp, by.v, by.v))
    falls = by.eta < zero
    dual = xp.where(falls, xp.minimum(dual, at.eta / xp.where(falls, -by.eta, xp.ones_like(zero))), dual)
    return xp.minimum(primal, longest(xp, at.s, by.s)), xp.minimum(dual, longest(xp, at.lam, by.lam))


def _to_the_wall(xp: Any, now: Array, half_slope: Array, curvature: Array) -> Array:
    """The first t in (0, 1] where ``now + 2t·half_slope + t²·curvature`` vanishes, or 1, in a form that does not cancel."""
    square = half_slope * half_slope - curvature * now
    root = -half_slope + xp.sqrt(xp.maximum(square, xp.zeros_like(square)))
    reached = (square >= 0) & (root > now)
    return xp.where(reached, now / xp.where(reached, root, xp.ones_like(root)), xp.ones_like(now))
