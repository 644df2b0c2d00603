"""The Chebyshev radius of many label sets at once: an interior-point method on cutting planes.

In units of the box the program is ``max e  s.t.  s_i = a_i·x + c_i - e ≥ 0, |x_j| ≤ 1`` with unit rows a_i, and its dual

    min ‖Aᵀλ‖₁ + c·λ   s.t.   λ ≥ 0, Σ λ_i = 1.

Both have an obvious interior (shrink x, lower e; any positive λ), so every iterate is a pair of bounds on the radius.
Mehrotra's predictor and corrector close the gap in 10 to 20 steps, each a small definite system per set. It runs on a
few rows per set; all rows are priced with one matrix product and the violated ones join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array, concat, definite_solver, keep, matvec, mT, smallest, to_numpy

STEPS = 60
ROUNDS = 8
GAP = 1e-8  # of the radius: where the method stops
ROUGH = 1e-2  # … in rounds that are not the last: enough to see which rows matter
ROUGH_ON_ALL = 0.2  # … where that round has all rows, and the last goes on from there
ROUGH_AGAIN = 0.1  # … in further rounds, while the bounds are still apart
NEAR = 0.5  # of the radius: bounds this close say which rows matter, and the next round may be the last
NEAREST = 1e-3  # … and from here on no row leaves any more, so that this ends
BISECTIONS = 8  # of a line, for the best point on it
CLOSED = 1e-6  # of the radius: when a set is done
MORE_ROWS = 128  # than features, to begin with
FEW = 64  # features: from here on it pays to hold coordinates at the edge of the box
EDGE = 0.99  # of the box
LANES = 32  # sets that are solved together, at most
GATHERED = 1_000_000  # entries of their rows, so that they stay in the cache


class Item(NamedTuple):
    """A set whose radius is wanted."""

    number: int
    active: np.ndarray  # its rows
    start: np.ndarray | None  # [d] an input to begin from


class Ball(NamedTuple):
    """What came out for a set: a centre, the rows of its support and their multipliers."""

    number: int
    x: np.ndarray  # [d], in the box
    support: np.ndarray
    multipliers: np.ndarray
    tight: np.ndarray  # [len(support)] bool: the rows that seem to touch the ball; the others' multipliers are small


class Centre(NamedTuple):
    """Where the method stopped, in units of the box: a point, its radius, the multipliers of the rows, the gap."""

    x: Array  # [B, d]
    e: Array  # [B]
    multipliers: Array  # [B, m]
    slack: Array  # [B, m]
    gap: Array  # [B]


def _longest(xp: Any, value: Array, change: Array) -> Array:
    """The largest t ≤ 1 with ``value + t·change ≥ 0`` for each row [B] of positive values."""
    fastest = xp.max(-change / value, axis=1)
    return 1.0 / xp.where(fastest > 1.0, fastest, xp.ones_like(fastest))


def _column(v: Array) -> Array:
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
        s = reach - _column(e)
        mu = 1.0 / xp.sum(1.0 / s, axis=1)
        lam = _column(mu) / s
    else:
        x, e, s = before.x, before.e, before.slack
        lam = before.multipliers / _column(xp.sum(before.multipliers, axis=1))
        mu = before.gap / (m + 2 * d)
    v = matvec(xp, mT(a), lam)
    zero = xp.zeros_like(v)
    alpha = xp.where(v > 0, v, zero) + _column(mu)
    beta = xp.where(v < 0, -v, zero) + _column(mu)
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
        h = xp.matmul(mT(root), root) - b[:, :, None] * (b / _column(mass))[:, None, :]
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
        goal = _column((then / now) ** 3 * now / (m + 2 * d))
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
    dx = solve(gx + b * _column(ge / mass))
    return dx, (ge + xp.sum(b * dx, axis=1)) / mass


def _changes(
    xp: Any, a: Array, weight: Array, point: tuple, dx: Array, de: Array, rs: Array, rp: Array, rq: Array
) -> tuple[Array, Array, Array, Array]:
    """What these steps change: the slacks s and the multipliers λ, α, β."""
    s, lam, p, q, alpha, beta = point
    ds = matvec(xp, a, dx) - _column(de)
    return ds, rs / s - lam - weight * ds, (rp + alpha * dx) / p - alpha, (rq - beta * dx) / q - beta


def _step_lengths(
    xp: Any, point: tuple, ds: Array, dx: Array, dlam: Array, dalpha: Array, dbeta: Array
) -> tuple[Array, Array]:
    """How far primal and dual can go, each [B, 1]."""
    s, lam, p, q, alpha, beta = point
    primal = xp.minimum(_longest(xp, s, ds), xp.minimum(_longest(xp, p, -dx), _longest(xp, q, dx)))
    dual = xp.minimum(_longest(xp, alpha, dalpha), _longest(xp, beta, dbeta))
    return _column(primal), _column(xp.minimum(dual, _longest(xp, lam, dlam)))


def balls(
    xp: Any, rows: np.ndarray, offset: np.ndarray | None, box: float, items: list[Item], whole: bool = False
) -> Iterator[Ball]:
    """The largest ball of each set, for unit rows [n, d] of W and offsets ``c_i/‖w_i‖`` [n]; those that were found.

    ``whole``: on all rows at once, for matrices whose neighbouring rows are nearly equal (a DFT). There a few working
    rows say nothing about their neighbours, and it would take many rounds to find the ones that matter.
    """
    d = rows.shape[1]
    lanes = max(1, min(LANES, GATHERED // (rows.size if whole else 4 * d * d)))
    ordered = sorted(items, key=lambda item: len(item.active))
    everything = xp.asarray(rows)
    shift = None if offset is None else xp.asarray(offset / box)
    solve = _on_all_rows if whole else _on_few_rows
    for first in range(0, len(ordered), lanes):
        yield from solve(_Batch(xp, everything, shift, box, ordered[first : first + lanes]))


class _Price(NamedTuple):
    """All rows at the centre of a few, and the bound that the multipliers of those few give."""

    margins: Array  # [B, n]
    slope: Array  # [B, d]: how the bound grows with each coordinate
    above: Array  # [B]: the bound on the radius
    open: Array  # [B]: whether it is not reached


class _Batch:
    """Sets that are solved together, in units of the box."""

    def __init__(self, xp: Any, rows: Array, offset: Array | None, box: float, items: list[Item]) -> None:
        self.xp, self.rows, self.offset, self.box, self.items = xp, rows, offset, box, items
        self.n, self.d = rows.shape
        signs = np.full((len(items), self.n), -1.0)
        start = np.zeros((len(items), self.d))
        for row, item in enumerate(items):
            signs[row, item.active] = 1.0
            if item.start is not None:
                start[row] = np.clip(item.start / box, -1.0, 1.0)
        self.y, self.start = xp.asarray(signs), xp.asarray(start)  # [B, n], [B, d]

    def take(self, go: Array) -> None:
        """Goes on with these sets alone."""
        self.y = self.xp.take(self.y, go, axis=0)
        self.items = [self.items[row] for row in to_numpy(go).tolist()]

    def gather(self, work: Array) -> tuple[Array, Array]:
        """The signed rows [B, m, d] and offsets [B, m] at the positions ``work`` [B, m]."""
        xp, flat = self.xp, self.xp.reshape(work, (-1,))
        sign = xp.take_along_axis(self.y, work, axis=1)
        a = xp.reshape(xp.take(self.rows, flat, axis=0), (*work.shape, self.d)) * sign[:, :, None]
        if self.offset is None:
            return a, xp.zeros_like(sign)
        return a, sign * xp.reshape(xp.take(self.offset, flat), work.shape)

    def margins(self, x: Array) -> Array:
        """Of all rows at x: [B, d] → [B, n]."""
        reach = self.xp.matmul(x, mT(self.rows))
        return self.y * (reach if self.offset is None else reach + self.offset[None, :])

    def priced(self, a: Array, c: Array, centre: Centre, all_free: bool = False) -> _Price:
        """What all rows say about the centre of a few; ``all_free``: no coordinate was held at the edge of the box."""
        xp, margins = self.xp, self.margins(centre.x)
        slope = matvec(xp, mT(a), centre.multipliers)
        above = xp.sum(xp.abs(slope), axis=1) + xp.sum(c * centre.multipliers, axis=1)
        least, size = xp.min(margins, axis=1), xp.abs(centre.e)
        open_ = (above - least > CLOSED * xp.abs(above)) & (centre.gap < float("inf"))
        if all_free:  # solved, and no row cuts the ball: what the bound still lacks was lost to rounding
            open_ = open_ & ((centre.gap > 2 * GAP * size) | (least < centre.e - CLOSED * size))
        return _Price(margins, slope, above, open_)

    def found(self, centre: Centre, work: Array, open_: Array | None = None) -> Iterator[Ball]:
        """The balls of the sets that are not open, or of all: in thin regions a bound may lose digits to rounding."""
        rows = range(len(self.items)) if open_ is None else np.flatnonzero(~to_numpy(open_)).tolist()
        for row in rows:
            yield _ball(self.items[row], self.box, centre, work, row)


def _on_few_rows(batch: _Batch) -> Iterator[Ball]:
    """Few rows until the ball is roughly known, then again with the rows that cut it, until none does.

    The centre of a few rows can be far out: half of all rows may cut its ball. Those come in that are met first on the
    way to it from the best point known so far. Until the bounds are near each other no row leaves, or what it cut off
    would come back.
    """
    xp, n, d, x = batch.xp, batch.n, batch.d, batch.start
    most = max(len(item.active) for item in batch.items)
    fewest = m = min(n, min(3 * d, d + MORE_ROWS) + min(2 * d, most))
    best = _Best(x, batch.margins(x))
    score = xp.where(batch.y > 0, xp.full_like(batch.y, -float("inf")), best.margins)
    free = None  # [B, f] the coordinates that are not held at the edge of the box; None: all
    gap = xp.full_like(x[:, 0], ROUGH)
    for turn in range(ROUNDS):
        work = smallest(xp, score, m)
        a, c = batch.gather(work)
        gap = gap if m < n else xp.full_like(gap, GAP)
        centre = interior(xp, a, c, x, gap) if free is None else _in_few_coordinates(xp, a, c, x, gap, free)
        price = batch.priced(a, c, centre, free is None)
        yield from batch.found(centre, work, price.open if m < n else None)
        go = xp.nonzero(price.open)[0]
        if go.shape[0] == 0 or m == n:
            return
        best = best.towards(xp, centre.x, price.margins)
        apart = (price.above - best.radius(xp)) / xp.abs(price.above)
        sure = (apart < NEAR) & (apart > NEAREST)
        loose = xp.where(sure, 0.3 * xp.abs(centre.e) + 3.0 * centre.gap, xp.full_like(apart, float("inf")))
        kept = centre.slack < loose[:, None]
        score = keep(xp, best.first_met(xp, price.margins, centre.e), work, kept)
        free = _free(xp, centre.x, price.slope, free) if d >= FEW and turn < 3 else None
        x, score, apart, kept = (xp.take(v, go, axis=0) for v in (centre.x, score, apart, kept))
        best = _Best(*(xp.take(v, go, axis=0) for v in best))
        free = None if free is None else xp.take(free, go, axis=0)
        batch.take(go)
        gap = xp.where(apart < NEAR, xp.full_like(apart, GAP), xp.full_like(apart, ROUGH_AGAIN))
        m = min(n, max(fewest, int(xp.max(xp.count_nonzero(kept, axis=1))) + d // 2 + 1))


class _Best(NamedTuple):
    """The best points known, and all rows there."""

    x: Array  # [B, d]
    margins: Array  # [B, n]

    def radius(self, xp: Any) -> Array:
        """What these points prove [B]."""
        return xp.min(self.margins, axis=1)

    def towards(self, xp: Any, x: Array, margins: Array) -> _Best:
        """The best points on the way to x, where the margins are these.

        By bisection on the slope of the worst row, which changes its sign there.
        """
        change = margins - self.margins
        low, high = xp.zeros_like(x[:, 0]), xp.ones_like(x[:, 0])
        t = high  # the whole way, where that is best
        for _ in range(BISECTIONS):
            worst = xp.argmin(self.margins + _column(t) * change, axis=1)
            rises = xp.take_along_axis(change, worst[:, None], axis=1)[:, 0] > 0
            low, high = xp.where(rises, t, low), xp.where(rises, high, t)
            t = 0.5 * (low + high)
        t = _column(t)
        there = _Best(self.x + t * (x - self.x), self.margins + t * change)
        better = _column(there.radius(xp) > self.radius(xp))
        return _Best(xp.where(better, there.x, self.x), xp.where(better, there.margins, self.margins))

    def first_met(self, xp: Any, margins: Array, e: Array) -> Array:
        """Where each row is met on the way to points with these margins, whose ball has the radius e: [B, n].

        In [0, 1] for rows that cut the ball; beyond that the other ones, the nearest first.
        """
        here, there = self.margins - _column(self.radius(xp)), margins - _column(e)
        inside = there >= 0
        met = here / xp.where(inside, xp.ones_like(here), here - there)
        return xp.where(inside, 1.0 + there, met)


def _on_all_rows(batch: _Batch) -> Iterator[Ball]:
    """All rows until the ball is roughly known, then those around it; if another row cuts it, all rows to the end."""
    xp, n = batch.xp, batch.n
    fewer = max(n // 4, 4 * batch.d)
    work = xp.zeros(batch.y.shape, dtype=xp.int64) + xp.arange(n)[None, :]
    a, c = batch.gather(work)
    centre = interior(xp, a, c, batch.start, ROUGH_ON_ALL if fewer < n else GAP)
    if fewer < n:
        near = smallest(xp, centre.slack, fewer)
        part = centre._replace(
            multipliers=xp.take_along_axis(centre.multipliers, near, axis=1),
            slack=xp.take_along_axis(centre.slack, near, axis=1),
        )
        some = batch.gather(near)
        part = interior(xp, *some, centre.x, GAP, before=part)
        open_ = batch.priced(*some, part).open
        yield from batch.found(part, near, open_)
        go = xp.nonzero(open_)[0]
        if go.shape[0] == 0:
            return
        batch.take(go)
        a, c, work = (xp.take(v, go, axis=0) for v in (a, c, work))
        centre = Centre(*(xp.take(v, go, axis=0) for v in centre))
        centre = interior(xp, a, c, centre.x, GAP, before=centre)
    yield from batch.found(centre, work)


def _free(xp: Any, x: Array, slope: Array, free: Array | None) -> Array | None:
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


def _in_few_coordinates(xp: Any, a: Array, c: Array, x: Array, gap: Array, free: Array) -> Centre:
    """As ``interior``, with the coordinates that are not ``free`` held at the edge of the box.

    In wide regions most of them end there. Whether they belong there is seen from the bound that the multipliers give in
    all coordinates.
    """
    chosen = xp.take(xp.eye(x.shape[1], dtype=a.dtype), xp.reshape(free, (-1,)), axis=0)
    chosen = xp.reshape(chosen, (*free.shape, x.shape[1]))  # [B, f, d]: a row picks one of them
    edge = xp.where(xp.sum(chosen, axis=1) > 0, xp.zeros_like(x), xp.sign(x))
    part = interior(xp, xp.matmul(a, mT(chosen)), c + matvec(xp, a, edge), matvec(xp, chosen, x), gap)
    return part._replace(x=edge + matvec(xp, mT(chosen), part.x))


def _ball(item: Item, box: float, centre: Centre, work: Array, row: int) -> Ball:
    multipliers, slack = to_numpy(centre.multipliers[row, :]), to_numpy(centre.slack[row, :])
    x = np.clip(to_numpy(centre.x[row, :]) * box, -box, box)
    positive = multipliers > 0
    support, multipliers, slack = to_numpy(work[row, :])[positive], multipliers[positive], slack[positive]
    tight = multipliers > slack
    vertex = np.count_nonzero(np.abs(x) < box * (1 - 1e-7)) + 1  # rows that touch the ball where no more do than must
    if np.count_nonzero(tight) < vertex <= len(support):
        tight[np.argpartition(slack / multipliers, vertex - 1)[:vertex]] = True
    return Ball(item.number, x, support, multipliers, tight)
