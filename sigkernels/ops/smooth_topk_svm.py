"""Smooth top-k SVM: every label of a set should be among the k highest logits, by a margin of 1.

One label y (Berrada, Zisserman, Kumar 2018), with ``v = z/(kτ)`` and the elementary symmetric polynomials σ_i of the
``exp(v_j)``, j ≠ y::

    τ·softplus(1/τ + R - v_y),   R = log σ_k - log σ_{k-1}     (τ → 0: the top-k hinge)

A set Y: the sum of these terms over y ∈ Y, with j ∉ Y in R: a label competes with those that are not in the set, not
with the others of the set, which may all be among the first k. So it is for truncated top-k entropy, and R is shared.
With fewer than k labels outside Y the loss is 0: every label of Y is among the first k whatever the logits.

σ_k overflows float64 long before k = 100. But for any shift ν, with ``p_j = sigmoid(v_j + ν)``,

    R = log P(N = k) - log P(N = k-1) - ν,   N = Σ_j Bernoulli(p_j)

and with ν such that the mean of N is near k - ½ both probabilities are of the order 1/√k: no logarithms are needed, and
whatever underflows does not matter. The distribution of N is a product of n polynomials of degree 1, multiplied
as a tree and cut at degree k: O(nk) products and sums of positive numbers. Going down the tree again gives all

    ∂R/∂v_j = P(j | N = k) - P(j | N = k-1)          (positive, and they add up to 1)

The difference loses a factor k of the precision, so all of it is done in float64, for a few rows at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.interface import sum_dtype
from ..losses import Reduction
from ..sharding import LabelShard
from ..validation import check_reduction, check_tau
from .row_loss import Entries, check_logits
from .row_operator import RowLossOperator

BISECTIONS = 10  # of ν: far better than the mean of N needs
CHUNK = 1 << 19  # logits that are worked on at a time: their tree stays in the cache


def _product(left: Tensor, right: Tensor, degree: int) -> Tensor:
    """The products of polynomials, coefficients first, ``[p, …] × [q, …] → [min(p+q-1, degree+1), …]``."""
    size = min(left.shape[0] + right.shape[0] - 1, degree + 1)
    out = left.new_zeros(size, *left.shape[1:])
    for i in range(min(right.shape[0], size)):
        part = left[: size - i]
        out[i : i + part.shape[0]].addcmul_(part, right[i])
    return out


def _product_adjoint(other: Tensor, grad: Tensor, size: int) -> Tensor:
    """The gradient of one factor, ``[size, …]``, from the other ``[q, …]`` and the gradient of their product."""
    out = grad.new_zeros(size, *grad.shape[1:])
    for i in range(min(other.shape[0], grad.shape[0])):
        part = grad[i : i + size]
        out[: part.shape[0]].addcmul_(part, other[i])
    return out


def _tree(v: Tensor, shift: Tensor, k: int) -> list[Tensor]:
    """Polynomials with the probabilities of 0, 1, … k among ever more labels, ``[k+1, B, nodes]``; the last has one node."""
    at = v + shift[:, None]
    return _multiply(torch.stack([torch.sigmoid(-at), torch.sigmoid(at)]), k)


def _multiply(leaves: Tensor, k: int) -> list[Tensor]:
    """The levels of the tree above these polynomials, ``[degree+1, B, nodes]``."""
    levels = [leaves]
    while levels[-1].shape[2] != 1:
        if levels[-1].shape[2] % 2 or levels[-1].shape[2] == 0:  # one more that is 1
            one = levels[-1].new_zeros(*levels[-1].shape[:2], 1)
            one[0] = 1
            levels[-1] = torch.cat([levels[-1], one], 2)
            if levels[-1].shape[2] == 1:
                break
        left, right = levels[-1].chunk(2, 2)
        levels.append(_product(left, right, k))
    return levels


def _shift(v: Tensor, k: int, shard: LabelShard | None = None) -> tuple[Tensor, Tensor]:
    """``ν [B]`` with which N has a mean near k - ½, and whether there are fewer than k labels, ``[B]``.

    With the k-th largest v at 0, the mean is above that at ν = log 2k and below it at ν = -log 2n.
    """
    largest, labels = torch.topk(v, min(k, v.shape[1]), dim=1)
    if shard is not None:
        largest = shard.merge_topk(largest, labels, k)[0]
    last = largest[:, -1]
    few = last == -torch.inf
    last = torch.where(few, 0, last)
    low = -math.log(2 * (v.shape[1] if shard is None else shard.num_labels)) - last
    high = math.log(2 * k) - last
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        mean = torch.sigmoid(v + middle[:, None]).sum(1)
        above = (mean if shard is None else shard.all_reduce(mean)) > k - 0.5
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return 0.5 * (low + high), few


def _log_ratio(v: Tensor, k: int, shard: LabelShard | None = None) -> tuple[Tensor, list[list[Tensor]]]:
    """R of each row of ``v [B, n]`` in float64, differentiable in v, and the tree.

    A shard has a tree of its own labels, and above it every rank the same one of the ranks' roots.
    """
    shift, few = _shift(v.detach(), k, shard)
    levels = [_tree(torch.where(few[:, None], 0, v), shift, k)]
    if shard is not None:
        own = levels[0][-1]
        roots = shard.gather_same(F.pad(own, (0, 0, 0, 0, 0, k + 1 - own.shape[0])))
        levels.append(_multiply(torch.cat(roots, 2), k))
    root = levels[-1][-1][:, :, 0]
    if root.shape[0] <= k:  # fewer than k labels in all
        return torch.full_like(shift, -torch.inf), levels
    return torch.where(few, -torch.inf, root[k].log() - root[k - 1].log() - shift), levels


def _log_ratio_grad(levels: list[list[Tensor]], k: int, n: int, shard: LabelShard | None = None) -> Tensor:
    """``∂R/∂v [B, n]``, from the top of the tree down."""
    root = levels[-1][-1]
    if root.shape[0] <= k:
        return root.new_zeros(root.shape[1], n)
    grad = torch.zeros_like(root)
    grad[k], grad[k - 1] = 1 / root[k], -1 / root[k - 1]
    if shard is not None:
        grad = _multiply_adjoint(levels[1], grad)[: levels[0][-1].shape[0], :, shard.rank : shard.rank + 1]
    grad = _multiply_adjoint(levels[0], grad)
    return (grad[1] * levels[0][0][1])[:, :n].clamp(min=0)  # below 0 by rounding alone


def _multiply_adjoint(levels: list[Tensor], grad: Tensor) -> Tensor:
    """The gradient of the leaves of a tree from that of its root."""
    for level in reversed(levels[:-1]):
        left, right = level.chunk(2, 2)
        grad = grad[:, :, : left.shape[2]]  # without the one that was added above
        grad = torch.cat([_product_adjoint(other, grad, level.shape[0]) for other in (right, left)], 2)
    return grad


def svm_rows_and_grad_(
    z: Tensor, at: Entries, k: int, tau: float, row_scale: Tensor | None, shard: LabelShard | None = None
) -> Tensor:
    """The loss of each row of ``z [B, n]``, which is used up: ``row_scale [B]`` turns it into the gradient.

    ``shard``: z and the entries are those of this rank's labels.
    """
    wide = sum_dtype(z.device)
    unit = 1 / (k * tau)
    positives = z[at.rows, at.labels].to(wide) * unit
    z[at.rows, at.labels] = -torch.inf
    ratio = torch.empty(z.shape[0], dtype=wide, device=z.device)
    step = max(1, CHUNK // max(z.shape[1] if shard is None else shard.most_rows, 1))
    for start in range(0, z.shape[0], step):
        part = z[start : start + step]
        ratio[start : start + step], levels = _log_ratio(part.to(wide) * unit, k, shard)
        if row_scale is not None:
            part.copy_(_log_ratio_grad(levels, k, z.shape[1], shard))
    gap = 1 / tau + ratio[at.rows] - positives
    rows = ratio.new_zeros(z.shape[0]).index_add_(0, at.rows, at.weighted(tau * F.softplus(gap)))
    if shard is not None:
        rows = shard.all_reduce(rows)
    if row_scale is not None:
        pull = at.weighted(torch.sigmoid(gap) / k) * row_scale.to(wide)[at.rows]
        total = torch.zeros_like(rows).index_add_(0, at.rows, pull)
        if shard is not None:
            total = shard.all_reduce(total)
        z.mul_(total.to(z.dtype)[:, None])
        z[at.rows, at.labels] = -pull.to(z.dtype)
    return rows


def smooth_topk_svm_reference(z: Tensor, at: Entries, k: int, tau: float) -> Tensor:
    """The loss of each row, ``[B]``, in plain differentiable torch."""
    v = z.to(sum_dtype(z.device)) / (k * tau)
    ratio = _log_ratio(v.index_put((at.rows, at.labels), v.new_full((), -torch.inf)), k)[0]
    terms = at.weighted(tau * F.softplus(1 / tau + ratio[at.rows] - v[at.rows, at.labels]))
    return v.new_zeros(z.shape[0]).index_add(0, at.rows, terms)


_svm = RowLossOperator("smooth_topk_svm", svm_rows_and_grad_, smooth_topk_svm_reference)


def smooth_topk_svm(z: Tensor, targets: Any, k: int, tau: float = 1.0, reduction: Reduction = "mean") -> Tensor:
    """The smooth top-k SVM loss of label sets.

    Args:
        z: logits ``[..., n]``, float16, bfloat16, float32 or float64.
        targets: LabelSets with one set per row, a dense ``[..., n]`` tensor in [0, 1] (entries are the weights of the
            terms), a ``torch.sparse_csr`` tensor or a list of lists. A row without labels has loss 0.
        k: among how many of the highest logits a label of the set should be, ``1 ≤ k ≤ n``.
        tau: the temperature, at least 1e-6; towards 0 the loss becomes the hinge that is not smooth.
        reduction: ``"mean"`` over the rows, ``"sum"``, or ``"none"``: a loss per row, ``[...]``.

    Returns:
        The loss in float32 (float64 for float64 logits).

    Example:
        >>> sk.functional.smooth_topk_svm(torch.tensor([[9.0, 0.0, 0.0]]), [[0]], k=1)
        tensor(0.0007)
    """
    _, k = check_logits(z, k)
    tau = check_tau(tau)
    check_reduction(reduction)
    return _svm(z, targets, k, [tau], reduction)
