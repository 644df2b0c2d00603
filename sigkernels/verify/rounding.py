"""Floating-point arithmetic with proofs: error-free transforms and the error bounds built on them.

Only what holds for every IEEE-754 binary64 implementation is used: no extended registers, no fused multiply-add.
Bounds are themselves computed in binary64; each is inflated by ``SLOP`` so that their own rounding cannot matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from numpy import ndarray

U = 2.0**-53  # unit roundoff
SLOP = 1.0 + 1e-9  # covers the few hundred roundings made while a bound is computed
TINY = 1e-290  # far above every underflow error, far below every number of interest
SMALLEST = 1e-300  # quotients below it are rounded to this or to 0, whichever is safe: they have no precision left
BLOCK = 100_000  # entries of a matrix that are worked on at a time
EXACT_RANGE = (1e-140, 1e140)  # factors in this range: products and their error terms neither under- nor overflow


def gamma(m: int) -> float:
    """``γ_m = m·u/(1 - m·u)``: the relative error of a sum of m products, in whatever order it is taken."""
    return SLOP * m * U / (1.0 - m * U)


def two_sum(a: ndarray, b: ndarray) -> tuple[ndarray, ndarray]:
    """``a + b = s + e`` exactly (Knuth)."""
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


def two_parts(values: Iterable[Any]) -> tuple[ndarray, ndarray]:
    """Numbers (Fractions or floats) as ``high + low``, float64 each; what two floats cannot hold is lost."""
    numbers = [Fraction(v) for v in values]
    high = np.array([float(v) for v in numbers])
    return high, np.array([float(v - Fraction(h)) for v, h in zip(numbers, high.tolist(), strict=True)])


def _split(a: ndarray) -> tuple[ndarray, ndarray]:
    scaled = 134217729.0 * a  # 2^27 + 1 (Veltkamp)
    high = scaled - (scaled - a)
    return high, a - high


def two_prod(a: ndarray, b: ndarray) -> tuple[ndarray, ndarray]:
    """``a · b = p + e`` exactly (Dekker), for factors within ``EXACT_RANGE`` or zero."""
    p = a * b
    ah, al = _split(a)
    bh, bl = _split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def in_exact_range(*arrays: ndarray) -> bool:
    """Whether ``two_prod`` is exact on these factors."""
    for a in arrays:
        magnitude = np.abs(a)
        magnitude = magnitude[magnitude > 0]
        if magnitude.size and not (magnitude.min() > EXACT_RANGE[0] and magnitude.max() < EXACT_RANGE[1]):
            return False
    return True


def column_sums(terms: ndarray, errors: ndarray) -> tuple[ndarray, ndarray]:
    """The sums over axis 0 of ``terms + errors`` [m, d], and bounds on their errors, both [d].

    A tree of ``two_sum``: what rounding loses is collected and added at the end, so the result is about as good as in
    twice the precision.
    """
    count = 2 * terms.shape[0] + 2
    lost = errors.sum(axis=0)
    lost_magnitude = np.abs(errors).sum(axis=0)
    while terms.shape[0] > 1:
        half = terms.shape[0] // 2
        total, e = two_sum(terms[:half], terms[half : 2 * half])
        lost = lost + e.sum(axis=0)
        lost_magnitude = lost_magnitude + np.abs(e).sum(axis=0)
        terms = total if terms.shape[0] == 2 * half else np.concatenate([total, terms[-1:]])
    root = terms[0] if terms.shape[0] else np.zeros(lost.shape)
    result = root + lost
    bound = SLOP * (gamma(count) * lost_magnitude + U * np.abs(result)) + TINY
    return result, bound


def weighted_row_sum(rows: ndarray, weights: ndarray) -> tuple[ndarray, ndarray]:
    """``Σ_i weights_i rows_i`` [d] with a bound on its error [d]; infinite bounds where that cannot be given."""
    if not in_exact_range(rows, weights):
        return np.zeros(rows.shape[1]), np.full(rows.shape[1], np.inf)
    return column_sums(*two_prod(rows, weights[:, None]))


def exact_dots(rows: ndarray, x: ndarray, add: ndarray | None = None) -> ndarray | None:
    """``rows @ x (+ add)`` [m], each correctly rounded (so its sign is exact); None outside ``EXACT_RANGE``."""
    if not in_exact_range(rows, x):
        return None
    p, e = two_prod(rows, x[None, :])
    parts = [p, e] if add is None else [p, e, add[:, None]]
    return np.array([math.fsum(row) for row in np.concatenate(parts, axis=1).tolist()])


def norm_upper(x: ndarray) -> float:
    """An upper bound on the Euclidean norm of a vector."""
    scale = float(np.max(np.abs(x), initial=0.0))
    if scale == 0.0 or not math.isfinite(scale):
        return scale
    scaled = x / scale
    return scale * math.sqrt(float(scaled @ scaled)) * (1.0 + gamma(x.size + 4)) * SLOP


def row_blocks(matrix: ndarray) -> Iterator[slice]:
    """Parts of the rows that are small enough for the cache: arrays of their size cost no fresh memory."""
    step = max(1, BLOCK // max(1, matrix.shape[1]))
    return (slice(start, start + step) for start in range(0, matrix.shape[0], step))


def largest_entries(matrix: ndarray) -> ndarray:
    """The largest absolute value in each row [n]; 0 without columns."""
    return np.maximum(np.max(matrix, axis=1, initial=0.0), -np.min(matrix, axis=1, initial=0.0))


def row_norms(matrix: ndarray) -> tuple[ndarray, ndarray]:
    """Lower and upper bounds on the Euclidean norms of the rows [n]; both are 0 for a zero row."""
    scale = largest_entries(matrix)
    safe = np.where(scale > 0, scale, 1.0)
    norms = np.empty(matrix.shape[0])
    for part in row_blocks(matrix):
        scaled = matrix[part] / safe[part, None]
        norms[part] = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))
    norms = norms * scale
    relative = gamma(matrix.shape[1] + 8) * SLOP
    subnormal = np.where(scale > 0, 1e-322, 0.0)  # where numbers have no relative precision left
    return np.maximum(norms * (1.0 - relative) - subnormal, 0.0), norms * (1.0 + relative) + subnormal


def smallest_singular_value_exceeds(rows: ndarray, bound: float, entry_error: float = 0.0) -> bool:
    """Prove ``σ_min(B) > bound`` for every B with ``‖B - rows‖_F ≤ entry_error``; rows is [m, d].

    If the Cholesky factorisation of the computed ``BᵀB - cI`` runs to its end, then
    ``λ_min(BᵀB) ≥ c - (γ_m + γ_{d+1}/(1-γ_{d+1}) + 2u)·tr(BᵀB)``: the first term is the rounding of the product, the
    second the backward error of the factorisation (both bounded by the trace), the third the subtraction.
    """
    m, d = rows.shape
    if m < d or not math.isfinite(bound):
        return False
    gram = rows.T @ rows
    trace = float(np.trace(gram)) * (1.0 + gamma(m + d + 2)) * SLOP
    rounding = 2.0 * (gamma(m + 2) + gamma(d + 3)) * trace + TINY
    needed = (bound + entry_error) * SLOP
    shift = (needed * needed + rounding) * SLOP * SLOP
    if not math.isfinite(shift) or shift >= trace:
        return False
    gram[np.arange(d), np.arange(d)] -= shift
    try:
        factor = np.linalg.cholesky(gram)
    except np.linalg.LinAlgError:
        return False
    return bool(np.all(np.isfinite(factor)) and np.all(np.diagonal(factor) > 0))
