"""Labels above a threshold as LabelSets, against linear + comparison + nonzero.

pytest bench/bench_predict.py
"""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from peers import CLOCK, QUICK, Case, Problem, peak_bytes, race

from sigkernels import ops
from sigkernels.layer import Layer

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [Case(8921, -1, 50, 64)] if QUICK else [Case(8921, -1, 50, 64), Case(100_000, -1, 64, 64)]
THRESHOLD = 2.0  # in logits: about 0.5% of the labels
WHO = ("sigkernels", "eager linear + nonzero")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("who", WHO)
def test_predict(benchmark, case, who):
    problem = Problem(case)
    x, weight = problem.x.detach(), problem.weight.detach()
    layer = Layer(weight, None, case.n, -1)

    def ours():
        return ops.predict(x, layer, THRESHOLD)

    def eager():
        return (F.linear(x, weight) > THRESHOLD).nonzero(as_tuple=True)

    functions = dict(zip(WHO, (ours, eager), strict=True))
    benchmark.extra_info.update(n=case.n, rows=case.rows, peak_bytes=peak_bytes(functions[who]))
    race(benchmark, f"predict, {case}", who, lambda: functions)
