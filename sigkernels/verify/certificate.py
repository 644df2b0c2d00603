"""What a verdict is and what proves it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from numpy import ndarray


class Verdict(str, Enum):
    """Can the classifier predict this label set? Each answer compares equal to its name as a string.

    Example:
        >>> sk.Verdict.ARGMAXABLE == "ARGMAXABLE"
        True
    """

    ARGMAXABLE = "ARGMAXABLE"  # yes, with a ball of radius ≥ tol of inputs (in the box) that do
    THIN = "THIN"  # yes, but no such ball is known: the region is smaller, or outside the box
    NOT_EPS = "NOT_EPS"  # no ball of radius tol exists; whether a smaller region does is not known
    UNARGMAXABLE = "UNARGMAXABLE"  # no, for no input at all
    UNDECIDED = "UNDECIDED"  # nothing was proved

    def __str__(self) -> str:
        return self.value

    __repr__ = __str__
    __hash__ = str.__hash__


@dataclass(frozen=True, eq=False)
class Certificate:
    """The vectors that prove one line of a report; ``kind`` says how they are read.

    =============  ==============================================================================================
    witness        ``witness`` x: every label has its sign at x
    roots          DFT part only: ``roots`` are the labels g with a sign change between g-1 and g (modulo n), at most 2k
                   of them; the trigonometric polynomial with a root in each of these gaps has the signs of the set
    codes          codes only: the set is small enough for the closed form of the codes, and so holds no vectors
    gordan         ``multipliers`` λ > 0 on the labels ``support``; near λ a vector makes ``Σ λ_i y_i w_i`` vanish
    alternation    DFT without slack: ``support`` are 2k+2 labels of alternating sign, more than degree k can follow
    dual           ``multipliers`` on ``support`` bound the radius from above, and no more
    none           nothing is proved
    =============  ==============================================================================================

    A certificate may hold both a witness and multipliers; then it bounds the radius from both sides. Vectors are
    float64, or arrays of exact ``fractions.Fraction`` where float64 is too coarse.

    Example:
        >>> sk.verify(np.eye(3), [[0, 2]]).certificate(0).kind
        'witness'
    """

    kind: str = "none"
    witness: ndarray | None = None  # [d]
    support: ndarray | None = None  # [p] int64, labels
    multipliers: ndarray | None = None  # [p]
    roots: ndarray | None = None  # [2r] int64
    bounds: Certificate | None = None  # vectors that bound the radius more closely than those of the proof
