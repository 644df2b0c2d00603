"""A cheap search for inputs under which some labels have the highest logits: projections in differences of rows.

``x`` starts at the sum of the unit rows of the set, seen from their mean. While the best of the others, j, is not below
the worst of the set, i, x moves along ``w_i - w_j`` to where the two have changed places (a reflection), as in the
published search for classes that can win. It finds wide regions only, but with one matrix product for many sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..question import ActiveSets, Question
from .arrays import Array, mT, to_numpy
from .cone import Found

BLOCK = 16_000_000  # logits at once: 128 MB in float64
STEPS = 40
REFLECTION = 1.9  # of the way to the mirror image: 1 is a projection, 2 a reflection


def highest_logits(
    question: Question, xp: Any, sets: ActiveSets, which: np.ndarray, single: bool = True
) -> Iterator[Found]:
    """Inputs, with their thresholds, for the sets ``which`` of a question with a free threshold.

    ``single``: in float32. Witnesses are proved in float64 like all others.
    """
    dtype = xp.float32 if single else xp.float64
    weight = question.weight[:, : question.inputs]
    scale = float(np.max(question.norms[1], initial=0.0)) or 1.0
    rows = xp.asarray(weight / scale, dtype=dtype)
    which = np.array([i for i in which.tolist() if 0 < len(sets[i]) < question.n], dtype=np.int64)  # others are trivial
    block = max(1, min(512, BLOCK // question.n))
    for first in range(0, len(which), block):
        part = which[first : first + block]
        yield from _reflect(question, xp, rows, scale, [sets[int(i)] for i in part], part)


def _reflect(
    question: Question, xp: Any, rows: Array, scale: float, actives: list[np.ndarray], part: np.ndarray
) -> Iterator[Found]:
    """The search for the sets ``part`` with these labels, on ``rows`` = W / scale."""
    lengths = xp.sqrt(xp.sum(rows * rows, axis=1))
    unit = rows / xp.where(lengths > 0, lengths, xp.ones_like(lengths))[:, None]
    member = np.zeros((len(actives), question.n), dtype=bool)
    for row, active in enumerate(actives):
        member[row, active] = True
    inside = xp.asarray(member)
    centre = xp.mean(unit, axis=0)
    x = xp.matmul(xp.asarray(member, dtype=rows.dtype), unit)
    sizes = xp.asarray([[max(1, len(a))] for a in actives], dtype=rows.dtype)
    x = x / sizes - centre[None, :]
    left = np.arange(len(part))
    infinity = float("inf")
    for step in range(STEPS + 1):
        logits = xp.matmul(x, mT(rows))
        worst = xp.where(inside, logits, xp.full_like(logits, infinity))
        best = xp.where(inside, xp.full_like(logits, -infinity), logits)
        i, j = xp.argmin(worst, axis=1), xp.argmax(best, axis=1)
        low, high = xp.min(worst, axis=1), xp.max(best, axis=1)
        length = xp.sqrt(xp.sum(x * x, axis=1))
        done = low - high > 1e-6 * length
        if bool(xp.any(done)):
            at, go = xp.nonzero(done)[0], xp.nonzero(~done)[0]
            middle = to_numpy(xp.take((low + high) / 2, at)).astype(np.float64) * scale
            points = _inputs(
                question, to_numpy(xp.take(x, at, axis=0)), middle, [actives[n] for n in left[to_numpy(at)]]
            )
            yield Found(part[left[to_numpy(at)]], points, [], [])
            left = left[to_numpy(go)]
            if not len(left):
                return
            x, inside, i, j, low, high = (xp.take(v, go, axis=0) for v in (x, inside, i, j, low, high))
        if step == STEPS:
            return
        along = xp.take(rows, i, axis=0) - xp.take(rows, j, axis=0)
        square = xp.sum(along * along, axis=1)
        far = REFLECTION * (high - low) + 1e-3 * xp.sqrt(square * xp.sum(x * x, axis=1))
        x = x + (far / xp.where(square > 0, square, xp.ones_like(square)))[:, None] * along


def _inputs(question: Question, x: np.ndarray, middle: np.ndarray, actives: list[np.ndarray]) -> np.ndarray:
    """Points [p, inputs] scaled into the ball, each with the feature of a threshold between the two groups of logits.

    ``middle`` [p]: that threshold without a bias; beside a bias it is found again from the logits in the ball.
    """
    x = x.astype(np.float64)
    points = np.zeros((len(x), question.d))
    points[:, : question.inputs] = x
    points[:, -1] = -middle / question.threshold_unit
    if question.ball.name == "l2":
        points = question.ball.scaled(points)
    else:
        reach = np.maximum(np.max(np.abs(x), axis=1), np.sqrt(np.einsum("ij,ij->i", x, x)) / 2)
        points *= (question.box / reach)[:, None]
    if question.bias is None:
        return points
    points[:, -1] = 0.0
    logits = question.logits(points)
    for row, active in enumerate(actives):
        low, rest = float(np.min(logits[row, active])), logits[row].copy()
        rest[active] = -np.inf
        points[row, -1] = -(low + float(np.max(rest))) / (2 * question.threshold_unit)
    return points
