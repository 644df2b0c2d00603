"""The question: a classifier ``z = W x + c``, a ball of inputs, and the label sets to decide, in numpy."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import numpy as np
from numpy import ndarray

from ..codes import code_rows, middle
from ..labels import LabelSets
from .circle import LOW_ERROR, dft_low
from .input_ball import BALLS, InputBall
from .rounding import SLOP, U, gamma, row_blocks, row_norms
from .rules import DecisionRule


@lru_cache(maxsize=2)
def unit_circle(n: int) -> tuple[ndarray, ndarray]:
    """``cos(2πm/n), sin(2πm/n)`` for m = 0 … n-1, each within ``12u`` of the true value.

    Angles are folded into the first octant in integers, so that no rounding of the angle exceeds a few units of u.
    """
    m = np.arange(n, dtype=np.int64)
    below = np.minimum(m, n - m)  # the angle is π·a/n with a = 2·below in [0, n]
    a = 2 * below
    left = 2 * a > n
    a = np.where(left, n - a, a)
    steep = 4 * a > n  # beyond 45 degrees: cos θ = sin(π/2 - θ)
    angle = np.where(steep, math.pi * (n - 2 * a) / (2 * n), math.pi * a / n)
    c, s = np.cos(angle), np.sin(angle)
    cos, sin = np.where(steep, s, c), np.where(steep, c, s)
    return np.where(left, -cos, cos), np.where(m > n - m, -sin, sin)


def dft_matrix(n: int, k: int, labels: ndarray | None = None) -> ndarray:
    """Rows of the truncated DFT ``W_dft`` [n, 2k+1] in float64, each entry within ``DFT_ERROR·√(2/n)`` of the truth."""
    cos, sin = unit_circle(n)
    scale = math.sqrt(2.0 / n)
    labels = np.arange(n, dtype=np.int64) if labels is None else np.asarray(labels, dtype=np.int64)
    out = np.empty((len(labels), 2 * k + 1))
    out[:, 0] = math.sqrt(1.0 / n)
    for j in range(1, k + 1):
        index = (j * labels) % n
        out[:, 2 * j - 1] = scale * cos[index]
        out[:, 2 * j] = scale * sin[index]
    return out


ActiveSets = list[ndarray]  # the sorted labels of each set
DFT_ERROR = 16 * U
BLOCK = 10_000_000  # entries of W that are made at a time where it is not
MADE = 2_000  # rows of W that are put together at a time
DENSE = 100_000_000  # entries of W up to which the matrix of a DFT head is formed as a whole
LARGEST = 2.0**450  # of all numbers in a computation: what is made of products of two of them does not overflow


def _within_range(weight: ndarray, bias: ndarray | None, k: int) -> tuple[ndarray, ndarray | None, int]:
    """The same question in float64 with no number beyond ``LARGEST``, and not all of them tiny.

    One power of two, whose exponent comes last, for W and the bias: nothing is rounded, and neither radii nor proofs
    change.
    """
    weight = np.ascontiguousarray(weight, dtype=np.float64)
    bias = None if bias is None else np.ascontiguousarray(bias, dtype=np.float64)
    given = [weight] if bias is None else [weight, bias]
    largest = max(max(float(a.max(initial=0.0)), -float(a.min(initial=0.0))) for a in given)
    if largest == 0.0 or 1 / LARGEST <= largest <= LARGEST or (k >= 0 and largest < 1.0):
        return weight, bias, 0
    if k >= 0:  # the scale of the DFT is given
        name = "slack_weight" if np.max(np.abs(weight), initial=0.0) == largest else "bias"
        raise ValueError(f"{name} holds {largest:g}; beside a DFT numbers up to {LARGEST:.0e} are verified: rescale it")
    exponent = math.frexp(largest)[1]
    shift = -exponent if largest < 1.0 else 450 - exponent
    scaled = [np.ldexp(a, shift) for a in given]
    if not all(np.array_equal(np.ldexp(s, -shift), a) for s, a in zip(scaled, given, strict=True)):
        smallest = min(float(np.min(np.abs(a[a != 0]), initial=math.inf)) for a in given)
        raise ValueError(
            f"head_or_matrix and bias range from {smallest:g} to {largest:g}, too far for float64; "
            "scale each label's row and bias by a number of its own, which changes no answer"
        )
    return scaled[0], None if bias is None else scaled[1], shift


def _shifted(bias: ndarray | None, rule: DecisionRule, n: int) -> ndarray | None:
    """The bias [n] minus what the rule compares logits with, rounded to float64; None where nothing is left."""
    logit = rule.logit()
    if not np.any(logit):
        return bias
    shifted = np.broadcast_to(0.0 if bias is None else bias, (n,)) - logit
    return shifted if np.any(shifted) else None


def _typical_norm(weight: ndarray) -> float:
    """The power of two nearest to the median norm of the rows that are not zero; 1 where there is none."""
    norms = row_norms(weight)[1]
    norms = norms[norms > 0]
    return 2.0 ** round(math.log2(float(np.median(norms)))) if norms.size else 1.0


class Question:
    """``z = [W_dft(n, k) | C | weight] x + bias`` on n labels, inputs in a ball of size ``box``; ``k = -1`` without a DFT part.

    ``C`` are ``codes`` columns of codes, 0 or more, beside a DFT part; their entries are powers of two and exact.

    The stored ``weight`` and ``bias`` are taken as exact numbers (times one power of two, where they are huge or tiny:
    a question of signs). The DFT part means the true (irrational) matrix; its
    float64 rounding is used in computations and its error enters every proof. A threshold of the rule is part of the
    bias; one that is free is a last column of W, constant and as long as a typical row. With the domain
    ``"nonnegative"`` the rows ``labels … n-1`` stand for the features. ``ball`` names the norm: ``"box"`` or ``"l2"``.
    """

    stored: ndarray  # [n, s], as it came in
    stored_bias: ndarray | None  # [n]
    n: int
    k: int
    weight: ndarray
    bias: ndarray | None
    exponent: int  # of the power of two by which these two are multiplied
    dft_columns: int
    codes: int
    inputs: int  # features of the classifier
    threshold_unit: float  # the entries of the threshold's column
    labels: int
    domain: str
    d: int
    tol: float
    box: float
    ball: InputBall  # of this size: the inputs that count
    entry_error: float  # of the DFT columns in float64
    low_error: float  # … together with their low parts

    def __init__(
        self,
        weight: ndarray,
        bias: ndarray | None,
        k: int,
        tol: float,
        box: float,
        rule: DecisionRule = DecisionRule(),  # noqa: B008 (frozen)
        codes: int = 0,
        domain: str = "all",
        ball: str = "box",
    ):
        self.stored, self.stored_bias = weight, bias
        self.rule = rule
        self.n = weight.shape[0]
        self.k = k
        self.weight, self.bias, self.exponent = _within_range(weight, _shifted(bias, rule, self.n), k)
        self.dft_columns = 2 * k + 1 if k >= 0 else 0
        self.codes = codes
        self.inputs = self.dft_columns + codes + weight.shape[1]
        self.threshold_unit = 0.0
        if rule.is_free and k < 0:  # the first column of a DFT is constant already
            self.threshold_unit = _typical_norm(self.weight)
            self.weight = np.column_stack([self.weight, np.full(self.n, self.threshold_unit)])
        self.labels = self.n
        self.domain = domain
        if domain == "nonnegative":
            self._add_rows_of_the_domain()
        self.d = self.dft_columns + codes + self.weight.shape[1]
        self.tol = float(tol)
        self.box = float(box)
        self.ball = BALLS[ball](self.box)
        self.entry_error = DFT_ERROR * math.sqrt(2.0 / self.n) if k >= 0 else 0.0
        self.low_error = LOW_ERROR * math.sqrt(2.0 / self.n) if k >= 0 else 0.0

    def _add_rows_of_the_domain(self) -> None:
        """One more row for each feature: ``x_j > 0`` is a label that belongs to every set.

        Strict signs of all logits hold in a neighbourhood, so ``x_j ≥ 0`` and ``x_j > 0`` allow the same sets.
        """
        rows = np.eye(self.inputs, self.weight.shape[1]) * _typical_norm(self.weight)
        self.weight = np.concatenate([self.weight, rows])
        self.bias = None if self.bias is None else np.append(self.bias, np.zeros(self.inputs))
        self.n += self.inputs

    def with_domain(self, sets: ActiveSets) -> ActiveSets:
        """The sets with the rows of the domain, which belong to each of them."""
        if self.n == self.labels:
            return sets
        return [np.append(active, np.arange(self.labels, self.n)) for active in sets]

    @cached_property
    def matrix(self) -> ndarray:
        """W [n, d] in float64."""
        if self.k < 0:
            return self.weight
        return self._made_rows(np.arange(self.n))

    def _made_rows(self, labels: ndarray) -> ndarray:
        out = np.empty((len(labels), self.dft_columns + self.codes + self.weight.shape[1]))
        for start in range(0, len(labels), MADE):  # the parts stay in the cache
            some = labels[start : start + MADE]
            parts = [dft_matrix(self.n, self.k, some), code_rows(self.codes, some), self.weight[some]]
            np.concatenate(parts, axis=1, out=out[start : start + MADE])
        return out

    @property
    def is_dense(self) -> bool:
        """Whether W may be held in memory: always for a plain matrix, which is there already."""
        return self.k < 0 or self.n * self.d <= DENSE

    def rows(self, labels: ndarray) -> ndarray:
        """These rows of W [p, d]."""
        if self.is_dense:
            return self.matrix[labels]
        return self._made_rows(labels)

    def low(self, labels: ndarray) -> ndarray:
        """What the DFT columns of these rows lack in float64 [p, 2k+1]; nothing without a DFT part."""
        if self.k < 0:
            return np.zeros((len(labels), 0))
        return dft_low(self.n, self.k, labels, self.rows(labels)[:, : self.dft_columns])

    def logits(self, x: ndarray) -> ndarray:
        """``W x + c`` for inputs [m, d] → [m, n]; a large DFT is made in blocks of labels."""
        if self.is_dense:
            out = x @ self.matrix.T
        else:
            out = np.empty((len(x), self.n))
            step = max(1, BLOCK // self.d)
            for start in range(0, self.n, step):
                labels = np.arange(start, min(self.n, start + step))
                out[:, labels] = x @ self.rows(labels).T
        return out if self.bias is None else out + self.bias

    @cached_property
    def norms(self) -> tuple[ndarray, ndarray]:
        """Lower and upper bounds on ``‖w_i‖`` [n]."""
        if self.k < 0:
            return row_norms(self.matrix)
        low, high = row_norms(self.weight)  # a row of the DFT has norm √((2k+1)/n) exactly
        fixed = self.dft_columns / self.n + (self.codes > 0)  # and one of the codes 1
        return np.sqrt(low * low + fixed) / (SLOP * SLOP), np.sqrt(high * high + fixed) * SLOP * SLOP

    @cached_property
    def zero_rows(self) -> ndarray:
        """The labels whose row of W is zero [q]: their logit is their bias, whatever the input."""
        if self.k >= 0:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(~np.any(self.weight, axis=1))

    @cached_property
    def is_pure_dft(self) -> bool:
        """Whether logits are trigonometric polynomials of degree k: no slack (or zeros), no bias (or a constant)."""
        return self.k >= 0 and self.deciding_bias is None and not self.codes and not self.weight.any()

    @cached_property
    def deciding_bias(self) -> ndarray | None:
        """The bias [n], where it decides what is possible: beside the constant column of a DFT one for all labels does not."""
        uniform = self.k >= 0 and self.bias is not None and bool(np.all(self.bias == self.bias[0]))
        return None if uniform else self.bias

    @cached_property
    def centred(self) -> tuple[float, float, float]:
        """(centre, apart, size): what the constant column of a DFT takes away of every bias, and what is left.

        With ``-√n·centre`` more of the first feature no bias lies further than ``apart`` from 0, and all features of an
        input in the ball of ``size`` may be added to it. The last two are rounded to the safe side.
        """
        if self.bias is None:
            return 0.0, 0.0, self.box
        root = math.sqrt(self.n)
        centre, apart = middle((float(self.bias.min()), float(self.bias.max())), self.box / root)
        return centre, apart * SLOP, self.box * (1.0 - 1e-12) - root * abs(centre) * (1.0 + 1e-12)

    def as_inputs(self, points: ndarray) -> ndarray:
        """Points [p, d] of the cone of a question without a deciding bias, as far out as the ball allows.

        The constant column takes the bias away; where that leaves no room in the ball they lie beyond.
        """
        if self.bias is None:
            return self.ball.scaled(points)
        shift, size = math.sqrt(self.n) * float(self.bias[0]), self.centred[2]
        out = self.ball.scaled(points) * ((size if size > 0.0 else max(self.box, abs(shift))) / self.box)
        out[:, 0] -= shift
        return self.ball.pulled_in(out) if size > 0.0 else out

    @cached_property
    def trivial_radius(self) -> float:
        """An upper bound on every radius: no ball in the box is wider than one label allows."""
        low = self.norms[0]
        rows = low > 0
        if not rows.any():
            return math.inf
        with np.errstate(over="ignore"):
            radius = self._reach()[rows]
            if self.bias is not None:
                radius = radius + np.abs(self.bias[rows]) / low[rows]
        return float(np.min(radius)) * SLOP * (1.0 + gamma(self.d + 4))

    def _reach(self) -> ndarray:
        """How far from 0 the logits without bias can come within the ball, in units of ``‖w_i‖`` [n]; inf for zero rows."""
        if self.ball.name == "l2":
            return np.where(self.norms[0] > 0, self.ball.size, math.inf)
        reach = np.zeros(self.n)  # size · reach might underflow: the size comes last
        for part in row_blocks(self.weight):
            reach[part] = np.abs(self.weight[part]).sum(axis=1)
        if self.k >= 0:
            reach = reach + self.dft_columns * math.sqrt(2.0 / self.n) + math.sqrt(self.codes)
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.ball.size * (reach / self.norms[0])

    def constant_answer(self, active: ndarray) -> ndarray:
        """The labels with a zero row whose bias contradicts this set [q]: any one of them decides it."""
        if self.zero_rows.size == 0:
            return self.zero_rows
        if self.bias is None:
            return self.zero_rows
        sign = np.where(np.isin(self.zero_rows, active), 1.0, -1.0)
        return self.zero_rows[sign * self.bias[self.zero_rows] <= 0]


def active_labels(labels: LabelSets) -> ActiveSets:
    """The sorted labels of each set."""
    return np.split(labels.indices.cpu().numpy(), labels.offsets[1:-1].cpu().numpy()) if len(labels) else []


def distinct_sets(sets: ActiveSets) -> tuple[ActiveSets, ndarray]:
    """Each different set once, in order of first appearance, and where each of the given sets went [m]."""
    place: dict[bytes, int] = {}
    inverse = np.array([place.setdefault(active.tobytes(), len(place)) for active in sets], dtype=np.int64)
    first = np.unique(inverse, return_index=True)[1]
    return [sets[i] for i in first.tolist()], inverse
