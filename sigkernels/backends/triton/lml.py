"""The LML projection in Triton: one row per program; ``ops/lml.py`` has the mathematics.

A row is swept in blocks. Numbers of a block have the type of the arithmetic (float32, or float64 for float64 logits),
ν and the sums over blocks are float64. As in the CPU kernel, ν is added as two numbers, and what rounding loses of the
sum goes into the exponential.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...sharding import LabelShard
from .. import torch_lml
from ..interface import LMLSteps, Root
from . import configs

_SOLVE, _PROJECT, _PULLBACK, _SPREAD = range(4)
_MAX_BLOCK_BYTES = 16384  # of a row, in registers
_NUM_WARPS = 8
_MAX_REGISTERS = (
    255  # of a thread, on NVIDIA. Left alone, ptxas spills a few to get one more block onto a multiprocessor
)


@triton.jit
def _sigma(z, hi, lo):
    """σ(|t|), σ(-|t|) and t > 0 at t = z + hi + lo."""
    t = z + hi
    back = t - z
    lost = ((z - (t - back)) + (hi - back)) + lo
    size = tl.abs(t)
    above = t > 0
    away = tl.where(above, -lost, lost)
    # an infinite t has lost nothing
    e = tl.exp(-size) * (1 + tl.where(size < 1024, away, 0.0))
    big = 1 / (1 + e)
    return big, e * big, above


@triton.jit
def _far_share(z, nu, log_slope):
    """h / Σh where every h underflows: a softmax of -|z + ν|, float64."""
    return tl.exp(-tl.abs(z.to(tl.float64) + nu) - log_slope)


@triton.jit
def _row(z, at, n, REAL: tl.constexpr):
    return tl.load(z + at, mask=at < n, other=float("-inf")).to(REAL)


@triton.jit
def lml_kernel(
    z,  # [B, n]
    grad,  # [B, n]: pullback
    out,  # [B, n]
    nus,  # [B] float64
    slopes,  # [B] float64: Σh, or its logarithm (negative) where that underflows
    totals,  # [B] float64: spread
    n,
    k,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    REAL: tl.constexpr,
    LIMIT: tl.constexpr,  # stands for an infinite ν
    LAST_STEP: tl.constexpr,
    EPS: tl.constexpr,
    TINY: tl.constexpr,  # sums below it are as good as underflowed
):
    row = tl.program_id(0).to(tl.int64)
    z += row * n
    out += row * n
    lanes = tl.arange(0, BLOCK)
    zero = tl.zeros((), tl.float64)
    if STEP <= 1:
        # -- the bracket, from the finite logits ---------------------------------------------------------------------
        highest, lowest = zero - float("inf"), zero + float("inf")
        finite, forced, broken = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        for start in range(0, n, BLOCK):
            v = _row(z, start + lanes, n, REAL)
            here = tl.abs(v) < float("inf")
            highest = tl.maximum(highest, tl.max(tl.where(here, v, float("-inf"))).to(tl.float64))
            lowest = tl.minimum(lowest, tl.min(tl.where(here, v, float("inf"))).to(tl.float64))
            finite += tl.sum(here.to(tl.int32))
            forced += tl.sum((v == float("inf")).to(tl.int32))
            broken += tl.sum((v != v).to(tl.int32))
        need = k - forced
        broken += ((need < 0) | (need > finite)).to(tl.int32)  # no y satisfies that
        solvable = (need > 0) & (need < finite) & (broken == 0)
        # where there is no root, any numbers will do: they are replaced below
        prior = tl.log(tl.where(solvable, need, 1).to(tl.float64) / tl.where(solvable, finite - need, 1).to(tl.float64))
        low = tl.where(solvable, prior - highest, 0.0)
        high = tl.where(solvable, prior - lowest, 0.0)
        nu = low
        step_1 = high - low + 1
        step_2 = step_1
        going = solvable.to(tl.int32)
        far_apart = tl.zeros((), tl.int32)
        sweeps = 0
        # -- safeguarded Newton on log P - log Q ---------------------------------------------------------------------
        while (going > 0) & (sweeps < 2500):
            sweeps += 1
            hi = nu.to(REAL)
            lo = (nu - hi.to(tl.float64)).to(REAL)
            p, q, slope_p, slope_q = zero, zero, zero, zero
            count = tl.zeros((), tl.int32)
            for start in range(0, n, BLOCK):
                big, r, above = _sigma(_row(z, start + lanes, n, REAL), hi, lo)
                h = r * big
                p += tl.sum(tl.where(above, 0.0, r)).to(tl.float64)
                q += tl.sum(tl.where(above, r, 0.0)).to(tl.float64)
                slope_p += tl.sum(tl.where(above, 0.0, h)).to(tl.float64)
                slope_q += tl.sum(tl.where(above, h, 0.0)).to(tl.float64)
                count += tl.sum(above.to(tl.int32))
            excess = (count - k).to(tl.float64)
            p += tl.maximum(excess, 0.0)
            q += tl.maximum(-excess, 0.0)
            low = tl.where(p < q, nu, low)
            high = tl.where(p > q, nu, high)
            both = (p > 0) & (q > 0)
            safe_p, safe_q = tl.where(both, p, 1.0), tl.where(both, q, 1.0)
            step = -tl.log(safe_p / safe_q) / tl.where(both, slope_p / safe_p + slope_q / safe_q, 1.0)
            newton = both & (nu + step >= low) & (nu + step <= high) & (tl.abs(step) <= 0.7 * step_2)
            step = tl.where(newton, step, (low + high) / 2 - nu)
            step_2 = step_1
            step_1 = tl.where(newton, tl.abs(step), (high - low) / 2)
            far_apart = ((count == k) & (p < TINY) & (q < TINY)).to(tl.int32)
            exact = (p == q) | (far_apart > 0)
            nu = tl.where(exact, nu, nu + step)
            tight = (high - low) <= EPS * tl.abs(nu)
            going = tl.where(exact | (newton & (step_1 <= LAST_STEP)) | tight, 0, 1)
        nu = tl.where(solvable, nu, tl.where(need > 0, zero + LIMIT, zero - LIMIT))
        nu = tl.where(broken > 0, zero + float("nan"), nu)
        log_slope = zero
        if far_apart > 0:
            # P and Q underflow: sigma is an exponential on both sides of the gap, and P = Q has a closed form
            least, most = zero + float("inf"), zero - float("inf")
            for start in range(0, n, BLOCK):
                v = _row(z, start + lanes, n, REAL).to(tl.float64)
                least = tl.minimum(least, tl.min(tl.where(v + nu > 0, v, float("inf"))))
                most = tl.maximum(most, tl.max(tl.where(v + nu > 0, float("-inf"), v)))
            up, down = zero, zero
            for start in range(0, n, BLOCK):
                v = _row(z, start + lanes, n, REAL).to(tl.float64)
                up += tl.sum(tl.where(v + nu > 0, tl.exp(least - v), 0.0))
                down += tl.sum(tl.where(v + nu > 0, 0.0, tl.exp(v - most)))
            log_up, log_down = tl.log(up) - least, tl.log(down) + most
            nu = log_up / 2 - log_down / 2
            log_slope = log_up / 2 + log_down / 2 + 0.6931471805599453
        tl.store(nus + row, nu)
    else:
        nu = tl.load(nus + row)
    hi = nu.to(REAL)
    lo = (nu - hi.to(tl.float64)).to(REAL)
    if STEP <= 1:
        slope = zero
        for start in range(0, n, BLOCK):
            at = start + lanes
            big, r, above = _sigma(_row(z, at, n, REAL), hi, lo)
            slope += tl.sum(tl.where(at < n, r * big, 0.0)).to(tl.float64)
            if STEP == 1:
                tl.store(out + at, tl.where(above, big, r).to(out.dtype.element_ty), mask=at < n)
        tl.store(slopes + row, tl.where(log_slope < 0, log_slope, slope))
    elif STEP == 2:
        grad += row * n
        weighted = zero
        for start in range(0, n, BLOCK):
            at = start + lanes
            big, r, above = _sigma(_row(z, at, n, REAL), hi, lo)
            g = tl.load(grad + at, mask=at < n, other=0.0).to(REAL)
            weighted += tl.sum(tl.where(at < n, r * big * g, 0.0)).to(tl.float64)
        slope = tl.load(slopes + row)
        mean = tl.where(slope > 0, weighted / tl.where(slope > 0, slope, 1.0), 0.0).to(REAL)
        if slope < 0:
            weighted = zero
            for start in range(0, n, BLOCK):
                at = start + lanes
                share = _far_share(_row(z, at, n, REAL), nu, slope)
                weighted += tl.sum(share * tl.load(grad + at, mask=at < n, other=0.0).to(tl.float64))
            mean = weighted.to(REAL)
        for start in range(0, n, BLOCK):
            at = start + lanes
            big, r, above = _sigma(_row(z, at, n, REAL), hi, lo)
            g = tl.load(grad + at, mask=at < n, other=0.0).to(REAL)
            tl.store(out + at, (r * big * (g - mean)).to(out.dtype.element_ty), mask=at < n)
    else:
        slope = tl.load(slopes + row)
        total = tl.load(totals + row)
        scale = tl.where(slope > 0, total / tl.where(slope > 0, slope, 1.0), 0.0).to(REAL)
        for start in range(0, n, BLOCK):
            at = start + lanes
            v = _row(z, at, n, REAL)
            big, r, above = _sigma(v, hi, lo)
            spread = r * big * scale
            if slope < 0:
                spread = (_far_share(v, nu, slope) * total).to(REAL)
            tl.store(out + at, spread.to(out.dtype.element_ty), mask=at < n)


def constants(step: int, n: int, dtype: torch.dtype) -> dict[str, object]:
    """The compile-time arguments of the kernel for rows of n numbers of ``dtype``."""
    wide = dtype == torch.float64
    return {
        "STEP": step,
        "BLOCK": max(16, min(triton.next_power_of_2(n), _MAX_BLOCK_BYTES // (8 if wide else 4))),
        "REAL": tl.float64 if wide else tl.float32,
        "LIMIT": 8.9e307 if wide else 1.7e38,
        "LAST_STEP": 1e-8 if wide else 1e-4,
        "EPS": 4.6e-16 if wide else 1e-10,
        "TINY": 1e-290 if wide else 1e-30,
    }


def options(platform: str) -> dict[str, int]:
    """How the kernel is compiled on "cuda" or "hip"."""
    return {"num_warps": _NUM_WARPS} | ({"maxnreg": _MAX_REGISTERS} if platform == "cuda" else {})


def solve(z: Tensor, k: int, shard: LabelShard | None = None) -> Root:
    if shard is not None:  # the kernel has no sums over ranks
        return torch_lml.solve(z, k, shard)
    root = _new_root(z)
    _launch(_SOLVE, z, root, k=k)
    return root


def project(z: Tensor, k: int) -> tuple[Tensor, Root]:
    root, y = _new_root(z), torch.empty_like(z, memory_format=torch.contiguous_format)
    _launch(_PROJECT, z, root, k=k, out=y)
    return y, root


def pullback(grad: Tensor, z: Tensor, root: Root) -> Tensor:
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    _launch(_PULLBACK, z, root, grad=grad.contiguous(), out=out)
    return out


def spread(z: Tensor, root: Root, total: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
    _launch(_SPREAD, z, root, total=total.to(torch.float64).contiguous(), out=out)
    return out


STEPS = LMLSteps(solve, project, pullback, spread)


def _new_root(z: Tensor) -> Root:
    return Root(*(torch.empty(z.shape[0], dtype=torch.float64, device=z.device) for _ in range(2)))


def _launch(
    step: int,
    z: Tensor,
    root: Root,
    k: int = 0,
    grad: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """One row per program. A step that does not read or write an array gets z or ν in its place, untouched."""
    z = z.contiguous()
    if z.shape[0] == 0:
        return
    grad, out, total = (
        given if given is not None else spare for given, spare in ((grad, z), (out, z), (total, root.nu))
    )
    lml_kernel[(z.shape[0],)](
        z, grad, out, root.nu, root.slope, total, z.shape[1], k,
        **constants(step, z.shape[1], z.dtype), **options(configs.platform()),
    )  # fmt: skip
