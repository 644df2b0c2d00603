"""One training step of the output layer (loss and gradients) as the number of labels grows.

    pytest bench/bench_scaling.py

Peers: eager torch with the DFT columns as a buffer, which is what the published layer does; and an ordinary ``nn.Linear``
of the same width, which trains all columns, with eager torch and with our fused loss. Targets are label sets; eager
torch has to convert them to a dense array in every step, as a data loader would. Where eager would need more than ``EAGER_LIMIT``
bytes for one ``B × n`` array it is left out, and the report shows no factor.
"""

from __future__ import annotations

import functools

import pytest
import torch
from peers import CLOCK, QUICK, Case, Problem, Step, peak_bytes, race
from torch.nn import functional as F

import sigkernels as sk
from sigkernels import datasets

pytestmark = pytest.mark.benchmark(timer=CLOCK)

ROWS, K, SLACK = 64, 50, 64
SIZES = (2_000, 20_000) if QUICK else (10_000, 30_000, 100_000, 300_000, 1_000_000)
EAGER_LIMIT = 2**30  # bytes of one B × n float32 array, four of which live at once
WHO = ("sigkernels, DFT head", "sigkernels, linear", "eager torch, DFT as a buffer", "eager torch, nn.Linear")


@functools.lru_cache(maxsize=1)
def steps(n: int) -> dict[str, Step]:
    problem = Problem(Case(n, K, SLACK, ROWS))
    targets = datasets.synthetic(n, K, num_examples=ROWS).load().labels
    x, slack, columns = problem.x, problem.weight, problem.columns
    weight = torch.cat([problem.dft, slack.detach()], 1).requires_grad_()

    def eager_dft() -> torch.Tensor:
        logits = F.linear(x[:, :columns], problem.dft) + F.linear(x[:, columns:], slack)
        return F.binary_cross_entropy_with_logits(logits, targets.to_dense(), reduction="sum")

    def eager_linear() -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(F.linear(x, weight), targets.to_dense(), reduction="sum")

    losses = (
        lambda: sk.functional.dft_loss(x, slack, targets, n, K, reduction="sum"),
        lambda: sk.functional.linear_loss(x, weight, targets, reduction="sum"),
        eager_dft,
        eager_linear,
    )

    def clean(loss):
        def step() -> None:
            loss().backward()
            x.grad = slack.grad = weight.grad = None

        return step

    return {who: clean(loss) for who, loss in zip(WHO, losses, strict=True) if fits(who, n)}


def fits(who: str, n: int) -> bool:
    return who.startswith("sigkernels") or 4 * ROWS * n <= EAGER_LIMIT


@pytest.mark.parametrize(("n", "who"), [(n, who) for n in SIZES for who in WHO if fits(who, n)])
def test_step(benchmark, who: str, n: int) -> None:
    benchmark.extra_info.update(n=n, rows=ROWS, peak_bytes=peak_bytes(steps(n)[who], repeats=1))
    group = f"training step, n={n:,}, {ROWS} rows, k={K}, slack={SLACK}"
    race(benchmark, group, who, lambda: steps(n), seconds=4.0)
