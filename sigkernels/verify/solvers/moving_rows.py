"""The largest balls of matrices of which about as many rows touch a ball as there are features: heads with codes.

Mehrotra's interior-point method as in :mod:`.interior`, one system per set and step, on the rows that are nearest at
that step. With margins ``m_i(x) = a_i·x + c_i`` in units of the box and multipliers α, β of its edges it follows

    s_i = m_i(x) - e,   Σ λ_i a_i = α - β,   Σ λ_i = 1,   λ_i s_i = α_j (1 - x_j) = β_j (1 + x_j) = μ → 0

from a soft ball (:mod:`.soft_margin`), where ``s_i - δ λ_i = m_i - e`` instead and all products are equal. What the
equations lack falls along the way, so that rows can come in at any time, with any slack. All rows of all sets are
priced with one matrix product per step. As soon as the rows that touch the ball seem to be known, their equations are
solved. Nothing here is believed: the point and the multipliers of a ball each prove a bound, in :mod:`..check`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array, concat, definite_solver, mT, plus_diagonal, smallest, to_numpy
from .ball_batch import GAP, Ball, Batch
from .soft_margin import SoftBalls, soft_balls

STEPS = 30
ROUGH = 0.001  # of the radius: Hessians are made in float32 until all products sum to so little
ROWS = 1.5  # nearest rows per feature
TIED = 3.5  # … at most, where many are tied: a few of them say little of the others
FEW = 16  # one in so many rows may be out of date, where none of those cuts the ball
MOST = 5  # rows per feature: beyond that loose ones leave, however near
HEAVY = 0.1  # of a multiplier, if as many rows touch as there are features: rows with a larger one stay
NEAR = 0.05  # of the radius: rows that near do not leave
TIES = 0.02  # of the radius: among rows as near as that any may come first
EDGE = 0.99  # of the box
ROUGHLY_PRICED = 0.01  # of the radius: until the gap is so small, float32 is enough to price all rows
SETTLED = 0.01  # … and from there on rows only come in where they cut the ball
CORRECTIONS = 2  # of a step, at most
AIM = 0.1  # … which bring products of slacks and multipliers to between this and its inverse of their goal
LONGER = 1.08, 0.08  # … on steps that are so many times as long, and so much longer
WORTH = 0.02  # … if these are at least so much longer then
STEP = 0.995  # of the way to where a slack or multiplier vanishes
SHARPEN = 1e-4  # of the radius: from this gap on the touching rows are tried
AGAIN = 0.05  # … and again where the gap has fallen to this part
REFINEMENTS = 2
VANISHED = 1e-14  # of the box: products that sum to less are nothing but rounding
ROUNDING = 1e-7  # of the radius: bounds this close are enough where rounding keeps them apart


class _Step(NamedTuple):
    x: Array  # [d]
    e: Array
    s: Array  # [m]
    multipliers: Array  # [m]
    upper: Array  # [d], of x_j ≤ 1
    lower: Array  # [d], of x_j ≥ -1


class _Bound(NamedTuple):
    """Multipliers, and the bound on the radius that they give."""

    value: float
    work: Array  # [p]
    multipliers: Array  # [p]
    touching: Array  # [p] bool


def on_moving_rows(batch: Batch) -> Iterator[Ball]:
    """The balls of those sets that the method closes; the batch goes on with the others."""
    xp = batch.xp
    try:
        soft = soft_balls(batch)
    except np.linalg.LinAlgError:
        return
    left, paths = [], [_Path(batch, i, soft) for i in range(len(batch.items))]
    for _ in range(STEPS):
        for path in paths:
            with _lost_if_singular(path):
                path.step()
        left += [path.lane for path in paths if not path.sound]
        paths = [path for path in paths if path.sound]
        corners = [(path, corner) for path in paths if (corner := path.corner()) is not None]
        if not paths:
            break
        points = [path.x for path in paths] + [x for _, x in corners]
        lanes = xp.asarray([path.lane for path in paths] + [path.lane for path, _ in corners])
        rough = all(path.gap > ROUGHLY_PRICED for path in paths)
        margins = batch.margins(xp.stack(points), lanes, rough)
        for row, (path, x) in enumerate(corners, start=len(paths)):
            path.offer_point(x, margins[row, :])
        for row, path in enumerate(paths):
            if not rough:
                path.offer_point(path.x, margins[row, :])
            path.priced(margins[row, :])
            if path.is_closed:
                yield path.ball()
        paths = [path for path in paths if not path.is_closed]
        if not paths:
            break
    batch.take(xp.asarray(sorted(left + [path.lane for path in paths]), dtype=xp.int64))


@contextlib.contextmanager
def _lost_if_singular(path: _Path) -> Iterator[None]:
    try:
        yield
    except np.linalg.LinAlgError:
        path.sound = False


class _Path:
    """The point, the slacks and the multipliers of one set, on its way to the largest ball."""

    def __init__(self, batch: Batch, lane: int, soft: SoftBalls):
        xp = self.xp = batch.xp
        self.batch, self.lane = batch, lane
        self.sound, self.is_closed = True, False
        self.gap, self.tried = float("inf"), SHARPEN / AGAIN
        self.below, self.best_x = -float("inf"), batch.start[lane, :]
        self.above: _Bound | None = None
        self.count = min(batch.n, int(ROWS * batch.d))
        self.x, self.e = xp.clip(soft.x[lane, :], -0.999, 0.999), soft.e[lane]
        margins, softness = soft.margins[lane, :], soft.softness[lane]
        self.work = self._nearest(margins)
        self._gather()
        # The slacks and multipliers with s - δλ = t and s λ = μ: at μ = 0 those of the soft ball.
        t = xp.take(margins, self.work) - self.e
        cut = xp.where(t < 0, -t, xp.zeros_like(t))
        mean = xp.sum(cut) / xp.maximum(xp.sum(xp.astype(t < 0, t.dtype)), xp.ones_like(self.e))
        root = xp.sqrt(t * t + 4.0 * mean * mean)
        self.s, self.multipliers = 0.5 * (t + root), 0.5 * (root - t) / softness
        mu = mean * mean / softness
        v = self._combined(self.multipliers)
        pushed = xp.maximum(xp.abs(v), mu)
        p, q = 1.0 - self.x, 1.0 + self.x
        self.upper = xp.where(self.x > EDGE, pushed, mu / p)
        self.lower = xp.where(self.x < -EDGE, pushed, mu / q)

    def _nearest(self, margins: Array) -> Array:
        """The rows with the smallest margins; of ties, which structured matrices have by thousands, any."""
        xp = self.xp
        size = TIES * xp.maximum(xp.abs(self.e), 1e-3 * xp.mean(xp.abs(margins)))
        scores = margins + size * self.batch.dither
        near = smallest(xp, scores[None, :], self.count)[0, :]
        level = xp.max(xp.take(scores, near))
        tied = int(xp.count_nonzero(margins <= level)) - int(xp.count_nonzero(margins <= level - size))
        if 2 * tied < self.count:
            return near
        return smallest(xp, scores[None, :], min(self.count + tied, int(TIED * self.batch.d)))[0, :]

    def _gather(self) -> None:
        """The rows ``work``, and what makes their margins of their products: signs and offsets."""
        xp, batch = self.xp, self.batch
        self.rows, self.rows32 = xp.take(batch.rows, self.work, axis=0), None
        self.sign = xp.take(batch.y[self.lane, :], self.work)
        offset = batch.offset
        self.c = xp.zeros_like(self.sign) if offset is None else self.sign * xp.take(offset, self.work)

    def _reach(self, x: Array) -> Array:
        """What x adds to the margins of the rows: [d] → [m]."""
        return self.sign * self.xp.matmul(self.rows, x)

    def _combined(self, weights: Array) -> Array:
        """The sum of the signed rows with these weights: [m] → [d]."""
        return self.xp.matmul(mT(self.rows), self.sign * weights)

    def step(self) -> None:
        """One predictor-corrector step, with more corrections while these lengthen it."""
        xp, (m, d) = self.xp, self.rows.shape
        p, q = 1.0 - self.x, 1.0 + self.x
        now = self._products(self._point())
        mu = now / (m + 2 * d)
        if not now > VANISHED:  # a radius of 0, which has no digits
            self.sound = False
            return
        self.rough = bool(now > ROUGH * xp.abs(self.e))
        self._factorise(p, q)
        zero = xp.zeros_like(self.x)
        step = self._towards(xp.zeros_like(self.s), zero, zero)
        primal, dual = self._lengths(step)
        goal = (self._products(self._after(step, primal, dual)) / now) ** 3 * mu
        rs, rp, rq = goal - step.s * step.multipliers, goal + step.x * step.upper, goal - step.x * step.lower
        step = self._towards(rs, rp, rq)
        primal, dual = self._lengths(step)
        for _ in range(CORRECTIONS):
            ahead = self._after(step, *(xp.minimum(LONGER[0] * t + LONGER[1], 1.0) for t in (primal, dual)))
            rs = rs + _missing(xp, ahead.s * ahead.multipliers, goal)
            rp = rp + _missing(xp, (1.0 - ahead.x) * ahead.upper, goal)
            rq = rq + _missing(xp, (1.0 + ahead.x) * ahead.lower, goal)
            other = self._towards(rs, rp, rq)
            longer = self._lengths(other)
            if not bool(longer[0] + longer[1] >= primal + dual + WORTH):
                break
            step, (primal, dual) = other, longer
        after = self._after(step, STEP * primal, STEP * dual)
        self.x, self.e, self.s, self.multipliers, self.upper, self.lower = after
        total = xp.sum(after.multipliers) + after.e
        self.sound = bool((total - total == 0) & (xp.min(after.multipliers) > 0) & (xp.max(xp.abs(after.x)) < 1.0))

    def _factorise(self, p: Array, q: Array) -> None:
        """The Hessian in x, with e eliminated, and what the equations lack."""
        xp = self.xp
        self.weight = self.multipliers / self.s
        self.mass = xp.sum(self.weight)
        self.rest = self._reach(self.x) + self.c - self.e - self.s
        self.mean = self._combined(self.weight)
        root, mean = xp.sqrt(self.weight / self.mass), self.mean / self.mass
        sides = (self.upper / p + self.lower / q) / self.mass
        rows = self.rows
        if self.rough:  # what a step lacks for it is made up by the next
            if self.rows32 is None:
                self.rows32 = xp.take(self.batch.rows32, self.work, axis=0)
            rows = self.rows32
            root, mean, sides = (xp.astype(v, xp.float32) for v in (root, mean, sides))
        root = rows * root[:, None]
        h = xp.matmul(mT(root), root)
        h -= mean[:, None] * mean[None, :]
        self.factor = definite_solver(xp, plus_diagonal(xp, h, sides)[None, :, :])

    def _solve(self, g: Array) -> Array:
        """The Hessian's inverse times g [d]."""
        xp, g = self.xp, g / self.mass
        return xp.astype(self.factor((xp.astype(g, xp.float32) if self.rough else g)[None, :])[0, :], g.dtype)

    def _towards(self, rs: Array, rp: Array, rq: Array) -> _Step:
        """The step that solves the equations and brings the products λ·s, α·p, β·q to these, to first order."""
        xp, p, q = self.xp, 1.0 - self.x, 1.0 + self.x
        later = rs / self.s - self.weight * self.rest  # the multipliers, but for the change of the rows' margins
        g = self._combined(later) - rp / p + rq / q
        ge = 1.0 - xp.sum(later)
        dx = self._solve(g + self.mean * (ge / self.mass))
        de = (ge + xp.sum(self.mean * dx)) / self.mass
        change = self._reach(dx) - de
        return _Step(
            dx,
            de,
            change + self.rest,
            later - self.multipliers - self.weight * change,
            (rp + self.upper * dx) / p - self.upper,
            (rq - self.lower * dx) / q - self.lower,
        )

    def _lengths(self, step: _Step) -> tuple[Array, Array]:
        """How far primal and dual can go."""
        xp, p, q = self.xp, 1.0 - self.x, 1.0 + self.x
        primal = xp.maximum(xp.max(-step.s / self.s), xp.maximum(xp.max(step.x / p), xp.max(-step.x / q)))
        dual = xp.maximum(xp.max(-step.upper / self.upper), xp.max(-step.lower / self.lower))
        dual = xp.maximum(dual, xp.max(-step.multipliers / self.multipliers))
        one = xp.ones_like(primal)
        return 1.0 / xp.maximum(primal, one), 1.0 / xp.maximum(dual, one)

    def _point(self) -> _Step:
        return _Step(self.x, self.e, self.s, self.multipliers, self.upper, self.lower)

    def _after(self, step: _Step, primal: Array, dual: Array) -> _Step:
        return _Step(
            self.x + primal * step.x,
            self.e + primal * step.e,
            self.s + primal * step.s,
            self.multipliers + dual * step.multipliers,
            self.upper + dual * step.upper,
            self.lower + dual * step.lower,
        )

    def _products(self, at: _Step) -> Array:
        xp = self.xp
        sides = at.upper * (1.0 - at.x) + at.lower * (1.0 + at.x)
        return xp.sum(at.s * at.multipliers) + xp.sum(sides)

    def offer_point(self, x: Array, margins: Array) -> None:
        """Keep a point where all rows have these margins, if none is better."""
        radius = float(self.xp.min(margins))
        if radius > self.below:
            self.below, self.best_x = radius, x

    def _offer_bound(self, multipliers: Array, touching: Array) -> float:
        """Keep multipliers if no others give a better bound than they do."""
        xp = self.xp
        value = xp.sum(xp.abs(self._combined(multipliers))) + xp.sum(self.c * multipliers)
        value = float(value / xp.sum(multipliers))
        if self.above is None or value < self.above.value:
            self.above = _Bound(value, self.work, multipliers, touching)
        return value

    def priced(self, margins: Array) -> None:
        """With all rows priced: whether the bounds meet. If not, the nearest rows come in and loose ones leave."""
        xp = self.xp
        touching = self.multipliers * (self.batch.d * xp.abs(self.e)) > self.s
        value = self._offer_bound(self.multipliers, touching)
        self.gap = (value - float(xp.min(margins))) / max(abs(value), 1e-300)
        left = self._left()
        if left > GAP and left <= ROUNDING:
            # Where systems are nearly singular, what the multipliers do not cancel is all that is left.
            self.is_closed = float(self._products(self._point())) < 0.1 * left * abs(value)
        else:
            self.is_closed = left <= GAP
        if not self.is_closed and (self.gap > SETTLED or bool(xp.min(margins) < self.e - GAP * xp.abs(self.e))):
            self._refresh(margins)

    def _left(self) -> float:
        """The gap between the best bounds, as a part of the radius."""
        assert self.above is not None
        return (self.above.value - self.below) / max(abs(self.above.value), 1e-300)

    def ball(self) -> Ball:
        """The best point and the best multipliers."""
        assert self.above is not None
        return self.batch.ball_at(self.lane, self.best_x, *self.above[1:], self._left() <= GAP)

    def _refresh(self, margins: Array) -> None:
        xp, d, n = self.xp, self.batch.d, self.batch.n
        near = np.zeros(n, dtype=bool)
        near[to_numpy(self._nearest(margins))] = True
        work, s, size = to_numpy(self.work), to_numpy(self.s), abs(float(self.e))
        stay = near[work] | (to_numpy(self.multipliers) > HEAVY / d)
        if len(work) < MOST * d:
            stay |= s < NEAR * size
        near[work] = False
        new, values = np.flatnonzero(near), to_numpy(margins)
        if np.any(values[new] < float(self.e)) or len(new) + np.count_nonzero(~stay) > len(work) // FEW:
            self._exchange(xp.asarray(np.flatnonzero(stay)), xp.asarray(new), margins)

    def _exchange(self, stay: Array, new: Array, margins: Array) -> None:
        """Go on with the rows at these positions and with new ones, whose multipliers are as central as the others."""
        xp = self.xp
        mu = self._products(self._point()) / (self.rows.shape[0] + 2 * self.batch.d)
        s = xp.maximum(xp.take(margins, new) - self.e, mu * self.batch.d)
        self.work, self.s, self.multipliers = (
            concat(xp, [xp.take(old, stay), more])
            for old, more in ((self.work, new), (self.s, s), (self.multipliers, mu / s))
        )
        self._gather()

    def corner(self) -> Array | None:
        """The point that the rows which seem to touch the ball determine, where that is worth a try.

        The multipliers that they determine are kept if they give a better bound.
        """
        if self.gap > AGAIN * self.tried:
            return None
        self.tried = self.gap
        size = abs(float(self.e))
        at_edge = to_numpy((self.upper > size * (1.0 - self.x)) | (self.lower > size * (1.0 + self.x)))
        free = np.flatnonzero(~at_edge)
        share = to_numpy(self.multipliers / self.s)
        if len(share) <= len(free) + 1:
            return None
        # At least as many touch as coordinates are free and one more; after the last of them comes the largest fall.
        order = np.argsort(-share, kind="stable")
        falls = np.diff(np.log(share[order[len(free) :]]))
        touching = order[: len(free) + 1 + int(np.argmin(falls))]
        try:
            return self._determined_by(touching, at_edge, free)
        except np.linalg.LinAlgError:
            return None

    def _determined_by(self, touching: np.ndarray, at_edge: np.ndarray, free: np.ndarray) -> Array:
        """The least squares of the touching rows' equations: for the point, and for the multipliers nearest to these."""
        xp, at, chosen, held = self.xp, self.xp.asarray(touching), self.xp.asarray(free), self.xp.asarray(at_edge)
        x, multipliers = xp.where(held, xp.sign(self.x), self.x), xp.take(self.multipliers, at)
        rows = xp.take(self.rows, at, axis=0) * xp.take(self.sign, at)[:, None]
        system = concat(xp, [xp.take(rows, chosen, axis=1), -xp.ones_like(rows[:, :1])], axis=1)
        solve = definite_solver(xp, xp.matmul(mT(system), system)[None, :, :])
        z = concat(xp, [xp.take(x, chosen), self.e[None]])
        given = xp.matmul(rows, xp.where(held, x, xp.zeros_like(x))) + xp.take(self.c, at)
        goal = concat(xp, [xp.zeros_like(z[:-1]), -xp.ones_like(z[:1])])
        for _ in range(REFINEMENTS):
            z = z - solve(xp.matmul(mT(system), given + xp.matmul(system, z))[None, :])[0, :]
            lacking = goal - xp.matmul(mT(system), multipliers)
            multipliers = multipliers + xp.matmul(system, solve(lacking[None, :])[0, :])
        every, full = np.zeros(self.work.shape[0]), to_numpy(x).copy()
        every[touching] = np.maximum(to_numpy(multipliers), 0.0)
        self._offer_bound(xp.asarray(every), xp.asarray(every > 0))
        full[free] = to_numpy(z)[:-1]
        return xp.asarray(np.clip(full, -1.0, 1.0))


def _missing(xp: Any, products: Array, goal: Array) -> Array:
    """What brings products to within a range of their goal, not more than that range downwards (Gondzio)."""
    low, high = AIM * goal, goal / AIM
    zero = xp.zeros_like(products)
    return xp.maximum(xp.where(products < low, low - products, xp.where(products > high, high - products, zero)), -high)
