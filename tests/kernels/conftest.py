"""Fixtures of the kernel tests: where compiled artefacts are kept, and the CUDA backend on host memory.

Kernel tests run last, and what they compile is compiled beside the tests before them, most of which keep one core busy:
a test module says what that is in ``prepare(artefacts)``.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType

import pytest

from sigkernels.backends.cuda import CUDABackend

from .on_host import load, patched
from .toolchain import host_module, over

HERE = Path(__file__).parent
_beside = ThreadPoolExecutor(1)
_prepared: dict[str, Future[None]] = {}  # by test module


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: HERE in item.path.parents)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly or not hasattr(session.config, "cache"):
        return
    modules = {item.module.__name__: item.module for item in session.items if isinstance(item, pytest.Function)}
    for name, module in modules.items():
        if hasattr(module, "prepare") and HERE in Path(module.__file__).parents:
            _prepared[name] = _beside.submit(module.prepare, artefact_folder(session.config))


def pytest_sessionfinish() -> None:
    over.set()
    _beside.shutdown(wait=False, cancel_futures=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Waits for what was begun, before any fixture does it too. Where it failed, the tests do it again and say how."""
    if isinstance(item, pytest.Function) and item.module.__name__ in _prepared:
        wait([_prepared[item.module.__name__]])


def artefact_folder(config: pytest.Config) -> Path:
    """Kept between runs and keyed by content, so that only a change compiles again."""
    return Path(config.cache.mkdir("kernels"))


@pytest.fixture(scope="session")
def artefacts(request: pytest.FixtureRequest) -> Path:
    return artefact_folder(request.config)


@pytest.fixture(scope="session")
def host_kernels(artefacts: Path) -> ModuleType:
    """``sigkernels._cuda`` as the shim runs it."""
    return load(host_module(artefacts))


@pytest.fixture
def cuda_on_host(host_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> CUDABackend:
    """The CUDA backend, launchers and bindings included, on CPU tensors."""
    return patched(host_kernels, monkeypatch.setattr)
