r"""The limited multi-label projection: the point of {0 < y < 1, Σy = k} nearest to the logits in entropy.

    y = argmin_{0<y<1} -z·y - H_b(y)  s.t.  Σ_i y_i = k        z, y: [..., n]
      = σ(z + ν),   ν: [...]  the root of  g(ν) = Σ_i σ(z_i + ν) - k

Backward, with h_i = y_i (1 - y_i) and E[g] = Σ h g / Σ h:  grad_z = h ∘ (g - E[g]).
The negative log-likelihood of a set Y is -Σ_{j∈Y} log y_j = Σ_{j∈Y} softplus(-(z_j + ν)); its gradient is -(1 - y_j)
on Y plus h / Σh · Σ_{j∈Y} (1 - y_j) everywhere.

How ν is found. With r_i = σ(-|z_i + ν|) and N = #{z_i + ν > 0},

    g = P - Q,   P = Σ_{z_i+ν ≤ 0} r_i + max(N - k, 0),   Q = Σ_{z_i+ν > 0} r_i + max(k - N, 0)

has no cancellation even on rows where every y is 0 or 1 to the last bit, so the root is known to full relative
precision there too. Newton runs on log P - log Q, whose slope lies in [1/2, 2] (P or Q is a plain sum of r, and
1/2 ≤ 1-r ≤ 1), inside the bracket logit(k/n) - max z ≤ ν ≤ logit(k/n) - min z; it bisects when a step leaves the
bracket or does not shrink.

Where k logits lie so far above all others that P and Q underflow at N = k, σ is an exponential on both sides of the gap
and P = Q has a closed form, ν = (logsumexp_{above}(-z) - logsumexp_{below}(z)) / 2. There the slope Σh is kept as its
logarithm, which is negative, and h / Σh is a softmax of -|z + ν|.

A logit of -inf is a label that may not be chosen (y = 0), +inf one that must be (y = 1). A row that holds a NaN, more
than k logits at +inf or fewer than k above -inf has no solution: it is NaN, as torch.softmax of a row of -inf is.
The backward pass recomputes σ from z and ν: no array of the size of z is saved beside z itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backends import select
from ..backends.interface import LMLSteps, Root, ratio_or_zero, spread_at, sum_dtype
from ..losses import Reduction
from ..sharding import LabelShard
from ..validation import check_reduction
from .differentiable import Differentiable
from .row_loss import Entries, check_k, check_logits, entries, finish_rows, split_targets

_EDGE = 1e-5  # n == k: every label is chosen; the published layer answers 1 - 1e-5


def _kernels(z: Tensor) -> LMLSteps:
    """The backend's four steps for this tensor: solve, project, pullback, spread."""
    return select(z, "lml").lml()


