"""Logits ``[B, n]``, against F.linear with the DFT matrix in memory.

    pytest bench/bench_logits.py

The array has to be written either way: a plain layer is a product that torch does as well as anybody.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peers import CLOCK, QUICK, Case, Problem, Step, duel

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [Case(8921, 80, 50, 64), Case(100_000, 50, 64, 64)]


def steps(problem: Problem) -> tuple[Step, Step]:
    x, weight, (n, k, *_) = problem.x.detach(), problem.weight.detach(), problem.case
    full = torch.cat([problem.dft, weight], 1)
    return lambda: sk.functional.dft_logits(x, weight, n, k), lambda: F.linear(x, full)


test_logits = duel("logits", "eager linear", CASES[:1] if QUICK else CASES, steps, memory=False)
