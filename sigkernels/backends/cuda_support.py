"""Whether the compiled CUDA kernels run on a device: its architecture against those compiled, the driver against the runtime."""

from __future__ import annotations

import re
from typing import Any


def unsupported(module: Any, device: int) -> str | None:
    """``None``, or one sentence: why ``sigkernels._cuda`` cannot run on this device and what to do. Makes no context."""
    return too_old_a_driver(module) or _unsupported_device(module, device)


def too_old_a_driver(module: Any) -> str | None:
    """``None``, or one sentence: a driver runs every runtime up to its own major version."""
    driver, runtime = module.versions()
    if driver // 1000 >= runtime // 1000:
        return None
    has = f"supports CUDA {_version(driver)}" if driver else "is missing"
    return (
        f"sigkernels._cuda was built with CUDA {_version(runtime)} and the driver {has}; update the driver, or rebuild "
        "with an older toolkit"
    )


def _unsupported_device(module: Any, device: int) -> str | None:
    capability = tuple(module.capability(device))
    if not module.ARCHITECTURES or runs_on(module.ARCHITECTURES, capability, jit=_compiles_ptx(module)):
        return None
    return (
        f"sigkernels._cuda was built for {module.ARCHITECTURES} and cuda:{device} has compute capability "
        f"{capability[0]}.{capability[1]}; rebuild with TORCH_CUDA_ARCH_LIST set to it"
    )


def runs_on(architectures: str, capability: tuple[int, ...], jit: bool) -> bool:
    """Whether code for ``architectures`` ("8.0;9.0a;12.0+PTX") runs on a device; ``jit``: its driver compiles the PTX."""
    for major, minor, suffix, ptx in re.findall(r"(\d+)\.?(\d)([af]?)(\+PTX)?", architectures):
        compiled = int(major), int(minor)
        if suffix == "a":  # for this one architecture
            fits = compiled == capability
        else:
            fits = compiled[0] == capability[0] and compiled[1] <= capability[1]
        if fits or (ptx and not suffix and jit and compiled <= capability):
            return True
    return False


def _compiles_ptx(module: Any) -> bool:
    """A driver reads the PTX of toolkits up to its own version."""
    driver, runtime = module.versions()
    return driver >= runtime


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
