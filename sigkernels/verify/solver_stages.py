"""The stages around a solver: interior points, linear programs, exact alternatives; the last two on any executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, as_completed
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from .certificate import Certificate
from .code_words import code_points
from .input_ball import Box, InputBall
from .ledger import Ledger
from .solvers.ball_batch import Ball, Item
from .solvers.exact import MAX_WIDTH, gordan_alternative, largest_ball
from .solvers.largest_balls import balls
from .solvers.least_norm import Corner, HullProblem, active_set, corner
from .solvers.lp import polish, programs
from .solvers.precise_hull import precise_hull
from .solvers.refine import vertices
from .threads import one_blas_thread

BALL_WIDTH = 32  # columns up to which the exact largest ball is worth its time
HULL_ENTRIES = 20_000  # … and entries of a matrix, on the l2 ball, where every row is priced in many digits
STEPS_PER_FEATURE = 20  # of the active set, at most
WHOLE_WIDTH = 64  # columns of a DFT from which the interior-point method on all rows beats linear programs on few


def _spread(executor: Executor | None, function: Callable[..., Any], shared: tuple, items: list) -> Iterator[Any]:
    """``function(*shared, part)`` for parts of the items, results as they come; in this thread without an executor."""
    if executor is None:
        for item in items:
            yield from function(*shared, [item])
        return
    workers = getattr(executor, "_max_workers", None) or 8
    size = max(1, -(-len(items) // (4 * workers)))
    parts = (items[at : at + size] for at in range(0, len(items), size))
    futures = [executor.submit(_elsewhere, function, *shared, part) for part in parts]
    for future in as_completed(futures):
        yield from future.result()


def _elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """A call that the executor may have brought into another process, whose BLAS has threads of its own."""
    with one_blas_thread():
        return function(*arguments)


class _Rows(NamedTuple):
    """The rows of W that are not zero, with unit norm."""

    labels: ndarray  # [p]
    rows: ndarray  # [p, d]
    offset: ndarray | None  # [p] c_i/‖w_i‖
    norms: ndarray  # [p]

    @classmethod
    @np.errstate(over="ignore")
    def for_sets(cls, ledger: Ledger, which: ndarray) -> _Rows | None:
        """``None`` where there is nothing to solve: no sets, or no such rows."""
        question = ledger.question
        norms = question.norms[1]
        labels = np.flatnonzero(norms > 0)
        if not len(which) or not len(labels):
            return None
        # Solvers take no infinity.
        offset = None if question.bias is None else np.nan_to_num(question.bias[labels] / norms[labels])
        matrix = question.matrix if len(labels) == question.n else question.matrix[labels]
        return cls(labels, matrix / norms[labels, None], offset, norms[labels])

    def items(self, ledger: Ledger, which: ndarray) -> list[Item]:
        """The sets of these numbers, on the numbering of these rows."""
        place = np.full(ledger.question.n, -1)
        place[self.labels] = np.arange(len(self.labels))
        found = ((i, place[ledger.sets[i]]) for i in which.tolist())
        points = ledger.points(which)
        return [Item(i, active[active >= 0], start) for (i, active), start in zip(found, points, strict=True)]

    @np.errstate(over="ignore")
    def offer(self, ledger: Ledger, i: int, x: ndarray, support: ndarray, multipliers: ndarray) -> None:
        """Have a point and multipliers of unit rows proved."""
        ledger.offer(i, Certificate("witness", witness=x))
        if len(support) and not (ledger.is_settled(i) and ledger.target < np.inf):
            kind = "dual" if ledger.yes[i] or ledger.no[i] else "gordan"
            raw = multipliers / self.norms[support]
            ledger.offer(i, Certificate(kind, support=self.labels[support], multipliers=raw))


def _refine(ledger: Ledger, i: int, x: ndarray, support: ndarray) -> None:
    """Have the vertex with these tight labels, and those that pivots lead to, proved in twice the precision."""
    for tight, vertex in vertices(ledger.question, ledger.sets[i], x, support):
        ledger.offer(i, Certificate("witness", witness=vertex.point))
        if all(m > 0 for m in vertex.multipliers):
            ledger.offer(i, Certificate("dual", support=tight, multipliers=vertex.multipliers))
        if ledger.is_done(i):
            return


def _at_the_edges(slope: ndarray, tight: int, box: float) -> ndarray:
    """A point [d] at the edges of the box that the multipliers point to, 0 in the coordinates they leave free.

    In thin regions a solver's own point may lie on the wrong side of all rows. With ``tight`` rows ``tight - 1``
    coordinates are free: those in which the weighted rows, whose sum is ``slope`` [d], cancel best.
    """
    x = np.sign(slope) * box
    x[np.argsort(np.abs(slope), kind="stable")[: tight - 1]] = 0.0
    return x


def _from_codes(ledger: Ledger, items: list[Item]) -> list[Item]:
    """The sets with the sums of their codes to begin from, beside which any other point says little of where rows meet.

    On the l2 ball only where a polynomial is all that is known: its region is thin.
    """
    question = ledger.question
    if not question.codes:
        return items
    chosen = [item for item in items if question.ball.name == "box" or "closed form" in ledger.stage[item.number]]
    points = code_points(question, [ledger.sets[item.number] for item in chosen]) if chosen else ()
    found = {item.number: x for item, x in zip(chosen, points, strict=True)}
    return [item._replace(start=found.get(item.number, item.start)) for item in items]


def interior_points(ledger: Ledger, which: ndarray, xp: Any) -> None:
    """Offer the largest balls that the interior-point method finds, each sharpened to the vertex it is close to."""
    mine = _Rows.for_sets(ledger, which)
    if mine is None:
        return
    items = _from_codes(ledger, mine.items(ledger, which))
    whole = ledger.question.k >= 0 and not ledger.question.codes and ledger.question.d >= WHOLE_WIDTH
    crowded = ledger.question.codes > 0
    active = {item.number: item.active for item in items}
    with np.errstate(all="ignore"), contextlib.suppress(np.linalg.LinAlgError):
        for ball in balls(xp, mine.rows, mine.offset, ledger.question.ball, items, whole, crowded):
            sharp = None if ball.sharp else _sharpened(mine, ledger.question.ball, active[ball.number], ball)
            if sharp is not None:
                mine.offer(ledger, ball.number, *sharp)
            if not ledger.is_closed(ball.number):
                mine.offer(ledger, ball.number, ball.x, ball.support, ball.multipliers)


def _sharpened(mine: _Rows, inputs: InputBall, active: ndarray, ball: Ball) -> tuple[ndarray, ndarray, ndarray] | None:
    """The point and the multipliers that the tight rows of a ball determine."""
    support, multipliers = ball.support[ball.tight], ball.multipliers[ball.tight]
    if inputs.name == "box":
        return polish(mine.rows, mine.offset, active, inputs.size, ball.x, support, multipliers)
    problem = HullProblem.of(mine.rows, mine.offset, active, inputs.size)
    found = corner(problem, support, multipliers) if len(support) else None
    return None if found is None else _proposal(found, inputs)


def _proposal(found: Corner, inputs: InputBall) -> tuple[ndarray, ndarray, ndarray]:
    return inputs.pulled_in(found.x[None, :])[0], found.support, found.multipliers


def _solve_active_sets(
    rows: ndarray, offset: ndarray | None, inputs: InputBall, items: list[tuple[Item, ndarray, ndarray]]
) -> list[tuple[int, Any]]:
    out = []
    with np.errstate(all="ignore"):
        for item, support, multipliers in items:
            problem = HullProblem.of(rows, offset, item.active, inputs.size)
            found = active_set(problem, support, multipliers, STEPS_PER_FEATURE * rows.shape[1])
            out.append((item.number, None if found is None else _proposal(found, inputs)))
    return out


def active_sets(ledger: Ledger, which: ndarray, executor: Executor | None) -> None:
    """Offer the point of least norm of each set on the l2 ball, by an active set that starts from what is known."""
    mine = _Rows.for_sets(ledger, which)
    if mine is None:
        return
    place = np.full(ledger.question.n, -1)
    place[mine.labels] = np.arange(len(mine.labels))
    items = []
    for item in mine.items(ledger, which):
        high = ledger.high[item.number]
        if high is not None and high.support is not None and high.multipliers is not None:
            support = place[high.support]
            largest = max(high.multipliers)  # of exact numbers, which may be beyond float64
            weights = np.array([float(m / largest) for m in high.multipliers]) * mine.norms[support]
        else:  # from the row that is lowest at the best point
            start = np.zeros(ledger.question.d) if item.start is None else item.start
            problem = HullProblem.of(mine.rows, mine.offset, item.active, ledger.question.box)
            support, weights = np.array([int(np.argmin(problem.margins(start)))]), np.ones(1)
        items.append((item, support, weights))
    shared = (mine.rows, mine.offset, ledger.question.ball)
    for i, answer in _spread(executor, _solve_active_sets, shared, items):
        if answer is not None:
            mine.offer(ledger, i, *answer)


def _solve_programs(rows: ndarray, offset: ndarray | None, box: float, items: list[Item]) -> list[tuple[int, Any]]:
    return [(item.number, programs(rows, offset, item.active, box, item.start)) for item in items]


def linear_programs(ledger: Ledger, which: ndarray, executor: Executor | None) -> None:
    """Offer the point and the multipliers of the Chebyshev program of each set."""
    mine = _Rows.for_sets(ledger, which)
    if mine is None:
        return
    question = ledger.question
    in_box = question.ball.name == "box"
    # Whether a set is possible at all does not depend on the ball: without the box, it is asked in a wide one.
    box = question.box if in_box else question.box * Box.default_size
    for i, answers in _spread(executor, _solve_programs, (mine.rows, mine.offset, box), mine.items(ledger, which)):
        for answer in answers:
            if not ledger.is_done(i):
                mine.offer(ledger, i, *answer)
        if not in_box:
            continue
        for x, support, multipliers in answers:
            if ledger.yes[i] and not ledger.is_done(i):
                _refine(ledger, i, x, mine.labels[support])
            if ledger.yes[i] and not ledger.is_done(i):
                sign = np.where(np.isin(mine.labels[support], ledger.sets[i]), 1.0, -1.0)
                slope = (sign * multipliers) @ mine.rows[support]
                _refine(ledger, i, _at_the_edges(slope, len(support), ledger.question.box), mine.labels[support])


def _solve_exactly(
    matrix: ndarray, bias: ndarray | None, items: list[tuple[int, ndarray, ndarray | None]]
) -> list[tuple[int, Any]]:
    out = []
    for i, active, x in items:
        y = np.full(matrix.shape[0], -1.0)
        y[active] = 1.0
        rows, margins = matrix, None if x is None else y * (matrix @ x)
        if bias is not None:
            rows = np.concatenate([np.column_stack([matrix, bias]), np.eye(1, matrix.shape[1] + 1, matrix.shape[1])])
            y = np.append(y, 1.0)
            margins = None if margins is None else np.append(margins + y[:-1] * bias, 0.0)
        out.append((i, gordan_alternative(y[:, None] * rows, margins)))
    return out


def exact_alternatives(ledger: Ledger, which: ndarray, executor: Executor | None) -> None:
    """Offer exact points and multipliers, where the matrix is narrow enough for rational arithmetic."""
    question = ledger.question
    which = which[~ledger.yes[which]]
    if question.d + (question.bias is not None) > MAX_WIDTH or not len(which):
        return
    items = [(i, ledger.sets[i], ledger.point(i)) for i in which.tolist()]
    for i, answer in _spread(executor, _solve_exactly, (question.matrix, question.bias), items):
        if answer is None:
            continue
        if answer.point is None:
            kept = answer.support < question.n
            multipliers = np.array([m for m, k in zip(answer.multipliers, kept, strict=True) if k], dtype=object)
            ledger.offer(i, Certificate("gordan", support=answer.support[kept], multipliers=multipliers))
            continue
        point = answer.point
        if question.bias is not None:
            point = [v / point[-1] for v in point[:-1]]
        else:
            length = question.ball.exact_length_upper(np.array(point, dtype=object))
            point = [v * Fraction(question.box) / length for v in point]
        try:
            rounded = np.array([float(v) for v in point])
        except OverflowError:
            rounded = np.full(question.d, np.inf)  # proves nothing
        if not ledger.offer(i, Certificate("witness", witness=rounded)):
            ledger.offer(i, Certificate("witness", witness=np.array(point, dtype=object)))


def exact_balls(ledger: Ledger, which: ndarray) -> None:
    """Offer the exact largest ball of each set with a witness: rows may be too nearly parallel for solvers in float64."""
    question = ledger.question
    which = which[ledger.yes[which]]
    labels = np.flatnonzero(question.norms[1] > 0)
    if question.k >= 0 or question.d > BALL_WIDTH or not labels.size:
        return
    rows, norms = question.matrix[labels], question.norms[1][labels]
    in_l2 = question.ball.name == "l2"
    if in_l2 and rows.size > HULL_ENTRIES:
        return
    for i in which.tolist():
        y = np.where(np.isin(labels, ledger.sets[i]), 1.0, -1.0)
        bias = None if question.bias is None else y * question.bias[labels]
        if in_l2:
            found = precise_hull(y[:, None] * rows, bias, question.box, ledger.point(i))
        else:
            found = largest_ball(y[:, None] * rows, bias, norms, question.box, ledger.point(i))
        if found is None or found.point is None:
            continue
        ledger.offer(i, Certificate("witness", witness=np.array(found.point, dtype=object)))
        multipliers = np.array(found.multipliers, dtype=object)
        ledger.offer(i, Certificate("dual", support=labels[found.support], multipliers=multipliers))
