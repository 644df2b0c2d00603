"""What users would pick instead of the fused pass, and how the two are timed: one place for all suites.

The peers get dense targets for free. ``dense`` holds the DFT matrix as a frozen buffer; ``plain`` has no DFT part at
all: a linear layer of width s and nothing that guarantees any label set.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import sigkernels as sk

QUICK = bool(os.environ.get("SIGKERNELS_BENCH_QUICK"))
ACTIVE = 15  # active labels of a row


class Case(NamedTuple):
    n: int
    k: int  # -1: no DFT part
    s: int
    rows: int

    def __str__(self) -> str:
        return f"n={self.n} k={self.k} s={self.s} B={self.rows}"


class Problem:
    """Inputs of one case, our step and the steps of the peers; a step is forward and backward."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.case = case
        n, k, s, rows = case
        self.columns = max(2 * k + 1, 0)
        self.x = torch.randn(rows, self.columns + s, dtype=dtype, requires_grad=True)
        self.weight = (torch.randn(n, s) * 0.1).to(dtype).requires_grad_()
        chosen = torch.randint(0, n, (rows, ACTIVE)).tolist()
        self.sets = sk.LabelSets.from_lists([set(row) for row in chosen], n)

    @functools.cached_property
    def slack(self) -> Tensor:
        return self.x.detach()[:, self.columns :].clone().requires_grad_()

    @functools.cached_property
    def dense_targets(self) -> Tensor:
        return self.sets.to_dense(self.x.dtype)

    @functools.cached_property
    def dft(self) -> Tensor:
        return sk.dft_matrix(self.case.n, self.case.k, dtype=self.x.dtype)

    def step(self, loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            self.x.grad = self.weight.grad = self.slack.grad = None
            loss().backward()

        return run

    def ours(self) -> Tensor:
        if self.case.k < 0:
            return sk.functional.linear_loss(self.x, self.weight, self.sets)
        return sk.functional.dft_loss(self.x, self.weight, self.sets, self.case.n, self.case.k)

    def dense(self) -> Tensor:
        z = F.linear(self.x[:, : self.columns], self.dft) + F.linear(self.x[:, self.columns :], self.weight)
        return F.binary_cross_entropy_with_logits(z, self.dense_targets)

    def plain(self) -> Tensor:
        return F.binary_cross_entropy_with_logits(F.linear(self.slack, self.weight), self.dense_targets)

    def who(self, name: str) -> Callable[[], None]:
        """The step of ``name``, one of ``STEPS``."""
        loss = {"sigkernels": self.ours, "eager, frozen DFT": self.dense}.get(name, self.plain)
        if name == "compiled, no DFT":
            loss = torch.compile(loss)
        return self.step(loss)

    @property
    def flops(self) -> int:
        """Of the three products over the slack columns: what cannot be avoided."""
        return 6 * self.case.rows * self.case.n * self.case.s


STEPS = ("sigkernels", "eager, frozen DFT", "eager, no DFT", "compiled, no DFT")


def interleaved(functions: dict[str, Callable[[], object]], seconds: float = 3.0) -> dict[str, float]:
    """Median seconds of each, measured A B C A B C … in one process: what disturbs one disturbs all."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
        function()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(next(iter(samples.values()))) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in samples.items()}