def _project(z: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:  # [B, n] → y [B, n], ν [B], slope [B]
    y, root = _kernels(z).project(z, k)
    return y, root.nu, root.slope


def _pullback(grad: Tensor, z: Tensor, nu: Tensor, slope: Tensor, k: int) -> Tensor:
    return _kernels(z).pullback(grad.contiguous(), z, Root(nu, slope))


def _nll(
    z: Tensor,  # [B, n]
    indices: Tensor | None,  # [nnz], with offsets: the sets Y
    offsets: Tensor | None,  # [B+1]
    dense: Tensor | None,  # [B, n]: instead of the sets, a weight for the term of each label
    k: int,
) -> tuple[Tensor, Tensor, Tensor]:  # the loss of each row [B] float64, ν, slope
    root = _kernels(z).solve(z, k, None)
    return _nll_rows(z, entries(indices, offsets, dense, z.shape[1]), root), root.nu, root.slope


def _nll_pullback(
    grad: Tensor,  # [B]
    z: Tensor,
    indices: Tensor | None,
    offsets: Tensor | None,
    dense: Tensor | None,
    nu: Tensor,
    slope: Tensor,
    k: int,
) -> Tensor:
    return _nll_grad(grad, z, entries(indices, offsets, dense, z.shape[1]), Root(nu, slope), None)


def _nll_rows(z: Tensor, at: Entries, root: Root) -> Tensor:
    f = at.weighted(F.softplus(-_shifted(z, root.nu, at)))
    return f.new_zeros(z.shape[0]).index_add_(0, at.rows, f)


def _nll_grad(
    grad: Tensor, z: Tensor, at: Entries, root: Root, out: Tensor | None, shard: LabelShard | None = None
) -> Tensor:
    """The gradient of the rows' losses times ``grad [B]``; ``out`` may be z itself."""
    t = _shifted(z, root.nu, at)
    missing = at.weighted(torch.sigmoid(-t)) * grad.to(t.dtype)[at.rows]  # 1 - y at the targets
    total = missing.new_zeros(z.shape[0]).index_add_(0, at.rows, missing)
    if shard is not None:
        total = shard.all_reduce(total)
    grad_z = _kernels(z).spread(z, root, total, out)
    # At a target two terms meet: their difference is taken before it is rounded to the dtype of z.
    spread = spread_at(t, torch.sigmoid(t) * torch.sigmoid(-t), root.slope[at.rows], total[at.rows])
    grad_z[at.rows, at.labels] = (spread - missing).to(z.dtype)
    return grad_z


def nll_rows_and_grad_(
    z: Tensor, at: Entries, k: int, row_scale: Tensor | None, shard: LabelShard | None = None
) -> Tensor:
    """The NLL of each row of ``z [B, n]``; where ``row_scale [B]`` is given, z becomes the gradient times it.

    ``shard``: z and the entries are those of this rank's labels.
    """
    if k == (z.shape[1] if shard is None else shard.num_labels):
        rows = torch.zeros(z.shape[0], dtype=sum_dtype(z.device), device=z.device)
        rows.index_add_(0, at.rows, at.weighted(torch.ones_like(at.rows, dtype=rows.dtype)))
        if row_scale is not None:
            z.zero_()
        rows *= -math.log1p(-_EDGE)
        return rows if shard is None else shard.all_reduce(rows)
    root = _kernels(z).solve(z, k, shard)
    rows = _nll_rows(z, at, root)
    if row_scale is not None:
        _nll_grad(row_scale, z, at, root, z, shard)
    return rows if shard is None else shard.all_reduce(rows)


def _fake_root(z: Tensor) -> tuple[Tensor, Tensor]:
    wide = sum_dtype(z.device)
    return z.new_empty(z.shape[0], dtype=wide), z.new_empty(z.shape[0], dtype=wide)


def _shifted(z: Tensor, nu: Tensor, at: Entries) -> Tensor:
    """z + ν at the targets, ``[nnz]`` float64."""
    return z[at.rows, at.labels].to(nu.dtype) + nu[at.rows]


# -- operators and their derivatives -------------------------------------------------------------------------------
#
# The gradients come from the root itself, which is exact on rows of any width; where they are differentiated again, the
# same formulas in terms of y are.


def _save_root(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arrays, ctx.k = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*arrays, *output[1:])


def _save_pullback(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *arrays, _nu, _slope, ctx.k = inputs
    ctx.save_for_backward(*arrays)


def _lml_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
    return _lml_pullback(grad, *ctx.saved_tensors, ctx.k), None


def _lml_twice(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
    def formula(grad: Tensor, z: Tensor) -> Tensor:
        y = _lml(z, ctx.k)[0]
        h = y * (1 - y)
        return h * (grad - ratio_or_zero((h * grad).sum(1), h.sum(1))[:, None])

    return *torch.func.vjp(formula, *ctx.saved_tensors)[1](gg), None, None, None


def _lml_nll_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return _lml_nll_pullback(grad, *ctx.saved_tensors, ctx.k), None, None, None, None


def _lml_nll_twice(ctx: Any, gg: Tensor) -> tuple[Any, ...]:
    grad, z, indices, offsets, dense = ctx.saved_tensors
    at = entries(indices, offsets, dense, z.shape[1])

    def formula(grad: Tensor, z: Tensor) -> Tensor:
        y = _lml(z, ctx.k)[0]
        h = y * (1 - y)
        missing = at.weighted(1 - y[at.rows, at.labels]) * grad.to(z.dtype)[at.rows]
        total = torch.zeros_like(z[:, 0]).index_add(0, at.rows, missing)
        at_targets = torch.zeros_like(z).index_put((at.rows, at.labels), missing)
        return h * ratio_or_zero(total, h.sum(1))[:, None] - at_targets

    return *torch.func.vjp(formula, grad, z)[1](gg), *[None] * 6


def _operator(name: str, forward: Callable[..., Any]) -> Any:
    return torch.library.custom_op(f"sigkernels::{name}", forward, mutates_args=())


_lml = Differentiable(_operator("lml", _project), _project, _save_root, _lml_backward)
_lml_pullback = Differentiable(_operator("lml_backward", _pullback), _pullback, _save_pullback, _lml_twice)
_lml_nll = Differentiable(_operator("lml_nll", _nll), _nll, _save_root, _lml_nll_backward)
_lml_nll_pullback = Differentiable(
    _operator("lml_nll_backward", _nll_pullback), _nll_pullback, _save_pullback, _lml_nll_twice
)


@_lml.operator.register_fake
def _(z: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), *_fake_root(z)


@_lml_nll.operator.register_fake
def _(z: Tensor, indices: Any, offsets: Any, dense: Any, k: int) -> tuple[Tensor, Tensor, Tensor]:
    nu, slope = _fake_root(z)
    return torch.empty_like(nu), nu, slope


@_lml_pullback.operator.register_fake
@_lml_nll_pullback.operator.register_fake
def _(grad: Tensor, z: Tensor, *_: Any) -> Tensor:
    return z.new_empty(z.shape)


def lml(z: Tensor, k: int) -> Tensor:
    """The limited multi-label projection of each row: probabilities that add up to k.

    Args:
        z: logits ``[..., n]``, float16, bfloat16, float32 or float64. ``-inf`` forbids a label, ``+inf`` forces it; a row
            with more than k forced labels, or fewer than k that are not forbidden, has no solution and becomes NaN.
        k: how many labels are chosen, ``1 ≤ k ≤ n``. For ``k = n`` every y is ``1 - 1e-5``, with gradient zero.

    Returns:
        ``y [..., n]`` in the dtype of z, ``0 ≤ y ≤ 1``, ``Σ y = k`` in each row. Differentiable to any order.

    Example:
        >>> sk.functional.lml(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), k=2)  # rows add up to k
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    n, k = check_logits(z, k)
    if k == n:
        return _everything(z, torch.full_like(z, 1 - _EDGE))
    return _lml(z.reshape(-1, n), k)[0].reshape(z.shape)


def lml_nll(z: Tensor, targets: Any, k: int, reduction: Reduction = "mean") -> Tensor:
    """The negative log-likelihood of label sets under the LML projection, ``-Σ_{j∈Y} log lml(z, k)_j`` per row.

    It comes straight from the logits, so that it is finite and has a gradient where ``y_j`` underflows.

    Args:
        z: logits ``[..., n]``.
        targets: LabelSets with one set per row, a dense ``[..., n]`` tensor in [0, 1] (entries are the weights of
            the terms), a ``torch.sparse_csr`` tensor or a list of lists.
        k: how many labels the projection chooses, ``1 ≤ k ≤ n``.
        reduction: ``"mean"`` over the rows, ``"sum"``, or ``"none"``: a loss per row, ``[...]``.

    Returns:
        The loss in float32 (float64 for float64 logits).

    Example:
        >>> sk.functional.lml_nll(torch.zeros(2, 4), [[1], [0, 3]], k=2)
        tensor(1.0397)
    """
    n, k = check_logits(z, k)
    check_reduction(reduction)
    active, flat = split_targets(targets, z), z.reshape(-1, n)
    if k < n:
        rows = _lml_nll(flat, *active, k)[0]
    else:
        rows = nll_rows_and_grad_(flat.detach(), entries(*active, n), k, None)
        rows = _everything(flat.to(rows.dtype).sum(1), rows)
    return finish_rows(rows, reduction, z)


class LML(nn.Module):
    """``lml(z, k)`` as a layer: logits ``[..., n]`` → probabilities ``[..., n]`` that add up to ``k``.

    Example:
        >>> sk.LML(k=2)(torch.tensor([[0.0, 0.0, 0.0, 0.0]]))
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    k: int

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = check_k(k)

    def forward(self, z: Tensor) -> Tensor:
        return lml(z, self.k)

    def extra_repr(self) -> str:
        return f"k={self.k}"


def _everything(z: Tensor, answer: Tensor) -> Tensor:
    """``answer``, with a gradient of zero for z."""
    return torch.where(torch.ones((), dtype=torch.bool, device=z.device), answer, z)
