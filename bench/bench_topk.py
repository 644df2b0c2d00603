"""The m highest logits without the ``[B, n]`` array, against linear + torch.topk.

pytest bench/bench_topk.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peers import QUICK, Case, Problem, peak_bytes

import sigkernels as sk

CASES = (
    [Case(8921, -1, 50, 64)]
    if QUICK
    else [Case(8921, -1, 50, 64), Case(100_000, -1, 64, 64), Case(100_000, 50, 64, 64)]
)
M = 10


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("who", ["sigkernels", "eager linear + torch.topk"])
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

    function = ours if who == "sigkernels" else eager
    benchmark.group = f"top {M}, {case}"
    benchmark.extra_info.update(who=who, n=case.n, rows=case.rows, peak_bytes=peak_bytes(function))
    benchmark.pedantic(function, rounds=15, warmup_rounds=2)
