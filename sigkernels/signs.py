"""Sign vectors and label sets: alternations, runs, and which of them a classifier can reach at all.

Counting needs no linear programming: a generic ``n × d`` matrix reaches Cover's number of sign vectors, and the
truncated DFT reaches exactly those with at most ``2k`` sign changes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from .label_forms import is_set
from .labels import LabelSets
from .validation import check_int

__all__ = ["alternations", "count_argmaxable", "dft_witness", "is_argmaxable_dft", "runs"]


def alternations(y: Any) -> ndarray:
    """The number of sign changes of each vector, read left to right: ``[..., n] → [...]``.

    ``y`` holds signs (±1), zeros and ones, or booleans: an entry counts as active when it is positive. Of LabelSets
    each set is a vector.

    Example:
        >>> sk.signs.alternations([[1, 1, -1, 1], [1, 1, 1, 1]])
        array([2, 0])
    """
    if isinstance(y, LabelSets):
        # Around the circle every run has two ends; reading left to right, the step from label n-1 to label 0 is not seen.
        ends = [
            torch.zeros(len(y), dtype=torch.bool, device=y.device).index_fill_(0, y.rows()[y.indices == label], True)
            for label in (0, y.num_labels - 1)
        ]
        return (2 * y.runs() - (ends[0] != ends[1]).to(torch.int64)).cpu().numpy()
    signs = y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else np.asarray(y)
    if signs.dtype.kind not in "biuf":
        raise TypeError(f"y must hold signs, zeros and ones or booleans, got dtype {signs.dtype}")
    active = signs > 0
    if active.ndim < 1:
        raise ValueError(f"y must be a vector or an array of vectors [..., n], got shape {active.shape}")
    return np.sum(active[..., 1:] != active[..., :-1], axis=-1)


def runs(sets: Any, n: int) -> ndarray:
    """The number of runs of neighbouring active labels of each set around the circle of n labels, ``[m]``.

    Label n-1 is a neighbour of label 0. The full set has no end and counts 0.

    Example:
        >>> sk.signs.runs([[0, 1, 4], [9, 0]], n=10)  # labels 9 and 0 are neighbours
        array([2, 1])
    """
    return LabelSets.of(sets, check_int("n", n, 1), name="sets").runs().cpu().numpy()


def count_argmaxable(n: int, d: int, bias: bool = False) -> int:
    """How many of the ``2^n`` sign vectors a generic ``n × d`` matrix reaches (Cover 1965), exactly.

    ``2 Σ_{i<d} C(n-1, i)``, or ``Σ_{i≤d} C(n, i)`` with a generic bias.

    Example:
        >>> sk.signs.count_argmaxable(n=5, d=2), 2**5
        (10, 32)
    """
    n, d = check_int("n", n, 1), check_int("d", d, 1)
    if bias:
        return sum(math.comb(n, i) for i in range(d + 1))
    return 2 * sum(math.comb(n - 1, i) for i in range(d))


def is_argmaxable_dft(sets: Any, n: int, k: int) -> ndarray:
    """Whether the truncated DFT with ``2k+1`` columns reaches each set, ``[m]`` bool: at most k circular runs.

    Example:
        >>> sk.signs.is_argmaxable_dft([[0, 1], [0, 2, 4]], n=9, k=2)
        array([ True, False])
    """
    _check_degree(n, k)
    return runs(sets, n) <= k


def dft_witness(labels: Any, n: int, k: int) -> ndarray:
    """DFT features x ``[2k+1]`` in float64 that predict this set: ``(W_dft x)_i > 0`` exactly for its labels.

    The polynomial has the right signs as a real function. In float64 they survive where it stays above about 1e-15 of
    its maximum, which :func:`sigkernels.verify` checks; beyond that only the proof by roots is left.

    Example:
        >>> x = sk.signs.dft_witness([2, 3], n=9, k=2)
        >>> np.flatnonzero(sk.dft_matrix(9, 2).numpy() @ x > 0)
        array([2, 3])
    """
    from .verify.witness import notch_polynomial

    _check_degree(n, k)
    if not is_set(labels):
        raise TypeError(f"labels must be one set, like [3, 17, 18], got {labels!r}; write [{labels!r}] for one label")
    if isinstance(labels, LabelSets) or any(is_set(label) for label in labels):
        raise ValueError("labels must be one set, like [3, 17, 18]; call dft_witness once per set")
    one = LabelSets.from_lists([labels], n)
    count = int(one.runs()[0])
    if count > k:
        raise ValueError(f"labels form {count} runs, and k = {k} columns reach at most {k}: use a larger k")
    return notch_polynomial(one.indices.cpu().numpy(), n, k)


def _check_degree(n: int, k: int) -> None:
    n, k = check_int("n", n, 1), check_int("k", k, 0)
    if 2 * k + 1 > n:
        raise ValueError(f"k = {k} needs 2k+1 ≤ n labels, and n = {n}: use k ≤ {(n - 1) // 2}")
