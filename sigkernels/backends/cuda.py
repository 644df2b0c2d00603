"""The CUDA backend: the kernels of ``csrc/cuda`` on torch's tensors, memory and current stream."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..losses import ColumnLoss, ConfusionParams, ElementwiseLoss
from . import cuda_support
from .gpu_backend import GPUBackend
from .gpu_kernels import Columns, Elementwise, GPUKernels, Gradients, Targets, tf32_allowed
from .gpu_tiles import Chunk
from .interface import BackendError, LMLSteps, Operation, accumulate_dtype


class CUDABackend(GPUBackend):
    """The compiled kernels of ``csrc/cuda``."""

    name = "cuda"

    def unavailable(self) -> str | None:
        try:
            module = _module()
        except ImportError as error:
            return (
                f"sigkernels._cuda is not built ({error}); install a CUDA toolkit and reinstall from the source with "
                "SIGKERNELS_CUDA=1 pip install ."
            )
        if not torch.cuda.is_available() or torch.version.hip:
            return f"torch sees no CUDA device ({module.devices()}); install a CUDA build of torch and a driver"
        reasons = [_unsupported(device) for device in range(module.device_count())]
        return None if None in reasons else (reasons or [cuda_support.too_old_a_driver(module)])[0]

    def devices(self) -> tuple[str, ...]:
        return ("cuda",)

    def refuses_device(self, device: torch.device) -> str | None:
        return super().refuses_device(device) or (_unsupported(device.index) if device.type == "cuda" else None)

    def refuses(self, operation: Operation, loss: ElementwiseLoss | ColumnLoss | None = None) -> str | None:
        if operation == "lml":
            return "LML has no CUDA C++ kernel; use 'triton' or 'torch'"
        return self.refuses_loss(loss)

    def kernels(self) -> GPUKernels:
        return CUDAKernels(_module())

    def lml(self) -> LMLSteps:
        raise BackendError(str(self.refuses("lml")))


@functools.cache
def _module() -> Any:
    return importlib.import_module("sigkernels._cuda")


@functools.cache
def _unsupported(device: int) -> str | None:
    return cuda_support.unsupported(_module(), device)


@functools.cache
def _resident_blocks(kind: str, device: int) -> int:
    return _module().resident_blocks(kind, device)


class CUDAKernels:
    """The launchers of ``sigkernels._cuda``, which take addresses."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.tile: int = module.TILE
        self.longest_list: int = module.LONGEST_LIST

    def blocks(self, x: Tensor) -> int:
        return _resident_blocks(_kind(x), _where(x)[0])

    def rows(self, x: Tensor) -> int:
        return self._module.rows_per_group(_kind(x))

    def parts(self, chunk: Chunk) -> int:
        groups = -(-chunk.batch // self.rows(chunk.slack))
        return min(max(self.blocks(chunk.slack) // groups, 1), chunk.tiles)

    def fused_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, launch: Elementwise) -> None:
        self._module.fused_loss(
            self._launch(chunk),
            self._targets(targets, chunk),
            self._gradients(gradients, chunk),
            loss=launch.params.numbers(),
            label_weight=_address(launch.label_weight),
            pos_weight=_address(launch.pos_weight),
            row_factor=launch.row_factor.data_ptr(),
            row_sums=launch.row_sums.data_ptr(),
            blocks=len(launch.row_sums),
        )

    def confusion_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, launch: Columns) -> None:
        self._module.confusion_loss(
            self._launch(chunk),
            self._targets(targets, chunk),
            self._gradients(gradients, chunk),
            loss=_confusion_settings(launch.params, launch.scale, accumulate_dtype(chunk.slack.dtype)),
            beta=_address(launch.beta),
            eta=_address(launch.eta),
            logits=launch.logits.data_ptr(),
            values=launch.values.data_ptr(),
            grad_beta=_address(launch.grad_beta),
            grad_eta=_address(launch.grad_eta),
            blocks=len(launch.values),
        )

    def add_slabs(self, slabs: Tensor, out: Tensor, scale: Tensor | None, accumulate: bool) -> None:
        device, stream = _where(out)
        self._module.add_slabs(
            device=device,
            stream=stream,
            slabs=slabs.data_ptr(),
            out=out.data_ptr(),
            scale=_address(scale),
            count=len(slabs),
            size=out.numel(),
            wide=out.dtype == torch.float64,
            accumulate=accumulate,
        )

    def logits(self, chunk: Chunk, out: Tensor) -> None:
        self._module.logits(self._launch(chunk), out=out.data_ptr(), out_stride=out.stride(0))

    def topk(self, chunk: Chunk, m: int, keys: Tensor, labels: Tensor) -> None:
        parts = keys.shape[1] // m
        addresses = {"keys": keys.data_ptr(), "labels": labels.data_ptr()}
        self._module.topk(self._launch(chunk), ranges=parts, m=m, **addresses)

    def predict_count(self, chunk: Chunk, threshold: float, counts: Tensor) -> None:
        self._module.predict_count(
            self._launch(chunk), ranges=len(counts), threshold=threshold, counts=counts.data_ptr()
        )

    def predict_fill(self, chunk: Chunk, threshold: float, starts: Tensor, indices: Tensor) -> None:
        self._module.predict_fill(
            self._launch(chunk),
            ranges=len(starts),
            threshold=threshold,
            starts=starts.data_ptr(),
            label_start=chunk.layer.label_start,
            indices=indices.data_ptr(),
        )

    def _launch(self, chunk: Chunk) -> Any:
        """A chunk as the kernels see it; the caller keeps the chunk until the launch is under way."""
        factors, device, stream = chunk.factors, *_where(chunk.slack)
        return self._module.Launch(
            device=device,
            stream=stream,
            dtype=_kind(chunk.slack),
            x=chunk.slack.data_ptr(),
            dft=chunk.dft.data_ptr(),
            weight=chunk.layer.weight.data_ptr(),
            bias=_address(chunk.layer.bias),
            u=factors.u.data_ptr(),
            v=factors.v.data_ptr(),
            turn=factors.turn.data_ptr(),
            batch=chunk.batch,
            labels=chunk.layer.num_rows,
            slack=chunk.slack.shape[1],
            rank=factors.rank,
            even=factors.even,
            columns=chunk.layer.dft_columns,
            dft_stride=chunk.dft.shape[1],
        )

    def _targets(self, targets: Targets, chunk: Chunk) -> Any:
        dense = targets.dense
        return self._module.Targets(
            sparse=dense is None,
            indices=_address(targets.indices),
            positions=_address(targets.at),
            label_start=chunk.layer.label_start,
            dense=_address(dense),
            dense_stride=0 if dense is None else dense.stride(0),
        )

    def _gradients(self, gradients: Gradients, chunk: Chunk) -> Any:
        weight = gradients.weight
        return self._module.Gradients(
            out_scale=_address(gradients.out_scale),
            need_x=gradients.slabs is not None,
            slabs=_address(gradients.slabs),
            grad_weight=_address(weight),
            grad_weight_narrow=weight is not None and weight.dtype != accumulate_dtype(chunk.slack.dtype),
            grad_bias=_address(gradients.bias),
            accumulate=gradients.accumulate,
            scratch=_address(gradients.scratch),
        )


def _kind(x: Tensor) -> str:
    """What the kernels call a dtype: float32 follows torch's setting for tf32."""
    if x.dtype == torch.float32 and tf32_allowed():
        return "tf32"
    return str(x.dtype).removeprefix("torch.")


def _where(x: Tensor) -> tuple[int, int]:
    """(device index, stream) of a tensor; host memory is for the tests that run the kernels on the host."""
    if not x.is_cuda:
        return 0, 0
    return x.device.index, torch.cuda.current_stream(x.device).cuda_stream


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _confusion_settings(params: ConfusionParams, scale: float, dtype: torch.dtype) -> dict[str, float]:
    """The fields of ``ConfusionParams`` in ``csrc/core/confusion.h``."""
    labels = {"beta": params.number("beta"), "eta": params.number("eta")}
    return params.numbers() | labels | {"tiny": torch.finfo(dtype).tiny, "scale": scale}
