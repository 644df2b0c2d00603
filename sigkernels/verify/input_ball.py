"""The inputs that count: the box ``|x_j| ≤ R``, or the l2 ball ``‖x‖₂ ≤ R``.

The radius of a label set is the largest least margin ``min_i y_i(w_i·x + c_i)/‖w_i‖`` over these inputs x. An input
bounds it from below by its length; multipliers bound it from above by the dual norm of their weighted rows, the largest
value that ``v·x`` takes on the unit ball: ``‖v‖₁`` for the box, ``‖v‖₂`` for the l2 ball.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
from numpy import ndarray

from .rounding import gamma, row_norms

ROOT_BITS = 200  # of a square root, rounded up
BallName = Literal["box", "l2"]


@dataclass(frozen=True)
class InputBall(ABC):
    """Inputs of a length of at most ``size``, in the norm of the subclass."""

    size: float
    name: ClassVar[str]
    default_size: ClassVar[float]

    @abstractmethod
    def lengths(self, points: ndarray) -> ndarray:
        """The lengths of points [p, d], rounded: [p]."""

    @abstractmethod
    def lengths_upper(self, points: ndarray) -> ndarray:
        """Upper bounds on the lengths of points [p, d]: [p]."""

    @abstractmethod
    def exact_length_upper(self, x: ndarray) -> Fraction:
        """The same for x of Fractions."""

    @abstractmethod
    def dual_norm_upper(self, total: ndarray) -> float:
        """An upper bound on the dual norm of v, whose entries are at most ``total`` [d] in size."""

    @abstractmethod
    def pulled_in(self, points: ndarray) -> ndarray:
        """Points [p, d], each moved to an input near it where it is outside."""

    def scaled(self, points: ndarray) -> ndarray:
        """Points [p, d], each scaled so that it is as long as an input may be."""
        # In two steps, since the squares of large numbers overflow.
        largest = np.max(np.abs(points), axis=1, keepdims=True, initial=0.0)
        points = points / np.where(largest > 0, largest, 1.0)
        lengths = self.lengths(points)[:, None]
        return self.pulled_in(points * (self.size / np.where(lengths > 0, lengths, 1.0)))


class Box(InputBall):
    """``|x_j| ≤ R``."""

    name = "box"
    default_size: ClassVar[float] = 1e4

    def lengths(self, points: ndarray) -> ndarray:
        return np.max(np.abs(points), axis=1, initial=0.0)

    def lengths_upper(self, points: ndarray) -> ndarray:
        return self.lengths(points)

    def exact_length_upper(self, x: ndarray) -> Fraction:
        return max((abs(v) for v in x), default=Fraction(0))

    def dual_norm_upper(self, total: ndarray) -> float:
        return float(total.sum()) * (1.0 + gamma(total.size + 2))

    def pulled_in(self, points: ndarray) -> ndarray:
        return np.clip(points, -self.size, self.size)

    def __str__(self) -> str:
        return f"inputs |x_j| ≤ {self.size:g}"


class L2Ball(InputBall):
    """``‖x‖₂ ≤ R``."""

    name = "l2"
    default_size: ClassVar[float] = 1.0

    def lengths(self, points: ndarray) -> ndarray:
        return np.sqrt(np.einsum("ij,ij->i", points, points))

    def lengths_upper(self, points: ndarray) -> ndarray:
        return row_norms(points)[1]

    def exact_length_upper(self, x: ndarray) -> Fraction:
        largest = max((abs(v) for v in x), default=Fraction(0))
        if not largest:
            return largest
        square = sum(((v / largest) ** 2 for v in x), Fraction(0))
        return Fraction(math.isqrt(int(square * 4**ROOT_BITS)) + 1, 2**ROOT_BITS) * largest

    def dual_norm_upper(self, total: ndarray) -> float:
        return float(self.lengths_upper(total[None, :])[0])

    def pulled_in(self, points: ndarray) -> ndarray:
        # A little further, by what an upper bound on the length adds to it: none seems to be outside, with any BLAS.
        lengths = self.lengths(points)[:, None] * (1.0 + gamma(4 * points.shape[1] + 64))
        return points * (self.size / np.maximum(lengths, self.size))

    def __str__(self) -> str:
        return f"inputs ‖x‖₂ ≤ {self.size:g}"


BALLS: dict[str, type[Box] | type[L2Ball]] = {Box.name: Box, L2Ball.name: L2Ball}
