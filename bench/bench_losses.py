"""Losses on a DFT head, forward and backward: ours against the same formula on materialised logits, eager and compiled.

    pytest bench/bench_losses.py

The peers hold the DFT matrix as a frozen buffer and get dense targets for free.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import sigkernels as sk

QUICK = bool(os.environ.get("SIGKERNELS_BENCH_QUICK"))
CASES = [(32, 8921, 80, 50)] if QUICK else [(64, 8921, 80, 50), (64, 100_000, 50, 64)]  # rows, n, k, slack
LOSSES = {
    "BCE": sk.BCE(),
    "Focal": sk.Focal(),
    "Asymmetric": sk.Asymmetric(),
    "sigmoidF1": sk.SigmoidF1(),
    "LML-NLL": sk.LMLNLL(10),
}
WHO = ("sigkernels", "torch, eager", "torch, compiled")


class Problem:
    """One head's inputs, and the two ways to its loss."""

    def __init__(self, rows: int, n: int, k: int, slack: int) -> None:
        torch.manual_seed(0)
        self.n, self.k = n, k
        self.x = torch.randn(rows, 2 * k + 1 + slack, requires_grad=True)
        self.weight = (torch.randn(n, slack) * 0.1).requires_grad_()
        self.dft = sk.dft_matrix(n, k, dtype=torch.float32)
        chosen = torch.randint(0, n, (rows, 5))
        self.sets = sk.LabelSets.from_lists([set(row) for row in chosen.tolist()], n)
        self.dense = self.sets.to_dense()

    def ours(self, loss: sk.Loss) -> torch.Tensor:
        return sk.functional.dft_loss(self.x, self.weight, self.sets, self.n, self.k, loss)

    def materialised(self, loss: sk.Loss) -> Callable[[], torch.Tensor]:
        columns = 2 * self.k + 1
        formula = loss.value

        def dense_loss() -> torch.Tensor:
            z = self.x[:, :columns] @ self.dft.T + self.x[:, columns:] @ self.weight.T
            return formula(z, self.dense).mean()

        return dense_loss


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"n={case[1]}")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("who", WHO)
def test_losses(benchmark, case, name, who):
    problem, loss = Problem(*case), LOSSES[name]
    if name == "LML-NLL" and who != "sigkernels":
        pytest.skip("bench_lml.py has the peer of the projection")
    function: Callable[[], torch.Tensor]
    if who == "sigkernels":

        def function() -> torch.Tensor:
            return problem.ours(loss)
    else:
        function = problem.materialised(loss)
        if who == "torch, compiled":
            function = torch.compile(function)

    def step() -> None:
        torch.autograd.grad(function(), (problem.x, problem.weight))

    rows, n, k, slack = case
    benchmark.group = f"{name}, n={n:,}, k={k}, slack={slack}, rows={rows}"
    benchmark.extra_info.update(who=who, n=n, rows=rows)
    benchmark.pedantic(step, rounds=9 if n < 50_000 else 5, warmup_rounds=2)
