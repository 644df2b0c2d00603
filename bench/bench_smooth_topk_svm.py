"""Smooth top-k SVM, forward and backward: ours against the published tree in log space.

pytest bench/bench_smooth_topk_svm.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peers import CLOCK, OURS, QUICK, log_tree_topk_svm, race
from torch import Tensor

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [(8, 1000, 5)] if QUICK else [(256, 1000, 5), (64, 11_732, 5), (16, 11_732, 100)]  # rows, labels, k
PEER = "published tree in log space"


@pytest.mark.parametrize(("rows", "n", "k"), CASES)
@pytest.mark.parametrize("who", (OURS, PEER))
def test_smooth_topk_svm(benchmark, rows, n, k, who):
    torch.manual_seed(0)
    z = (torch.randn(rows, n) * 2).requires_grad_()
    labels = torch.randint(0, n, (rows,))
    sets = sk.LabelSets.from_lists(labels[:, None].tolist(), n)

    def step(loss: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(), z)

    functions = {
        OURS: step(lambda: sk.functional.smooth_topk_svm(z, sets, k)),
        PEER: step(lambda: log_tree_topk_svm(z, labels, k)),
    }
    torch.testing.assert_close(functions[OURS](), functions[PEER](), rtol=0, atol=1e-4)
    benchmark.extra_info.update(n=n, rows=rows)
    race(benchmark, f"smooth top-k SVM, n={n:,}, rows={rows}, k={k}", who, lambda: functions, rounds=3)
