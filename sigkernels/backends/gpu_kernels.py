"""The kernels that a GPU backend brings, and what a launch of each takes. ``gpu_pass.py`` and ``gpu_scans.py`` launch them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..losses import ConfusionParams, ElementwiseParams
from .gpu_tiles import Chunk


class Targets(NamedTuple):
    """Label sets by tile, or numbers; what is not there is None."""

    indices: Tensor | None  # [nnz]
    at: Tensor | None  # [tiles+1, B] int32: where the positives of each row enter each tile
    dense: Tensor | None  # [B, m], accumulation dtype


class Gradients(NamedTuple):
    """Where a launch puts its gradients; what is not needed is None."""

    slabs: Tensor | None  # [blocks, B, D]
    weight: Tensor | None  # [m, s]
    bias: Tensor | None  # [m]
    accumulate: bool  # add to what weight and bias hold of the rows of earlier launches
    out_scale: Tensor | None  # [] or None: multiplies the gradients of weight and bias
    scratch: Tensor | None  # [blocks, rows, tile]: ∂loss/∂z of a tile while its gradients are made


class Elementwise(NamedTuple):
    """What an elementwise loss adds to a launch."""

    params: ElementwiseParams
    label_weight: Tensor | None  # [m]
    pos_weight: Tensor | None  # [m]
    row_factor: Tensor  # [B]
    row_sums: Tensor  # [blocks, B] float64, out


class Columns(NamedTuple):
    """What a confusion-matrix loss adds to a launch."""

    params: ConfusionParams
    scale: float
    beta: Tensor | None  # [m]; None: the number in the loss
    eta: Tensor | None  # [m]
    logits: Tensor  # [blocks, rows, tile] scratch
    values: Tensor  # [blocks] float64, out
    grad_beta: Tensor | None  # [m] float64, out
    grad_eta: Tensor | None  # [m] float64, out


class GPUKernels(Protocol):
    """The kernels of a GPU backend. Every method but the sizes launches on the current stream and returns at once."""

    @property
    def tile(self) -> int:
        """Labels per tile."""

    @property
    def longest_list(self) -> int:
        """The largest m of ``topk``."""

    def blocks(self, x: Tensor) -> int:
        """How many blocks run on the device at once."""

    def rows(self, x: Tensor) -> int:
        """How many rows a block takes at a time; scratch arrays hold a multiple of it."""

    def parts(self, chunk: Chunk) -> int:
        """Into how many parts ``topk`` and ``predict`` cut the labels, to fill the device."""

    def fused_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, launch: Elementwise) -> None: ...

    def confusion_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, launch: Columns) -> None: ...

    def add_slabs(self, slabs: Tensor, out: Tensor, scale: Tensor | None, accumulate: bool) -> None:
        """``out = scale · Σ slabs`` over the first dimension, or that added to ``out``; in a fixed order."""

    def logits(self, chunk: Chunk, out: Tensor) -> None:
        """``out [B, m]``, in the dtype of x."""

    def topk(self, chunk: Chunk, m: int, keys: Tensor, labels: Tensor) -> None:
        """The m best of every part, ``[B, parts · m]``: order keys of logits, and int32 labels of the chunk.

        An unfilled place has the lowest key and a negative label: it can never reach the m best of all parts.
        """

    def predict_count(self, chunk: Chunk, threshold: float, counts: Tensor) -> None:
        """``counts [parts, B]`` int32: the labels above the threshold."""

    def predict_fill(self, chunk: Chunk, threshold: float, starts: Tensor, indices: Tensor) -> None:
        """Writes those labels: the ones of a part and a row from ``indices[starts[part, row]]`` on."""


def tf32_allowed() -> bool:
    """Whether torch lets float32 products run as tf32, by whichever of its settings the user has chosen."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # it resolves what it inherits; older torch has no such thing
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
