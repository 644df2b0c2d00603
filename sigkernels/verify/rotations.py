"""Label sets of a DFT head that are rotations of each other: one of them decides all.

Rotating the labels of a set by s rotates every pair of features ``(x_{2j-1}, x_{2j})`` by the angle ``2πjs/n``: the logits
move along, and the length of each pair stays. So where no pair is longer than the box, one input stands for n sets; in the
l2 ball any input does.
Slack columns and codes get features of 0 and count by the length of their rows alone.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy import ndarray

from .question import Question, dft_matrix
from .rounding import SLOP, TINY, U, gamma, row_norms
from .witness import notch_polynomial

BLOCK = 2_000_000  # logits at a time


def representatives(n: int, size: int) -> tuple[ndarray, ndarray]:
    """One set of ``size`` labels for each class of rotations, sorted and with label 0 [m, size], and the classes' sizes."""
    rest = list(itertools.combinations(range(1, n), size - 1))
    active = np.column_stack(
        [np.zeros(len(rest), dtype=np.int64), np.array(rest, dtype=np.int64).reshape(len(rest), -1)]
    )
    gaps = np.diff(active, axis=1, append=n)
    first = np.ones(len(gaps), dtype=bool)  # no rotation of the gaps comes before them
    repeats = np.zeros(len(gaps), dtype=np.int64)
    for shift in range(size):
        rotated = np.roll(gaps, -shift, axis=1)
        where = np.argmax(rotated != gaps, axis=1)
        difference = np.take_along_axis(rotated - gaps, where[:, None], axis=1)[:, 0]
        first &= difference >= 0
        repeats += difference == 0
    return active[first], n // repeats[first]


def representative_of(active: ndarray, n: int) -> tuple[int, ...]:
    """The set of :func:`representatives` that this one is a rotation of."""
    gaps = np.diff(active, append=active[0] + n).tolist()
    least = min(gaps[s:] + gaps[:s] for s in range(len(gaps)))
    return (0, *itertools.accumulate(least[:-1]))


def notch_inputs(question: Question, active: ndarray) -> ndarray:
    """Inputs [m, 2k+1] that predict sets [m, r] of at most k runs, with every rotation of them in the ball."""
    x = _inputs_beside_centred_biases(question, active)
    x[:, 0] -= math.sqrt(question.n) * question.centred[0]
    return x


def _inputs_beside_centred_biases(question: Question, active: ndarray) -> ndarray:
    """These inputs without what takes away the centre of the biases."""
    x = np.array([notch_polynomial(labels, question.n, question.k) for labels in active])
    x = x.reshape(len(active), question.dft_columns)
    size = question.centred[2] * (1.0 - 1e-12)
    if question.ball.name == "l2":
        return question.ball.scaled(x) * (size / question.box)
    pairs = np.hypot(x[:, 1::2], x[:, 2::2])
    longest = np.max(np.column_stack([np.abs(x[:, 0]), pairs]), axis=1)
    return x * (size / longest)[:, None]


def prove_rotations(question: Question, active: ndarray) -> ndarray:
    """Lower bounds [m] on the radius of every rotation of the sets [m, r] of at most k runs; -∞ where there is none."""
    apart = question.centred[1]
    rows = dft_matrix(question.n, question.k)
    length = math.sqrt(question.dft_columns / question.n) * SLOP  # of every row of the DFT
    out = np.empty(len(active))
    step = max(1, BLOCK // question.n)
    for start in range(0, len(active), step):
        part = active[start : start + step]
        x = _inputs_beside_centred_biases(question, part)
        logits = x @ rows.T
        margins = -logits
        np.put_along_axis(margins, part, np.take_along_axis(logits, part, axis=1), axis=1)
        error = gamma(question.dft_columns + 3) * row_norms(x)[1] * length + TINY
        error += question.entry_error * np.abs(x).sum(axis=1) * SLOP
        room = np.min(margins, axis=1) - error * SLOP - apart
        out[start : start + step] = np.where(room > 0, room, -math.inf)
    return out / (float(question.norms[1].max()) * SLOP) * (1.0 - 8 * U)
