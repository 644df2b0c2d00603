"""Label sets whose largest balls are sought together: their rows, signs and starting points, and what is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..input_ball import InputBall
from .arrays import Array, matvec, mT, to_numpy
from .interior import Centre

CLOSED = 1e-6  # of the radius: when a set is done
GAP = 1e-8  # of the radius: where a method stops


class Item(NamedTuple):
    """A set whose radius is wanted."""

    number: int
    active: np.ndarray  # its rows
    start: np.ndarray | None  # [d] an input to begin from


class Ball(NamedTuple):
    """What came out for a set: a centre, the rows of its support and their multipliers."""

    number: int
    x: np.ndarray  # [d], an input
    support: np.ndarray
    multipliers: np.ndarray
    tight: np.ndarray  # [len(support)] bool: the rows that seem to touch the ball; the others' multipliers are small
    sharp: bool = False  # whether the bounds are as close as these rows can bring them


class Price(NamedTuple):
    """All rows at the centre of a few, and the bound that the multipliers of those few give."""

    margins: Array  # [B, n]
    slope: Array  # [B, d]: how the bound grows with each coordinate
    above: Array  # [B]: the bound on the radius
    open: Array  # [B]: whether it is not reached


class Batch:
    """Sets that are solved together, in units of the ball's size."""

    def __init__(
        self,
        xp: Any,
        rows: Array,
        offset: Array | None,
        ball: InputBall,
        items: list[Item],
        rows32: Array | None = None,
    ) -> None:
        self.xp, self.rows, self.offset, self.ball, self.items = xp, rows, offset, ball, items
        self.rows32 = rows32  # the same rows in float32, for rough steps
        self.is_box = ball.name == "box"
        self.n, self.d = rows.shape
        signs = np.full((len(items), self.n), -1.0)
        start = np.zeros((len(items), self.d))
        for row, item in enumerate(items):
            signs[row, item.active] = 1.0
            if item.start is not None:
                start[row] = ball.pulled_in(item.start[None, :])[0] / ball.size
        self.y, self.start = xp.asarray(signs), xp.asarray(start)  # [B, n], [B, d]
        self.eye = xp.eye(self.d, dtype=rows.dtype)
        self.dither = xp.asarray(np.random.default_rng(0).random(self.n))  # [n], for ties

    def take(self, go: Array) -> None:
        """Goes on with these sets alone."""
        self.y, self.start = (self.xp.take(v, go, axis=0) for v in (self.y, self.start))
        self.items = [self.items[row] for row in to_numpy(go).tolist()]

    def gather(self, work: Array) -> tuple[Array, Array]:
        """The signed rows [B, m, d] and offsets [B, m] at the positions ``work`` [B, m]."""
        xp, flat = self.xp, self.xp.reshape(work, (-1,))
        sign = xp.take_along_axis(self.y, work, axis=1)
        a = xp.reshape(xp.take(self.rows, flat, axis=0), (*work.shape, self.d)) * sign[:, :, None]
        if self.offset is None:
            return a, xp.zeros_like(sign)
        return a, sign * xp.reshape(xp.take(self.offset, flat), work.shape)

    def margins(self, x: Array, lanes: Array | None = None, rough: bool = False) -> Array:
        """Of all rows at x: [B, d] → [B, n]; ``lanes``: for these sets of the batch, one for each x; ``rough``: in float32."""
        xp = self.xp
        reach = xp.matmul(xp.astype(x, xp.float32), mT(self.rows32)) if rough else xp.matmul(x, mT(self.rows))
        y = self.y if lanes is None else xp.take(self.y, lanes, axis=0)
        return y * (reach if self.offset is None else reach + self.offset[None, :])

    def dual_norm(self, slope: Array) -> Array:
        """The most that ``slope·x`` reaches on the unit ball: [B, d] → [B]."""
        if self.is_box:
            return self.xp.sum(self.xp.abs(slope), axis=1)
        return self.xp.sqrt(self.xp.sum(slope * slope, axis=1))

    def priced(self, a: Array, c: Array, centre: Centre, all_free: bool = False) -> Price:
        """What all rows say about the centre of a few; ``all_free``: no coordinate was held at the edge of the box."""
        xp, margins = self.xp, self.margins(centre.x)
        slope = matvec(xp, mT(a), centre.multipliers)
        above = self.dual_norm(slope) + xp.sum(c * centre.multipliers, axis=1)
        least, size = xp.min(margins, axis=1), xp.abs(centre.e)
        open_ = (above - least > CLOSED * xp.abs(above)) & (centre.gap < float("inf"))
        if all_free:  # solved, and no row cuts the ball: what the bound still lacks was lost to rounding
            open_ = open_ & ((centre.gap > 2 * GAP * size) | (least < centre.e - CLOSED * size))
        return Price(margins, slope, above, open_)

    def ball_at(self, lane: int, x: Array, work: Array, multipliers: Array, touching: Array, sharp: bool) -> Ball:
        """The ball of one set, from a point and multipliers ``sharp`` if their bounds meet."""
        x = self.ball.pulled_in(to_numpy(x)[None, :] * self.ball.size)[0]
        multipliers, touching = to_numpy(multipliers), to_numpy(touching)
        positive = multipliers > 0
        support = to_numpy(work)[positive]
        return Ball(self.items[lane].number, x, support, multipliers[positive], touching[positive], sharp)

    def found(self, centre: Centre, work: Array, open_: Array | None = None) -> Iterator[Ball]:
        """The balls of the sets that are not open, or of all: in thin regions a bound may lose digits to rounding."""
        rows = range(len(self.items)) if open_ is None else np.flatnonzero(~to_numpy(open_)).tolist()
        for row in rows:
            yield ball_of(self.items[row], self.ball, centre, work, row)


def ball_of(item: Item, ball: InputBall, centre: Centre, work: Array, row: int) -> Ball:
    """The ball of one set, the centre's ``row``."""
    multipliers, slack = to_numpy(centre.multipliers[row, :]), to_numpy(centre.slack[row, :])
    x = ball.pulled_in(to_numpy(centre.x[row, :])[None, :] * ball.size)[0]
    positive = multipliers > 0
    support, multipliers, slack = to_numpy(work[row, :])[positive], multipliers[positive], slack[positive]
    tight = multipliers > slack
    if ball.name != "box":
        return Ball(item.number, x, support, multipliers, tight)
    # The rows that touch the ball where no more do than must.
    vertex = np.count_nonzero(np.abs(x) < ball.size * (1 - 1e-7)) + 1
    if np.count_nonzero(tight) < vertex <= len(support):
        tight[np.argpartition(slack / multipliers, vertex - 1)[:vertex]] = True
    return Ball(item.number, x, support, multipliers, tight)
