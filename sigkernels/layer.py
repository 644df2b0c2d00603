"""The classifier matrix that every operation works on, as plain data."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerMeta(NamedTuple):
    """What a layer is beside its tensors; operators carry it as one list of integers."""

    num_labels: int  # n
    k: int  # -1: no DFT part
    label_start: int = 0
    codes: int = 0  # columns of codes; 0: none

    @property
    def dft_columns(self) -> int:
        """``2k+1``, or 0 without a DFT part."""
        return 2 * self.k + 1 if self.k >= 0 else 0

    @property
    def fixed_columns(self) -> int:
        """The columns before those of ``weight``: of the DFT, then of the codes."""
        return (2 * self.k + 1 if self.k >= 0 else 0) + self.codes


class Layer(NamedTuple):
    """``z = [W_dft(n, k) | C | weight] x + bias`` for the labels ``label_start … label_start + m - 1``.

    ``x`` holds the ``2k+1`` DFT features first, then those of the codes ``C`` (``codes.py``) and the ``s`` of ``weight``.
    A plain linear layer has no DFT part: ``k = -1``.
    """

    weight: Tensor  # [m, s]
    bias: Tensor | None  # [m]
    meta: LayerMeta

    @property
    def num_labels(self) -> int:
        """n: how many labels there are, here and elsewhere."""
        return self.meta.num_labels

    @property
    def k(self) -> int:
        """The highest frequency of the DFT part; -1 without one."""
        return self.meta.k

    @property
    def label_start(self) -> int:
        """The first label of this layer."""
        return self.meta.label_start

    @property
    def num_rows(self) -> int:
        """m: how many labels this layer holds."""
        return self.weight.shape[0]

    @property
    def labels(self) -> slice:
        """This layer's labels among all n."""
        return slice(self.meta.label_start, self.meta.label_start + self.weight.shape[0])

    @property
    def dft_columns(self) -> int:
        """``2k+1``, or 0 without a DFT part."""
        return self.meta.dft_columns

    @property
    def codes(self) -> int:
        """How many columns of codes there are."""
        return self.meta.codes

    @property
    def fixed_columns(self) -> int:
        """The columns before those of ``weight``: of the DFT, then of the codes."""
        return self.meta.fixed_columns

    @property
    def in_columns(self) -> int:
        """The width of ``x``."""
        return self.meta.fixed_columns + self.weight.shape[1]

    def part(self, start: int, stop: int) -> Layer:
        """The rows ``start … stop-1`` of this layer as a layer of their own."""
        return Layer(
            self.weight[start:stop],
            None if self.bias is None else self.bias[start:stop],
            self.meta._replace(label_start=self.meta.label_start + start),
        )
