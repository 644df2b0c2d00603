"""Elementwise losses and their derivatives inside a kernel: ``f = w·(pw·y·P(z) + (1-y)·N(z))`` for all of them.

The settings are compile-time constants: they do not change during training, and a float64 pass keeps them exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....losses import ElementwiseParams


def settings(params: ElementwiseParams) -> dict[str, object]:
    """The constants of a loss for the kernels."""
    names = {"label_smoothing": "SMOOTHING", "detach_focus": "DETACH"}
    return {names.get(name, name.upper()): value for name, value in params.numbers().items()}


LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def log1p_unit(e, ROUGH: tl.constexpr):
    """``log(1+e)`` for e in [0, 1]: a minimax polynomial, right to 1.8e-7 of itself, ROUGH to 8.5e-6, where float32 has
    no logarithm that is both fast and exact for small e."""
    if e.dtype == tl.float64:
        u = 1.0 + e  # the rounding of 1+e is divided out again
        p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    elif ROUGH:
        p = e * -0.023869125172495842 + 0.1012222170829773
        p = tl.fma(p, e, -0.2100486308336258)
        p = tl.fma(p, e, 0.3252066671848297)
        p = tl.fma(p, e, -0.4993613660335541)
        p = tl.fma(p, e, 0.9999915957450867) * e
    else:
        p = e * 0.0052326880395412445 - 0.029505213722586632
        p = tl.fma(p, e, 0.07822591066360474)
        p = tl.fma(p, e, -0.13663242757320404)
        p = tl.fma(p, e, 0.19106005132198334)
        p = tl.fma(p, e, -0.2484298199415207)
        p = tl.fma(p, e, 0.3331909775733948)
        p = tl.fma(p, e, -0.4999949336051941)
        p = tl.fma(p, e, 0.9999999403953552) * e
    return p


@triton.jit
def exp_minus(size):
    """``exp(-size)`` for numbers of at least 0."""
    if size.dtype == tl.float64:
        e = tl.exp(-size)
    else:
        e = tl.exp2(size * -LOG2E)
    return e


@triton.jit
def inverse(u):
    """``1/u`` for u in [1, 2]. A division by a float32 takes three instructions more, for numbers that are not there."""
    if u.dtype == tl.float64:
        v = 1.0 / u
    else:
        root = tl.rsqrt(u)
        v = root * root
    return v


@triton.jit
def softplus_and_sigmoid(t, ROUGH: tl.constexpr):
    """The cross-entropy of targets 0 and 1 and its slope, but for the sign: t is z where the target is 0, else -z."""
    e = exp_minus(tl.abs(t))
    return tl.maximum(t, 0.0) + log1p_unit(e, ROUGH), inverse(1.0 + e) * tl.where(t < 0, e, 1.0)


@triton.jit
def log1p(m):
    """``log(1+m)``, m > -1, exact to a few ulp where ``log(1+m)`` alone has lost m."""
    u = 1.0 + m
    return tl.where(u == 1.0, m, tl.log(u) * (m / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def power(m, GAMMA: tl.constexpr):
    """``m^γ`` and ``γ·m^(γ-1)`` for m in [0, 1]."""
    if GAMMA == 0.0:
        value = m * 0.0 + 1.0
        slope = m * 0.0
    elif GAMMA == 1.0:
        value = m
        slope = m * 0.0 + 1.0
    elif GAMMA == 2.0:
        value = m * m
        slope = 2.0 * m
    elif GAMMA == 4.0:
        value = m * m * m * m
        slope = 4.0 * m * m * m
    else:
        base = tl.where(m < 1e-30, 1e-30, m)
        value = tl.where(m < 1e-30, 0.0, tl.exp(GAMMA * tl.log(base)))
        slope = GAMMA * value / base
    return value, slope


@triton.jit
def value_and_grad(
    z,
    y,
    KIND: tl.constexpr,
    SMOOTHING: tl.constexpr,
    GAMMA_POS: tl.constexpr,
    GAMMA_NEG: tl.constexpr,
    ALPHA_POS: tl.constexpr,
    ALPHA_NEG: tl.constexpr,
    CLIP: tl.constexpr,
    EPS: tl.constexpr,
    DETACH: tl.constexpr,
    ROUGH: tl.constexpr = False,
):
    """y after smoothing, P, P', N, N' at the logits ``z``."""
    # e = exp(-|z|) gives σ(z), σ(-z) and both softplus without cancellation.
    e = exp_minus(tl.abs(z))
    big = 1.0 / (1.0 + e)
    p = tl.where(z < 0, e * big, big)
    q = tl.where(z < 0, big, e * big)
    tail = log1p_unit(e, ROUGH)
    softplus = tl.where(z > 0, z, 0.0) + tail  # -log q
    softminus = tl.where(z < 0, -z, 0.0) + tail  # -log p
    # 0·inf of an infinite logit must not become a NaN in the focusing terms
    softplus_f = tl.where(softplus < 1e30, softplus, 1e30)
    softminus_f = tl.where(softminus < 1e30, softminus, 1e30)
    if KIND == 0:
        if SMOOTHING != 0.0:
            y = y * (1.0 - SMOOTHING) + SMOOTHING / 2
        pos, dpos, neg, dneg = softminus, -q, softplus, p
    elif KIND == 1:
        focus = ALPHA_POS * tl.exp(-GAMMA_POS * softplus_f)  # α (1-p)^γ
        pos = focus * softminus
        dpos = -focus * (GAMMA_POS * p * softminus_f + q)
        focus = ALPHA_NEG * tl.exp(-GAMMA_NEG * softminus_f)
        neg = focus * softplus
        dneg = focus * (GAMMA_NEG * q * softplus_f + p)
    else:
        focus = tl.exp(-GAMMA_POS * softplus_f)
        log_p = tl.where(p < EPS, tl.log(p * 0.0 + EPS), -softminus)
        pos = -focus * log_p
        dpos = -focus * tl.where(p < EPS, 0.0, q)
        m = tl.where(p < CLIP, 0.0, p - CLIP)
        rest = tl.where(p < CLIP, 1.0, q + CLIP)  # 1 - m, from q: exact where m is near 1
        log_rest = tl.where(rest < 0.5, tl.log(tl.where(rest < EPS, EPS, rest)), log1p(-m))
        value, slope = power(m, GAMMA_NEG)
        neg = -value * log_rest
        inside = tl.where(rest < EPS, 0.0, value / tl.where(rest < EPS, 1.0, rest))
        if not DETACH:
            dpos += focus * GAMMA_POS * p * log_p
            inside -= slope * log_rest
        dneg = tl.where(p < CLIP, 0.0, inside * p * q)
    return y, pos, dpos, neg, dneg
