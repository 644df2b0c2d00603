"""A training step on a GPU, forward and backward of BCE, against eager torch and torch.compile (needs a GPU).

pytest bench/bench_gpu_step.py

The cases are those of the predictions in docs/gpu.md. The peers hold the DFT matrix as a buffer and get dense targets.
Device time, and beside it the time in which the host queues a step.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import NamedTuple

import pytest
import torch
from gpu_paths import DeviceClock, Step
from peers import ACTIVE, CLOCK, OURS, QUICK, Case, Problem

from sigkernels import BCE

pytestmark = [
    pytest.mark.benchmark(timer=CLOCK),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("tf32"),
]
CASES = [
    *(Case(8921, 80, s, rows) for s, rows in ((50, 64), (50, 256), (500, 1024))),
    *(Case(20_000, 50, 100, rows) for rows in (64, 256)),
    *(Case(100_000, k, 64, 256) for k in (50, -1)),
    Case(131_072, -1, 768, 1024),
    Case(1_000_000, 50, 64, 256),
]
KINDS = {"bf16": torch.bfloat16, "tf32": torch.float32}
PEERS = ("eager", "compiled")
ROUNDS = 5 if QUICK else 20


class Taken(NamedTuple):
    device: list[float]
    host: float  # seconds
    peak_bytes: int


def step_of(problem: Problem, who: str) -> Step:
    if who == OURS:
        return problem.who(OURS)
    return problem.who(f"{who}, {'frozen' if problem.case.k >= 0 else 'no'} DFT", BCE())


@functools.lru_cache(maxsize=1)
def times_of(case: Case, kind: str) -> dict[str, Taken]:
    device = torch.device("cuda", torch.cuda.current_device())
    problem, clock = Problem(case, KINDS[kind], device), DeviceClock(device)
    steps = {who: step_of(problem, who) for who in (OURS, *PEERS)}
    peaks = {who: _peak_bytes(step) for who, step in steps.items()}
    host = {who: statistics.median(_queued(step) for _ in range(ROUNDS)) for who, step in steps.items()}
    taken: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(ROUNDS):
        for who, step in steps.items():
            taken[who].append(clock(step))
    return {who: Taken(taken[who], host[who], peaks[who]) for who in steps}


def _peak_bytes(step: Step) -> int:
    step()  # compiles, and makes tables
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def _queued(step: Step) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@pytest.mark.parametrize("who", (OURS, *PEERS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_step(benchmark, case, kind, who):
    taken = times_of(case, kind)[who]
    benchmark.group = f"GPU step, {kind}, {case}"
    benchmark.extra_info.update(who=who, n=case.n, rows=case.rows, active=ACTIVE, peak_bytes=taken.peak_bytes)
    benchmark.extra_info["host µs"] = taken.host * 1e6
    benchmark.pedantic(CLOCK.replay(taken.device), rounds=len(taken.device))
