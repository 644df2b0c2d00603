"""One array namespace for the screens: numpy on the CPU, cupy on a GPU, anything that follows the array API standard.

The standard's names are used where numpy and cupy have them too; the few that differ between versions are bridged here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.linalg import lapack

Array = Any  # an array of whichever namespace is in use
CHOLESKY_WIDTH = 12  # below, numpy's one call for a whole batch is faster


def namespace(device: str) -> Any:
    """The namespace for ``device``: ``"cpu"`` or ``"cuda"`` (``"cuda:1"`` selects a GPU)."""
    if device == "cpu":
        return np
    if not (device == "cuda" or device.startswith("cuda:")):
        raise ValueError(f'device={device!r}: use "cpu", "cuda" or "cuda:<number>"')
    try:
        import cupy
    except ImportError:
        raise RuntimeError(
            f"device={device!r} needs cupy, which is not installed: pip install cupy-cuda12x (or cupy-cuda13x), "
            'or use device="cpu"'
        ) from None
    if not cupy.is_available():
        raise RuntimeError(f'device={device!r}: cupy finds no usable GPU; use device="cpu"')
    if ":" in device:
        cupy.cuda.Device(int(device.split(":")[1])).use()
    return cupy


def to_numpy(a: Array) -> np.ndarray:
    """A numpy copy (or view) of an array of any namespace."""
    return a.get() if hasattr(a, "get") else np.asarray(a)


def mT(a: Array) -> Array:
    """The last two axes swapped."""
    return a.swapaxes(-1, -2) if hasattr(a, "swapaxes") else a.mT


def concat(xp: Any, parts: Sequence[Array], axis: int = 0) -> Array:
    """The arrays joined along an axis."""
    return xp.concat(parts, axis=axis) if hasattr(xp, "concat") else xp.concatenate(parts, axis=axis)


def smallest(xp: Any, scores: Array, count: int) -> Array:
    """The positions of the ``count`` smallest entries of each row, in no particular order: [B, n] → [B, count]."""
    if hasattr(xp, "argpartition") and count < scores.shape[1]:
        return xp.argpartition(scores, count - 1, axis=1)[:, :count]
    return xp.argsort(scores, axis=1)[:, :count]


def keep(xp: Any, scores: Array, work: Array, kept: Array | None = None) -> Array:
    """The scores [B, n] with -∞ at the positions ``work`` [B, m] (those of them that are ``kept``): they sort first."""
    if hasattr(xp, "put_along_axis"):
        scores = scores.copy()
        lowest = xp.full(work.shape, -float("inf"), dtype=scores.dtype)
        if kept is not None:
            lowest = xp.where(kept, lowest, xp.take_along_axis(scores, work, axis=1))
        xp.put_along_axis(scores, work, lowest, axis=1)
        return scores
    member = work[:, :, None] == xp.arange(scores.shape[1])[None, None, :]
    if kept is not None:
        member = member & kept[:, :, None]
    return xp.where(xp.any(member, axis=1), xp.full_like(scores, -float("inf")), scores)


def spread(xp: Any, like: Array, work: Array, values: Array) -> Array:
    """Zeros [B, n], with ``values`` [B, m] at the positions ``work`` [B, m]."""
    out = xp.zeros_like(like)
    if hasattr(xp, "put_along_axis"):
        xp.put_along_axis(out, work, values, axis=1)
        return out
    member = work[:, :, None] == xp.arange(like.shape[1])[None, None, :]
    return xp.sum(xp.where(member, values[:, :, None], xp.zeros_like(values)[:, :, None]), axis=1)


def matvec(xp: Any, a: Array, x: Array) -> Array:
    """``a @ x`` per batch entry: [B, m, d], [B, d] → [B, m]."""
    return xp.matmul(a, x[:, :, None])[:, :, 0]


def plus_diagonal(xp: Any, h: Array, values: Array) -> Array:
    """h [d, d], which it may overwrite, with these values [d] more on its diagonal."""
    if xp is np and h.flags.c_contiguous:
        h.reshape(-1)[:: len(values) + 1] += values
        return h
    return h + values[:, None] * xp.eye(h.shape[0], dtype=h.dtype)


def definite_solver(xp: Any, h: Array) -> Callable[[Array], Array]:
    """``g ↦ h⁻¹ g`` per batch entry for symmetric positive definite h: [B, d, d]; g and the result are [B, d].

    By Cholesky where LAPACK is at hand; where rounding has made h indefinite, and elsewhere, by elimination, and where it is
    singular, in least squares.
    """
    if not (xp is np and h.shape[1] >= CHOLESKY_WIDTH):
        return lambda g: xp.linalg.solve(h, g[:, :, None])[:, :, 0]
    single = h.dtype == np.float32
    factorise, solve_factors = (lapack.spotrf, lapack.spotrs) if single else (lapack.dpotrf, lapack.dpotrs)
    factors = [factorise(matrix.T, lower=1, clean=0) for matrix in h]

    def solve(g: Array) -> Array:
        out = np.empty(g.shape, dtype=h.dtype)
        for i, (factor, failed) in enumerate(factors):
            out[i] = _eliminated(h[i], g[i]) if failed else solve_factors(factor, g[i], lower=1)[0]
        return out

    return solve


def _eliminated(h: np.ndarray, g: np.ndarray) -> np.ndarray:
    """``h⁻¹ g`` [d]; in least squares where h is singular, so that one set of many does not stop the others."""
    try:
        return np.linalg.solve(h, g)
    except np.linalg.LinAlgError:
        return np.linalg.lstsq(h, g)[0]


def solve_definite(xp: Any, h: Array, g: Array) -> Array:
    """``h⁻¹ g`` as by ``definite_solver``."""
    return definite_solver(xp, h)(g)
