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


@triton.jit
def log1p(e):
    """Exact to a few ulp where ``log(1+e)`` alone has lost e: the rounding of 1+e is divided out again."""
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


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
):
    """y after smoothing, P, P', N, N' at the logits ``z``."""
    # e = exp(-|z|) gives σ(z), σ(-z) and both softplus without cancellation.
    e = tl.exp(-tl.abs(z))
    big = 1.0 / (1.0 + e)
    p = tl.where(z < 0, e * big, big)
    q = tl.where(z < 0, big, e * big)
    tail = log1p(e)
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
