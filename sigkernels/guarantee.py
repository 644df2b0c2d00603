"""What a head promises for every set of r labels, in closed form, whatever its learnable columns are.

Both proofs use the fixed columns alone, with 0 for the slack features. They scale a vector of features x up until it
touches the box ``|x_j| ≤ R``. Label biases lie within h of their middle, which the constant feature takes away; with
margin m before a scaling by t, the ball around the input has radius

    (t·m - h) / max_i ‖w_i‖

**Codes** (``codes.py``): ``m = (1 - (2r-1)μ)/2``, wide, for ``(2r-1)μ < 1``.

**DFT**, r ≤ k runs of neighbouring labels, which r labels have at most, and all but r of them too: the trigonometric
polynomial ``p(t) = ±Π sin((t - τ_m)/2)`` with its 2r roots midway between the labels where the set starts and ends.
Roots are different midpoints, so the roots around a label are at least ½, ½, 3/2, 3/2, … labels away, and
``|p| ≥ Π_{j=1}^{r} sin²((2j-1)π/2n)`` at every label. The columns are orthonormal, so the features have
``‖x‖_∞ ≤ ‖x‖_2 = (Σ_i p(t_i)²)^½ ≤ √n``. Exact, and thin: the margin falls with a power of n for every further label.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from . import codes as code_columns

BOX = 1e4  # the verifier's own default
_UNIT_ROUNDOFF = 2.0**-24  # of float32


@dataclass(frozen=True)
class Guarantee:
    """What holds for every set of ``size`` labels. ``print`` it to read it in words.

    Attributes:
        size: of the sets.
        predictable: whether some input of the classifier matrix predicts each of them.
        radius: of a ball of such inputs with its centre in the box; 0 where none is promised.
        source: the columns that the proof uses: ``"constant"``, ``"codes"``, ``"dft"`` or ``"none"``.
        reachable_in_float32: whether rounding in float32 leaves the signs of the logits as they are.
        box: the bound on the entries of inputs.
        reason: why nothing is promised; empty where something is.

    Example:
        >>> head = sk.DFTHead(300, 1000, k=10, codes=64)
        >>> promised = head.guarantee(3)
        >>> promised.predictable, promised.source, promised.reachable_in_float32
        (True, 'codes', True)
    """

    size: int
    predictable: bool
    radius: float
    source: Literal["constant", "codes", "dft", "none"]
    reachable_in_float32: bool
    box: float = BOX
    reason: str = ""

    def __str__(self) -> str:
        labels = f"sets of {self.size} label{'' if self.size == 1 else 's'}"
        if not self.predictable:
            return f"{labels}: no guarantee for all of them; {self.reason}"
        words = {"constant": "the constant column", "codes": "the codes", "dft": "the DFT columns"}
        width = f"radius at least {self.radius:.3g} in a box of {self.box:g}"
        if not self.radius:
            width = f"but no ball within a box of {self.box:g} is promised"
        if not self.reachable_in_float32:
            width += "; too thin for float32: exact, but no encoder will land there. More codes make wide regions"
        return f"{labels}: every one is predictable by {words[self.source]}, {width}"


def guarantee(
    size: int,
    *,
    num_labels: int,
    k: int,
    codes: int,
    slack: int,
    max_norm: float,
    bias: tuple[float, float] = (0.0, 0.0),
    box: float = BOX,
) -> Guarantee:
    """The best of the closed forms for ``size`` labels.

    ``max_norm`` and ``bias``, the lowest and the highest one, are those of the present head.
    """
    columns = 2 * k + 1 + codes + slack
    options = [
        option
        for option in (
            _constant(size, num_labels, bias, box),
            _codes(size, num_labels, codes, bias, box),
            _dft(size, num_labels, k, bias, box),
        )
        if option is not None
    ]
    if not options:
        return Guarantee(size, False, 0.0, "none", False, box, _why_not(k, codes, num_labels))
    best = max(options, key=lambda option: option.room)
    # |fl(w·x) - w·x| ≤ γ ‖w‖ ‖x‖ with γ ≈ columns · u
    rounding = columns * _UNIT_ROUNDOFF * max_norm * best.feature_norm
    return Guarantee(size, True, max(best.room / max_norm, 0.0), best.source, best.margin > rounding, box)


@dataclass(frozen=True)
class _Proof:
    """How far the logits are from the threshold inside the box; before scaling, the margin and the norm of the features."""

    source: Literal["constant", "codes", "dft"]
    room: float
    margin: float
    feature_norm: float


def _constant(size: int, num_labels: int, bias: tuple[float, float], box: float) -> _Proof | None:
    """The empty set by one negative constant, that of all labels by a positive one."""
    if size not in (0, num_labels):
        return None
    unit = 1 / math.sqrt(num_labels)
    return _Proof("constant", box * unit + (bias[0] if size else -bias[1]), unit, 1.0)


def _codes(size: int, num_labels: int, codes: int, bias: tuple[float, float], box: float) -> _Proof | None:
    found = code_columns.guarantee(size, num_labels, codes, max_norm=1.0, bias=bias, box=box) if size >= 1 else None
    mu = code_columns.coherence(codes, num_labels)
    if found is None or mu is None:
        return None
    constant = math.sqrt(num_labels) * (1 + mu) / 2
    # ‖Σ c_i‖² = Σ_ij c_i·c_j ≤ r + r(r-1)μ
    squared = size + size * (size - 1) * mu
    return _Proof("codes", found.room, found.margin, math.sqrt(constant**2 + squared))


def _dft(size: int, num_labels: int, k: int, bias: tuple[float, float], box: float) -> _Proof | None:
    runs = min(size, num_labels - size)  # at most
    if not 1 <= runs <= k:
        return None
    # The product of many small factors underflows to 0, which promises no ball but still a region.
    logs = sum(2 * math.log(math.sin((2 * j - 1) * math.pi / (2 * num_labels))) for j in range(1, runs + 1))
    limit = box / math.sqrt(num_labels)
    centre, apart = code_columns.middle(bias, limit)
    # The polynomial's own constant feature may have either sign.
    return _Proof("dft", (limit - abs(centre)) * math.exp(logs) - apart, math.exp(logs), math.sqrt(num_labels))


def _why_not(k: int, codes: int, num_labels: int) -> str:
    promised = max(k, code_columns.guaranteed_size(codes, num_labels))
    return (
        f"this head promises sets of up to {promised} labels; give it a larger k or more codes, or ask sk.verify about the "
        "sets that matter"
    )
