"""The CUDA backend on CPU tensors. As a pytest plugin it serves a whole test session:

PYTHONPATH=tests SIGKERNELS_HOST_KERNELS=<_cuda…so> python -m pytest -p kernels.on_host -k cuda tests/test_topk.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sigkernels import backends
from sigkernels.backends import cuda
from sigkernels.backends.cuda import CUDABackend


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def patched(kernels: ModuleType, set_attribute: Callable[[object, str, Any], None]) -> CUDABackend:
    """The CUDA backend with ``kernels`` as its compiled module and CPU tensors allowed."""
    cuda._sizes.cache_clear()
    set_attribute(cuda, "_module", lambda: kernels)
    set_attribute(CUDABackend, "unavailable", lambda self: None)
    set_attribute(CUDABackend, "devices", lambda self: ("cpu",))
    backends._unavailable.cache_clear()
    backend = backends.by_name("cuda")
    assert isinstance(backend, CUDABackend)
    return backend


# At import, which for a plugin is before any conftest asks the backends for their devices.
if os.environ.get("SIGKERNELS_HOST_KERNELS"):
    patched(load(Path(os.environ["SIGKERNELS_HOST_KERNELS"])), setattr)
