"""The m highest logits without the ``[B, n]`` array, against linear + torch.topk.

pytest bench/bench_topk.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peers import CLOCK, QUICK, Case, Problem, peak_bytes, race

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = (
    [Case(8921, -1, 50, 64)]
    if QUICK
    else [Case(8921, -1, 50, 64), Case(100_000, -1, 64, 64), Case(100_000, 50, 64, 64)]
)
M = 10
WHO = ("sigkernels", "eager linear + torch.topk")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("who", WHO)
def test_topk(benchmark, case, who):
    problem = Problem(case)
    x, weight = problem.x.detach(), problem.weight.detach()
    full = weight if case.k < 0 else torch.cat([problem.dft, weight], 1)

    def ours():
        if case.k < 0:
            return sk.functional.linear_topk(x, weight, M)
        return sk.functional.dft_topk(x, weight, case.n, case.k, M)

    def eager():
        return torch.topk(F.linear(x, full), M, dim=1)

    functions = dict(zip(WHO, (ours, eager), strict=True))
    benchmark.extra_info.update(n=case.n, rows=case.rows, peak_bytes=peak_bytes(functions[who]))
    race(benchmark, f"top {M}, {case}", who, lambda: functions)
