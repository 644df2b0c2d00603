"""One training step while other processes want the cores: data loaders, neighbours on a shared server, a quota.

    pytest bench/bench_busy.py          # a race beside one competitor, and beside one per core
    python bench/bench_busy.py          # idle and busy, with the ratio of the two

Everything runs with the default waiting of the OpenMP runtime. ``OMP_WAIT_POLICY=passive``, set before Python starts, helps
eager torch; ours does not need it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from peers import CLOCK, OURS, Case, Problem, Step, race, samples

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASE = Case(8921, 80, 50, 64)
WHO = (OURS, "eager, frozen DFT", "eager, no DFT")
CORES = os.cpu_count() or 1


@contextlib.contextmanager
def competitors(count: int) -> Iterator[None]:
    """Processes that never give their core away."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def steps() -> dict[str, Step]:
    problem = Problem(CASE)
    return {name: problem.who(name) for name in WHO}


@pytest.mark.parametrize("count", sorted({1, CORES}))
@pytest.mark.parametrize("who", WHO)
def test_busy(benchmark, who, count):
    with competitors(count):
        race(benchmark, f"beside {count} busy processes on {CORES} cores, {CASE}", who, steps, seconds=6.0)
    benchmark.extra_info.update(n=CASE.n, rows=CASE.rows)


def main() -> None:
    torch.set_num_threads(CORES)
    idle: dict[str, float] = {}
    for count in sorted({0, 1, CORES}):
        # One after the other: a peer's threads that still wait would be competitors too.
        for name, step in steps().items():
            with competitors(count):
                taken = statistics.median(samples({name: step}, seconds=6.0)[name])
            idle.setdefault(name, taken)
            print(
                f"{count} competitors  {name:20} {taken * 1e3:8.2f} ms  {taken / idle[name]:6.1f} of idle", flush=True
            )


if __name__ == "__main__":
    main()
