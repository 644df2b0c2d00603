"""Columns that make impossible label sets possible, to be proved: a search for few, and ones that always do.

A set with signs y is possible for ``[W | V]`` when some input x and features t of the new columns have
``y_i(w_i·x + v_i·t) > 0`` for every label i.

* **One set, one column**: ``v = y``. So as many columns as there are sets always do.
* **The highest logit** (a softmax): ``v_i = -‖w_i‖²/2`` does for all classes at once. At ``x = w_j`` the logits are
  ``(‖w_j‖² - ‖w_i - w_j‖²)/2``: highest for class j, if no other has the same row.
* **Learned**: the features and V are found together, by least squares on the violated signs. With 1 for the first
  feature of every set, labels that are in none of the sets (or in all) only need an entry that is small (or large)
  enough, so that the search is about the other ones. With one column it is convex.
* **Binary digits**, ±1, of the label's number, for sets of one label and a free threshold: different rows of one length,
  each of which has a higher product with itself than any other. Coarse enough for float32 at any number of labels.
* **Trigonometric**: ``2r`` columns and a constant one, where no set has more than r runs of labels around the circle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy import ndarray
from scipy.optimize import OptimizeResult, minimize

from .question import BLOCK, DENSE, ActiveSets, Question, dft_matrix
from .witness import notch_polynomial, runs_of

STEPS = 400  # of the search for columns of one number
WORK = 3e9  # of one such search, at most: multiplications, and entries that are read or written
PASSES = 10  # over the margins of all sets and labels in a step
FEWEST_STEPS = 50  # a search that has no time for these is not begun
ENOUGH = 0.5  # of the margin that is aimed at: where the search may stop


class Columns(NamedTuple):
    """Columns to append to W [n, c], in units of the rows of the question, not proved yet.

    ``inputs`` [m, d + c]: what should predict each set, the new features after those of W and before a threshold.
    """

    method: str
    values: ndarray
    inputs: ndarray | None = None


Way: TypeAlias = Callable[[], Columns | None]  # to find columns; None where it finds none


def ways(question: Question, sets: ActiveSets) -> list[Way]:
    """Ways to columns for these sets, fewest first as far as that is known; those of the last one always do."""
    sets = [active[active < question.labels] for active in sets]
    waves = max(len(runs_of(active, question.labels)) for active in sets)
    constant = bool(question.threshold_unit) or question.k >= 0  # such a column is there already
    known = {_one_for_each: len(sets)}
    if question.domain == "all" and constant < 2 * waves + 1 <= question.labels:  # features of either sign
        known[_trigonometric] = 2 * waves + 1 - constant
    if question.domain == "all" and question.rule.is_free and question.labels > 1 and all(len(s) == 1 for s in sets):
        known[_binary_digits] = (question.labels - 1).bit_length()
    fewest = min(known.values())
    found: list[Way] = []
    if question.is_dense and fewest > 1:
        if question.rule.name == "argmax" and question.k < 0:
            found.append(partial(_lifted, question))
        found += _searches(question, sets, fewest)
    cheapest = sorted(known.items(), key=lambda item: item[1])
    return found + [partial(build, question, sets) for build, count in cheapest if question.labels * count <= DENSE]


def _one_for_each(question: Question, sets: ActiveSets) -> Columns:
    signs = _signs(sets, np.arange(question.labels)).T
    inputs = _inputs(question, np.zeros((len(sets), question.d)), np.eye(len(sets)))
    return Columns("one column for each set", signs * _row_norms(question)[:, None], inputs)


def _trigonometric(question: Question, sets: ActiveSets) -> Columns:
    labels = question.labels
    degree = max(len(runs_of(active, labels)) for active in sets)
    size = math.sqrt(labels / 2)  # an entry of 1 in the columns
    waves = dft_matrix(labels, degree) * size
    norms = _row_norms(question)
    polynomials = np.stack([notch_polynomial(active, labels, degree) for active in sets])
    old = np.zeros((len(sets), question.d))
    if not question.threshold_unit and question.k < 0:
        columns, new = waves * norms[:, None], polynomials / size
    else:  # beside a constant column that is there all rows have one unit
        unit = float(np.median(norms))
        columns, new = waves[:, 1:] * unit, polynomials[:, 1:] / (size * unit)
        if question.k >= 0:
            old[:, 0] = polynomials[:, 0]
        else:
            old[:, -1] = polynomials[:, 0] / (math.sqrt(labels) * question.threshold_unit)
    return Columns("trigonometric columns", columns, _inputs(question, old, new))


def _binary_digits(question: Question, sets: ActiveSets) -> Columns:
    count = (question.labels - 1).bit_length()
    digits = (np.arange(question.labels)[:, None] >> np.arange(count) & 1) * 2.0 - 1.0
    unit = float(np.median(_row_norms(question)))
    old = np.zeros((len(sets), question.d))
    if question.k >= 0:  # the constant column tells products of count from those of count - 2 and less
        old[:, 0] = -(count - 1) * unit * math.sqrt(question.labels)
    else:
        old[:, -1] = -(count - 1) * unit / question.threshold_unit
    return Columns("binary digits", digits * unit, _inputs(question, old, digits[np.concatenate(sets)]))


def _inputs(question: Question, old: ndarray, new: ndarray) -> ndarray:
    """Features of the columns that are there [m, d] and of the new ones [m, c], as large as inputs may be."""
    parts = (old[:, : question.inputs], new, old[:, question.inputs :])
    return question.ball.scaled(np.concatenate(parts, axis=1))


def _signs(sets: ActiveSets, labels: ndarray) -> ndarray:
    """±1 for each set and each of these labels [m, p]."""
    place = np.full(int(labels.max(initial=-1)) + 1, -1)
    place[labels] = np.arange(len(labels))
    signs = np.full((len(sets), len(labels)), -1.0)
    for row, active in enumerate(sets):
        at = place[active[active < len(place)]]
        signs[row, at[at >= 0]] = 1.0
    return signs


def _row_norms(question: Question) -> ndarray:
    """Of the labels [n], with their bias; without either the typical one: what an entry of 1 in a new column stands for."""
    norms = question.norms[1][: question.labels]
    if question.bias is not None:
        norms = np.hypot(norms, question.bias[: question.labels])
    typical = float(np.median(norms[norms > 0])) if np.any(norms > 0) else 1.0
    return np.where(norms > 0, norms, typical)


def _lifted(question: Question) -> Columns:
    rows = question.weight[: question.labels, : question.inputs]
    largest = float(np.max(np.abs(rows))) or 1.0
    squares = np.sum((rows / largest) ** 2, axis=1, keepdims=True)
    return Columns("half the squared norms", -squares * (largest / max(float(squares.max()), 1e-300)))


def _searches(question: Question, sets: ActiveSets, fewer_than: int) -> list[Way]:
    """Searches for learned columns, from one on as long as there is time for them."""
    count = np.zeros(question.labels, dtype=np.int64)
    for active in sets:
        count[active] += 1
    mixed = int(np.count_nonzero((count > 0) & (count < len(sets))))
    found: list[Way] = []
    width = 1
    while width < fewer_than:
        steps = int(min(STEPS, WORK / max(1, len(sets) * mixed * (PASSES + question.d + width))))
        if steps < FEWEST_STEPS:
            break
        found.append(partial(_learned, question, sets, count, width, steps))
        width += max(1, width // 3)
    return found


def _learned(question: Question, sets: ActiveSets, count: ndarray, width: int, steps: int) -> Columns | None:
    """So many columns by least squares on the violated signs; ``count`` [n]: how many of the sets hold each label."""
    norms = _row_norms(question)
    rows = question.matrix[: question.labels] / norms[:, None]
    mixed = np.flatnonzero((count > 0) & (count < len(sets)))
    found = _fit(question, rows[mixed], _signs(sets, mixed), width, steps)
    if found is None:
        return None
    x, t, v = found
    values = np.zeros((len(rows), width))
    values[mixed] = v
    rest = np.setdiff1d(np.arange(len(rows)), mixed)
    for part in np.array_split(rest, 1 + len(rest) * len(sets) // BLOCK):
        reach = x @ rows[part].T
        values[part, 0] = np.where(count[part] > 0, 1.0 - reach.min(axis=0), -1.0 - reach.max(axis=0))
    largest = np.maximum(np.max(np.abs(values), axis=0), 1e-300)
    return Columns("learned columns", values / largest * norms[:, None], _inputs(question, x, t * largest))


def _fit(
    question: Question, rows: ndarray, signs: ndarray, width: int, steps: int
) -> tuple[ndarray, ndarray, ndarray] | None:
    """Inputs x [m, d], new features t [m, width] and columns v [p, width] with all ``signs`` [m, p] on ``rows`` [p, d].

    Minimises ``½ Σ (1 - y (x·w + t·v))₊²`` and a little of the squares of the unknowns, from the sums of the rows of each
    set; the first of the new features is 1.
    """
    m, p, d = len(signs), len(rows), rows.shape[1]
    active = (signs + 1) / 2
    x = active @ rows
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300)
    v = np.full((p, width), -0.5)
    t = np.ones((m, width))
    if width > 1:  # what tells the sets apart most
        u, s, w = np.linalg.svd(active - active.mean(axis=0), full_matrices=False)
        more = min(width - 1, len(s))
        t[:, 1:], v[:, 1:] = 0.0, 0.0
        t[:, 1 : 1 + more] = u[:, :more] * np.sqrt(m)
        v[:, 1 : 1 + more] = w[:more].T * s[:more] / np.sqrt(m)
        if question.domain != "all":
            t[:, 1:] -= t[:, 1:].min(axis=0)
    shapes = ((m, d), (m, width - 1), (p, width))
    ends = np.cumsum([a * b for a, b in shapes])

    def parts(z: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        x, rest, v = (part.reshape(shape) for part, shape in zip(np.split(z, ends[:-1]), shapes, strict=True))
        return x, np.concatenate([np.ones((m, 1)), rest], axis=1), v

    def margins(z: ndarray) -> ndarray:
        x, t, v = parts(z)
        return signs * (x @ rows.T + t @ v.T)

    def loss(z: ndarray) -> tuple[float, ndarray]:
        x, t, v = parts(z)
        hinge = np.maximum(1.0 - signs * (x @ rows.T + t @ v.T), 0.0)
        pull = -signs * hinge
        slope = [(pull @ rows).ravel(), (pull @ v)[:, 1:].ravel(), (pull.T @ t).ravel()]
        return 0.5 * float(np.sum(hinge * hinge)), np.concatenate(slope)

    def stop(intermediate_result: OptimizeResult) -> None:
        if margins(intermediate_result.x).min(initial=1.0) >= ENOUGH:
            raise StopIteration

    bounds = None
    if question.domain != "all":  # all features are nonnegative, and only a threshold is not
        lowest = np.concatenate(
            [np.tile(np.arange(d) < question.inputs, m), np.ones(m * (width - 1)), np.zeros(p * width)]
        )
        bounds = [(0.0 if low else None, None) for low in lowest]
        x[:, : question.inputs] = np.maximum(x[:, : question.inputs], 0.0)
    start = np.concatenate([x.ravel(), t[:, 1:].ravel(), v.ravel()])
    end = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, callback=stop, options={"maxiter": steps}).x
    return parts(end) if margins(end).min(initial=1.0) > 0 else None
