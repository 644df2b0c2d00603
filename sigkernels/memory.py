"""How much memory a piece of work adds at its peak, as the operating system sees it.

Asked of the kernel and not of torch: torch does not see what a compiled extension takes for itself.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from .backends.compiled_core import core

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc(5)


def peak_bytes(work: Callable[[], object], repeats: int = 3, warm_up: Callable[[], object] | None = None) -> int | None:
    """The largest resident memory during ``work()`` minus that before it: the least of a few runs.

    ``warm_up`` (``work`` itself unless given) runs first and pays for what stays: thread pools, caches. What ``work``
    leaves behind must be gone when it returns (gradients above all), or the next run would only replace it and seem to
    need less. ``None`` where there is no Linux /proc to ask.
    """
    if not CLEAR_REFS.exists():
        return None
    (warm_up or work)()
    added = []
    for _ in range(repeats):
        gc.collect()
        _give_back()
        CLEAR_REFS.write_text(RESET_PEAK)
        before = _status("VmRSS")
        work()
        added.append(_status("VmHWM") - before)
    return max(min(added), 0)


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _give_back() -> None:
    """Freed memory that is kept, by malloc or for the next gradient, would hide the next peak."""
    if core:
        core.gradient_memory.forget()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return
