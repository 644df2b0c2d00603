"""Closed-form answers for the truncated DFT: no linear programming, any n.

A set with r runs of active labels around the circle changes sign 2r times. A trigonometric polynomial of degree k has
at most 2k roots, and one with a root in each of the 2r gaps has the signs of the set: so a set is argmaxable by the
DFT columns alone exactly when r ≤ k, and the gaps are the proof. The polynomials below also give coefficients that
work in float64.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from .certificate import Certificate
from .code_words import code_points
from .question import ActiveSets, Question


def runs_of(active: ndarray, n: int) -> list[tuple[int, int]]:
    """The runs of neighbouring active labels around the circle as (first label, length); none for the full set."""
    if len(active) in (0, n):
        return []
    first = active[np.flatnonzero(np.diff(active, prepend=active[-1] - n) != 1)]
    ends = np.flatnonzero(np.diff(active, append=active[0] + n) != 1)
    last = active[ends] if first[0] <= active[ends[0]] else np.roll(active[ends], -1)
    return [(int(a), int((b - a) % n) + 1) for a, b in zip(first, last, strict=True)]


def roots_certificate(active: ndarray, n: int) -> Certificate:
    """The gaps between labels where the sign changes, as a proof."""
    y = np.zeros(n, dtype=bool)
    y[active] = True
    return Certificate(kind="roots", roots=np.flatnonzero(y != np.roll(y, 1)))


def alternation_certificate(active: ndarray, n: int, k: int) -> Certificate:
    """2k+2 labels of alternating sign, for a set with more than k runs."""
    y = np.zeros(n, dtype=bool)
    y[active] = True
    changes = np.flatnonzero(y[1:] != y[:-1]) + 1
    return Certificate(kind="alternation", support=np.concatenate([[0], changes])[: 2 * k + 2].astype(np.int64))


def _fejer(t: ndarray, degree: int) -> ndarray:
    """The Fejér kernel of this degree, 1 at t = 0."""
    half = np.sin(t / 2)
    small = np.abs(half) < 1e-12
    ratio = np.sin((degree + 1) * t / 2) / ((degree + 1) * np.where(small, 1.0, half))
    return np.where(small, 1.0, ratio) ** 2


def notch_polynomial(active: ndarray, n: int, k: int) -> ndarray:
    """Coefficients x [2k+1] of ``p(t) = -Π_i f_i(t)``, f_i negative within run i and positive elsewhere.

    Spare degree goes into Fejér notches, ``f = 1 - K(t-c)/K(h)`` with half-width h, which stay near 1 away from their
    run: p then keeps its size instead of vanishing like a product of many sines. A run too wide for a notch, or one
    without spare degree, gets ``sin((t-a)/2) sin((t-b)/2)``.
    """
    runs = runs_of(active, n)
    x = np.zeros(2 * k + 1)
    if not runs:
        x[0] = math.sqrt(n) if len(active) else -math.sqrt(n)
        return x
    spare = k // len(runs)
    half_width = np.array([math.pi * length / n for _, length in runs])
    centre = np.array([2 * math.pi * (start + (length - 1) / 2) / n for start, length in runs])
    narrow = _fejer(half_width, spare) > 0.2
    if spare < 2:
        narrow[:] = False
    degree = np.ones(len(runs), dtype=np.int64)
    if narrow.any():
        for_notches = k - int((~narrow).sum())
        degree[narrow] = for_notches // int(narrow.sum())
        degree[np.flatnonzero(narrow)[: for_notches - int(degree[narrow].sum())]] += 1
        narrow &= (_fejer(half_width, int(degree.max())) > 0.1) & (degree > 1)
        degree[~narrow] = 1

    samples = 1 << (2 * k + 2).bit_length()
    t = 2 * math.pi * np.arange(samples) / samples
    value = np.full(samples, -1.0)
    for m in np.unique(degree):
        notched = narrow & (degree == m)
        if notched.any():
            kernel = _fejer(t[None, :] - centre[notched, None], int(m))
            value *= np.prod(1.0 - kernel / _fejer(half_width[notched], int(m))[:, None], axis=0)
    for c, h in zip(centre[~narrow], half_width[~narrow], strict=True):
        value *= np.sin((t - c + h) / 2) * np.sin((t - c - h) / 2)
    coefficients = np.fft.rfft(value)[: k + 1] / samples
    x[0] = math.sqrt(n) * coefficients[0].real
    x[1::2] = math.sqrt(2 * n) * coefficients[1:].real
    x[2::2] = -math.sqrt(2 * n) * coefficients[1:].imag
    return x


def notch_points(question: Question, sets: ActiveSets, centred: bool = True) -> ndarray:
    """Inputs [m, d] with the coefficients of these polynomials, as far out as the ball allows: rounded, and not yet proved.

    ``centred``: the first column, which is constant, takes up what is common to the biases.
    """
    common = float(np.median(question.bias)) if centred and question.bias is not None else 0.0
    shift = -min(max(math.sqrt(question.n) * common, -question.box), question.box)
    x = np.zeros((len(sets), question.d))
    for row, active in zip(x, sets, strict=True):
        row[: question.dft_columns] = notch_polynomial(active, question.n, question.k)
    x = question.ball.scaled(x) * (1.0 - abs(shift) / question.box)
    x[:, 0] += shift
    return question.ball.pulled_in(x)


def closed_form_input(question: Question, kind: str, active: ndarray) -> ndarray:
    """The input [d] that a proof by ``"roots"`` or ``"codes"`` is about, rounded.

    It lies in the ball where it outgrows the biases there, and beyond the ball else.
    """
    points = code_points if kind == "codes" else notch_points
    x = points(question, [active])
    if question.bias is None:
        return x[0]
    sign = np.full(question.n, -1.0)
    sign[active] = 1.0
    if np.min(sign * question.logits(x)[0]) > 0.0:
        return x[0]
    x = points(question, [active], centred=False)
    least = float(np.min(sign * (question.logits(x)[0] - question.bias)))
    return x[0] * (2.0 * float(np.max(np.abs(question.bias))) / least if least > 0.0 else 1.0)
