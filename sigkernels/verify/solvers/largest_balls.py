"""The largest balls of many label sets at once: an interior-point method on cutting planes.

The method (:mod:`.interior` in the box, :mod:`.interior_l2` in the l2 ball) runs on a few rows per set; all rows are
priced with one matrix product and the violated ones join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..input_ball import InputBall
from .arrays import Array, keep, matvec, smallest, spread, to_numpy
from .ball_batch import GAP, Ball, Batch, Item
from .interior import EDGE, Centre, column, free_coordinates, in_few_coordinates, interior
from .interior_l2 import interior_l2
from .moving_rows import on_moving_rows

ROUNDS = 16
ROUGH = 1e-2  # … in rounds that are not the last: enough to see which rows matter
ROUGH_ON_ALL = 0.2  # … where that round has all rows, and the last goes on from there
ROUGH_AGAIN = 0.1  # … in further rounds, while the bounds are still apart
NEAR = 0.5  # of the radius: bounds this close say which rows matter, and the next round may be the last
NEAREST = 1e-3  # … and from here on no row leaves any more, so that this ends
LOOSE = 0.1  # of the radius: rows that far from the ball leave
INSIDE = 0.99  # of the best point: where the next round begins
BISECTIONS = 8  # of a line, for the best point on it
MORE_ROWS = 128  # than features, to begin with
FEW = 64  # features: from here on it pays to hold coordinates at the edge of the box, and to solve crowded sets one by one
AT_EDGE = 4  # one coordinate in so many: where fewer are at the edge of the box, about as many rows touch as features
PEAK = 0.05  # of the largest coordinate of a point: those below are small
LANES = 32  # sets that are solved together, at most
GATHERED = 1_000_000  # entries of their rows, so that they stay in the cache


def balls(
    xp: Any,
    rows: np.ndarray,
    offset: np.ndarray | None,
    ball: InputBall,
    items: list[Item],
    whole: bool = False,
    crowded: bool = False,
) -> Iterator[Ball]:
    """The largest ball of each set, for unit rows [n, d] of W and offsets ``c_i/‖w_i‖`` [n]; those that were found.

    ``whole``: on all rows at once, for matrices whose neighbouring rows are nearly equal (a DFT). There a few working
    rows say nothing about their neighbours, and it would take many rounds to find the ones that matter. ``crowded``: about
    as many rows touch a ball as there are features (codes).
    """
    d = rows.shape[1]
    everything = xp.asarray(rows)
    shift = None if offset is None else xp.asarray(offset / ball.size)
    lanes = max(1, min(LANES, GATHERED // (rows.size if whole else 4 * d * d)))

    def batches(items: list[Item], lanes: int = lanes, rows32: Array | None = None) -> Iterator[Batch]:
        ordered = sorted(items, key=lambda item: len(item.active))
        parts = (ordered[first : first + lanes] for first in range(0, len(ordered), lanes))
        return (Batch(xp, everything, shift, ball, part, rows32) for part in parts)

    if whole or d < FEW or ball.name != "box":
        for batch in batches(items):
            yield from _on_all_rows(batch) if whole else _on_few_rows(batch)
        return
    moving = [item for item in items if crowded or _is_peaked(item)]
    for batch in batches([item for item in items if not (crowded or _is_peaked(item))]):
        yield from _on_few_rows(batch, moving)
    left: list[Item] = []
    for batch in batches(moving, LANES, xp.astype(everything, xp.float32) if moving else None):
        yield from on_moving_rows(batch)
        left += batch.items
    for batch in batches(left):
        yield from _on_few_rows(batch)


def _is_peaked(item: Item) -> bool:
    """Whether a few coordinates of the starting point are far larger than the others.

    Scaled up it meets few edges of the box, and so many rows touch the largest ball: as many as coordinates are free.
    """
    if item.start is None:
        return False
    size = np.abs(item.start)
    return bool(np.count_nonzero(size > PEAK * size.max()) < len(size) // AT_EDGE)


def _interior(batch: Batch) -> Callable[..., Centre]:
    return interior if batch.is_box else interior_l2


def _on_few_rows(batch: Batch, crowded: list[Item] | None = None) -> Iterator[Ball]:
    """Few rows until the ball is roughly known, then again with the rows that cut it, until none does.

    The centre of a few rows can be far out: half of all rows may cut its ball. Those come in that are met first on the
    way to it from the best point known so far. Until the bounds are near each other no row leaves, or what it cut off
    would come back.

    Sets of which few coordinates are at the edge of the box after the first round go to the list ``crowded``, if given.
    """
    xp, n, d, x = batch.xp, batch.n, batch.d, batch.start
    most = max(len(item.active) for item in batch.items)
    fewest = m = min(n, min(3 * d, d + MORE_ROWS) + min(2 * d, most))
    best = _Best(x, batch.margins(x))
    score = xp.where(batch.y > 0, xp.full_like(batch.y, -float("inf")), best.margins)
    free = None  # [B, f] the coordinates that are not held at the edge of the box; None: all
    known = None  # what the last round says of the multipliers
    gap = xp.full_like(x[:, 0], ROUGH)
    for iteration in range(ROUNDS):
        work = smallest(xp, score, m)
        a, c = batch.gather(work)
        gap = gap if m < n else xp.full_like(gap, GAP)
        if free is not None:
            centre = in_few_coordinates(xp, a, c, x, gap, free)
        else:
            centre = _interior(batch)(xp, a, c, x, gap, before=_again(xp, a, c, best, known, work))
        price = batch.priced(a, c, centre, free is None)
        yield from batch.found(centre, work, price.open if m < n else None)
        go = xp.nonzero(price.open)[0]
        if go.shape[0] == 0 or m == n:
            return
        best = best.towards(xp, centre.x, price.margins)
        known = _Known(spread(xp, best.margins, work, centre.multipliers), price.above)
        if crowded is not None and iteration == 0:
            inside = xp.count_nonzero(xp.abs(centre.x) >= EDGE, axis=1) < d // AT_EDGE
            for row in np.flatnonzero(to_numpy(price.open & inside)).tolist():
                crowded.append(batch.items[row]._replace(start=to_numpy(best.x[row, :]) * batch.ball.size))
            go = xp.nonzero(price.open & ~inside)[0]
            if go.shape[0] == 0:
                return
        apart = (price.above - best.radius(xp)) / xp.abs(price.above)
        sure = (apart < NEAR) & (apart > NEAREST)
        loose = xp.where(sure, LOOSE * xp.abs(centre.e) + 3.0 * centre.gap, xp.full_like(apart, float("inf")))
        kept = centre.slack < loose[:, None]
        score = keep(xp, best.first_met(xp, price.margins, centre.e), work, kept)
        free = (
            free_coordinates(xp, centre.x, price.slope, free) if batch.is_box and d >= FEW and iteration < 3 else None
        )
        x, score, apart, kept = (xp.take(v, go, axis=0) for v in (centre.x, score, apart, kept))
        best = _Best(*(xp.take(v, go, axis=0) for v in best))
        known = _Known(*(xp.take(v, go, axis=0) for v in known))
        free = None if free is None else xp.take(free, go, axis=0)
        batch.take(go)
        gap = xp.where(apart < NEAR, xp.full_like(apart, GAP), xp.full_like(apart, ROUGH_AGAIN))
        m = min(n, max(fewest, int(xp.max(xp.count_nonzero(kept, axis=1))) + d // 2 + 1))


class _Known(NamedTuple):
    """Multipliers of all rows, and the bound that they give."""

    multipliers: Array  # [B, n]
    above: Array  # [B]


def _again(xp: Any, a: Array, c: Array, best: _Best, known: _Known | None, work: Array) -> Centre | None:
    """Where a round on the rows ``work`` goes on: from the best point and the multipliers of the last; None at first.

    From multipliers that cancel nothing, as at the start, most steps of the method go into making them cancel.
    """
    if known is None:
        return None
    x = INSIDE * best.x
    reach = matvec(xp, a, x) + c
    room = known.above - xp.min(reach, axis=1)
    e = xp.min(reach, axis=1) - 0.1 * room
    slack = reach - column(e)
    least = column(0.1 * room / (a.shape[1] + 2 * a.shape[2])) / slack
    multipliers = xp.maximum(xp.take_along_axis(known.multipliers, work, axis=1), least)
    return Centre(x, e, multipliers, slack, known.above - e)


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
            worst = xp.argmin(self.margins + column(t) * change, axis=1)
            rises = xp.take_along_axis(change, worst[:, None], axis=1)[:, 0] > 0
            low, high = xp.where(rises, t, low), xp.where(rises, high, t)
            t = 0.5 * (low + high)
        t = column(t)
        other = _Best(self.x + t * (x - self.x), self.margins + t * change)
        better = column(other.radius(xp) > self.radius(xp))
        return _Best(xp.where(better, other.x, self.x), xp.where(better, other.margins, self.margins))

    def first_met(self, xp: Any, margins: Array, e: Array) -> Array:
        """Where each row is met on the way to points with these margins, whose ball has the radius e: [B, n].

        In [0, 1] for rows that cut the ball; beyond that the other ones, the nearest first.
        """
        now, later = self.margins - column(self.radius(xp)), margins - column(e)
        inside = later >= 0
        met = now / xp.where(inside, xp.ones_like(now), now - later)
        return xp.where(inside, 1.0 + later, met)


def _on_all_rows(batch: Batch) -> Iterator[Ball]:
    """All rows until the ball is roughly known, then those around it; if another row cuts it, all rows to the end."""
    xp, n = batch.xp, batch.n
    fewer = max(n // 4, 4 * batch.d)
    work = xp.zeros(batch.y.shape, dtype=xp.int64) + xp.arange(n)[None, :]
    a, c = batch.gather(work)
    centre = _interior(batch)(xp, a, c, batch.start, ROUGH_ON_ALL if fewer < n else GAP)
    if fewer < n:
        near = smallest(xp, centre.slack, fewer)
        part = centre._replace(
            multipliers=xp.take_along_axis(centre.multipliers, near, axis=1),
            slack=xp.take_along_axis(centre.slack, near, axis=1),
        )
        some = batch.gather(near)
        part = _interior(batch)(xp, *some, centre.x, GAP, before=part)
        open_ = batch.priced(*some, part).open
        yield from batch.found(part, near, open_)
        go = xp.nonzero(open_)[0]
        if go.shape[0] == 0:
            return
        batch.take(go)
        a, c, work = (xp.take(v, go, axis=0) for v in (a, c, work))
        centre = Centre(*(xp.take(v, go, axis=0) for v in centre))
        centre = _interior(batch)(xp, a, c, centre.x, GAP, before=centre)
    yield from batch.found(centre, work)
