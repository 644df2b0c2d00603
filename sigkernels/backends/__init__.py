"""Backends: one operation, several implementations, chosen per tensor.

``auto`` takes ``cpu`` for CPU tensors, and ``triton`` for CUDA tensors, or ``cuda`` for the losses of those shapes where
``gpu_paths.py`` says so; ``torch`` serves every other device, and whatever a kernel does not cover.
``SIGKERNELS_BACKEND``, as it was when the package was imported, or ``with sk.backend(name)`` forces one: a forced
backend that cannot do the job raises.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import gpu_paths, missing_kernels
from .cpu import CPUBackend
from .cuda import CUDABackend, short_way
from .gpu_paths import GPUPath, LossShape
from .interface import Backend, BackendError, ColumnResult, LossCall, LossResult, Operation
from .torch_backend import TorchBackend
from .triton import TritonBackend

__all__ = [
    "Backend",
    "BackendError",
    "ColumnResult",
    "LossCall",
    "LossResult",
    "available_backends",
    "backend",
    "backend_status",
    "by_name",
    "choose",
    "forced_name",
    "gpu_paths_here",
    "scale_on_device",
    "select",
]

_log = logging.getLogger("sigkernels")  # at debug level: which backends can run, and why one is passed over; each once
_BACKENDS: dict[str, Backend] = {b.name: b for b in (CPUBackend(), CUDABackend(), TritonBackend(), TorchBackend())}
# device type → kernels in order of preference; torch does what none of them does
_AUTO = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
# Read once: to ask for it at every call takes as long as a tenth of a small step.
_ENVIRONMENT = os.environ.get("SIGKERNELS_BACKEND") or "auto"
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("sigkernels_backend", default=None)


def backend_status() -> dict[str, str | None]:
    """Every backend by name: ``None`` where it can be used, else why not and what to install.

    Example:
        >>> sk.backend_status()["torch"] is None
        True
    """
    return {name: _unavailable(name) for name in _BACKENDS}


def available_backends() -> list[str]:
    """The names of the backends that can be used here.

    Example:
        >>> "torch" in sk.available_backends()
        True
    """
    return [name for name, reason in backend_status().items() if reason is None]


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces a backend inside a ``with`` block.

    Args:
        name: ``"cpu"``, ``"cuda"``, ``"triton"``, ``"torch"`` or ``"auto"``.

    Raises:
        RuntimeError: it cannot be used here; the message says what to install.

    Example:
        >>> with sk.backend("torch"):
        ...     logits = sk.LinearHead(4, 10)(torch.randn(2, 4))
        >>> logits.shape
        torch.Size([2, 10])
    """
    _require(name, "backend")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def by_name(name: str) -> Backend:
    """A backend, whether it can be used here or not."""
    return _BACKENDS[name]


def forced_name() -> str:
    """The backend that a ``with`` block or the environment asks for, or ``"auto"``."""
    name = _forced.get()
    if name is None:
        name = _ENVIRONMENT
        if name != "auto":
            _require(name, "SIGKERNELS_BACKEND")
    return name


@functools.cache
def _unavailable(name: str) -> str | None:
    """Asked once per process: a failed search for a module or a driver costs more than a small layer."""
    reason = _BACKENDS[name].unavailable()
    _log.debug("backend %s: %s", name, "available" if reason is None else f"not available: {reason}")
    return reason


@functools.lru_cache(maxsize=64)
def _log_refusal(name: str, reason: str) -> None:
    _log.debug("backend %s is passed over: %s", name, reason)


def select(x: Tensor, operation: Operation = "logits", loss: Any = None, codes: int = 0) -> Backend:
    """The backend for an operation on this tensor, with this loss where it has one, on a layer with so many codes."""
    return choose(forced_name(), x.device, operation, loss, codes)


def choose(
    forced: str,
    device: torch.device,
    operation: Operation,
    loss: Any = None,
    codes: int = 0,
    shape: LossShape | None = None,
) -> Backend:
    """The same where the name of the forced backend, or ``"auto"``, is known. ``shape``: of an elementwise loss."""
    if forced != "auto":
        reason = _refusal(_BACKENDS[forced], device, operation, loss, codes, shape)
        if reason is not None:
            raise BackendError(f"backend '{forced}' was asked for, but {reason}")
        return _BACKENDS[forced]
    takes_cuda = shape is not None and gpu_paths.choose_path(shape, gpu_paths_here(loss)).path == "cuda"
    for name in _AUTO.get(device.type, ()):
        if _unavailable(name) is not None or (name == "cuda" and not takes_cuda):
            continue
        refusal = _refusal(_BACKENDS[name], device, operation, loss, codes, shape)
        if refusal is None:
            return _BACKENDS[name]
        _log_refusal(name, refusal)
    if device.type == "cpu" and (reason := _unavailable("cpu")) is not None:
        missing_kernels.warn_once(reason)
    return _BACKENDS["torch"]


def scale_on_device(grads: list[Tensor], factor: Tensor) -> None:
    """Multiplies gradients in place by a scalar of their device, which nobody waits for. It is 1 nearly always: where there
    is Triton, one small launch finds that out and writes nothing."""
    if factor.is_cuda and _unavailable("triton") is None:
        from .triton import scale

        grads = scale.scale_(grads, factor)
    for grad in grads:
        grad.mul_(factor)


def gpu_paths_here(loss: Any = None) -> tuple[GPUPath, ...]:
    """The paths that ``auto`` has to choose from on CUDA tensors, for BCE or this loss."""
    cuda: tuple[GPUPath, ...] = ("cuda",) if _unavailable("cuda") is None and short_way(loss) else ()
    flash: tuple[GPUPath, ...] = ("flash",) if _unavailable("triton") is None else ()
    return (*cuda, *flash, "library")


def _refusal(
    backend: Backend, device: torch.device, operation: Operation, loss: Any, codes: int, shape: LossShape | None
) -> str | None:
    about_layer = (backend.refuses_codes() if codes else None) or backend.refuses(operation, loss)
    about_update = backend.refuses_update() if operation == "fused_update" else None
    refusal = backend.refuses_device(device) or about_update or about_layer
    return refusal or (backend.refuses_shape(shape) if shape is not None else None)


def _require(name: str, source: str) -> None:
    if name == "auto":
        return
    if name not in _BACKENDS:
        raise ValueError(f"{source} = {name!r} is not a backend; choose one of auto, {', '.join(_BACKENDS)}")
    reason = _unavailable(name)
    if reason is not None:
        raise BackendError(f"backend '{name}' was asked for ({source}), but {reason}")
