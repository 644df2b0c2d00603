"""The LML projection in plain torch, on any device: blocks of rows in float64, so that sums over labels are exact.

``ops/lml.py`` has the mathematics. All functions take ``z [B, n]``; a row's shift ν is a float64 number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..sharding import LabelShard
from .interface import LMLSteps, Root, ratio_or_zero, spread_at, sum_dtype

_MAX_SWEEPS = 2500  # bisection alone needs fewer: log2(range / precision)
_BLOCK = 2**20  # elements that are worked on at a time
_STEP_TOL = {True: 1e-8, False: 1e-4}  # by "is float64": Newton squares the error, so this step is the last


def solve(z: Tensor, k: int, shard: LabelShard | None = None) -> Root:
    """ν and the slope of Σσ(z + ν) at it, for each row of ``z [B, n]``, of which a shard holds its own columns."""
    wide = sum_dtype(z.device)
    nu = torch.empty(z.shape[0], dtype=wide, device=z.device)
    slope = torch.empty_like(nu)
    for rows in _blocks(z) if shard is None else _blocks(z, shard.most_rows):
        block = z[rows].to(wide)
        nu[rows], log_slope = _solve(block, k, _STEP_TOL[wide == torch.float64], shard)
        total = _h(block + nu[rows, None]).sum(1)
        slope[rows] = torch.where(log_slope < 0, log_slope, total if shard is None else shard.all_reduce(total))
    return Root(nu, slope)


def project(z: Tensor, k: int) -> tuple[Tensor, Root]:
    """``y = σ(z + ν)`` in the dtype of z, and the root."""
    root = solve(z, k)
    y = torch.empty_like(z, memory_format=torch.contiguous_format)
    for rows in _blocks(z):
        y[rows] = torch.sigmoid(z[rows].to(root.nu.dtype) + root.nu[rows, None])
    return y, root


def pullback(grad: Tensor, z: Tensor, root: Root) -> Tensor:
    """``h ∘ (grad - E[grad])`` with ``E[g] = Σ h g / Σ h``; zero where every h underflows."""
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    for rows in _blocks(z):
        t = z[rows].to(root.nu.dtype) + root.nu[rows, None]
        g = grad[rows].to(t.dtype)
        h, slope = _h(t), root.slope[rows]
        in_logs = (torch.exp(-t.abs() - slope[:, None].clamp(max=0)) * g).sum(1)
        mean = torch.where(slope < 0, in_logs, ratio_or_zero((h * g).sum(1), slope))
        out[rows] = h.mul_(g - mean[:, None])
    return out


def spread(z: Tensor, root: Root, total: Tensor, out: Tensor | None = None) -> Tensor:
    """``h / Σ h`` times ``total [B]``: a number per row, spread over its labels. ``out`` may be z itself."""
    if out is None:
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
    for rows in _blocks(z):
        t = z[rows].to(root.nu.dtype) + root.nu[rows, None]
        out[rows] = spread_at(t, _h(t), root.slope[rows, None], total[rows, None].to(t.dtype))
    return out


STEPS = LMLSteps(solve, project, pullback, spread)


def _blocks(z: Tensor, columns: int | None = None) -> Iterator[slice]:
    size = max(1, _BLOCK // max(1, z.shape[1] if columns is None else columns))
    return (slice(start, start + size) for start in range(0, z.shape[0], size))


def _h(t: Tensor) -> Tensor:
    """``σ(t)·σ(-t)``, from exp(-|t|): relative precision holds where y is 0 or 1 to the last bit."""
    e = t.abs().neg_().exp_()
    return e.div_((1 + e).square_())


def _far_apart(z: Tensor, nu: Tensor, shard: LabelShard | None) -> tuple[Tensor, Tensor]:
    """ν and log Σh of rows whose k highest logits lie so far above the others that every h underflows."""
    above = z + nu[:, None] > 0
    logs = torch.stack([torch.where(above, -z, -math.inf), torch.where(above, -math.inf, z)]).logsumexp(2)
    up, low = logs if shard is None else shard.logsumexp(logs)
    return up / 2 - low / 2, up / 2 + low / 2 + math.log(2)


def _counts(z: Tensor, finite: Tensor, shard: LabelShard | None) -> tuple[Tensor, Tensor, Tensor]:
    """How many logits of each row are finite, +inf and NaN, of all shards."""
    counts = torch.stack([finite.sum(1), (z == math.inf).sum(1), z.isnan().sum(1)])
    finite, infinite, broken = counts if shard is None else shard.all_reduce(counts)
    return finite, infinite, broken


def _extremes(z: Tensor, finite: Tensor, shard: LabelShard | None) -> tuple[Tensor, Tensor]:
    """The largest and the smallest finite logit of each row, of all shards."""
    if shard is None:
        return z.masked_fill(~finite, -math.inf).amax(1), z.masked_fill(~finite, math.inf).amin(1)
    none = z.new_full((z.shape[0], 1), -math.inf)  # a shard may have no labels at all
    both = (torch.cat([none, t.masked_fill(~finite, -math.inf)], 1).amax(1) for t in (z, -z))
    highest, lowest = shard.maximum(torch.stack(list(both)))
    return highest, -lowest


def _solve(z: Tensor, k: int, tol: float, shard: LabelShard | None = None) -> tuple[Tensor, Tensor]:
    """ν of each row, and log Σh at it where Σh underflows (else 0)."""
    finite = z.isfinite()
    n, chosen, nans = _counts(z, finite, shard)
    need = k - chosen  # y = 1 for those that are chosen, whatever ν is
    prior = torch.log(need.to(z.dtype) / (n - need))  # logit(k/n); ±inf or NaN where there is no root
    highest, lowest = _extremes(z, finite, shard)
    lo, hi = prior - highest, prior - lowest
    # More logits at +inf than k, or fewer than k above -inf: no y satisfies that.
    broken = (nans > 0) | (need < 0) | (need > n)
    feasible = (need > 0) & (need < n) & ~broken
    # Without a root every finite logit is chosen, or none.
    limit = torch.full_like(lo, torch.finfo(z.dtype).max / 2).copysign(need - 0.5)
    nu = torch.where(feasible, lo, limit)
    done = ~feasible
    tiny = torch.finfo(z.dtype).tiny * 1e8
    log_slope = torch.zeros_like(nu)
    step_1 = step_2 = hi - lo + 1  # sizes of the last step and of the one before
    for _ in range(_MAX_SWEEPS):
        t = z + nu[:, None]
        above = t > 0
        e = t.abs_().neg_().exp_()
        r = e / (1 + e)
        h = r / (1 + e)
        count, total, total_h = above.sum(1), r.sum(1), h.sum(1)
        q, slope_q = r.mul_(above).sum(1), h.mul_(above).sum(1)
        if shard is not None:
            count, total, total_h, q, slope_q = shard.all_reduce(torch.stack([count, total, total_h, q, slope_q]))
        excess = count - k
        p = (total - q) + excess.clamp(min=0)
        q = q + (-excess).clamp_(min=0)
        lo, hi = torch.where(p < q, nu, lo), torch.where(p > q, nu, hi)
        # Newton on log P - log Q; a bisection where it leaves the bracket or its steps do not shrink.
        step = -(p / q).log() / ((total_h - slope_q) / p + slope_q / q)
        newton = (nu + step >= lo) & (nu + step <= hi) & (step.abs() <= 0.7 * step_2)
        step = torch.where(newton, step, (lo + hi) / 2 - nu)
        step_2, step_1 = step_1, torch.where(newton, step.abs(), (hi - lo) / 2)
        far = (excess == 0) & (p < tiny) & (q < tiny) & ~done
        exact = (p == q) | done | far
        nu = torch.where(exact, nu, nu + step)
        tight = (hi - lo) <= 2 * torch.finfo(z.dtype).eps * nu.abs()
        done = exact | (newton & (step.abs() <= tol)) | tight
        if bool(far.any()):
            nu[far], log_slope[far] = _far_apart(z[far], nu[far], shard)
        if bool(done.all()):
            break
    return torch.where(broken, math.nan, nu), log_slope
