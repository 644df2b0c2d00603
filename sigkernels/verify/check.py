"""The checker: what a certificate proves about a label set, from (W, y, certificate) alone.

Nothing here knows how a certificate was found. Every claim is either combinatorial, exact in rational arithmetic, or
float64 with an error bound that is part of the proof (see :mod:`.rounding`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from .certificate import Certificate, Verdict
from .code_words import prove_code_words
from .question import Question
from .rounding import (
    SLOP,
    SMALLEST,
    TINY,
    U,
    exact_dots,
    gamma,
    norm_upper,
    smallest_singular_value_exceeds,
    two_parts,
    weighted_row_sum,
)
from .witness_check import prove_witness

# Multipliers that leave more than this are refused, even where an exact vector near them can be proved.
CANCELLED = 1e-9


class Proof(NamedTuple):
    """What is proved: ``lo ≤ eps* ≤ hi``, and whether the set is argmaxable (True), is not (False), or neither.

    Example:
        >>> from sigkernels.verify.check import Proof
        >>> Proof(lo=0.1, hi=0.2, argmaxable=True).verdict(tol=1e-8)
        ARGMAXABLE
    """

    lo: float
    hi: float
    argmaxable: bool | None
    reason: str = ""  # why nothing was proved

    def verdict(self, tol: float) -> Verdict:
        """The strongest verdict that this proof carries."""
        if self.argmaxable is False:
            return Verdict.UNARGMAXABLE
        if self.argmaxable:
            return Verdict.ARGMAXABLE if self.lo >= tol else Verdict.THIN
        return Verdict.NOT_EPS if self.hi < tol else Verdict.UNDECIDED


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # what is not finite proves nothing
def prove(question: Question, active: ndarray, certificate: Certificate, target: float = math.inf) -> Proof:
    """What this certificate proves for the set of ``active`` labels (sorted, distinct).

    ``target``: the radius that matters; effort to bound it from below more closely than that is saved.
    """
    lo, hi, argmaxable, reason = trivial_bounds(question, active)
    if argmaxable is False:
        return Proof(lo, hi, argmaxable)
    malformed = _malformed(certificate)
    if malformed:
        return Proof(lo, hi, None, malformed)
    kind = certificate.kind
    if certificate.witness is not None:
        low, signs_hold, reason = prove_witness(question, active, certificate.witness, target)
        lo = max(lo, low)
        if signs_hold:
            argmaxable = True
    elif kind == "witness":
        reason = "it holds no witness"
    if kind == "roots":
        low, reason = _roots(question, active, certificate.roots)
        if not reason:
            lo, argmaxable = max(lo, low), True
    elif kind == "codes":
        low, reason = prove_code_words(question, active)
        if not reason:
            lo, argmaxable = max(lo, low), True
    elif kind == "alternation":
        reason = _alternation(question, active, certificate.support)
        if not reason:
            hi, argmaxable = min(hi, 0.0), False
    if certificate.multipliers is not None and kind != "alternation":
        support, multipliers = certificate.support, certificate.multipliers
        if multipliers.dtype != object:
            multipliers = multipliers.astype(np.float64)
        bad = _bad_multipliers(question, support, multipliers)
        if bad:
            reason = bad
        else:
            assert support is not None
            if kind == "gordan":
                reason = _gordan(question, active, support, multipliers)
                if not reason:
                    argmaxable, hi = False, 0.0
            if argmaxable is not False or question.bias is not None:  # without a bias no bound is below 0
                hi = min(hi, _dual_bound(question, active, support, multipliers))
    elif kind in ("gordan", "dual"):
        reason = "it holds no multipliers"
    if certificate.bounds is not None:
        inner = certificate.bounds
        extra = prove(question, active, Certificate("none", inner.witness, inner.support, inner.multipliers), target)
        lo, hi = max(lo, extra.lo), min(hi, extra.hi)
    if kind not in ("witness", "roots", "codes", "gordan", "alternation", "dual", "none"):
        reason = f"its kind {kind!r} is unknown"
    return Proof(lo, hi, argmaxable, reason)


def _malformed(certificate: Certificate) -> str:
    """Whether it is more than vectors of numbers, so that the proofs below need not ask."""
    if not isinstance(certificate, Certificate):
        return f"its certificate is a {type(certificate).__name__}"
    for name in ("witness", "support", "multipliers", "roots"):
        vector = getattr(certificate, name)
        if vector is None:
            continue
        if not isinstance(vector, np.ndarray) or vector.ndim != 1:
            return f"its {name} is not a vector"
        if vector.dtype.kind not in ("iu" if name in ("support", "roots") else "fiuO") or vector.dtype.itemsize > 8:
            return f"its {name} holds {vector.dtype}"
    if certificate.bounds is not None:
        return _malformed(certificate.bounds)
    return ""


def trivial_bounds(question: Question, active: ndarray) -> Proof:
    """What holds without any certificate: ``x = 0`` is in the ball, one label bounds the ball, and zero rows decide."""
    if question.constant_answer(active).size:
        return Proof(-math.inf if question.bias is not None else 0.0, 0.0, False)
    lo = 0.0 if question.bias is None else -math.inf
    return Proof(lo, question.trivial_radius, None)


# The DFT's own proofs


def _changes(question: Question, active: ndarray) -> ndarray:
    """The labels g whose sign differs from that of g-1 (modulo n), sorted."""
    y = np.zeros(question.n, dtype=bool)
    y[active] = True
    return np.flatnonzero(y != np.roll(y, 1))


def _roots(question: Question, active: ndarray, roots: ndarray | None) -> tuple[float, str]:
    """A radius for ``p(t) = ±Π sin((t-τ_m)/2)``, τ_m midway between the labels g_m - 1 and g_m; "" when it is proved.

    2r ≤ 2k roots make a trigonometric polynomial of degree r ≤ k, so the DFT columns span it, and between two
    neighbouring roots it keeps its sign: nothing is left to rounding.
    """
    if question.k < 0:
        return -math.inf, "roots prove nothing without a DFT part"
    if roots is None or not np.array_equal(roots, _changes(question, active)):
        return -math.inf, "its roots are not the sign changes of the set"
    if len(roots) > 2 * question.k:
        return -math.inf, f"{len(roots)} roots need degree {len(roots) // 2}, and k = {question.k}"
    # |p| ≤ 1, so its coefficients are at most √(2n) and R/√(2n)·p is in the box; the columns are orthonormal, so they
    # have the norm of the n values of p, at most √n, and R/√n·p is in the l2 ball. Between two roots log|p| is concave,
    # so the labels next to the roots have the least |p|. Each of the 2r logarithms has a relative error below 1e-12.
    labels = np.unique(np.concatenate([roots, roots - 1]) % question.n)
    half_steps = np.abs(2 * (labels[:, None] - roots[None, :]) + 1)
    half_steps = np.minimum(half_steps, 2 * question.n - half_steps)
    log_value = np.log(np.sin((math.pi / 2) * half_steps / question.n)).sum(axis=1)
    log_margin = float(np.min(log_value, initial=0.0))
    log_margin -= 0.5 * math.log((1.0 if question.ball.name == "l2" else 2.0) * question.n)
    return radius_of_margin(question, log_margin), ""


def radius_of_margin(question: Question, log_margin: float) -> float:
    """A radius, where an input of the unit ball has ``exp(log_margin)`` for the least logit of the DFT, on its side.

    It is scaled up to the ball that the centre of the biases leaves; -∞ where that does not outgrow what is left of them.
    ``log_margin`` has a relative error below 1e-10.
    """
    _, apart, size = question.centred
    longest = float(question.norms[1].max())
    if size <= 0.0:
        return -math.inf
    log_margin += math.log(size) - 1e-9 * (1.0 + abs(log_margin))
    if apart:
        room = (math.exp(log_margin) if log_margin > -700 else 0.0) - apart
        return room / (longest * (1.0 + 1e-9)) if room > 0.0 else -math.inf
    log_radius = log_margin - math.log(longest) - 1e-9
    return math.exp(log_radius) if log_radius > -700 else 0.0


def _alternation(question: Question, active: ndarray, support: ndarray | None) -> str:
    """2k+2 labels of alternating sign need 2k+2 roots on the circle; a polynomial of degree k has at most 2k."""
    if not question.is_pure_dft:
        return "alternations decide only a DFT without slack, with one bias for all labels or none"
    if support is None or len(support) < 2 * question.k + 2:
        return f"it does not name the {2 * question.k + 2} labels that are needed"
    if support.min() < 0 or support.max() >= question.n:
        return "it names labels that do not exist"
    signs = np.isin(support, active)
    if np.any(np.diff(support) <= 0) or np.any(signs[1:] == signs[:-1]):
        return "the signs of its labels do not alternate"
    return ""


# Multipliers


def _bad_multipliers(question: Question, support: ndarray | None, multipliers: ndarray) -> str:
    if support is None or support.shape != multipliers.shape:
        return "support and multipliers must be two vectors of one length"
    if support.size == 0:
        return "its support is empty"
    if support.min() < 0 or support.max() >= question.n:
        return "its support names labels that do not exist"
    if np.unique(support).size != support.size:
        return "its support names a label twice"
    if multipliers.dtype == object:
        exact = all(isinstance(v, Fraction) and v > 0 for v in multipliers)
        return "" if exact else "its multipliers are not all positive Fractions"
    if not np.all(np.isfinite(multipliers)) or not np.all(multipliers > 0):
        return "its multipliers are not all positive and finite"
    return ""


def _signed_rows(question: Question, active: ndarray, support: ndarray) -> tuple[ndarray, ndarray | None]:
    sign = np.where(np.isin(support, active), 1.0, -1.0)
    bias = None if question.bias is None else sign * question.bias[support]
    return sign[:, None] * question.rows(support), bias


def _gordan(question: Question, active: ndarray, support: ndarray, multipliers: ndarray) -> str:
    """Prove that some λ ≥ 0, λ ≠ 0 has ``Σ λ_i y_i w_i = 0`` and ``Σ λ_i y_i c_i ≤ 0`` (Gordan); "" when it is proved.

    Let ``b_i = λ_i y_i (w_i, c_i)``, with one more row (0, μ) when there is a bias (``μ ≥ 0`` takes up the slack of the
    inequality). One bias for all labels of a DFT counts for nothing: its constant column takes it away. Changing λ_i to λ_i(1+δ_i) with ``|δ_i| < 1`` keeps it positive, and ``Bᵀδ = -Bᵀ1`` has a solution with
    ``‖δ‖ ≤ ‖Bᵀ1‖/σ_min(B)``. So ``‖Bᵀ1‖ < σ_min(B)`` proves it, with both sides bounded rigorously.
    """
    rows, bias = _signed_rows(question, active, support)
    bias = None if question.deciding_bias is None else bias
    if multipliers.dtype == object:
        return _exact_gordan(question, rows, bias, multipliers)
    # Rows get norm near 1 and multipliers follow: powers of two, so nothing is rounded unless it underflows.
    if bias is not None:
        rows = np.concatenate([rows, bias[:, None]], axis=1)
    entries = np.count_nonzero(rows)
    exponent = np.frexp(np.max(np.abs(rows[:, : question.d]), axis=1, initial=0.0))[1]
    rows, multipliers = np.ldexp(rows, -exponent[:, None]), np.ldexp(multipliers, exponent)
    multipliers = np.ldexp(multipliers, -np.frexp(multipliers.max())[1])
    if np.count_nonzero(rows) != entries or not np.all(multipliers > 0):
        return "numbers too large or too small for exact sums"
    total, error = weighted_row_sum(rows, multipliers)
    if not np.all(np.isfinite(error)):
        return "numbers too large or too small for exact sums"
    if question.k < 0 and _sums_to_zero(rows, multipliers, total, bias is not None):
        return ""
    residual = np.abs(total) + error
    blur = np.zeros(len(rows))  # of every DFT entry of a row of B
    if question.k >= 0:
        blur = np.ldexp(multipliers, -exponent) * question.entry_error
    residual[: question.dft_columns] += float(blur.sum()) * SLOP
    scaled = rows * multipliers[:, None]
    if bias is not None:
        slack = max(0.0, -float(total[-1]))
        if slack > 0:  # this row makes the last column vanish too
            extra = np.zeros((1, scaled.shape[1]))
            extra[0, -1] = slack
            scaled = np.concatenate([scaled, extra])
            residual[-1] = abs(total[-1] + slack) + error[-1]
    frobenius = norm_upper(scaled.ravel())
    if float(np.max(residual)) > CANCELLED * frobenius:
        return "the weighted rows do not cancel"
    rounding = 2 * U * frobenius + norm_upper(blur) * math.sqrt(max(1, question.dft_columns)) * SLOP
    if smallest_singular_value_exceeds(scaled, norm_upper(residual), rounding):
        return ""
    return "the multipliers do not prove an exact dependency: the residual is too large for the smallest singular value"


def _sums_to_zero(rows: ndarray, multipliers: ndarray, total: ndarray, has_bias: bool) -> bool:
    """Whether the float64 multipliers are themselves exact (duplicates, zero rows, integers)."""
    d = rows.shape[1] - has_bias
    if np.any(total[:d]) or (has_bias and total[d] > 0):
        return False
    sums = exact_dots(np.ascontiguousarray(rows.T), multipliers)
    return sums is not None and not np.any(sums[:d]) and not (has_bias and sums[d] > 0)


def _exact_gordan(question: Question, rows: ndarray, bias: ndarray | None, multipliers: ndarray) -> str:
    if question.k >= 0:
        return "exact multipliers mean nothing for the irrational DFT"
    for j in range(rows.shape[1]):
        if sum((Fraction(float(v)) * m for v, m in zip(rows[:, j], multipliers, strict=True)), Fraction(0)):
            return f"the weighted rows do not cancel in column {j}"
    offsets = () if bias is None else zip(bias, multipliers, strict=True)
    if sum((Fraction(float(v)) * m for v, m in offsets), Fraction(0)) > 0:
        return "the weighted biases are positive"
    return ""


def _dual_bound(question: Question, active: ndarray, support: ndarray, multipliers: ndarray) -> float:
    """``(R·‖Σ λ_i y_i w_i‖* + Σ λ_i y_i c_i) / Σ λ_i‖w_i‖``, rounded up: no input of the ball has a larger margin.

    ``‖·‖*`` is the dual norm of the ball: ``‖·‖₁`` for the box, ``‖·‖₂`` for the l2 ball.
    """
    # Any positive multipliers will do, so what two floats cannot hold is dropped.
    if multipliers.dtype == object:
        largest = max(multipliers)
        high, low = two_parts(m / largest for m in multipliers)
    else:
        high = np.ldexp(multipliers, -np.frexp(multipliers.max())[1])
        low = np.zeros(0)
    keep = high > 0
    support, high, low = support[keep], high[keep], low[keep] if low.size else low
    rows, bias = _signed_rows(question, active, support)
    weights = [high, low] if low.size else [high]
    total, error = weighted_row_sum(np.concatenate([rows] * len(weights)), np.concatenate(weights))
    blur = float(high.sum()) * question.entry_error * SLOP * SLOP
    spread = question.ball.dual_norm_upper(np.abs(total) + error)
    if blur * question.dft_columns > 1e-8 * spread:  # the rounding of the DFT matters here: use what it left out
        missing = np.zeros(rows.shape)
        missing[:, : question.dft_columns] = question.low(support)
        missing[~np.isin(support, active)] *= -1.0
        stacked = np.concatenate([rows] * len(weights) + [missing] * len(weights))
        total, error = weighted_row_sum(stacked, np.concatenate(weights * 2))
        blur = float(high.sum()) * question.low_error * SLOP * SLOP
    reach = np.abs(total) + error
    reach[: question.dft_columns] += blur
    bound = question.box * question.ball.dual_norm_upper(reach) * (1.0 + 4 * U)
    if bias is not None:
        value, slack = weighted_row_sum(np.concatenate([bias] * len(weights))[:, None], np.concatenate(weights))
        bound += float(value[0]) + float(slack[0])
        bound += 4 * U * (abs(bound) + float(slack[0]))
    # A positive bound is divided by the least possible weight, a negative one by the greatest.
    weight = float(high @ question.norms[0 if bound >= 0 else 1][support])
    rounding = 1.0 + gamma(len(high) + 8) if weight > TINY else SLOP * SLOP  # tiny numbers round more coarsely
    weight = weight / rounding if bound >= 0 else weight * rounding
    if not 0 < weight < math.inf or not math.isfinite(bound):
        return math.inf
    ratio = bound / weight
    return max(ratio + SLOP * 4 * U * ratio, SMALLEST) if bound >= 0 else ratio - SLOP * 4 * U * ratio
