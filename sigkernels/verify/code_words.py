"""Closed-form answers for heads with codes: a small set of labels is predictable, with a radius, by a formula.

The features ``u = Σ_{i∈A} c_i`` of the codes and a constant feature predict A (:mod:`sigkernels.codes`): nothing is
solved, and the learnable columns enter by the length of their rows alone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from ..codes import code_witness, coherence, guarantee, guaranteed_size, middle
from .question import Question
from .rounding import SLOP, U


def prove_code_words(question: Question, active: ndarray) -> tuple[float, str]:
    """The radius that the codes promise for this set, rounded down, and "" when they promise one."""
    if not question.codes:
        return -math.inf, "code words prove nothing without codes"
    bias = _bias_range(question)
    longest = float(question.norms[1].max())
    found = guarantee(len(active), question.n, question.codes, max_norm=longest, bias=bias, box=question.box)
    if found is None:
        most = guaranteed_size(question.codes, question.n)
        return -math.inf, f"{len(active)} labels are more than the {most} that these codes promise to predict"
    if question.ball.name == "l2":  # the middle of the biases is not taken away there
        room = _scale_in_l2(question, len(active)) * found.margin * (1 - 16 * U) - max(map(abs, bias))
    else:  # the margin is a multiple of a power of two, exact; a few roundings in the rest, of numbers up to these
        room = found.room - 64 * U * (question.box / math.sqrt(question.n) + abs(bias[0]) + abs(bias[1]))
    if room <= 0:  # scaled up far enough the witness outgrows every bias, but not within the ball
        return -math.inf, ""
    return room / (longest * SLOP * SLOP) * (1 - 4 * U), ""


def _scale_in_l2(question: Question, r: int) -> float:
    """How far the witness of a set of r labels can be scaled up: ``‖Σ c_i‖² ≤ r + r(r-1)μ``, and the constant feature."""
    mu = coherence(question.codes, question.n)
    assert mu is not None
    return question.box / math.sqrt(question.n * ((1 + mu) / 2) ** 2 + r + r * (r - 1) * mu)


def code_points(question: Question, sets: list[ndarray], centred: bool = True) -> ndarray:
    """The witnesses of these sets, as far out as the ball allows, ``[len(sets), d]``: rounded, and not yet proved.

    ``centred``: the constant feature takes away the middle of the biases, in the box.
    """
    x = np.zeros((len(sets), question.d))
    offsets = np.cumsum([0, *map(len, sets)])
    columns = slice(question.dft_columns, question.dft_columns + question.codes)
    x[:, 0], x[:, columns] = code_witness(question.n, question.codes, np.concatenate([*sets, []]).astype(int), offsets)
    if not centred or question.bias is None or question.ball.name == "l2":
        return question.ball.scaled(x)
    root = math.sqrt(question.n)
    shift = root * middle(_bias_range(question), question.box / root)[0]
    longest = np.max(np.abs(x[:, columns]), axis=1, initial=question.codes**-0.5)
    x *= np.minimum((question.box - shift) / -x[:, 0], question.box / longest)[:, None]
    x[:, 0] -= shift
    return question.ball.pulled_in(x)


def _bias_range(question: Question) -> tuple[float, float]:
    return (0.0, 0.0) if question.bias is None else (float(question.bias.min()), float(question.bias.max()))
