"""Fixtures of the kernel tests: where compiled artefacts are kept, and the CUDA backend on host memory."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from sigkernels.backends.cuda import CUDABackend

from .on_host import load, patched
from .toolchain import host_module


@pytest.fixture(scope="session")
def artefacts(request: pytest.FixtureRequest) -> Path:
    """Kept between runs and keyed by content, so that only a change compiles again."""
    return Path(request.config.cache.mkdir("kernels"))


@pytest.fixture(scope="session")
def host_kernels(artefacts: Path) -> ModuleType:
    """``sigkernels._cuda`` as the shim runs it."""
    return load(host_module(artefacts))


@pytest.fixture
def cuda_on_host(host_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> CUDABackend:
    """The CUDA backend, launchers and bindings included, on CPU tensors."""
    return patched(host_kernels, monkeypatch.setattr)
