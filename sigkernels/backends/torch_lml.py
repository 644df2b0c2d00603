"""The LML projection in plain torch, on any device: blocks of rows in float64, so that sums over labels are exact.

``ops/lml.py`` has the mathematics. All functions take ``z [B, n]``; a row's shift ν is a float64 number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .interface import sum_dtype

_MAX_SWEEPS = 200  # bisection alone needs fewer: log2(range / precision)
_BLOCK = 2**20  # elements that are worked on at a time
_STEP_TOL = {True: 1e-8, False: 1e-4}  # by "is float64": Newton squares the error, so this step is the last


class Root(NamedTuple):
    """The solution of a row."""

    nu: Tensor  # [B]: Σ σ(z + nu) = k
    slope: Tensor  # [B]: Σ h at nu, with h = σ(z + nu)·σ(-z - nu)


def solve(z: Tensor, k: int) -> Root:
    """ν and the slope of Σσ(z + ν) at it, for each row of ``z [B, n]``."""
    wide = sum_dtype(z.device)
    nu = torch.empty(z.shape[0], dtype=wide, device=z.device)
    slope = torch.empty_like(nu)
    for rows in _blocks(z):
        block = z[rows].to(wide)
        nu[rows] = _solve(block, k, _STEP_TOL[wide == torch.float64])
        slope[rows] = _h(block, nu[rows]).sum(1)
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
        h = _h(z[rows].to(root.nu.dtype), root.nu[rows])
        g = grad[rows].to(h.dtype)
        mean = _ratio((h * g).sum(1), root.slope[rows])
        out[rows] = h.mul_(g - mean[:, None])
    return out


def spread(z: Tensor, root: Root, total: Tensor, out: Tensor | None = None) -> Tensor:
    """``h / Σ h`` times ``total [B]``: a number per row, spread over its labels. ``out`` may be z itself."""
    if out is None:
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
    scale = _ratio(total.to(root.slope.dtype), root.slope)
    for rows in _blocks(z):
        out[rows] = _h(z[rows].to(root.nu.dtype), root.nu[rows]).mul_(scale[rows, None])
    return out


def _blocks(z: Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK // max(1, z.shape[1]))
    return (slice(start, start + size) for start in range(0, z.shape[0], size))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, 0.0)


def _h(z: Tensor, nu: Tensor) -> Tensor:
    """``σ(t)·σ(-t)`` at t = z + ν, from exp(-|t|): relative precision holds where y is 0 or 1 to the last bit."""
    e = (z + nu[:, None]).abs_().neg_().exp_()
    return e.div_((1 + e).square_())


def _solve(z: Tensor, k: int, tol: float) -> Tensor:
    finite = z.isfinite()
    chosen = (z == math.inf).sum(1)  # y = 1 whatever ν is
    n, need = finite.sum(1), k - chosen
    prior = torch.log(need.to(z.dtype) / (n - need))  # logit(k/n); ±inf or NaN where there is no root
    lo = prior - z.masked_fill(~finite, -math.inf).amax(1)
    hi = prior - z.masked_fill(~finite, math.inf).amin(1)
    broken = z.isnan().any(1)
    feasible = (need > 0) & (need < n) & ~broken
    # Without a root every finite logit is chosen, or none.
    limit = torch.full_like(lo, torch.finfo(z.dtype).max / 2).copysign(need - 0.5)
    nu = torch.where(feasible, lo, limit)
    done = ~feasible
    step_1 = step_2 = hi - lo + 1  # sizes of the last step and of the one before
    for _ in range(_MAX_SWEEPS):
        t = z + nu[:, None]
        above = t > 0
        e = t.abs_().neg_().exp_()
        r = e / (1 + e)
        h = r / (1 + e)
        excess = above.sum(1) - k
        total, total_h = r.sum(1), h.sum(1)
        q, slope_q = r.mul_(above).sum(1), h.mul_(above).sum(1)
        p = (total - q) + excess.clamp(min=0)
        q = q + (-excess).clamp_(min=0)
        lo, hi = torch.where(p < q, nu, lo), torch.where(p > q, nu, hi)
        # Newton on log P - log Q; a bisection where it leaves the bracket or its steps do not shrink.
        step = -(p / q).log() / ((total_h - slope_q) / p + slope_q / q)
        newton = (nu + step >= lo) & (nu + step <= hi) & (step.abs() <= 0.7 * step_2)
        step = torch.where(newton, step, (lo + hi) / 2 - nu)
        step_2, step_1 = step_1, torch.where(newton, step.abs(), (hi - lo) / 2)
        exact = (p == q) | done
        nu = torch.where(exact, nu, nu + step)
        tight = (hi - lo) <= 2 * torch.finfo(z.dtype).eps * nu.abs()
        done = exact | (newton & (step.abs() <= tol)) | tight
        if bool(done.all()):
            break
    return torch.where(broken, math.nan, nu)
