"""Closed-form answers for heads with codes: a small set of labels is predictable, with a radius, by a formula.

The features ``u = Σ_{i∈A} c_i`` of the codes and a constant feature predict A (:mod:`sigkernels.codes`): nothing is
solved, and the learnable columns enter by the length of their rows alone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from ..codes import code_witness, guarantee, guaranteed_size
from .question import Question
from .rounding import SLOP, U


def prove_code_words(question: Question, active: ndarray) -> tuple[float, str]:
    """The radius that the codes promise for this set, rounded down, and "" when they promise one."""
    if not question.codes:
        return -math.inf, "code words prove nothing without codes"
    largest = 0.0 if question.bias is None else float(np.max(np.abs(question.bias)))
    found = guarantee(
        len(active), question.n, question.codes, max_norm=float(question.norms[1].max()), box=question.box
    )
    if found is None:
        most = guaranteed_size(question.codes, question.n)
        return -math.inf, f"{len(active)} labels are more than the {most} that these codes promise to predict"
    # A few roundings in the scale and in what follows; the margin is a multiple of a power of two, exact.
    room = found.scale * found.margin * (1 - 16 * U) - largest
    if room <= 0:  # scaled up far enough the witness outgrows every bias, but not within the box
        return -math.inf, ""
    return room / (float(question.norms[1].max()) * SLOP * SLOP) * (1 - 4 * U), ""


def code_points(question: Question, sets: list[ndarray]) -> ndarray:
    """The witnesses of these sets, scaled to the box, ``[len(sets), d]``: rounded, so to be proved where that matters."""
    x = np.zeros((len(sets), question.d))
    offsets = np.cumsum([0, *map(len, sets)])
    columns = slice(question.dft_columns, question.dft_columns + question.codes)
    x[:, 0], x[:, columns] = code_witness(question.n, question.codes, np.concatenate([*sets, []]).astype(int), offsets)
    x *= question.box / np.max(np.abs(x), axis=1, keepdims=True)
    return np.clip(x, -question.box, question.box)
