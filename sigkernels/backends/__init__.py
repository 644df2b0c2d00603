"""Backends: one operation, several implementations, chosen per tensor.

``auto`` takes ``cpu`` for CPU tensors, and ``cuda``, else ``triton``, for CUDA tensors; ``torch`` serves every other
device, and whatever a kernel does not cover. ``SIGKERNELS_BACKEND`` or ``with sk.backend(name)`` forces one: a forced
backend that cannot do the job raises.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from . import missing_kernels
from .interface import Backend, LossResult

__all__ = [
    "Backend",
    "BackendError",
    "LossResult",
    "available_backends",
    "backend",
    "backend_status",
    "by_name",
    "forced_name",
    "select",
]


class BackendError(RuntimeError):
    """A backend was asked for that cannot do the job, with one line that says why and what to install."""


_MODULES = {"cpu": ".cpu", "cuda": ".cuda", "triton": ".triton", "torch": ".torch_tiled"}
_AUTO = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}  # device type → kernels in order of preference
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("sigkernels_backend", default=None)


def backend_status() -> dict[str, str | None]:
    """Every backend by name: ``None`` where it can be used, else why not and what to install."""
    return {name: by_name(name).available() for name in _MODULES}


def available_backends() -> list[str]:
    """The names of the backends that can be used here."""
    return [name for name, reason in backend_status().items() if reason is None]


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Forces a backend inside a ``with`` block: ``"cpu"``, ``"cuda"``, ``"triton"``, ``"torch"`` or ``"auto"``."""
    _require(name, "backend")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


@functools.cache
def by_name(name: str) -> Backend:
    """The module of a backend."""
    module: Any = importlib.import_module(_MODULES[name], __package__)
    return module


def forced_name() -> str:
    """The backend that a ``with`` block or the environment asks for, or ``"auto"``."""
    name = _forced.get()
    if name is None:
        name = os.environ.get("SIGKERNELS_BACKEND") or "auto"
        _require(name, "SIGKERNELS_BACKEND")
    return name


def select(x: Tensor, loss: Any = None) -> str:
    """The name of the backend for this tensor, and for this loss where one is given."""
    forced = forced_name()
    if forced != "auto":
        reason = _why_not(forced, x, loss)
        if reason is not None:
            raise BackendError(f"backend '{forced}' was asked for, but {reason}")
        return forced
    for name in _AUTO.get(x.device.type, ()):
        module = by_name(name)
        if module.available() is None and (loss is None or module.supports(loss) is None):
            return name
    if x.device.type == "cpu" and (reason := by_name("cpu").available()) is not None:
        missing_kernels.warn_once(reason)
    return "torch"


def _why_not(name: str, x: Tensor, loss: Any) -> str | None:
    module = by_name(name)
    devices = module.devices()
    if devices is not None and x.device.type not in devices:
        return f"it takes {' or '.join(devices)} tensors and the input is on {x.device}; move it, or use 'torch'"
    return module.supports(loss) if loss is not None else None


def _require(name: str, source: str) -> None:
    if name == "auto":
        return
    if name not in _MODULES:
        raise ValueError(f"{source} = {name!r} is no backend; choose one of auto, {', '.join(_MODULES)}")
    reason = by_name(name).available()
    if reason is not None:
        raise BackendError(f"backend '{name}' was asked for ({source}), but {reason}")
