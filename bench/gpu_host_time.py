"""The host's part of a GPU step: microseconds of Python and torch around its launches, which are stubbed. Needs no GPU.

    python bench/gpu_host_time.py

A step is forward and backward with autograd, on small CPU tensors, so that torch's own operations cost next to nothing.
What only a device adds is missing: its launches, and the choice of the device around them.
"""

from __future__ import annotations

import collections
import time
from typing import Any

import torch
from gpu_launches import StubBackend, StubFlash, call, library_run, recorded

from sigkernels.backends import flash_pass
from sigkernels.backends.flash_kernels import FlashSizes
from sigkernels.backends.interface import LossCall
from sigkernels.ops.fused_loss import FusedLoss, Spec

STEPS, ROUNDS = 200, 9
CASE = (2_048, 5, 16, 8)  # n, k, s, B


def step_time(problem: LossCall, run: Any) -> float:
    """Seconds of thread time a step: of the best round."""
    x, weight = (tensor.detach().requires_grad_() for tensor in (problem.x, problem.layer.weight))
    spec = Spec(StubBackend(run), problem.loss, problem.layer.meta, "mean")  # type: ignore[arg-type]
    taken = []
    for _ in range(ROUNDS + 1):
        start = time.thread_time()
        for _ in range(STEPS):
            FusedLoss.apply(spec, problem.targets, x, weight, None).backward()
            x.grad = weight.grad = None
        taken.append((time.thread_time() - start) / STEPS)
    return min(taken[1:])  # the first makes tables


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        problem = call(*CASE, dtype, device=torch.device("cpu"))
        params: Any = problem.loss.kernel_params()
        with recorded(dispatch=False) as recorder:
            recorder.launches = collections.deque(maxlen=1)  # type: ignore[assignment]
            kernels = StubFlash(recorder, FlashSizes(64, 256, 132), marks=True, products=False)

            def flash(c: LossCall, params: Any = params, kernels: Any = kernels) -> Any:
                return flash_pass.fused_loss(c, params, kernels)

            runs = {"flash": flash, "library": library_run}
            for name, run in runs.items():
                print(f"{name} {str(dtype).removeprefix('torch.')}: {step_time(problem, run) * 1e6:.0f} µs a step")


if __name__ == "__main__":
    main()
