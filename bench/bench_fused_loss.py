"""The fused loss, forward and backward through the public function, against what users would pick instead.

pytest bench/bench_fused_loss.py          # one pytest-benchmark entry per case and peer
python bench/bench_fused_loss.py          # the table of ratios, all peers of a case interleaved
"""

from __future__ import annotations

import sys

import pytest
import torch
from peers import QUICK, STEPS, Case, Problem, interleaved, peak_bytes

CASES = [
    Case(8921, 80, 50, 16),
    Case(8921, 80, 50, 64),
    Case(8921, 80, 50, 256),
    Case(8921, 80, 500, 64),
    Case(20_000, 50, 100, 64),
    Case(100_000, 50, 64, 64),
    Case(1_000_000, 50, 64, 64),
]
LINEAR = [Case(8921, -1, 50, 64), Case(8921, -1, 500, 64), Case(20_000, -1, 100, 256), Case(100_000, -1, 64, 64)]
if QUICK:
    CASES, LINEAR = CASES[:2], LINEAR[:1]


def steps(case: Case) -> tuple[str, ...]:
    """A plain layer has no DFT to freeze; a million labels are not compiled."""
    names = [name for name in STEPS if case.k >= 0 or "frozen" not in name]
    return tuple(name for name in names if case.n < 1_000_000 or "compiled" not in name)


@pytest.mark.parametrize(("case", "who"), [(c, w) for c in CASES + LINEAR for w in steps(c)], ids=str)
def test_fused_loss(benchmark, case, who):
    problem = Problem(case)
    step = problem.who(who)
    benchmark.group = f"fused loss, {case}"
    benchmark.extra_info.update(who=who, n=case.n, rows=case.rows, peak_bytes=peak_bytes(step))
    benchmark.pedantic(step, rounds=5 if case.n >= 1_000_000 else 15, warmup_rounds=2)
    benchmark.extra_info["GFLOP/s"] = problem.flops / benchmark.stats["median"] / 1e9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(benchmark, dtype):
    case = Case(20_000, 50, 100, 64)
    benchmark.group = f"fused loss by dtype, {case}"
    benchmark.extra_info.update(who=f"sigkernels, {dtype}", n=case.n, rows=case.rows)
    benchmark.pedantic(Problem(case, dtype).who("sigkernels"), rounds=15, warmup_rounds=2)


def main(cases: list[Case]) -> None:
    for case in cases:
        problem = Problem(case)
        names = steps(case)
        times = interleaved({name: problem.who(name) for name in names})
        ours = times["sigkernels"]
        ratios = "  ".join(f"{name} {times[name] / ours:.2f}" for name in names[1:])
        rate = problem.flops / ours / 1e9
        print(f"{case!s:34} {ours * 1e3:8.2f} ms {rate:6.0f} GFLOP/s   {ratios}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(2)
    chosen = [case for case in CASES + LINEAR if not sys.argv[1:] or any(a in str(case) for a in sys.argv[1:])]
    main(chosen)
