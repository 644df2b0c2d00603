"""One training step of the output layer (loss and gradients) as the number of labels grows, up to a million.

Peers: eager torch with the classifier matrix as a tensor, dense targets and BCE-with-logits, which is what a model has
before the swap; and the same with the loss fused over an ordinary linear layer. Where eager would need more than
``EAGER_LIMIT`` bytes for its ``B × n`` arrays it is left out, and the report shows no factor.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sigkernels as sk
from sigkernels import datasets
from sigkernels.memory import peak_bytes

QUICK = bool(os.environ.get("SIGKERNELS_BENCH_QUICK"))
ROWS, K, SLACK = 64, 50, 64
SIZES = (2_000, 20_000) if QUICK else (10_000, 30_000, 100_000, 300_000, 1_000_000)
EAGER_LIMIT = 2**30  # bytes of one B × n float32 array, four of which live at once
Step = Callable[[], object]


def sigkernels_dft(x: Tensor, slack: Tensor, targets: sk.LabelSets, n: int) -> Step:
    return lambda: sk.functional.dft_loss(x, slack, targets, n, K, reduction="sum").backward()


def sigkernels_linear(x: Tensor, slack: Tensor, targets: sk.LabelSets, n: int) -> Step:
    weight = torch.cat([sk.dft_matrix(n, K, dtype=torch.float32), slack.detach()], 1).requires_grad_()

    def step() -> None:
        weight.grad = None
        sk.functional.linear_loss(x, weight, targets, reduction="sum").backward()

    return step


def eager_dft(x: Tensor, slack: Tensor, targets: sk.LabelSets, n: int) -> Step:
    """The DFT columns as a buffer: what the published layer does."""
    dft = sk.dft_matrix(n, K, dtype=torch.float32)

    def step() -> None:
        logits = F.linear(x[:, : 2 * K + 1], dft) + F.linear(x[:, 2 * K + 1 :], slack)
        F.binary_cross_entropy_with_logits(logits, targets.to_dense(), reduction="sum").backward()

    return step


def eager_linear(x: Tensor, slack: Tensor, targets: sk.LabelSets, n: int) -> Step:
    weight = torch.cat([sk.dft_matrix(n, K, dtype=torch.float32), slack.detach()], 1).requires_grad_()

    def step() -> None:
        weight.grad = None
        F.binary_cross_entropy_with_logits(F.linear(x, weight), targets.to_dense(), reduction="sum").backward()

    return step


IMPLEMENTATIONS = {
    "sigkernels, DFT head": sigkernels_dft,
    "sigkernels, linear": sigkernels_linear,
    "eager torch, DFT as a buffer": eager_dft,
    "eager torch, nn.Linear": eager_linear,
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("who", IMPLEMENTATIONS)
def test_step(benchmark, who: str, n: int) -> None:
    if who.startswith("eager") and 4 * ROWS * n > EAGER_LIMIT:
        pytest.skip(f"a {ROWS} × {n} array is too large")
    torch.manual_seed(0)
    x = torch.randn(ROWS, 2 * K + 1 + SLACK, requires_grad=True)
    slack = (torch.randn(n, SLACK) / 8).requires_grad_()
    targets = datasets.synthetic(n, K, num_examples=ROWS).load().labels
    step = IMPLEMENTATIONS[who](x, slack, targets, n)

    def clean_step() -> None:
        step()
        x.grad = slack.grad = None

    benchmark.group = f"training step, n={n:,}, {ROWS} rows, k={K}, slack={SLACK}"
    benchmark.extra_info.update(who=who, n=n, rows=ROWS, peak_bytes=peak_bytes(clean_step, repeats=1))
    benchmark.pedantic(clean_step, rounds=3 if QUICK else 7, warmup_rounds=1)
