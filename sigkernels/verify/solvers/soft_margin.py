"""A rough largest ball of many label sets at once: rows may cut into it a little, and inputs may leave the box a little.

With softness δ, for rows a_i and offsets c_i,

    min  ½ Σ_i (e - a_i·x - c_i)₊²  +  ½ Σ_j (|x_j| - 1)₊²  -  δ e        over x and e,

the soft margin of support vector machines for the largest ball instead of the smallest norm. At the minimum the hinges
over δ are multipliers that sum to 1 and cancel in every coordinate within the box. A few damped Newton steps tell
which rows matter, whichever touch the ball in the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .arrays import Array, concat, definite_solver, mT, plus_diagonal, smallest, to_numpy
from .ball_batch import Batch

STEPS = 6
ENOUGH = 0.1  # of half the sum of the squared hinges: no further step after one that promises less
ROWS = 2  # that have a say at the beginning, for each feature
HINGE = 0.025  # of the mean distance of all rows: what these are worth at least, where many are equally far
DAMPING = 3e-3  # of a row
LEVEL = 0.1  # of the slope at the beginning of a line: where its search ends
SEARCHES = 6


class SoftBalls(NamedTuple):
    """Where the method stopped, in units of the box."""

    x: Array  # [B, d], a little outside the box
    e: Array  # [B]
    softness: Array  # [B]: δ
    margins: Array  # [B, n]: of all rows at x


def soft_balls(batch: Batch) -> SoftBalls:
    """The soft balls of all sets together, roughly, from the batch's starting points."""
    xp, x, y = batch.xp, batch.start, batch.y
    margins = batch.margins(x)
    count = min(batch.n, ROWS * batch.d)
    near = xp.take_along_axis(margins, smallest(xp, margins, count), axis=1)
    e = xp.max(near, axis=1)
    hinges = xp.sum(e[:, None] - near, axis=1)
    softness = xp.maximum(hinges, HINGE * count * xp.mean(xp.abs(margins), axis=1))
    state = (xp.arange(x.shape[0]), y, x, e + (softness - hinges) / count, softness, margins)
    ended = []
    hessians = [_Hessian(xp, batch.rows32) for _ in batch.items]
    for step in range(STEPS):
        sets, y, x, e, softness, margins = state
        t = margins - e[:, None]
        dx, de = _directions(xp, [hessians[i] for i in to_numpy(sets).tolist()], y, t, x, softness)
        change = y * xp.matmul(dx, mT(batch.rows))
        length, descent = _search(xp, t, change - de[:, None], x, dx, de, softness)
        x, e, margins = x + length[:, None] * dx, e + length * de, margins + length[:, None] * change
        done = (descent <= ENOUGH * softness * softness / count) | (step == STEPS - 1)
        at, go = xp.nonzero(done)[0], xp.nonzero(~done)[0]
        ended.append([xp.take(v, at, axis=0) for v in (sets, x, e, softness, margins)])
        if go.shape[0] == 0:
            break
        state = tuple(xp.take(v, go, axis=0) for v in (sets, y, x, e, softness, margins))
    order = xp.argsort(concat(xp, [part[0] for part in ended]))
    return SoftBalls(
        *(xp.take(concat(xp, list(v)), order, axis=0) for v in zip(*(part[1:] for part in ended), strict=True))
    )


class _Hessian:
    """The sum of the squares of some rows, changed by those that come and go."""

    def __init__(self, xp: Any, rows: Array):
        self.xp, self.rows, self.among = xp, rows, xp.zeros_like(rows[:, 0]) > 0
        self.h = xp.zeros((rows.shape[1], rows.shape[1]), dtype=rows.dtype)

    def of(self, among: Array) -> Array:
        """For the rows of a mask [n]: [d, d]."""
        xp = self.xp
        come, go = among & ~self.among, self.among & ~among
        if 2 * int(xp.count_nonzero(go)) > int(xp.count_nonzero(self.among)):
            self.h, come, go = xp.zeros_like(self.h), among, go & ~go
        for mask, sign in ((come, 1.0), (go, -1.0)):
            rows = xp.take(self.rows, xp.nonzero(mask)[0], axis=0)
            if rows.shape[0]:
                self.h += sign * xp.matmul(mT(rows), rows)
        self.among = among
        return self.h


