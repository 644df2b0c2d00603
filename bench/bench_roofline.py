"""Where the fused pass stands between the machine's arithmetic and its memory; ``roofline.py`` has the definitions.

pytest bench/bench_roofline.py
"""

from __future__ import annotations

import pytest
from peers import CLOCK, QUICK, Problem, race
from roofline import BASE, CASES, SWEEPS, attainable, exponent, peak_steps, traffic

pytestmark = pytest.mark.benchmark(timer=CLOCK)


@pytest.mark.parametrize("who", ["torch sgemm", "copy"])
def test_peaks(benchmark, who):
    steps, work = peak_steps()
    taken = race(benchmark, "peaks of this machine", who, lambda: steps)
    unit = "GFLOP/s" if who == "torch sgemm" else "GB/s"
    benchmark.extra_info[unit] = work[who] / sorted(taken)[len(taken) // 2] / 1e9


@pytest.mark.parametrize("case", CASES[:2] if QUICK else CASES, ids=str)
def test_case(benchmark, case):
    problem = Problem(case)
    benchmark.extra_info.update(n=case.n, rows=case.rows, flop_per_byte=problem.flops / traffic(case))
    taken = race(benchmark, f"roofline, {case}", "sigkernels", lambda: {"sigkernels": problem.who("sigkernels")}, 1.0)
    rate = problem.flops / sorted(taken)[len(taken) // 2]
    benchmark.extra_info.update({"GFLOP/s": rate / 1e9, "of attainable": rate / attainable(case)})


@pytest.mark.parametrize("name", ["n"] if QUICK else SWEEPS)
def test_growth(benchmark, name):
    """How the time of a step grows with one size of the problem: time ~ size^exponent."""
    power, points = exponent(name)
    benchmark.group = f"growth of a step with {name}, from {BASE}"
    benchmark.extra_info.update(who="sigkernels", exponent=power)
    benchmark.pedantic(CLOCK.replay([seconds for _, seconds in points]), rounds=len(points))
