"""Whether other work competes for the processor while something is timed.

A time on a busy machine measures the other processes too. ``at_start`` looks at the load average and at the processes
that use the processor now; ``preemptions`` counts, for a piece of work, how often it was taken off its core.
Linux; elsewhere what the system does not tell is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PROC = Path("/proc")
WINDOW = 0.5  # seconds over which other processes are watched
BUSY_CORES = 0.25  # cores in use by others from which a machine counts as busy
BUSY_LOAD = 0.75  # load average per core
PREEMPTED = 100.0  # involuntary context switches per second of processor time: an idle machine has a few
REMEDY = "stop them, or set OMP_WAIT_POLICY=passive, and measure again"


@dataclass(frozen=True)
class Competitor:
    """A process of somebody else's that uses the processor."""

    pid: int
    name: str
    cores: float  # processor time per second


@dataclass(frozen=True)
class Load:
    """How busy a machine was when a measurement began."""

    cores: int
    load_average: float | None  # over the last minute
    competitors: list[Competitor] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """One sentence for each sign of a busy machine; empty on an idle one."""
        found = []
        busy = sum(competitor.cores for competitor in self.competitors)
        if busy >= BUSY_CORES:
            names = ", ".join(f"{c.name} ({c.cores:.1f})" for c in self.competitors[:5])
            found.append(f"other processes use {busy:.1f} of {self.cores} cores: {names}; {REMEDY}")
        if self.load_average is not None and self.load_average >= BUSY_LOAD * self.cores:
            found.append(
                f"the load average of the last minute is {self.load_average:.1f} on {self.cores} cores; "
                "wait until the machine is idle"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def at_start(window: float = WINDOW) -> Load:
    """Watches the other processes for ``window`` seconds."""
    before = _processor_seconds()
    started = time.perf_counter()
    time.sleep(window)
    elapsed = time.perf_counter() - started
    competitors = []
    for pid, (name, seconds) in _processor_seconds().items():
        cores = (seconds - before[pid][1]) / elapsed if pid in before else 0.0
        if pid != os.getpid() and cores >= 0.05:
            competitors.append(Competitor(pid, name, round(cores, 2)))
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Load(usable_cores(), average, sorted(competitors, key=lambda c: -c.cores))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def preemptions(work: Callable[[], object]) -> float | None:
    """Involuntary context switches per second of processor time while ``work()`` runs in this process."""
    if resource is None:
        work()
        return None
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (after.ru_nivcsw - before.ru_nivcsw) / max(seconds, 1e-3)


def _processor_seconds() -> dict[int, tuple[str, float]]:
    """Name and processor time so far of every process that can be seen; empty without a Linux /proc."""
    found = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it has ended
            continue
        # "pid (name) state …": the name may hold spaces and brackets. Fields 14 and 15 are user and system time.
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        found[int(folder.name)] = (name, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found
