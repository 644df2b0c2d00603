"""The classifier matrix that every operation works on, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layer(NamedTuple):
    """``z = [W_dft(n, k) | weight] x + bias`` for the labels ``label_start … label_start + m - 1``.

    ``x`` holds the ``2k+1`` DFT features first and the ``s`` features of ``weight`` after them.
    A plain linear layer has no DFT part: ``k = -1``.
    """

    weight: Tensor  # [m, s]
    bias: Tensor | None  # [m]
    num_labels: int  # n
    k: int  # -1: no DFT part
    label_start: int = 0

    @property
    def num_rows(self) -> int:
        """m: how many labels this layer holds."""
        return self.weight.shape[0]

    @property
    def dft_columns(self) -> int:
        """``2k+1``, or 0 without a DFT part."""
        return 2 * self.k + 1 if self.k >= 0 else 0

    @property
    def in_columns(self) -> int:
        """The width of ``x``."""
        return self.dft_columns + self.weight.shape[1]
