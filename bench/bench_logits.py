"""Logits ``[B, n]``, against F.linear with the DFT matrix in memory.

    pytest bench/bench_logits.py

The array has to be written either way: a plain layer is a product that torch does as well as anybody.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peers import CLOCK, QUICK, Case, Problem, race

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [Case(8921, 80, 50, 64)] if QUICK else [Case(8921, 80, 50, 64), Case(100_000, 50, 64, 64)]
WHO = ("sigkernels", "eager linear")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("who", WHO)
def test_logits(benchmark, case, who):
    problem = Problem(case)
    x, weight = problem.x.detach(), problem.weight.detach()
    full = torch.cat([problem.dft, weight], 1)

    def ours():
        return sk.functional.dft_logits(x, weight, case.n, case.k)

    def eager():
        return F.linear(x, full)

    benchmark.extra_info.update(n=case.n, rows=case.rows)
    race(benchmark, f"logits, {case}", who, lambda: dict(zip(WHO, (ours, eager), strict=True)))
