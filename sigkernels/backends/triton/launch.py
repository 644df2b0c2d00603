"""The launches of the Triton kernels, from tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu_kernels import Columns, Elementwise, Gradients, Targets, tf32_allowed
from ..gpu_tiles import Chunk
from ..interface import accumulate_dtype
from . import configs, interpreted
from .configs import TILE
from .kernels import losses, scans
from .kernels.confusion_loss import confusion_loss_kernel
from .kernels.fused_loss import fused_loss_kernel
from .kernels.gradients import add_slabs_kernel

_PARTS = 256  # programs that share one block of rows in a scan, at the most
_ROWS = 128  # a multiple of every BM
_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _arguments(chunk: Chunk) -> tuple[list[Tensor], list[int]]:
    """The tensors and the sizes with which the arguments of every kernel begin and end."""
    layer, factors, spare = chunk.layer, chunk.factors, chunk.slack
    tensors = [spare, chunk.dft, layer.weight, spare if layer.bias is None else layer.bias]
    tensors += [factors.u, factors.v, factors.turn] if factors.rank else [spare] * 3
    sizes = [chunk.batch, layer.num_rows, spare.shape[1], factors.rank, factors.even]
    return tensors, [*sizes, layer.dft_columns, chunk.dft.shape[1], chunk.tiles]


def _constants(chunk: Chunk) -> dict[str, Any]:
    dtype = chunk.slack.dtype
    acc = _TYPES[accumulate_dtype(dtype)]
    # The interpreter's bfloat16 arithmetic works on bit patterns: give it numbers.
    operand = acc if interpreted() and dtype == torch.bfloat16 else _TYPES[dtype]
    tf32 = dtype == torch.float32 and tf32_allowed() and not torch.version.hip
    return {
        "BN": TILE,
        "HAS_DFT": chunk.factors.rank > 0,
        "HAS_BIAS": chunk.layer.bias is not None,
        "DTYPE": operand,
        "ACC": acc,
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _launch(
    name: str, kernel: Any, chunk: Chunk, grid: Callable[[configs.Config], tuple[int, ...]], *args: Any, **kw: Any
) -> None:
    tensors, sizes = _arguments(chunk)
    constants = _constants(chunk)
    shape = (chunk.batch, chunk.layer.num_rows, chunk.slack.shape[1])
    device = chunk.slack.device
    kind = configs.kind_of(chunk.slack.dtype, constants["PRECISION"] == "tf32")

    def run(config: configs.Config) -> None:
        kernel[grid(config)](*tensors, *args, *sizes, **kw, **constants, **config.options())

    with _on(chunk.slack):
        configs.tune(name, kind, device, shape, run)
        run(configs.choose(name, kind, device, shape))


def _scan(name: str, kernel: Any, chunk: Chunk, programs: int, *args: Any, **kw: Any) -> None:
    """``programs`` per block of rows."""
    _launch(name, kernel, chunk, lambda config: (triton.cdiv(chunk.batch, config.BM), programs), *args, **kw)


class TritonKernels:
    """The kernels of this package."""

    tile = TILE
    longest_list = configs.MAX_LIST

    def blocks(self, x: Tensor) -> int:
        if not x.is_cuda:
            return 3
        return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count

    def rows(self, x: Tensor) -> int:
        return _ROWS

    def parts(self, chunk: Chunk) -> int:
        return -(-chunk.tiles // -(-chunk.tiles // _PARTS))

    def fused_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, launch: Elementwise) -> None:
        spare = chunk.slack
        constants = losses.settings(launch.params)
        _launch(
            "fused_loss", fused_loss_kernel, chunk, lambda _: (len(launch.row_sums),),
            *_target_arguments(targets, chunk),
            _or(launch.label_weight, spare), _or(launch.pos_weight, spare), launch.row_factor, launch.row_sums,
            *_gradient_arguments(gradients, spare),
            0 if gradients.scratch is None else gradients.scratch.shape[1],
            SPARSE=targets.dense is None, HAS_WEIGHT=launch.label_weight is not None,
            HAS_POS_WEIGHT=launch.pos_weight is not None, ACCUMULATE=gradients.accumulate,
            ACCUMULATE_BIAS=gradients.accumulate, **_gradient_constants(gradients), **constants,
        )  # fmt: skip

    def confusion_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, launch: Columns) -> None:
        spare, params = chunk.slack, launch.params
        _launch(
            "confusion_loss", confusion_loss_kernel, chunk, lambda _: (len(launch.values),),
            *_target_arguments(targets, chunk),
            _or(launch.beta, spare), _or(launch.eta, spare), launch.logits, launch.values,
            _or(launch.grad_beta, spare), _or(launch.grad_eta, spare),
            *_gradient_arguments(gradients, spare),
            launch.logits.shape[1],
            SPARSE=targets.dense is None, METRIC=params.metric, MIRRORED=params.mirrored, FORM=params.form,
            SCALE=launch.scale, BETA=params.number("beta"), ETA=params.number("eta"),
            TINY=torch.finfo(accumulate_dtype(spare.dtype)).tiny,
            HAS_BETA=launch.beta is not None, HAS_ETA=launch.eta is not None,
            NEED_BETA=launch.grad_beta is not None, NEED_ETA=launch.grad_eta is not None,
            **_gradient_constants(gradients),
        )  # fmt: skip

    def add_slabs(self, slabs: Tensor, out: Tensor, scale: Tensor | None, accumulate: bool) -> None:
        size = out.numel()
        if not size:
            return
        with _on(out):
            add_slabs_kernel[(triton.cdiv(size, configs.SLAB_BLOCK),)](
                slabs, out, _or(scale, out), len(slabs), size,
                SCALED=scale is not None, ACCUMULATE=accumulate, BLOCK=configs.SLAB_BLOCK, PARTS=8,
            )  # fmt: skip

    def logits(self, chunk: Chunk, out: Tensor) -> None:
        _scan("logits", scans.logits_kernel, chunk, chunk.tiles, out, out.stride(0))

    def topk(self, chunk: Chunk, m: int, keys: Tensor, labels: Tensor) -> None:
        parts, most = keys.shape[1] // m, max(2, triton.next_power_of_2(m))
        _scan("topk", scans.topk_kernel, chunk, parts, keys, labels, m, parts, M=most)

    def predict_count(self, chunk: Chunk, threshold: float, counts: Tensor) -> None:
        self._predict(chunk, threshold, counts, counts, counts, False)

    def predict_fill(self, chunk: Chunk, threshold: float, starts: Tensor, indices: Tensor) -> None:
        self._predict(chunk, threshold, indices, starts, indices, True)

    def _predict(
        self, chunk: Chunk, threshold: float, counts: Tensor, starts: Tensor, indices: Tensor, fill: bool
    ) -> None:
        parts, device = len(starts), chunk.slack.device
        limit = torch.full((1,), threshold, dtype=accumulate_dtype(chunk.slack.dtype), device=device)
        arguments = limit, counts, starts, indices, chunk.layer.label_start, -(-chunk.tiles // parts)
        _scan("predict", scans.predict_kernel, chunk, parts, *arguments, FILL=fill)


def _or(tensor: Tensor | None, spare: Tensor) -> Tensor:
    """A kernel that does not touch an argument still takes a pointer."""
    return spare if tensor is None else tensor


def _target_arguments(targets: Targets, chunk: Chunk) -> tuple[Any, ...]:
    spare, dense = chunk.slack, targets.dense
    stride = 0 if dense is None else dense.stride(0)
    return _or(targets.indices, spare), _or(targets.at, spare), _or(dense, spare), stride, chunk.layer.label_start


def _gradient_arguments(gradients: Gradients, spare: Tensor) -> list[Tensor]:
    given = (gradients.scratch, gradients.slabs, gradients.weight, gradients.bias, gradients.out_scale)
    return [_or(tensor, spare) for tensor in given]


def _gradient_constants(gradients: Gradients) -> dict[str, bool]:
    return {
        "NEED_X": gradients.slabs is not None,
        "NEED_WEIGHT": gradients.weight is not None,
        "NEED_BIAS": gradients.bias is not None,
        "SCALED": gradients.out_scale is not None,
    }
