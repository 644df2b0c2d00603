"""The contract of a flash kernel: what a launch takes, and what a backend's kernels do. ``flash_pass.py`` launches them.

A block owns ``block_labels`` consecutive labels. It keeps its rows of x and their gradient on chip while it walks over
these labels, writes their rows of ``grad_weight`` once, and its private sums (slabs, row sums) once, at the end. A launch of
more rows than that takes them one group after the other, and each group adds its part of ``grad_weight``::

    z = [x | coef_p] · [weight | basis]ᵀ + bias           p: the block; coef_p = coef[:, 16 p : 16 (p+1)]
    g = ∂f/∂z · row_factor
    grad_weight = scale · gᵀ x         grad_bias = scale · Σ_rows g            of the labels p·T … min((p+1)·T, m) - 1
    grad_coef_p = g · basis            slabs_p = g · weight                    of these labels alone, unscaled
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ..losses import ElementwiseParams

RANK = 16  # columns of the DFT part of a block: what one step of a tensor core takes
ABSENT = (
    -32768.0
)  # as a logit it costs nothing: a kernel that makes feature 15 a 1 gives it to labels that are not there
MARKED = 32  # labels whose positives are one word of ``marks``


class Turns(NamedTuple):
    """The waves of every block as complex numbers, cosines + i sines of frequencies 1 … k: factor[r, j] · turn[block, j].

    A group has 16 frequencies. The gradient of the constant feature is a column of the slabs in the place of a wave.
    """

    # [groups, words, 32, per], dtype of x: a word has ``per`` neighbouring blocks, two of 16 bits and one of 32, and so many
    # that they are a multiple of 8, with zeros for blocks that are not there. Part i of frequency 4 t + q is at 8 q + 4 i + t.
    turns: Tensor
    # float32 [groups, 16 frequencies, numbers, 2]; numbers: 8 where a block's waves have no more, else 16. They are those in the
    # middle of its 16 columns.
    factors: Tensor
    constant: float  # multiplies the sums over the columns of the constant


class Operands(NamedTuple):
    """The waves of every block as right operands of the tensor cores: coef_p = features · waves_p."""

    # [blocks, steps, 8, 4, 2, 2, per], dtype of x: a step has 16 features of 16 bits, or 8 of 32, with zeros behind the last.
    # Number (g, q, j, i, h) is of its feature (4 i + q) · per + h, and of column 8 j + g; of 32 bits of column
    # 8 j + 4 (g % 2) + g / 2, so that sums lie as operands do.
    waves: Tensor
    features: int  # 2k+1


class FlashSizes(NamedTuple):
    """How a backend cuts a problem; a prediction of its times chose them."""

    tile: int  # labels of a step: a block has a multiple of it, and so do the words of marks that it reads
    rows: int  # the most rows of one launch
    blocks: int  # that run on the device at once
    group: int  # rows that a block keeps on chip; those of a launch are taken one group after the other
    marks: bool  # whether the kernels want room for ``marks``
    turns: bool  # whether ``finish`` makes the gradient of the DFT features; else a product does
    features: int = 0  # the most DFT features whose coefficients ``fused_loss`` makes; else a product does


class FlashLaunch(NamedTuple):
    """One launch: all labels of a layer, and so many rows that a block keeps them on chip. B, s, m >= 1."""

    x: Tensor  # [B, s] the slack features in the dtype of the products; a row is packed, rows have a stride
    weight: Tensor  # [m, s] contiguous, dtype of x
    bias: Tensor | None  # [m] dtype of x, contiguous
    # [T+1, 16] dtype of x: the DFT of any block. Column 15 is 0 but in row T, which has nothing else: ABSENT.
    basis: Tensor | None
    blank: int  # so many of the first columns of basis and coef are 0: a kernel may leave them out
    coef: Tensor | None  # [B, blocks · 16] dtype of x: the features of a block's basis, for every block; column 15: 0
    # In the place of coef, for a ``fused_loss`` that makes them: of the DFT features [B, 2k+1] just before x in its rows.
    waves: Operands | None
    turns: Turns | None  # of these blocks, for a ``finish`` that makes the gradient of the DFT features
    block_labels: int  # T: a multiple of the tile
    blocks: int  # ceil(m / T)
    indices: Tensor | None  # int64 [nnz] global labels, ascending in each row; None: targets are dense
    offsets: Tensor | None  # int64 [B+1] of these rows, into indices
    dense: Tensor | None  # [B, m] in [0, 1], any dtype, bool too; a row is packed, rows have a stride
    label_start: int  # the global label of label 0
    params: ElementwiseParams
    label_weight: Tensor | None  # float32 [m]
    pos_weight: Tensor | None  # float32 [m]
    row_factor: Tensor | None  # float32 [B]: multiplies g; None: 1
    scale: float  # multiplies grad_weight and grad_bias
    out_scale: Tensor | None  # float32 []: multiplies them too, and in ``finish`` the slabs; None: 1
    accumulate: bool  # add to what grad_weight and grad_bias hold of the rows of earlier launches
    # Outputs and scratch; gradients that are not needed are None. Scratch has at least as many numbers as the shape says,
    # packed, whatever its own shape is.
    # int32 [blocks · T / 32, B], with sets, for kernels that want it: they mark label 32 w + i by bit i of word w
    marks: Tensor | None
    grad_weight: Tensor | None  # [m, s] contiguous: dtype of weight, or float32
    grad_bias: Tensor | None  # [m]: dtype of bias, or float32
    # [B, blocks · 16] dtype of x. Where there are turns: of the waves, in the kernels' own order, which has an even number of blocks.
    grad_coef: Tensor | None
    # float32 [blocks, B, s]; with grad_coef and turns [blocks, B, s+1], the last of them of the constant's columns together
    slabs: Tensor | None
    row_sums: Tensor  # float32 [blocks, B]: the loss of the block's labels
    totals: Tensor  # float64 [blocks]: row_sums summed over the rows
    # Where there are several groups of rows, and grad_weight and grad_bias are not float32.
    weight_sums: Tensor | None  # float32 [m, s]: sums over the groups
    bias_sums: Tensor | None  # float32 [m]


class FlashResults(NamedTuple):
    """What ``finish`` writes; None is not needed."""

    grad_x: Tensor | None  # [B, s], strided: scale · out_scale · Σ slabs
    # [B, 2k+1], strided, where there are turns: scale · out_scale · Σ_p grad_coef_p · wavesᵀ of block p, the first of them by slabs
    grad_features: Tensor | None
    rows: Tensor  # float64 [B]: Σ row_sums
    value: Tensor | None  # float32 []: scale · Σ totals, rounded once


class FlashKernels(Protocol):
    """The kernels of a backend. Each launches on the current stream of the tensors' device and returns at once."""

    def sizes(self, x: Tensor, slack: int, dft: bool) -> FlashSizes:
        """For ``x [B, …]`` and that many slack columns."""

    def fused_loss(self, launch: FlashLaunch) -> None:
        """The pass over all labels."""

    def finish(self, launch: FlashLaunch, results: FlashResults) -> None:
        """Adds the blocks' sums in a fixed order."""
