"""The m highest logits without the ``[B, n]`` array, against linear + torch.topk.

pytest bench/bench_topk.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peers import CLOCK, QUICK, Case, Problem, Step, duel

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [Case(8921, -1, 50, 64), Case(100_000, -1, 64, 64), Case(100_000, 50, 64, 64)]
M = 10


def steps(problem: Problem) -> tuple[Step, Step]:
    x, weight, (n, k, *_) = problem.x.detach(), problem.weight.detach(), problem.case
    if k < 0:
        return lambda: sk.functional.linear_topk(x, weight, M), lambda: torch.topk(F.linear(x, weight), M, dim=1)
    full = torch.cat([problem.dft, weight], 1)
    return lambda: sk.functional.dft_topk(x, weight, n, k, M), lambda: torch.topk(F.linear(x, full), M, dim=1)


test_topk = duel(f"top {M}", "eager linear + torch.topk", CASES[:1] if QUICK else CASES, steps)
