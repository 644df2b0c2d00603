"""The three GPU paths against each other, for every class of shapes that ``auto`` knows (needs a GPU).

pytest bench/bench_gpu_paths.py
"""

from __future__ import annotations

import functools

import pytest
import torch
from gpu_paths import GROUP, OURS, DeviceClock, GPUPath, problem, samples, steps_of
from peers import CLOCK, QUICK

from sigkernels.backends.gpu_paths import PATHS, ShapeClass, all_classes

pytestmark = [
    pytest.mark.benchmark(timer=CLOCK),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("tf32"),
]
ROUNDS = 5 if QUICK else 20


@functools.lru_cache(maxsize=1)
def times_of(shape: ShapeClass) -> dict[GPUPath, list[float]]:
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        return samples(steps_of(problem(shape, device)), DeviceClock(device), ROUNDS)
    except torch.OutOfMemoryError:
        return {}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", list(all_classes()), ids=str)
def test_gpu_paths(benchmark, shape, path):
    taken = times_of(shape).get(path)
    if taken is None:
        pytest.skip(f"{path} does not do this here")
    benchmark.group = GROUP + str(shape)
    benchmark.extra_info.update(who=OURS + path, n=shape.labels, rows=shape.rows)
    benchmark.pedantic(CLOCK.replay(taken), rounds=len(taken))
