"""The kept memory of weight gradients (``backends/gradient_memory.py``) beside fresh memory for every step.

    pytest bench/bench_gradient_memory.py

The same training step with and without the pool. What it saves are page faults, so the gain goes with the size of
``grad_weight`` and not with the batch; the price is the memory that waits between two steps.
"""

from __future__ import annotations

import sys

import pytest
from peers import CLOCK, OURS, QUICK, Case, Problem, Step, duel

from sigkernels.backends.compiled_core import core

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [Case(20_000, 50, 64, 64)] if QUICK else [Case(100_000, 50, 64, 64), Case(1_000_000, 50, 64, 64)]


def without_pool(step: Step) -> Step:
    """The step with gradients on fresh memory: none is large enough to be kept."""

    def run() -> None:
        least = core.gradient_memory.least_bytes
        core.gradient_memory.least_bytes = sys.maxsize
        try:
            step()
        finally:
            core.gradient_memory.least_bytes = least

    return run


def steps(problem: Problem) -> tuple[Step, Step]:
    step = problem.who(OURS)
    return step, without_pool(step)


test_gradient_memory = duel("training step, kept gradient memory", "fresh gradient memory", CASES, steps, memory=False)
