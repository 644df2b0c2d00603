"""Truncated top-k entropy: a positive is compared with the labels that are not among the top k anyway.

One label y (Lapin et al. 2016):   log(1 + Σ_{j∈J} exp(z_j - z_y)),   J = the n-k smallest of the z_j, j ≠ y
A set Y:   Σ_{y∈Y} log(1 + Σ_{j∈J} exp(z_j - z_y)),   J = the n-k smallest of the z_j, j ∉ Y

A set leaves n-|Y| others, so the d = max(k-|Y|, 0) largest of them are dropped: a selection of at most k, not a sort.
With A = log Σ_{j∈J} exp(z_j) a term is softplus(A - z_y) and, with c = Σ_y σ(A - z_y),

    grad_{z_y} = -σ(A - z_y),   grad_{z_j} = c·exp(z_j - A) on J,   0 on what was dropped

Equal logits at the edge of the selection: which of them is dropped is arbitrary (the loss is the same).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.interface import accumulate_dtype, sum_dtype
from ..losses import Reduction
from ..sharding import LabelShard
from ..validation import check_reduction
from .row_loss import Entries, check_logits
from .row_operator import RowLossOperator


def entropy_rows_and_grad_(
    z: Tensor, at: Entries, k: int, row_scale: Tensor | None, shard: LabelShard | None = None
) -> Tensor:
    """The loss of each row of ``z [B, n]``, which is used up: ``row_scale [B]`` turns it into the gradient.

    ``shard``: z and the entries are those of this rank's labels. What it drops is merged from the largest logits of every
    rank, and A from every rank's own.
    """
    wide = sum_dtype(z.device)
    positives = z[at.rows, at.labels].to(wide)
    z[at.rows, at.labels] = -torch.inf
    dropped = _dropped(z, at, k, shard)
    if dropped is not None:
        z[dropped] = -torch.inf
    bulk = torch.logsumexp(z if z.dtype == wide else z.to(accumulate_dtype(z.dtype)), 1).to(wide)  # A, [B]
    if shard is not None:
        bulk = shard.logsumexp(bulk)
    gap = bulk[at.rows] - positives
    rows = bulk.new_zeros(z.shape[0]).index_add_(0, at.rows, at.weighted(F.softplus(gap)))
    if shard is not None:
        rows = shard.all_reduce(rows)
    if row_scale is not None:
        pull = at.weighted(torch.sigmoid(gap)) * row_scale.to(wide)[at.rows]
        total = bulk.new_zeros(z.shape[0]).index_add_(0, at.rows, pull)
        if shard is not None:
            total = shard.all_reduce(total)
        bulk = torch.where(bulk == -torch.inf, 0, bulk)  # J is empty: every z is -inf and its exp 0
        z.sub_(bulk.to(z.dtype)[:, None]).exp_().mul_(total.to(z.dtype)[:, None])
        z[at.rows, at.labels] = -pull.to(z.dtype)
    return rows


def _dropped(z: Tensor, at: Entries, k: int, shard: LabelShard | None = None) -> tuple[Tensor, Tensor] | None:
    """(rows, labels) of the max(k-|Y|, 0) largest logits of each row; positives are already at -inf."""
    sizes = torch.zeros(z.shape[0], dtype=torch.int64, device=z.device)
    sizes.index_add_(0, at.rows, torch.ones_like(at.rows))
    if shard is not None:
        sizes = shard.all_reduce(sizes)
    # a row without positives has no terms, whatever is dropped
    drop = torch.where(sizes > 0, (k - sizes).clamp_(min=0), 0)
    most = min(k - 1, (z.shape[1] if shard is None else shard.num_labels) - 1)
    if most < 1 or z.shape[0] == 0:
        return None
    values, largest = torch.topk(z, min(most, z.shape[1]), dim=1)
    if shard is not None:
        largest = shard.merge_topk(values, largest + shard.start, most)[1]
    rows, ranks = (torch.arange(most, device=z.device) < drop[:, None]).nonzero(as_tuple=True)
    labels = largest[rows, ranks]
    if shard is None:
        return rows, labels
    own = (labels >= shard.start) & (labels < shard.stop)
    return rows[own], labels[own] - shard.start


def truncated_topk_entropy_reference(z: Tensor, at: Entries, k: int) -> Tensor:
    """The loss of each row, ``[B]``, in plain differentiable torch."""
    masked = z.index_put((at.rows, at.labels), z.new_full((), -torch.inf))
    dropped = _dropped(masked.detach(), at, k)
    if dropped is not None:
        masked = masked.index_put(dropped, z.new_full((), -torch.inf))
    # J is empty where k = n: a number that softplus turns into 0, derivatives included, in place of -inf
    empty = (masked.detach() == -torch.inf).all(1)
    bulk = torch.logsumexp(torch.where(empty[:, None], 0, masked), 1)
    bulk = torch.where(empty, -torch.finfo(z.dtype).max / 4, bulk)
    terms = at.weighted(F.softplus(bulk[at.rows] - z[at.rows, at.labels]))
    return z.new_zeros(z.shape[0]).index_add(0, at.rows, terms)


_entropy = RowLossOperator("truncated_topk_entropy", entropy_rows_and_grad_, truncated_topk_entropy_reference)


def truncated_topk_entropy(z: Tensor, targets: Any, k: int, reduction: Reduction = "mean") -> Tensor:
    """The truncated top-k entropy of label sets.

    Args:
        z: logits ``[..., n]``, float16, bfloat16, float32 or float64.
        targets: LabelSets with one set per row, a dense ``[..., n]`` tensor in [0, 1] (entries are the weights of the
            terms), a ``torch.sparse_csr`` tensor or a list of lists. A row without labels has loss 0.
        k: how many labels may be ranked first at no cost, ``1 ≤ k ≤ n``; with one label per row, ``k = 1`` is the usual
            softmax cross-entropy.
        reduction: ``"mean"`` over the rows, ``"sum"``, or ``"none"``: a loss per row, ``[...]``.

    Returns:
        The loss in float32 (float64 for float64 logits).

    Example:
        >>> sk.functional.truncated_topk_entropy(torch.zeros(1, 4), [[1]], k=1)  # log 4: the softmax cross-entropy
        tensor(1.3863)
    """
    _, k = check_logits(z, k)
    check_reduction(reduction)
    return _entropy(z, targets, k, [], reduction)
