"""Semismooth Newton on the squared hinge, for many label sets at once.

``f(x) = ½ Σ_i (1 - a_i·x)₊²`` with ``a_i = y_i w_i/‖w_i‖``. It is piecewise quadratic, so Newton's method ends after
finitely many steps: either at f = 0, where x is a witness, or at a minimum f > 0, where ``λ = (1 - Ax)₊`` is Gordan's
vector: ``Aᵀλ = -∇f = 0``. One run answers both ways.

A label set of few labels is decided by few of the n rows: Newton works on a set of rows (the active labels and
the rows with the smallest margins), all rows are priced with one matrix product, and the worst are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..question import ActiveSets
from .arrays import Array, concat, keep, matvec, mT, smallest, solve_definite, to_numpy
from .cone import Cone, Found

MAX_STEPS = 200  # of one run; most take 3 to 10
MAX_STEPS_DFT = 60  # what is not found by then is thin, and has a proof in closed form
MAX_ROUNDS = 8
WIDE = 40  # from this width on sets are solved one at a time: the rows of one stay in the cache
WIDE_ON_DEVICE = 90  # … and on a GPU, where a small matrix product costs as much as starting it
SAMPLED = 8  # rows per feature, of a sample in which a wide region must exist
NEIGHBOURS = 8  # of an active label on either side, in that sample
LANES = 64  # sets that are priced together, at most
LARGEST = 8_000_000  # entries of any array of one chunk: 64 MB
LEVEL = 1e-2  # of the slope at its start: where a line search ends
PROX = {8: 1e-10, 4: 1e-6}  # by bytes, of the mean curvature: makes the Hessian definite, and does not move the minimum
FLAT = {8: 3e-15, 4: 1e-6}  # … of the gradient, where it has vanished as far as this precision can tell


def _bytes(xp: Any, x: Array) -> int:
    return 4 if x.dtype == xp.float32 else 8


class Hinge(NamedTuple):
    """Where Newton stopped: ``x`` [B, d], the hinge ``s = 1 - Ax`` [B, m], and which ended with every ``a_i·x > 0``."""

    x: Array
    s: Array
    feasible: Array  # [B] bool


def _step_length(xp: Any, s: Array, q: Array, descent: Array) -> Array:
    """The t > 0 that minimises ``½ Σ (s - t q)₊²`` for each row, whose slope at 0 is ``-descent`` [B].

    Newton in one dimension inside a shrinking bracket, until the slope is a small part of that.
    """
    t = xp.ones(s.shape[0], dtype=s.dtype)
    low = xp.zeros(s.shape[0], dtype=s.dtype)
    high = xp.full(s.shape[0], float("inf"), dtype=s.dtype)
    zero = xp.zeros_like(q)
    for _ in range(12):
        r = s - t[:, None] * q
        rq = xp.where(r > 0, q, zero)
        slope = -xp.sum(r * rq, axis=1)
        level = xp.abs(slope) <= LEVEL * descent
        if bool(xp.all(level)):
            break
        curvature = xp.sum(rq * rq, axis=1)
        low = xp.where(slope < 0, t, low)
        high = xp.where(slope > 0, t, high)
        proposal = t - slope / xp.where(curvature > 0, curvature, xp.ones_like(curvature))
        middle = xp.where(high < float("inf"), 0.5 * (low + high), 2.0 * t)
        inside = (proposal > low) & (proposal < high) & (curvature > 0)
        t = xp.where(level, t, xp.where(inside, proposal, middle))
    return t


def hinge_newton(xp: Any, a: Array, x: Array, steps: int = MAX_STEPS) -> Hinge:
    """Minimise the squared hinge of ``a`` [B, m, d] from ``x`` [B, d]; entries that finish leave the batch."""
    batch, _, d = a.shape
    lanes = xp.arange(batch)
    finished = []
    eye = xp.eye(d, dtype=x.dtype)
    prox, flat = PROX[_bytes(xp, x)], FLAT[_bytes(xp, x)]
    s = 1.0 - matvec(xp, a, x)
    for step in range(steps + 1):
        hinge = xp.where(s > 0, s, xp.zeros_like(s))
        g = matvec(xp, mT(a), hinge)  # -∇f
        yes = xp.max(s, axis=1) < 0.9  # every a_i·x is clearly positive: a witness, if not yet the minimum
        no = xp.max(xp.abs(g), axis=1) <= flat * xp.sum(hinge, axis=1)
        done = yes | no if step < steps else xp.ones_like(yes)
        if bool(xp.any(done)):
            at = xp.nonzero(done)[0]
            go = xp.nonzero(~done)[0]
            taken = [xp.take(v, at, axis=0) for v in (lanes, x, s, yes)]
            finished.append(taken)
            if go.shape[0] == 0:
                break
            a, x, s, g, lanes = (xp.take(v, go, axis=0) for v in (a, x, s, g, lanes))
        masked = xp.where((s > 0)[:, :, None], a, xp.zeros_like(a))
        h = xp.matmul(mT(masked), masked)  # of one array with itself: half the work in BLAS
        trace = xp.sum(h * eye[None, :, :], axis=(1, 2))
        h = h + ((prox / d) * trace + 1e-30)[:, None, None] * eye[None, :, :]
        direction = solve_definite(xp, h, g)
        t = _step_length(xp, s, matvec(xp, a, direction), xp.sum(g * direction, axis=1))
        x = x + t[:, None] * direction
        s = 1.0 - matvec(xp, a, x)
    parts = [concat(xp, column) for column in zip(*finished, strict=True)]
    order = xp.argsort(parts[0])
    return Hinge(*(xp.take(v, order, axis=0) for v in parts[1:]))


def _search(xp: Any, s: Array, q: Array, descent: float) -> tuple[float, Array, Array]:
    """The step of ``_step_length`` for one set [m] whose slope at 0 is ``-descent``; with ``s - t q`` and its hinge."""
    t, low, high = 1.0, 0.0, float("inf")
    zero = xp.zeros_like(s)
    for left in reversed(range(12)):
        r = s - t * q
        hinge = xp.maximum(r, zero)
        slope = -float(xp.matmul(hinge, q))
        if abs(slope) <= LEVEL * descent or not left:
            break
        low, high = (t, high) if slope < 0 else (low, t)
        moving = xp.where(r > 0, q, zero)
        curvature = float(xp.matmul(moving, moving))
        t = t - slope / curvature if curvature > 0 else low
        if not low < t < high:
            t = 0.5 * (low + high) if high < float("inf") else 2.0 * low
    return t, r, hinge


def hinge_newton_one(xp: Any, rows: Array, y: Array, x: Array, enough: float = 0.9, steps: int = MAX_STEPS) -> Hinge:
    """The same for one set with rows ``y_i·rows_i`` [m, d]: for matrices so wide that the Hessian is what costs.

    It is built from the violated rows only, and changed by the rows that come and go where those are few.
    """
    eye = xp.eye(rows.shape[1], dtype=x.dtype)
    size = _bytes(xp, x)
    h, before = None, None
    s = 1.0 - y * xp.matmul(rows, x)
    hinge = xp.maximum(s, xp.zeros_like(s))
    for _ in range(steps):
        if bool(xp.max(s) < enough):
            break
        g = xp.matmul(y * hinge, rows)
        if bool(xp.max(xp.abs(g)) <= FLAT[size] * xp.sum(hinge)):
            break
        violated = s > 0
        at = xp.nonzero(violated)[0]
        changed = xp.nonzero(violated != before)[0] if h is not None else at
        if h is None or 2 * changed.shape[0] >= at.shape[0]:
            part = xp.take(rows, at, axis=0)
            h = xp.matmul(mT(part), part)
        elif changed.shape[0]:
            part = xp.take(rows, changed, axis=0)
            gone = xp.where(xp.take(violated, changed), xp.ones_like(part[:, 0]), -xp.ones_like(part[:, 0]))
            h = h + xp.matmul(mT(part), part * gone[:, None])
        before = violated
        # Rows have norm 1, so their number is the trace.
        curved = h + (PROX[size] * at.shape[0] / rows.shape[1] + 1e-30) * eye
        direction = solve_definite(xp, curved[None, :, :], g[None, :])[0, :]
        t, s, hinge = _search(xp, s, y * xp.matmul(rows, direction), float(xp.matmul(g, direction)))
        x = x + t * direction
    return Hinge(x[None, :], s[None, :], (xp.max(s) < enough)[None])


def _on_working_rows(cone: Cone, y: Array, work: Array, x: Array) -> Hinge:
    """Newton on the rows ``work`` [B, m] of each set, from ``x`` [B, D]."""
    xp = cone.xp
    sign = xp.take_along_axis(y, work, axis=1)
    if cone.width >= (WIDE if xp is np else WIDE_ON_DEVICE):
        parts = [
            hinge_newton_one(xp, xp.take(cone.rows, work[i, :], axis=0), sign[i, :], x[i, :])
            for i in range(work.shape[0])
        ]
        return Hinge(*(concat(xp, column) for column in zip(*parts, strict=True)))
    rows = xp.reshape(xp.take(cone.rows, xp.reshape(work, (-1,)), axis=0), (*work.shape, cone.width))
    return hinge_newton(xp, rows * sign[:, :, None], x)


def weighted_ridge(cone: Cone, actives: list[np.ndarray], emphasis: float = 0.3) -> Array:
    """Where to start [B, D]: least squares for ``a_i·x = 1``, the few active rows weighted up to match the others."""
    xp = cone.xp
    longest = max((len(a) for a in actives), default=0)
    index = np.zeros((len(actives), max(1, longest)), dtype=np.int64)
    weight = np.zeros(index.shape)
    for row, active in enumerate(actives):
        index[row, : len(active)] = active
        weight[row, : len(active)] = max(1.0, emphasis * cone.size / max(1, len(active)))
    w = xp.asarray(weight, dtype=cone.dtype)
    rows = xp.reshape(xp.take(cone.rows, xp.asarray(index.ravel()), axis=0), (*index.shape, cone.width))
    present = xp.where(w > 0, xp.ones_like(w), xp.zeros_like(w))
    h = cone.gram[None, :, :] + xp.matmul(mT(rows), rows * (w - present)[:, :, None])
    g = matvec(xp, mT(rows), w + present) - cone.total[None, :]
    eye = xp.eye(cone.width, dtype=h.dtype)[None, :, :]
    return solve_definite(xp, h + (1e-6 * cone.size / cone.width) * eye, g)


def motzkin(cone: Cone, sets: ActiveSets, which: np.ndarray, steps: int = 30) -> Iterator[Found]:
    """Weighted ridge, then projections onto the most violated row: finds witnesses of wide regions and nothing else."""
    xp = cone.xp
    for part in _chunks(cone, sets, which, min(32, 4_000_000 // cone.size)):
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
            # A few projections do not repair many violations.
            leave = done | (_violated(xp, margins) > 2 * cone.width) if step == 0 else done
            if bool(xp.any(leave)):
                at, go = xp.nonzero(done)[0], xp.nonzero(~leave)[0]
                if at.shape[0]:
                    yield Found(part[to_numpy(xp.take(left, at))], cone.inputs(xp.take(x, at, axis=0)), [], [])
                if go.shape[0] == 0:
                    break
                x, y, left, worst, low = (xp.take(v, go, axis=0) for v in (x, y, left, worst, low))
            if step == steps:
                break
            rows = xp.take(cone.rows, worst, axis=0)
            sign = xp.take_along_axis(y, worst[:, None], axis=1)[:, 0]
            aim = 0.05 * xp.sqrt(xp.sum(x * x, axis=1) / cone.width)  # a little beyond the hyperplane
            x = x + (sign * (aim - low))[:, None] * rows


def newton_on_all_rows(
    cone: Cone, sets: ActiveSets, which: np.ndarray, argmaxable: np.ndarray | None = None
) -> Iterator[Found]:
    """The same on all rows, for matrices whose neighbouring rows are nearly equal (a DFT).

    There a few working rows say nothing about their neighbours. Where a set is known to be ``argmaxable`` [m] only a wide
    region is worth the search: one that is not there on a sample of the rows is not there on all of them, either.
    """
    xp = cone.xp
    for i in which.tolist():
        actives = cone.actives(sets, np.array([i]))
        y, x = cone.signs(actives)[0, :], weighted_ridge(cone, actives)[0, :]
        if argmaxable is not None and argmaxable[i]:
            x = _on_a_sample(cone, actives[0], y, x)
            if x is None:
                continue
        hinge = hinge_newton_one(xp, cone.rows, y, x, enough=1.0, steps=MAX_STEPS_DFT)
        yes = to_numpy(hinge.feasible)
        yield _collect(cone, np.array([i]), xp.arange(cone.size)[None, :], hinge, yes, ~yes)


def _on_a_sample(cone: Cone, active: np.ndarray, y: Array, x: Array) -> Array | None:
    """Where all rows may go on from [D]: a point that satisfies a growing sample of them; None where there is none."""
    xp = cone.xp
    count = SAMPLED * cone.width
    sample = _around(active, cone.size, count)
    for attempt in range(3 * MAX_ROUNDS):
        if 3 * len(sample) > cone.size:
            break
        at = xp.asarray(sample)
        steps = MAX_STEPS if attempt else MAX_STEPS_DFT  # what was possible once is worth more
        part = hinge_newton_one(xp, xp.take(cone.rows, at, axis=0), xp.take(y, at), x, enough=1.0, steps=steps)
        if not bool(part.feasible[0]):
            return None
        x = part.x[0, :]
        margins = to_numpy(y * xp.matmul(cone.rows, x))
        violated = np.flatnonzero(margins <= 0)
        if not violated.size:
            break
        worst = violated[np.argsort(margins[violated], kind="stable")[:count]]
        sample = np.unique(np.concatenate([sample, worst]))
    return x


def _around(active: np.ndarray, size: int, count: int) -> np.ndarray:
    """About ``count`` of the rows 0 … size-1: the active ones and their neighbours, the rest from everywhere."""
    near = (active[:, None] + np.arange(-NEIGHBOURS, NEIGHBOURS + 1)[None, :]) % size
    return np.unique(np.concatenate([near.ravel(), np.arange(0, size, max(1, size // count)), [size - 1]]))


def newton(cone: Cone, sets: ActiveSets, which: np.ndarray) -> Iterator[Found]:
    """Decide the sets ``which`` by semismooth Newton on growing sets of rows."""
    xp, width = cone.xp, cone.width
    for part in _chunks(cone, sets, which, LANES):
        actives = cone.actives(sets, part)
        y = cone.signs(actives)
        x = weighted_ridge(cone, actives)
        m = min(cone.size, 3 * width + min(2 * width, max(map(len, actives))))
        margins = y * xp.matmul(x, mT(cone.rows))
        chosen = _first_choice(cone, y, margins, m)
        lanes = np.arange(len(part))
        for _ in range(MAX_ROUNDS):
            work = smallest(xp, chosen, m)
            hinge = _on_working_rows(cone, y, work, x)
            x = hinge.x
            margins = y * xp.matmul(x, mT(cone.rows))
            solved = xp.min(margins, axis=1) > 0
            open_ = ~solved & hinge.feasible
            yield _collect(cone, part[lanes], work, hinge, to_numpy(solved), to_numpy(~solved & ~hinge.feasible))
            go = xp.nonzero(open_)[0]
            if go.shape[0] == 0 or m == cone.size:
                break
            lanes = lanes[to_numpy(go)]
            x, y, margins, work = (xp.take(v, go, axis=0) for v in (x, y, margins, work))
            chosen = keep(xp, margins, work)  # rows in play stay, the worst of the others come in
            m = min(cone.size, m + width)


def _violated(xp: Any, margins: Array) -> Array:
    """How many margins [B, N] are negative [B]."""
    return xp.count_nonzero(margins < 0, axis=1)


def _first_choice(cone: Cone, y: Array, margins: Array, m: int) -> Array:
    """Scores [B, N] whose m smallest are the first working rows.

    The active labels always belong to them (when they are few: they are what is hard to satisfy), then come the worst
    rows. Where those all are violated they lie on one side of the hyperplane of x, so that -x satisfies them and they
    decide nothing: half of their places go to rows from everywhere.
    """
    xp = cone.xp
    every = max(1, 2 * cone.size // (3 * cone.width))
    everywhere = (xp.arange(cone.size) % every == 0)[None, :]
    one_sided = _violated(xp, margins) > m
    first = (y > 0) | (everywhere & one_sided[:, None])
    return xp.where(first, xp.full_like(margins, -float("inf")), margins)


def _collect(cone: Cone, part: np.ndarray, work: Array, hinge: Hinge, yes: np.ndarray, no: np.ndarray) -> Found:
    at = np.flatnonzero(yes)
    x = cone.inputs(cone.xp.take(hinge.x, cone.xp.asarray(at), axis=0)) if at.size else np.zeros((0, cone.question.d))
    losers = np.flatnonzero(no) if not cone.single else np.zeros(0, dtype=np.int64)
    dependencies = []
    if losers.size:
        rows, s = to_numpy(work), to_numpy(hinge.s)
        dependencies = [cone.dependency(rows[i], np.maximum(s[i], 0.0)) for i in losers]
    return Found(part[at], x, part[losers].tolist(), dependencies)


def _chunks(cone: Cone, sets: ActiveSets, which: np.ndarray, lanes: int) -> Iterator[np.ndarray]:
    """Parts of ``which``, sets of similar size together, so that their rows [B, longest, D] fit into ``LARGEST``."""
    sizes = np.array([len(sets[int(i)]) for i in which])
    order = np.argsort(sizes, kind="stable")
    ordered, sizes = which[order], sizes[order]
    start = 0
    while start < len(ordered):
        size = max(1, min(lanes, LARGEST // cone.width**2, LARGEST // cone.size))
        while size > 1:
            longest = int(sizes[start : start + size][-1])
            if size * (longest + 1) * cone.width <= LARGEST:
                break
            size //= 2
        yield ordered[start : start + size]
        start += size
