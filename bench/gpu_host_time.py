"""The host's part of a GPU step: microseconds of Python and torch around its launches. Needs no GPU.

    python bench/gpu_host_time.py

A step is what a backend makes of a call, forward and backward with autograd, on small CPU tensors. Launches of kernels and
matrix products are replaced by functions that do nothing: their arithmetic is a GPU's, and what Triton and cuBLAS take to
launch them is not ours. What remains is Python, the allocation and views of tensors, and autograd. What only a device adds
is missing: its allocator, and the choice of the device around launches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from gpu_launches import StubBackend, call

from sigkernels import label_forms
from sigkernels.backends import cuda, library_pass, library_walk
from sigkernels.backends import triton as triton_backend
from sigkernels.backends.gpu_paths import Choice, GPUPath
from sigkernels.backends.interface import LossCall, LossResult
from sigkernels.backends.triton import TritonBackend, flash, pointwise
from sigkernels.ops.fused_loss import FusedLoss, Spec

STEPS, ROUNDS = 200, 9
CASE = (512, 5, 16, 8)  # n, k, s, B: small, so that the allocator of the CPU hands out what it has


class NoKernel:
    """A Triton kernel that launches nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return nothing


class NoModule:
    """``sigkernels._cuda`` without a device."""

    TILE, WIDEST = 32, 128

    def sizes_of_block(self, *arguments: Any) -> tuple[int, int]:
        return 256, 192

    def processors(self, device: int) -> int:
        return 132

    def __getattr__(self, name: str) -> Any:
        return nothing


def nothing(*arguments: Any, **settings: Any) -> Any:
    """Stands in for a launch: hands back the result's memory, where there is one."""
    return settings.get("out", arguments[0] if arguments else None)


@contextlib.contextmanager
def stubbed(path: GPUPath) -> Iterator[None]:
    """Kernels and products do nothing, float32 is tf32, and ``path`` is what the table says."""
    with contextlib.ExitStack() as stack:

        def patch(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        for module in (library_walk, library_pass):
            patch(module, "product", nothing)
        for name in ("mm", "addmm"):
            patch(torch, name, nothing)
        patch(torch.Tensor, "addmm_", nothing)
        for module, name in ((pointwise, "elementwise"), (pointwise, "finish"), (flash, "flash"), (flash, "finish")):
            patch(module, f"{name}_kernel", NoKernel())
        patch(cuda, "_module", NoModule)
        patch(label_forms, "check_values", nothing)  # looks at tensors of the CPU alone
        patch(library_walk, "rounds_float32", lambda x: library_walk.tf32_allowed())
        allowed = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        stack.callback(setattr, torch.backends.cuda.matmul, "fp32_precision", allowed)
        patch(triton_backend, "choose_path", lambda shape, among: chosen)
        chosen = Choice(path, "asked for")
        yield


def only_results(problem: LossCall) -> LossResult:
    """A pass that allocates what it hands back and nothing else: what remains of a step is torch's autograd."""
    x, weight = problem.x, problem.layer.weight
    grads = x.new_empty(x.shape), weight.new_empty(weight.shape), None
    return LossResult(x.new_empty(x.shape[0]), *grads, value=x.new_empty((), dtype=torch.float32))


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
    backends: dict[GPUPath, Any] = {"cuda": cuda.CUDABackend(), "flash": TritonBackend(), "library": TritonBackend()}
    for dtype in (torch.bfloat16, torch.float32):
        problem = call(*CASE, dtype, device=torch.device("cpu"))
        print(f"autograd alone: {step_time(problem, only_results) * 1e6:.0f} µs a step")
        for path, backend in backends.items():
            with stubbed(path):
                taken = step_time(problem, backend.fused_loss)
            print(f"{path} {str(dtype).removeprefix('torch.')}: {taken * 1e6:.0f} µs a step")


if __name__ == "__main__":
    main()
