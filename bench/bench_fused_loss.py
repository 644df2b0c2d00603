"""The fused loss, forward and backward through the public function, against what users would pick instead.

pytest bench/bench_fused_loss.py          # one pytest-benchmark entry per case and peer
python bench/bench_fused_loss.py          # the table of ratios, all peers of a case interleaved
"""

from __future__ import annotations

import functools
import statistics
import sys

import pytest
import torch
from peers import CLOCK, COMPILERS, DFT_CASES, QUICK, STEPS, Case, Problem, interleaved, peak_bytes, race

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = DFT_CASES
LINEAR = [Case(8921, -1, 50, 64), Case(8921, -1, 500, 64), Case(20_000, -1, 100, 256), Case(100_000, -1, 64, 64)]
if QUICK:
    CASES, LINEAR = CASES[:2], LINEAR[:1]


def steps(case: Case) -> tuple[str, ...]:
    """A plain layer has no DFT to freeze; a million labels are not compiled."""
    names = [name for name in STEPS if case.k >= 0 or "frozen" not in name]
    return tuple(name for name in names if case.n < 1_000_000 or name.partition(", ")[0] not in COMPILERS)


@functools.lru_cache(maxsize=1)
def problem_of(case: Case) -> Problem:
    return Problem(case)


@pytest.mark.parametrize(("case", "who"), [(c, w) for c in CASES + LINEAR for w in steps(c)], ids=str)
def test_fused_loss(benchmark, case, who):
    problem = problem_of(case)
    taken = race(
        benchmark, f"fused loss, {case}", who, lambda: {name: problem.who(name) for name in steps(case)}, seconds=3.0
    )
    rate = problem.flops / statistics.median(taken) / 1e9
    benchmark.extra_info.update(n=case.n, rows=case.rows, peak_bytes=peak_bytes(problem.who(who)))
    benchmark.extra_info["GFLOP/s"] = rate


DTYPES = {"sigkernels": torch.float32, "sigkernels, bfloat16": torch.bfloat16, "sigkernels, float64": torch.float64}


@pytest.mark.parametrize("who", DTYPES)
def test_dtypes(benchmark, who):
    case = Case(20_000, 50, 100, 64)
    runners = {name: Problem(case, dtype).who("sigkernels") for name, dtype in DTYPES.items()}
    race(benchmark, f"fused loss by dtype, {case}", who, lambda: runners)
    benchmark.extra_info.update(n=case.n, rows=case.rows)


def main(cases: list[Case]) -> None:
    for case in cases:
        problem = Problem(case)
        names = steps(case)
        times = interleaved({name: problem.who(name) for name in names})
        ours = times["sigkernels"]
        ratios = "  ".join(f"{name} {times[name] / ours:.2f}" for name in names[1:])
        rate = problem.flops / ours / 1e9
        print(f"{case!s:34} {ours * 1e3:8.2f} ms {rate:6.0f} GFLOP/s   {ratios}", flush=True)
        for layer, peers in (
            ("the same layer", [name for name in names[1:] if ("frozen" in name) == (case.k >= 0)]),
            ("a layer without the DFT part", [name for name in names[1:] if case.k >= 0 and "frozen" not in name]),
        ):
            if peers:
                best = min(peers, key=lambda name: times[name])
                print(f"{'':34} best peer of {layer}: {times[best] / ours:.2f} ({best})", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(2)
    chosen = [case for case in CASES + LINEAR if not sys.argv[1:] or any(a in str(case) for a in sys.argv[1:])]
    main(chosen)
