"""Losses on a DFT head, forward and backward: ours against the same formula on materialised logits, eager and compiled.

    pytest bench/bench_losses.py

The peers hold the DFT matrix as a frozen buffer, so that they compute the same loss, and get dense targets for free;
BCE is torch's own ``binary_cross_entropy_with_logits``. All of a group are interleaved in one process: timed one after
the other, a step of 2 ms depends on what ran before it (BCE at n = 8,921 came out anywhere between 1.6× and 3.4×).
"""

from __future__ import annotations

import pytest
from peers import CLOCK, LOSSES, QUICK, Case, Problem, race

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [Case(8921, 80, 50, 32)] if QUICK else [Case(8921, 80, 50, 64), Case(100_000, 50, 64, 64)]
WHO = ("sigkernels", "eager, frozen DFT", "compiled, frozen DFT")


def entrants(name: str) -> tuple[str, ...]:
    """``bench_lml.py`` has the peer of the LML projection."""
    return WHO[:1] if name == "LML-NLL" else WHO


@pytest.mark.parametrize(
    ("case", "name", "who"), [(c, n, w) for c in CASES for n in LOSSES for w in entrants(n)], ids=str
)
def test_losses(benchmark, case, name, who):
    def runners():
        problem = Problem(case)
        return {entrant: problem.who(entrant, LOSSES[name]) for entrant in entrants(name)}

    benchmark.extra_info.update(n=case.n, rows=case.rows)
    race(benchmark, f"{name}, {case}", who, runners, seconds=3.0)
