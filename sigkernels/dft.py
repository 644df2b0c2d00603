"""The truncated DFT: the fixed part of a classifier that can predict every set of up to k labels.

``W_dft`` is ``[n, 2k+1]`` with orthonormal columns, in this order (``t_i = 2π i / n``)::

    1/√n, √(2/n)·cos t_i, √(2/n)·sin t_i, √(2/n)·cos 2t_i, √(2/n)·sin 2t_i, …, √(2/n)·cos k t_i, √(2/n)·sin k t_i

An angle ``j·t_i`` is never formed from a rounded ``t_i``: ``j·i mod n`` is reduced in integers first. At
n = 1e6 and k = 80 a float32 angle would be wrong in the second digit.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .validation import check_dft, check_int


def angles(num_labels: int, k: int, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """``2π (j·i mod n) / n`` for i in ``positions`` and j = 1 … k, ``[len(positions), k]`` float64."""
    multiples = np.multiply.outer(positions.astype(np.int64) % num_labels, np.arange(1, k + 1, dtype=np.int64))
    return (multiples % num_labels) * (2 * math.pi / num_labels)


def dft_rows(num_labels: int, k: int, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The rows ``positions`` (taken modulo n) of ``W_dft``, ``[len(positions), 2k+1]`` float64."""
    rows = np.empty((len(positions), 2 * k + 1))
    rows[:, 0] = 1 / math.sqrt(num_labels)
    angle = angles(num_labels, k, positions)
    rows[:, 1::2] = math.sqrt(2 / num_labels) * np.cos(angle)
    rows[:, 2::2] = math.sqrt(2 / num_labels) * np.sin(angle)
    return rows


def dft_matrix(
    num_labels: int,
    k: int,
    *,
    start: int = 0,
    stop: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """``W_dft`` for the labels ``start … stop-1``, ``[stop-start, 2k+1]``, made in float64 and rounded once.

    Args:
        num_labels: n, at least 2k+1.
        k: the highest frequency.
        start, stop: the range of labels; all of them by default.
        dtype, device: of the result.

    Example:
        >>> W = sk.dft_matrix(num_labels=100, k=2)
        >>> W.shape, torch.allclose(W.T @ W, torch.eye(5, dtype=torch.float64))
        (torch.Size([100, 5]), True)
    """
    num_labels, k = check_dft(num_labels, k)
    start, stop = check_int("start", start, 0), num_labels if stop is None else check_int("stop", stop, 0)
    if not start <= stop <= num_labels:
        raise ValueError(
            f"start and stop must satisfy start ≤ stop ≤ num_labels = {num_labels}, got {start} and {stop}"
        )
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating point type such as torch.float32, got {dtype!r}")
    positions = np.arange(start, stop)
    return torch.from_numpy(dft_rows(num_labels, k, positions)).to(dtype=dtype, device=device)
