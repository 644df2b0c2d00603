"""The cone of a classifier: its rows with unit norm, on the device of the screens.

With a bias the question is made homogeneous: rows ``(w_i, c_i)``, one more label n with the row ``(0, 1)`` that is
active in every set. ``(x, t)`` with ``t > 0`` then stands for the input ``x/t``. One bias for all labels of a DFT is left
out: its constant column takes it away.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..question import ActiveSets, Question
from ..rounding import largest_entries
from .arrays import Array, mT, to_numpy


class Found(NamedTuple):
    """What a solver hands over to be proved: witnesses for some sets, multipliers for others."""

    witness_of: np.ndarray  # [p] numbers of sets
    witness: np.ndarray  # [p, d] inputs of the classifier
    multipliers_of: list[int]
    multipliers: list[tuple[np.ndarray, np.ndarray]]  # (support, λ) per set, for the rows of W


class Cone:
    """Unit rows ``[N, D]`` of a question (N = n, D = d; one more of each with a bias) in the namespace ``xp``.

    ``single``: in float32, to look for witnesses faster. They are proved in float64 like all others; that there is none
    cannot be seen in float32, so no multipliers are handed over.
    """

    question: Question
    xp: Any
    single: bool
    dtype: Any
    bias_scale: float
    norms: Any
    rows: Any
    size: int
    width: int
    gram: Any
    total: Any

    def __init__(self, question: Question, xp: Any = np, single: bool = False):
        self.question, self.xp, self.single = question, xp, single
        self.dtype = xp.float32 if single else xp.float64
        rows = question.matrix
        bias = question.deciding_bias
        if bias is not None:
            # The bias column gets the scale of the rows, so that t is not a direction of its own kind.
            typical = float(np.median(question.norms[1][question.norms[1] > 0], keepdims=False)) if rows.any() else 1.0
            largest = float(np.max(np.abs(bias), initial=0.0))
            self.bias_scale = typical / largest if largest > 0 else 1.0
            last = np.zeros((1, question.d + 1))
            last[0, -1] = 1.0
            rows = np.concatenate([np.column_stack([rows, bias * self.bias_scale]), last])
        largest_entry = largest_entries(rows)
        scaled = rows / largest_entry[:, None]
        length = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))
        self.norms = length * largest_entry  # [N] numpy
        scaled /= length[:, None]
        self.rows = xp.asarray(scaled, dtype=self.dtype)
        self.size, self.width = self.rows.shape
        self.gram = xp.matmul(mT(self.rows), self.rows)
        self.total = xp.sum(self.rows, axis=0)

    def actives(self, sets: ActiveSets, which: np.ndarray) -> list[np.ndarray]:
        """The active rows of each of these sets."""
        lists = [sets[int(i)] for i in which]
        if self.question.deciding_bias is None:
            return lists
        return [np.append(a, self.size - 1) for a in lists]

    def signs(self, actives: list[np.ndarray]) -> Array:
        """±1 [len(actives), N]."""
        y = np.full((len(actives), self.size), -1.0)
        for row, active in enumerate(actives):
            y[row, active] = 1.0
        return self.xp.asarray(y, dtype=self.dtype)

    def inputs(self, x: Array) -> np.ndarray:
        """Points of the cone [p, D] as inputs of the classifier [p, d]: scaled to the ball, or divided by t."""
        points = to_numpy(x).astype(np.float64)
        if self.question.deciding_bias is None:
            return self.question.as_inputs(points)
        t = points[:, -1:] * self.bias_scale
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            out = points[:, :-1] / t
        return np.where(np.isfinite(out), out, 0.0)

    def dependency(self, rows: np.ndarray, hinge: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Multipliers of unit rows as (support, λ) for the rows of W."""
        keep = (hinge > 0) & (rows < self.question.n)
        support, inverse = np.unique(rows[keep], return_index=True)
        return support, (hinge[keep] / self.norms[rows[keep]])[inverse]
