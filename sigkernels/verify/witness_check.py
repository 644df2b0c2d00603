"""Witnesses: what an input of the classifier proves about the radius of a label set.

Part of the checker: nothing here knows how a witness was found.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy import ndarray

from .question import LARGEST, ActiveSets, Question
from .rounding import SLOP, SMALLEST, TINY, U, exact_dots, gamma, norm_upper, row_norms, two_parts

ENOUGH = 1e-8  # of the radius: what exact sums would add to it is not worth them
EXACT_ROWS = 4000  # at most this many rows of one witness are summed exactly


def prove_witnesses(
    question: Question, sets: ActiveSets, which: ndarray, x: ndarray, target: float | ndarray, exact: bool = True
) -> tuple[ndarray, ndarray]:
    """Lower bounds on the radius for witnesses ``x`` [m, d] of the sets ``which`` [m], and whether all signs hold.

    ``target`` ([] or [m]): the radii that matter. One matrix product for many witnesses; rows too close to call are
    summed exactly afterwards, unless ``exact`` is off.
    """
    lo = np.full(len(which), -math.inf)
    holds = np.zeros(len(which), dtype=bool)
    targets = np.broadcast_to(target, (len(which),))
    step = max(1 if question.is_dense else 8, 2_000_000 // question.n)  # rows of a large DFT are made once per part
    for start in range(0, len(which), step):
        part = slice(start, start + step)
        logits = question.logits(x[part])  # [step, n]
        actives = [sets[int(i)] for i in which[part]]
        lo[part], holds[part] = _clear_witnesses(question, actives, x[part], targets[part], logits)
        for row in np.flatnonzero(~holds[part]).tolist() if exact else ():
            at = start + row
            lo[at], holds[at], _ = prove_witness(question, actives[row], x[at], float(targets[at]), logits[row])
    return lo, holds


def _inside(question: Question, x: ndarray) -> ndarray:
    """The factors [m] that bring inputs [m, d] into the ball: 1 for those within."""
    lengths = question.ball.lengths_upper(x)
    return np.where(lengths <= question.box, 1.0, question.box / np.maximum(lengths, question.box) * (1.0 - 8 * U))


@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def _clear_witnesses(
    question: Question, actives: ActiveSets, x: ndarray, target: ndarray, logits: ndarray
) -> tuple[ndarray, ndarray]:
    """The bounds of ``prove_witness`` for many witnesses at once, and for which of them [m] they are proved.

    Only those whose margins all reach ``target`` [m] beyond every rounding error, so that nothing needs an
    exact sum.
    """
    high = question.norms[1]
    margins = -logits
    row = np.repeat(np.arange(len(actives)), [len(a) for a in actives])
    label = np.concatenate([*actives, np.empty(0, dtype=np.int64)]).astype(np.int64)
    margins[row, label] = logits[row, label]
    error = (gamma(question.d + 3) * row_norms(x)[1])[:, None] * high
    if question.bias is not None:
        error += gamma(question.d + 3) * np.abs(question.bias)
    doubt = np.full(len(x), TINY)
    if question.k >= 0:
        doubt += question.entry_error * np.abs(x[:, : question.dft_columns]).sum(axis=1) * SLOP
    margins -= error
    margins -= doubt[:, None]
    rows = high > 0
    lowest = np.min(margins, axis=1, initial=math.inf)
    radius = np.min(np.nan_to_num(margins[:, rows] / high[rows]), axis=1, initial=math.inf)
    inside = _inside(question, x)
    # Without a bias, what predicts the set from outside the ball does so from within, scaled.
    usable = inside == 1.0 if question.bias is not None else np.max(np.abs(x), axis=1, initial=0.0) <= LARGEST
    radius *= inside * (1.0 - 16 * U)
    clear = usable & (lowest > 0) & (radius > SMALLEST) & (radius >= target) & np.isfinite(target)
    return np.where(clear, radius, -math.inf), clear


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # of quotients: norms may be as small as numbers get
def prove_witness(
    question: Question, active: ndarray, x: ndarray, target: float = math.inf, logits: ndarray | None = None
) -> tuple[float, bool, str]:
    """A lower bound on ``min_i y_i(w_i·x + c_i)/‖w_i‖`` in the ball, whether every sign is proved, and why not.

    Rows whose float64 bound falls short of their sign, or of ``target`` where they might reach it, are summed exactly.
    """
    x = x if x.dtype == object else x.astype(np.float64, copy=False)
    malformed = _malformed(question, x)
    if malformed:
        return -math.inf, False, malformed
    if question.k < 0 and (x.dtype == object or np.max(np.abs(x), initial=0.0) > LARGEST):  # logits might overflow
        return _exact_witness(question, active, np.array([Fraction(v) for v in x.tolist()], dtype=object))
    x, rest = two_parts(x) if x.dtype == object else (x, None)
    if logits is None:
        logits = question.logits(x[None, :])[0]
    inside = float(_inside(question, x[None, :])[0])
    margins, error, doubt = _rounded_margins(question, active, x, rest, logits)
    low, high = question.norms
    if math.isfinite(target):
        goal = target / inside * high
        settled = (margins >= goal) | (margins + 2 * error < goal)
    else:
        goal = _reachable(margins, error, low, high)
        goal = np.where(goal > 0, (1.0 - ENOUGH) * goal, goal)
        settled = margins >= goal
    close = np.flatnonzero(~((margins > 0) & settled))
    if 0 < close.size <= EXACT_ROWS and not np.any(margins[close] < -2.0 * SLOP * error[close]):
        sums = _exact_margins(question, active, close, x, rest, doubt, goal)
        if sums is not None:
            margins[close] = sums
    wrong = np.flatnonzero(~(margins > 0))
    if wrong.size:
        reason = f"label {int(wrong[0])} does not provably have its sign at its witness"
        return _negative_radius(margins, low, high) if inside == 1.0 else -math.inf, False, reason
    if inside < 1.0 and question.bias is not None:
        return -math.inf, True, ""  # argmaxable, but this input is outside the ball
    rows = high > 0  # a zero row has its sign by its bias and bounds no ball
    radius = _down(float(np.min(_quotients(margins[rows], high[rows])))) if rows.any() else math.inf
    return radius if inside == 1.0 else _down(radius * inside), True, ""


def _malformed(question: Question, x: ndarray) -> str:
    """Why x is no input of this classifier, or none whose logits could be bounded."""
    if x.shape != (question.d,):
        return f"its witness has shape {x.shape}, expected ({question.d},)"
    if x.dtype != object:
        if not np.all(np.isfinite(x)):
            return "its witness is not finite"
        largest = float(np.max(np.abs(x), initial=0.0))
        return f"its witness holds {largest:g}, too large for a logit" if question.k >= 0 and largest > LARGEST else ""
    if not all(isinstance(v, Fraction) for v in x):
        return "its witness holds something other than Fractions"
    if question.k < 0:
        return ""
    if question.ball.exact_length_upper(x) > Fraction(question.box):
        return f"its exact witness is not among the {question.ball}"
    high, rest = two_parts(x)
    if not all(Fraction(h) + Fraction(r) == v for h, r, v in zip(high.tolist(), rest.tolist(), x, strict=True)):
        return "for a DFT a witness must be a sum of two floats per entry"
    return ""


def _rounded_margins(
    question: Question, active: ndarray, x: ndarray, rest: ndarray | None, logits: ndarray
) -> tuple[ndarray, ndarray, float]:
    """Lower bounds on ``y_i(w_i·x + c_i)`` [n], by how much float64 may have erred, and what of it is the DFT's own.

    ``|fl(w·x + c) - (w·x + c)| ≤ γ_{d+2}(‖w‖‖x‖ + |c|)``, and the rounding of W_dft itself.
    """
    high = question.norms[1]
    margins = -logits
    margins[active] = logits[active]
    error = (gamma(question.d + 3) * norm_upper(x)) * high
    if question.bias is not None:
        error += gamma(question.d + 3) * np.abs(question.bias)
    doubt = TINY
    if question.k >= 0:
        doubt += question.entry_error * float(np.abs(x[: question.dft_columns]).sum()) * SLOP
    error += doubt
    if rest is not None:
        error += 2.0 * norm_upper(rest) * high
    return margins - error, error, doubt


def _negative_radius(margins: ndarray, low: ndarray, high: ndarray) -> float:
    """A lower bound on how far an input is on the wrong side of some label."""
    rows = high > 0
    lengths = np.where(margins < 0, low, high)
    radius = float(np.min(margins[rows] / lengths[rows], initial=math.inf))
    return radius - 8 * U * abs(radius)


def _exact_margins(
    question: Question, active: ndarray, close: ndarray, x: ndarray, rest: ndarray | None, doubt: float, goal: ndarray
) -> ndarray | None:
    """Lower bounds on the margins of the rows ``close``, summed exactly; None where that cannot be done.

    Where the rounding of the DFT decides, its low parts are added to the sums.
    """
    sign = np.where(np.isin(close, active), 1.0, -1.0)
    bias = None if question.bias is None else question.bias[close]
    rows = question.rows(close)
    point = x
    if rest is not None:
        rows, point = np.concatenate([rows, rows], axis=1), np.concatenate([x, rest])
    sums = exact_dots(rows, point, bias)
    if sums is None:
        return None
    margins = sign * sums - 2 * U * np.abs(sums) - doubt * SLOP
    if question.k < 0:
        return margins
    low, high = question.norms[0][close], question.norms[1][close]
    best = float(np.min((margins + 2 * doubt * SLOP) / low))
    wanted = np.minimum(goal[close], max(best, 0.0) * high * SLOP * SLOP)
    blurred = np.flatnonzero((margins < wanted) & (margins > -3 * doubt))
    if blurred.size:
        missing = question.low(close[blurred])
        dft = point[: question.dft_columns]
        parts, points = [rows[blurred], missing], [point, dft]
        if rest is not None:
            parts, points = [*parts, missing], [*points, rest[: question.dft_columns]]
        both = np.concatenate(points)
        exact = exact_dots(np.concatenate(parts, axis=1), both, None if bias is None else bias[blurred])
        if exact is not None:
            left = question.low_error * float(np.abs(both).sum()) * SLOP + TINY
            margins[blurred] = sign[blurred] * exact - 2 * U * np.abs(exact) - left
    return margins


def _reachable(margins: ndarray, error: ndarray, low: ndarray, high: ndarray) -> ndarray:
    """The least margin each row needs so as not to lower the radius: what the lowest row can reach at best."""
    rows = low > 0
    best = float(np.min((margins[rows] + 2 * error[rows]) / low[rows], initial=math.inf))
    return best * high if math.isfinite(best) else np.zeros_like(high)


def _exact_witness(question: Question, active: ndarray, x: ndarray) -> tuple[float, bool, str]:
    """The same for a witness of Fractions, for matrices whose entries are exact."""
    _, high = question.norms
    largest = max((abs(v) for v in x), default=Fraction(0))
    scale = largest or Fraction(1)
    rounded = np.array([float(v / scale) for v in x])
    logits = question.matrix @ rounded
    # The rounded witness settles most rows; the rest are summed as fractions.
    error = gamma(question.d + 6) * norm_upper(rounded) * high + TINY
    settled = high > 0
    if question.bias is not None:
        if 1 / LARGEST < scale < LARGEST:
            bias = question.bias * float(1 / scale)
            logits += bias
            error += gamma(question.d + 6) * np.abs(bias)
        else:
            settled[:] = False
    margins = -logits
    margins[active] = logits[active]
    margins -= error
    settled &= margins > np.maximum(4 * error, 1e-200)
    # Bounds on the radius from the settled rows, lowest first: exact sums go on until no row can lie below.
    bounds = np.full(question.n, -math.inf)
    bounds[settled] = _quotients(margins[settled], high[settled])
    lowest: Fraction | None = None
    for i in np.argsort(bounds, kind="stable").tolist():
        if settled[i]:
            bound = Fraction(_down(float(bounds[i]))) * scale
            if lowest is not None and bound >= lowest:
                break
        logit = sum((Fraction(float(w)) * v for w, v in zip(question.weight[i], x, strict=True)), Fraction(0))
        if question.bias is not None:
            logit += Fraction(float(question.bias[i]))
        margin = logit if i in active else -logit
        if margin <= 0:
            return -math.inf, False, f"label {i} does not have its sign at its witness"
        if high[i] > 0:
            radius = margin / Fraction(float(high[i]))
            lowest = radius if lowest is None else min(lowest, radius)
    length = question.ball.exact_length_upper(x)
    if length > question.box:
        if question.bias is not None:
            return -math.inf, True, ""
        lowest = None if lowest is None else lowest * Fraction(question.box) / length
    return math.inf if lowest is None else _down(lowest), True, ""


def _quotients(margins: ndarray, lengths: ndarray) -> ndarray:
    """``margins / lengths``, the largest float64 where that overflows."""
    return np.nan_to_num(margins / lengths)


def _down(value: Fraction | float) -> float:
    """A float64 no larger than this positive number, which may have been rounded a few times; 0 where it underflows."""
    if value < SMALLEST:
        return 0.0
    try:
        return float(value) * (1.0 - 8 * U)
    except OverflowError:
        return 1e300
