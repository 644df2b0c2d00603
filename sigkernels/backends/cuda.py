"""The CUDA backend: the flash kernel of ``csrc/cuda`` on torch's tensors, memory and current stream.

It has the fused loss alone, where ``flash_pass`` applies; other operations and shapes are refused by name.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..losses import ColumnLoss, ElementwiseLoss, ElementwiseParams
from ..losses.kernel_params import BCE_KIND
from . import cuda_support, flash_pass
from .flash_kernels import FlashLaunch, FlashResults, FlashSizes
from .gpu_paths import LossShape
from .interface import Backend, BackendError, ColumnResult, LMLSteps, LossCall, LossResult, Operation, gradient_dtype

_INSTEAD = "use 'triton', 'torch' or 'auto'"
_SLABS = 96 * 2**20  # bytes, the most that the private sums of a launch's blocks take


class CUDABackend(Backend):
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
        if operation != "fused_loss":
            what = {"lml": "LML", "column_loss": "column losses"}.get(operation, operation)
            return f"there is no CUDA C++ kernel for {what}; {_INSTEAD}"
        return self.refuses_loss(loss)

    def refuses_shape(self, shape: LossShape) -> str | None:
        module = _module()
        if shape.product is None:
            reason = f"it multiplies bfloat16, float16, and float32 where torch allows tf32, not {shape.dtype}"
        elif not 1 <= shape.slack <= module.WIDEST:
            reason = f"it takes 1 to {module.WIDEST} slack columns, not {shape.slack}"
        elif not shape.rows or not shape.labels:
            return None
        else:
            sizes = _sizes(_kind(shape.dtype), shape.rows, shape.slack, shape.device.index or 0)
            reason = flash_pass.rank_refusal(shape.meta, shape.labels, shape.dtype, sizes) or ""
        return f"its kernel does not do this shape: {reason}; {_INSTEAD}" if reason else None

    def fused_loss(self, call: LossCall) -> LossResult:
        if not call.x.shape[0] or not call.layer.num_rows:
            return _nothing(call)
        shape = LossShape.of(call.x, call.layer.weight, call.layer.meta)
        if (reason := self.refuses_shape(shape) or flash_pass.refusal(call, shape)) is not None:
            raise BackendError(f"backend 'cuda' was asked for, but {reason}")
        return flash_pass.fused_loss(call, CUDAKernels())

    def column_loss(self, call: LossCall) -> ColumnResult:
        self._refuse("column_loss")

    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        self._refuse("logits")

    def logits_adjoint(self, g: Tensor, layer: Layer) -> Tensor:
        self._refuse("logits_adjoint")

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        self._refuse("topk")

    def predict(self, x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
        self._refuse("predict")

    def lml(self) -> LMLSteps:
        self._refuse("lml")

    def _refuse(self, operation: Operation) -> NoReturn:
        raise BackendError(str(self.refuses(operation)))


def short_way(loss: ElementwiseLoss | ColumnLoss | None) -> bool:
    """Whether the kernel was made for this loss, BCE without weights and smoothing (``None``: that one).

    It does the others too, but by long code that Triton, which compiles each by itself, is not slower than.
    """
    if loss is None:
        return True
    params = loss.kernel_params()
    if not isinstance(params, ElementwiseParams) or params.kind != BCE_KIND:
        return False
    return not params.label_smoothing and params.weight is None and params.pos_weight is None


def _nothing(call: LossCall) -> LossResult:
    """Without rows or labels."""
    tensors = (call.x, call.layer.weight, call.layer.bias)
    grads = (
        torch.zeros_like(tensor, dtype=gradient_dtype(tensor.dtype)) if need and tensor is not None else None
        for need, tensor in zip(call.needs, tensors, strict=True)
    )
    return LossResult(torch.zeros(call.x.shape[0], dtype=torch.float64, device=call.x.device), *grads)


@functools.cache
def _module() -> Any:
    return importlib.import_module("sigkernels._cuda")


@functools.cache
def _unsupported(device: int) -> str | None:
    return cuda_support.unsupported(_module(), device)


@functools.lru_cache(maxsize=256)
def _sizes(kind: str, batch: int, slack: int, device: int) -> FlashSizes:
    module = _module()
    (group, features), blocks = module.sizes_of_block(kind, batch, slack, device), module.processors(device)
    rows = rows_of_launch(group, slack + 1, blocks)
    return FlashSizes(module.TILE, rows, blocks, group, marks=False, turns=True, features=features)


def rows_of_launch(group: int, columns: int, blocks: int) -> int:
    """The most rows of a launch: whole groups whose slabs, float32 ``[blocks, rows, columns]``, take no more than ``_SLABS``."""
    return max(_SLABS // (4 * blocks * columns * group), 1) * group


class FlashFields(NamedTuple):
    """``FlashLaunch`` as the kernels see it: ``Flash`` of csrc/cuda/launch.h. Absent: 0."""

    x: int  # addresses
    weight: int
    bias: int
    basis: int
    coef: int
    waves: int
    blank: int  # columns of basis
    features: int  # those whose coefficients the kernel makes of them
    wave_steps: int  # of waves
    x_stride: int
    batch: int
    labels: int
    slack: int
    block_labels: int
    blocks: int
    indices: int
    offsets: int
    dense: int
    dense_type: str  # torch's name of it
    dense_stride: int
    label_start: int
    label_weight: int
    pos_weight: int
    row_factor: int
    out_scale: int
    scale: float
    wide: bool  # grad_weight and grad_bias are float32
    accumulate: bool
    numbers: int  # of factors
    constant: float
    grad_weight: int
    grad_bias: int
    grad_coef: int
    weight_sums: int
    bias_sums: int
    slabs: int
    row_sums: int
    totals: int
    turns: int
    factors: int


LOSS_FIELDS = ElementwiseParams._fields[:-2]  # without the weights of labels


class CUDAKernels:
    """The launchers of ``sigkernels._cuda``, which take addresses. The kernel follows the sets by itself, without marks."""

    def __init__(self) -> None:
        self._last: tuple[FlashLaunch, tuple[int, int, Any]] | None = None  # a launch and what the kernels see of it

    def sizes(self, x: Tensor, slack: int, dft: bool) -> FlashSizes:
        return _sizes(_kind(x.dtype), x.shape[0], slack, _where(x)[0])

    def fused_loss(self, launch: FlashLaunch) -> None:
        _module().fused_loss(*self._seen(launch))

    def finish(self, launch: FlashLaunch, results: FlashResults) -> None:
        grad_x, grad_features, rows, value = results
        _module().finish(
            *self._seen(launch),
            grad_x=_address(grad_x),
            grad_features=_address(grad_features),
            features=0 if grad_features is None else grad_features.shape[1],
            stride=0 if grad_x is None else grad_x.stride(0),
            wide=grad_x is not None and grad_x.dtype == torch.float32,
            rows=rows.data_ptr(),
            value=_address(value),
        )

    def _seen(self, launch: FlashLaunch) -> tuple[int, int, Any]:
        """Device, stream and launch as the kernels see them, which takes as long as all else here: ``finish`` finds them again."""
        if self._last is None or self._last[0] is not launch:
            self._last = launch, (*_where(launch.x), self._make(launch))
        return self._last[1]

    def _make(self, launch: FlashLaunch) -> Any:
        dense, x, operands = launch.dense, launch.x, launch.waves
        turns, factors, constant = launch.turns or (None, None, 0.0)
        waves, features = (None, 0) if operands is None else operands
        bias, basis, coef, waves_at, indices, offsets, dense_at, label_weight, pos_weight, row_factor, out_scale, *written = [
            0 if tensor is None else tensor.data_ptr()
            for tensor in (
                launch.bias, launch.basis, launch.coef, waves, launch.indices, launch.offsets, dense, launch.label_weight, launch.pos_weight,
                launch.row_factor, launch.out_scale, launch.grad_weight, launch.grad_bias, launch.grad_coef, launch.weight_sums,
                launch.bias_sums, launch.slabs, launch.row_sums, launch.totals, turns, factors,
            )
        ]  # fmt: skip
        gradient = launch.grad_weight if launch.grad_weight is not None else launch.grad_bias
        fields = FlashFields(
            x.data_ptr(), launch.weight.data_ptr(), bias, basis, coef, waves_at, launch.blank, features,
            0 if waves is None else waves.shape[1], x.stride(0), x.shape[0], launch.weight.shape[0], x.shape[1],
            launch.block_labels, launch.blocks, indices, offsets, dense_at,
            "" if dense is None else str(dense.dtype).removeprefix("torch."), 0 if dense is None else dense.stride(0),
            launch.label_start, label_weight, pos_weight, row_factor, out_scale, launch.scale,
            gradient is not None and gradient.dtype == torch.float32, launch.accumulate,
            0 if factors is None else factors.shape[2], constant, *written,
        )  # fmt: skip
        return _module().Flash(_kind(x.dtype), launch.params[: len(LOSS_FIELDS)], fields)


@functools.cache
def _kind(dtype: torch.dtype) -> str:
    """What the kernels call a dtype: they multiply float32 as tf32."""
    return "tf32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def _where(x: Tensor) -> tuple[int, int]:
    """(device index, stream) of a tensor; host memory is for the tests that run the kernels on the host."""
    if not x.is_cuda:
        return 0, 0
    return x.device.index, torch.cuda.current_stream(x.device).cuda_stream


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
