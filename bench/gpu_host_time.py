"""The host's part of a GPU step: microseconds of Python and torch around its launches. Needs no GPU.

    python bench/gpu_host_time.py

A step is forward and backward with autograd, on small CPU tensors. Launches of kernels and matrix products are replaced
by functions that do nothing: their arithmetic is a GPU's, and what Triton and cuBLAS take to launch them is not ours. What
remains is Python, the allocation and views of tensors, and autograd. What only a device adds is missing: its allocator,
and the choice of the device around launches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from gpu_launches import StubBackend, call, library_run

from sigkernels.backends import flash_pass, library_pass, library_walk
from sigkernels.backends.flash_kernels import FlashSizes
from sigkernels.backends.interface import LossCall
from sigkernels.backends.triton import pointwise
from sigkernels.ops.fused_loss import FusedLoss, Spec

STEPS, ROUNDS = 200, 9
CASE = (512, 5, 16, 8)  # n, k, s, B: small, so that the allocator of the CPU hands out what it has


class NoKernel:
    """A Triton kernel that launches nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return nothing


class NoFlash:
    """``FlashKernels`` that launch nothing."""

    def sizes(self, *arguments: Any) -> FlashSizes:
        return FlashSizes(64, 256, 132, 256)

    def __getattr__(self, name: str) -> Any:
        return nothing


def nothing(*arguments: Any, **settings: Any) -> Any:
    """Stands in for a launch: hands back the result's memory, where there is one."""
    return settings.get("out", arguments[0] if arguments else None)


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """Kernels and products do nothing."""
    with contextlib.ExitStack() as stack:
        for module, name in ((library_walk, "product"), (library_pass, "product"), (torch, "mm"), (torch, "addmm")):
            stack.enter_context(mock.patch.object(module, name, nothing))
        stack.enter_context(mock.patch.object(torch.Tensor, "addmm_", nothing))
        for name in ("elementwise_kernel", "finish_kernel"):
            stack.enter_context(mock.patch.object(pointwise, name, NoKernel()))
        yield


def step_time(problem: LossCall, run: Any) -> float:
    """Seconds of thread time a step: of the best round."""
    x, weight = (tensor.detach().requires_grad_() for tensor in (problem.x, problem.layer.weight))
    spec = Spec(StubBackend(run), problem.loss, problem.layer.meta, "mean")  # type: ignore[arg-type]
    taken = []
    for _ in range(ROUNDS + 1):
        start = time.thread_time()
        for _ in range(STEPS):
            FusedLoss.apply(None, spec, problem.targets, x, weight, None).backward()
            x.grad = weight.grad = None
        taken.append((time.thread_time() - start) / STEPS)
    return min(taken[1:])  # the first makes tables


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        problem = call(*CASE, dtype, device=torch.device("cpu"))
        params: Any = problem.loss.kernel_params()

        def flash(c: LossCall, params: Any = params) -> Any:
            return flash_pass.fused_loss(c, params, NoFlash())

        runs = {"flash": flash, "library": library_run}
        with stubbed():
            for name, run in runs.items():
                print(f"{name} {str(dtype).removeprefix('torch.')}: {step_time(problem, run) * 1e6:.0f} µs a step")


if __name__ == "__main__":
    main()