def _directions(
    xp: Any, hessians: list[_Hessian], y: Array, t: Array, x: Array, softness: Array
) -> tuple[Array, Array]:
    """Damped Newton steps in x [B, d] and e [B] for sets whose rows have the slacks t [B, n]; in float32."""
    rows, cut = hessians[0].rows, t < 0
    hinge = xp.where(cut, -t, xp.zeros_like(t))
    outside = xp.abs(x) > 1.0
    over = xp.where(outside, x - xp.sign(x), xp.zeros_like(x))
    weights = xp.astype(concat(xp, [y * hinge, xp.where(cut, y, xp.zeros_like(y))]), rows.dtype)
    combined = xp.astype(xp.matmul(weights, rows), x.dtype)
    g, total = combined[: x.shape[0], :] - over, combined[x.shape[0] :, :]
    # e is eliminated: what is left is the Hessian seen from the mean of the rows.
    mass = xp.sum(xp.astype(cut, t.dtype), axis=1) + DAMPING
    ge = softness - xp.sum(hinge, axis=1)
    g = xp.astype(g + total * (ge / mass)[:, None], rows.dtype)
    mean = xp.astype(total / xp.sqrt(mass)[:, None], rows.dtype)
    diagonal = DAMPING + xp.astype(outside, rows.dtype)
    found = []
    for i, hessian in enumerate(hessians):
        h = hessian.of(cut[i, :]) - mean[i, :][:, None] * mean[i, :][None, :]
        h = plus_diagonal(xp, h, diagonal[i, :])
        found.append(definite_solver(xp, h[None, :, :])(g[i : i + 1, :]))
    dx = xp.astype(concat(xp, found), x.dtype)
    return dx, (ge + xp.sum(total * dx, axis=1)) / mass


def _search(xp: Any, t: Array, q: Array, x: Array, dx: Array, de: Array, softness: Array) -> tuple[Array, Array]:
    """Where the slope of the objective is level on each line [B], and its slope at the beginning, downwards.

    The slacks are ``t + l q`` [B, n], the inputs ``x + l dx``.
    """
    zero, nothing = xp.zeros_like(t), xp.zeros_like(x)
    length, low = xp.ones_like(de), xp.zeros_like(de)
    high = xp.full_like(de, float("inf"))
    over = xp.where(xp.abs(x) > 1.0, x - xp.sign(x), nothing)
    descent = softness * de - xp.sum(xp.minimum(t, zero) * q, axis=1) - xp.sum(over * dx, axis=1)
    for _ in range(SEARCHES):
        slacks, inputs = t + length[:, None] * q, x + length[:, None] * dx
        moving = xp.where(slacks < 0, q, zero)
        out = xp.where(xp.abs(inputs) > 1.0, dx, nothing)
        slope = xp.sum(slacks * moving, axis=1) - softness * de
        slope = slope + xp.sum((inputs - xp.sign(inputs)) * out, axis=1)
        done = xp.abs(slope) <= LEVEL * descent
        if bool(xp.all(done)):
            break
        curvature = xp.sum(moving * moving, axis=1) + xp.sum(out * out, axis=1)
        low, high = xp.where(slope < 0, length, low), xp.where(slope > 0, length, high)
        proposal = length - slope / xp.where(curvature > 0, curvature, xp.ones_like(curvature))
        middle = xp.where(high < float("inf"), 0.5 * (low + high), 2.0 * length)
        inside = (proposal > low) & (proposal < high) & (curvature > 0)
        length = xp.where(done, length, xp.where(inside, proposal, middle))
    return length, descent
