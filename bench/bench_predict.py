"""Labels above a threshold as LabelSets, against linear + comparison + nonzero.

pytest bench/bench_predict.py
"""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from peers import CLOCK, QUICK, Case, Problem, Step, duel

from sigkernels import ops
from sigkernels.layer import Layer, LayerMeta

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASES = [Case(8921, -1, 50, 64), Case(100_000, -1, 64, 64)]
THRESHOLD = 2.0  # in logits: about 0.5% of the labels


def steps(problem: Problem) -> tuple[Step, Step]:
    x, weight = problem.x.detach(), problem.weight.detach()
    layer = Layer(weight, None, LayerMeta(problem.case.n, -1))
    return (
        lambda: ops.predict(x, layer, THRESHOLD),
        lambda: (F.linear(x, weight) > THRESHOLD).nonzero(as_tuple=True),
    )


test_predict = duel("predict", "eager linear + nonzero", CASES[:1] if QUICK else CASES, steps)
