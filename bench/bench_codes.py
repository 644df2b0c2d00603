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


CODES, OTHERS = f"{OURS}, codes", ("without codes", "as learned slack")


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

    return dict(zip((CODES, *OTHERS), (step(codes, s), step(0, s), step(0, s + codes)), strict=True))


def pairs(case: Case) -> dict[str, dict[str, Step]]:
    """Codes beside one other layer at a time: the widest would leave the caches cold for whichever comes after it."""
    taken = steps(case)
    return {other: {who: taken[who] for who in (CODES, other)} for other in OTHERS}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("who", (CODES, "other"))
def test_codes(benchmark, case, other, who):
    group = f"{CASES[case]} codes, {other}: {case}"
    race(benchmark, group, CODES if who == CODES else other, lambda: pairs(case)[other])
    benchmark.extra_info.update(n=case.n, rows=case.rows)


def main() -> None:
    for case in CASES:
        factors = {}
        for other, pair in pairs(case).items():
            mine, theirs = (statistics.median(times) for times in samples(pair, seconds=5.0).values())
            factors[other] = f"{mine * 1e3:.2f} ms beside {theirs * 1e3:.2f} {other} ({mine / theirs:.2f})"
        print(f"{case!s:28} {CASES[case]:4} codes: {', '.join(factors.values())}", flush=True)


if __name__ == "__main__":
    main()
