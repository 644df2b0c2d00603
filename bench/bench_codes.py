"""What codes cost a training step: the same layer without them, and with as many columns of learned slack instead.

    pytest bench/bench_codes.py                          # one pytest-benchmark entry per case and layer
    SIGKERNELS_ISA=avx2 python bench/bench_codes.py      # the table of ratios, all layers of a case interleaved

Forward and backward of BCE with the gradients of the features and of the slack. Features of codes come from a wider
projection, which is not timed: as many more as with the slack.
"""

from __future__ import annotations

import statistics

import pytest
import torch
from peers import CLOCK, OURS, QUICK, Case, Step, race, samples

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = {Case(11_732, 80, 25, 256): 256, Case(11_732, 80, 25, 64): 256, Case(100_000, 50, 64, 64): 1024}
if QUICK:
    CASES = {Case(2_000, 10, 25, 16): 64}


def steps(case: Case) -> dict[str, Step]:
    torch.manual_seed(0)
    n, k, s, rows = case
    codes = CASES[case]
    sets = sk.LabelSets.from_lists([set(row) for row in torch.randint(0, n, (rows, 15)).tolist()], n)

    def step(codes: int, slack: int) -> Step:
        x = torch.randn(rows, 2 * k + 1 + codes + slack, requires_grad=True)
        weight = (0.1 * torch.randn(n, slack)).requires_grad_()

        def run() -> None:
            sk.functional.dft_loss(x, weight, sets, n, k, codes=codes).backward()
            x.grad = weight.grad = None

        return run

    return {
        f"{OURS}, {codes} codes": step(codes, s),
        f"{OURS}, without codes": step(0, s),
        f"{OURS}, {codes} more columns of slack": step(0, s + codes),
    }


@pytest.mark.parametrize(("case", "who"), [(case, who) for case in CASES for who in steps(case)], ids=str)
def test_codes(benchmark, case, who):
    race(benchmark, f"codes, {case}", who, lambda: steps(case))
    benchmark.extra_info.update(n=case.n, rows=case.rows)


def main() -> None:
    for case in CASES:
        taken = samples(steps(case), seconds=6.0)
        codes, without, slack = (statistics.median(times) for times in taken.values())
        print(
            f"{case!s:28} {CASES[case]:4} codes {codes * 1e3:7.2f} ms: {codes / without:.2f} of the step without them "
            f"({without * 1e3:.2f} ms), as slack {slack / without:.2f} of it, {slack / codes:.2f} times as long as codes",
            flush=True,
        )


if __name__ == "__main__":
    main()
