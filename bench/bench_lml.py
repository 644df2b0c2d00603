"""LML projection, forward and backward: ours against the published bracketing search and against float64 truth.

pytest bench/bench_lml.py
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from peers_lml import bracketing_lml

import sigkernels as sk

QUICK = bool(os.environ.get("SIGKERNELS_BENCH_QUICK"))
CASES = [(32, 8921, 10)] if QUICK else [(256, 8921, 10), (256, 100_000, 10)]  # rows, labels, k
WHO: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sigkernels": sk.functional.lml,
    "published bracketing, 10 branches, eps 1e-4": bracketing_lml,
}


def error(function: Callable[[torch.Tensor, int], torch.Tensor], z: torch.Tensor, k: int) -> dict[str, float]:
    """How far a few rows are from the exact projection, and their sums from k."""
    rows = z[:8]
    with sk.backend("torch"):
        exact = sk.functional.lml(rows.double(), k)
    y = function(rows, k).double()
    return {"max_error": float((y - exact).abs().max()), "sum_error": float((y.sum(1) - k).abs().max() / k)}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(("rows", "n", "k"), CASES)
def test_lml(benchmark, rows, n, k, who):
    torch.manual_seed(0)
    z = (torch.randn(rows, n) * 2).requires_grad_()
    upstream = torch.randn(rows, n)
    function = WHO[who]

    def step() -> None:
        torch.autograd.grad(function(z, k), z, upstream)

    benchmark.group = f"LML forward + backward, n={n:,}, rows={rows}, k={k}"
    benchmark.extra_info.update(who=who, n=n, rows=rows, **error(function, z.detach(), k))
    slow = who != "sigkernels"
    benchmark.pedantic(step, rounds=3 if slow else 15, warmup_rounds=0 if slow and n > 50_000 else 1)
