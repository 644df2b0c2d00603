"""What float64 leaves out of the truncated DFT: its entries to a hundred bits, in integers.

Regions of a DFT head can be so thin that a label's margin is far below the rounding of the entries of its row. Proofs
about them use the rows as ``high + low``: the float64 entry and what it lacks.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy import ndarray

BITS = 180  # of the fixed-point numbers below; every result is within 2^-160
LOW_ERROR = 2.0**-100  # of ``high + low``, in units of √(2/n): the rounding of a low part, at most 2^-49·2^-53


@lru_cache(maxsize=1)
def _pi() -> int:
    """π in fixed point, by Machin's formula."""
    one = 1 << (BITS + 20)

    def arctan_of_inverse(m: int) -> int:
        total, power, j = 0, one // m, 1
        while power:
            total += power // j if j % 4 == 1 else -(power // j)
            power //= m * m
            j += 2
        return total

    return (16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)) >> 20


def _cos_sin(m: ndarray, n: int) -> tuple[ndarray, ndarray]:
    """``cos(2πm/n), sin(2πm/n)`` in fixed point (arrays of integers), by their Taylor series on [0, π/4]."""
    folded = np.minimum(m, n - m)  # the angle is π·a/n with a = 2·folded in [0, n]
    a = 2 * folded
    left = 2 * a > n
    a = np.where(left, n - a, a)
    steep = 4 * a > n  # beyond 45 degrees: the angle π/2 - θ instead
    numerator = np.where(steep, n - 2 * a, 2 * a)  # the angle is π·numerator/(2n)
    angle = numerator.astype(object) * _pi() // (2 * n)
    square = (angle * angle) >> BITS
    one = np.full(len(m), 1 << BITS, dtype=object)
    cos, sin = one.copy(), angle.copy()
    even, odd = one, angle
    for j in range(1, 26):  # (π/4)^52/52! is below 2^-240
        even = -((even * square) >> BITS) // ((2 * j - 1) * (2 * j))
        odd = -((odd * square) >> BITS) // ((2 * j) * (2 * j + 1))
        cos, sin = cos + even, sin + odd
    cos, sin = np.where(steep, sin, cos), np.where(steep, cos, sin)
    return np.where(left, -cos, cos), np.where(m > n - m, -sin, sin)


def dft_low(n: int, k: int, labels: ndarray, high: ndarray) -> ndarray:
    """What the float64 entries ``high`` [p, 2k+1] of these rows of the DFT lack, within ``LOW_ERROR·√(2/n)``."""
    residues = (np.arange(1, k + 1)[None, :] * np.asarray(labels, dtype=np.int64)[:, None]) % n
    distinct, place = np.unique(residues, return_inverse=True)
    place = place.reshape(residues.shape)
    cos, sin = _cos_sin(distinct, n)
    scale = math.isqrt((2 << (2 * BITS)) // n)
    first = math.isqrt((1 << (2 * BITS)) // n)
    low = np.empty(high.shape)
    low[:, 0] = [_missing(first, v) for v in high[:, 0].tolist()]
    for part, offset in ((cos, 1), (sin, 2)):
        true = (part * scale) >> BITS
        entries = high[:, offset::2]
        # Equal residues have equal entries: one subtraction each.
        sample = np.empty(len(distinct))
        sample[place.ravel()] = entries.ravel()
        missing = np.array([_missing(t, v) for t, v in zip(true.tolist(), sample.tolist(), strict=True)])
        low[:, offset::2] = missing[place]
    return low


def _missing(true: int, value: float) -> float:
    """A fixed-point number minus a float, rounded once."""
    numerator, denominator = value.as_integer_ratio()
    return math.ldexp(float(true - (numerator << BITS) // denominator), -BITS)
