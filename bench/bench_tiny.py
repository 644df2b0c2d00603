"""Layers so small that a step is mostly Python and autograd: ours beside eager torch, forward and backward, one thread.

    pytest bench/bench_tiny.py          # one pytest-benchmark entry per case and peer
    python bench/bench_tiny.py          # the table: lowest and median microseconds, all of a case interleaved

Eager torch is ``F.linear`` and ``F.binary_cross_entropy_with_logits`` as functions, with dense targets for free.
"""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F
from peers import CLOCK, OURS, QUICK, Case, Step, race, samples

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [Case(100, -1, 8, 8), Case(200, -1, 8, 8), Case(200, -1, 32, 8), Case(200, 3, 8, 8), Case(500, -1, 16, 16)]
if QUICK:
    CASES = CASES[:2]
EAGER = "eager"
REPEATS = 50  # of a step that is timed as one


def steps(case: Case) -> dict[str, Step]:
    """A DFT head has its projection, and its peer a bottleneck of the same width."""
    torch.manual_seed(0)
    n, k, s, rows = case
    head = sk.LinearHead(s, n) if k < 0 else sk.DFTHead(2 * s, n, k, s, bias=True)
    h = torch.randn(rows, head.in_features, requires_grad=True)
    sets = sk.LabelSets.from_lists([set(row) for row in torch.randint(0, n, (rows, 3)).tolist()], n)
    dense = sets.to_dense()
    weight, bias = (torch.nn.Parameter(p.detach().clone()) for p in (head.to_linear()[-1].weight, head.bias))
    proj = None if k < 0 else torch.nn.Linear(2 * s, weight.shape[1])

    def features() -> torch.Tensor:
        return h if proj is None else F.linear(h, proj.weight, proj.bias)

    def repeated(loss: object, *leaves: torch.Tensor) -> Step:
        def run() -> None:
            for _ in range(REPEATS):
                loss().backward()
                for leaf in leaves:
                    leaf.grad = None

        return run

    others = (h, weight, bias, *(() if proj is None else proj.parameters()))
    made = {
        f"{OURS}, head.loss": repeated(lambda: head.loss(h, sets), h, *head.parameters()),
        EAGER: repeated(lambda: F.binary_cross_entropy_with_logits(F.linear(features(), weight, bias), dense), *others),
    }
    if k < 0:
        made[f"{OURS}, linear_loss"] = repeated(
            lambda: sk.functional.linear_loss(h, weight, sets, bias), h, weight, bias
        )
    return made


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("case", "who"), [(case, who) for case in CASES for who in steps(case)], ids=str)
def test_tiny(benchmark, case, who):
    race(benchmark, f"{REPEATS} steps of a tiny layer, {case}", who, lambda: steps(case), seconds=2.0)
    benchmark.extra_info.update(n=case.n, rows=case.rows)


def main() -> None:
    for case in CASES:
        taken = samples(steps(case), seconds=5.0)
        times = (
            f"{who} {min(t) / REPEATS * 1e6:.1f} / {statistics.median(t) / REPEATS * 1e6:.1f}"
            for who, t in taken.items()
        )
        print(f"{case!s:24} {'   '.join(times)} µs", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
