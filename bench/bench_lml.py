"""LML projection, forward and backward: ours against the published bracketing search and against float64 truth.

pytest bench/bench_lml.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peers import CLOCK, QUICK, bracketing_lml, race
from torch import Tensor

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [(32, 8921, 10)] if QUICK else [(256, 8921, 10), (256, 100_000, 10)]  # rows, labels, k
WHO: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sigkernels": sk.functional.lml,
    "published bracketing, 10 branches, eps 1e-4": bracketing_lml,
}


def error(function: Callable[[Tensor, int], Tensor], z: Tensor, k: int) -> dict[str, float]:
    """How far a few rows are from the exact projection, and their sums from k."""
    rows = z[:8]
    with sk.backend("torch"):
        exact = sk.functional.lml(rows.double(), k)
    y = function(rows, k).double()
    return {"max_error": float((y - exact).abs().max()), "sum_error": float((y.sum(1) - k).abs().max() / k)}


@pytest.mark.parametrize(("rows", "n", "k"), CASES)
@pytest.mark.parametrize("who", WHO)
def test_lml(benchmark, rows, n, k, who):
    torch.manual_seed(0)
    z = (torch.randn(rows, n) * 2).requires_grad_()
    upstream = torch.randn(rows, n)

    def step(function: Callable[[Tensor, int], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(z, k), z, upstream)

    benchmark.extra_info.update(n=n, rows=rows, **error(WHO[who], z.detach(), k))
    group = f"LML forward + backward, n={n:,}, rows={rows}, k={k}"
    race(benchmark, group, who, lambda: {name: step(function) for name, function in WHO.items()}, rounds=3)
