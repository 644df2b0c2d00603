"""The launches of the flash kernels in Triton, and how a problem is cut for them."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...labels import LabelSets
from ...losses import ElementwiseParams
from ...losses.kernel_params import BCE_KIND
from ..flash_kernels import FlashLaunch, FlashSizes
from ..flash_pass import fused_loss as flash_pass
from ..flash_pass import rank_refusal, refusal
from ..interface import LossCall, LossResult
from . import interpreted
from .kernels.flash import finish_kernel, flash_kernel, mark_kernel
from .kernels.losses import settings

_MARKS = {"WORDS": 64, "ROWS": 32}
_SUMS = {"BLOCK": 64, "PARTS": 32}
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Shape(NamedTuple):
    """How a program is laid out, and what it takes."""

    BM: int  # rows
    BN: int  # labels of a step
    num_warps: int
    STAGES: int  # steps that are loaded ahead
    resident: int  # programs on a multiprocessor, by their registers and shared memory
    shared: int = 0  # bytes of shared memory where that is more than every device has


# By kind of product and by whether the loss is BCE of plain sets (``plain``), in order of rows. A model of A100, H100 and
# RTX 4090 chose them: nothing was measured. One program of 8 warps fills the registers of a multiprocessor.
SHAPES: dict[tuple[str, bool], tuple[Shape, ...]] = {
    ("16-bit", True): (Shape(64, 64, 4, 2, 2), Shape(128, 64, 8, 2, 1), Shape(256, 32, 8, 2, 1)),
    ("16-bit", False): (Shape(64, 32, 8, 2, 1),),
    ("tf32", True): (Shape(64, 64, 4, 2, 2), Shape(128, 64, 8, 2, 1, 160_000)),
}
WIDEST = 64  # slack columns: the rows of more do not stay in registers
_LAUNCHES = 2  # of the kernel, for the rows of a batch: each reads the weight again
_REGISTERS = 255  # of a thread: left alone, the compiler spills many to fit another program


def shape(kind: str, columns: int, batch: int, plain: bool = True) -> Shape:
    """For products of ``kind``, "16-bit" or "tf32", over so many columns: the least rows that hold the batch, or the most."""
    assert columns <= WIDEST
    fitting = SHAPES[kind, plain]
    return next((made for made in fitting if made.BM >= batch), fitting[-1])


def width(slack: int) -> int:
    """The power of two that holds the slack columns; a product takes 16 at least."""
    return max(16, triton.next_power_of_2(slack))


def is_plain(params: ElementwiseParams, sparse: bool) -> bool:
    """Whether the kernel has its short way for this loss."""
    settings = params.label_smoothing or params.weight is not None or params.pos_weight is not None
    return params.kind == BCE_KIND and sparse and not settings


def applies(call: LossCall) -> str | None:
    """``None`` where the flash kernels do this loss, else one sentence: why it takes the library path."""
    if (reason := refusal(call)) is not None:
        return reason
    x, slack = call.x, call.layer.weight.shape[1]
    params = call.loss.kernel_params()
    assert isinstance(params, ElementwiseParams)
    kernels = TritonFlash.of(call, params)
    if slack > WIDEST:
        return f"the flash kernel in Triton takes up to {WIDEST} slack columns, not {slack}"
    if torch.version.hip:
        return "the shapes of the flash kernel in Triton were chosen for NVIDIA's devices"
    if (_kind(x.dtype), kernels.plain) not in SHAPES:
        return "the flash kernel in Triton multiplies tf32 for BCE of label sets without weights alone"
    chosen = kernels.shape(x, slack)
    if x.shape[0] > _LAUNCHES * chosen.BM:
        return f"the flash kernel in Triton takes up to {_LAUNCHES * chosen.BM} rows of this loss, not {x.shape[0]}"
    if x.is_cuda and chosen.shared > _shared_memory(x.device):
        return f"the flash kernel in Triton takes {chosen.shared} bytes of shared memory, more than a block has here"
    return rank_refusal(call.layer, x.dtype, kernels.sizes(x, slack, call.layer.k >= 0))


def fused_loss(call: LossCall) -> LossResult:
    """An elementwise loss and its gradients, where the kernels apply."""
    params = call.loss.kernel_params()
    assert isinstance(params, ElementwiseParams)
    return flash_pass(call, params, TritonFlash.of(call, params))


def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def _kind(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 else "16-bit"


class TritonFlash(NamedTuple):
    """``FlashKernels`` in Triton."""

    plain: bool  # the losses that it is asked for
    rows: int  # of the whole batch: all its launches have one shape

    @classmethod
    def of(cls, call: LossCall, params: ElementwiseParams) -> TritonFlash:
        """The kernels for a call."""
        return cls(is_plain(params, isinstance(call.targets, LabelSets)), call.x.shape[0])

    def shape(self, x: Tensor, slack: int) -> Shape:
        """How a program of this batch is laid out."""
        return shape(_kind(x.dtype), width(slack), self.rows, self.plain)

    def sizes(self, x: Tensor, slack: int, dft: bool) -> FlashSizes:
        made = self.shape(x, slack)
        blocks = 3  # the interpreter's
        if x.is_cuda:
            blocks = made.resident * torch.cuda.get_device_properties(x.device).multi_processor_count
        return FlashSizes(made.BN, made.BM, blocks, made.BM)

    def mark(self, launch: FlashLaunch) -> None:
        marks = launch.marks
        assert marks is not None
        words, batch = marks.shape
        grid = triton.cdiv(words, _MARKS["WORDS"]), triton.cdiv(batch, _MARKS["ROWS"])
        with _on(launch.x):
            mark_kernel[grid](launch.indices, launch.offsets, marks, launch.label_start, batch, words, **_MARKS)

    def fused_loss(self, launch: FlashLaunch) -> None:
        x, spare = launch.x, launch.x
        batch, slack = x.shape
        chosen = self.shape(x, slack)
        optional = (
            launch.bias, launch.basis, launch.coef, launch.marks, launch.dense, launch.label_weight, launch.pos_weight,
            launch.row_factor, launch.out_scale, launch.grad_weight, launch.grad_bias, launch.grad_coef, launch.slabs,
        )  # fmt: skip
        pointers = [spare if tensor is None else tensor for tensor in optional]
        if launch.dense is not None and launch.dense.dtype == torch.bool:
            pointers[4] = launch.dense.view(torch.uint8)
        strides = [tensor.stride(0) if tensor is not None else 0 for tensor in (x, launch.coef, launch.dense)]
        with _on(x):
            flash_kernel[(launch.blocks,)](
                x, launch.weight, *pointers, launch.row_sums, launch.totals,
                *strides, batch, launch.weight.shape[0], launch.block_labels, launch.scale,
                SLACK=slack, WIDTH=width(slack), **layout(chosen), **options(launch), **settings(launch.params),
            )  # fmt: skip

    def finish(self, launch: FlashLaunch, grad_x: Tensor | None, rows: Tensor, value: Tensor | None) -> None:
        batch, slack = launch.x.shape
        spare = launch.row_sums
        sums = triton.cdiv(batch * slack, _SUMS["BLOCK"]) if grad_x is not None else 0
        with _on(launch.x):
            finish_kernel[(sums + triton.cdiv(batch, _SUMS["BLOCK"]),)](
                spare if launch.slabs is None else launch.slabs, launch.row_sums, launch.totals,
                spare if launch.out_scale is None else launch.out_scale, spare if grad_x is None else grad_x, rows,
                rows if value is None else value, 0 if grad_x is None else grad_x.stride(0), batch, launch.blocks,
                launch.scale, SLACK=slack, NEED_X=grad_x is not None, SCALED=launch.out_scale is not None,
                HAS_VALUE=value is not None, DTYPE=operand(launch.x.dtype), **_SUMS,
            )  # fmt: skip


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def layout(chosen: Shape) -> dict[str, int]:
    """A shape as keywords of a launch."""
    keywords = {name: getattr(chosen, name) for name in ("BM", "BN", "num_warps", "STAGES")}
    return keywords if torch.version.hip else keywords | {"maxnreg": _REGISTERS}


def operand(dtype: torch.dtype) -> Any:
    """What the kernel multiplies. The interpreter's bfloat16 arithmetic works on bit patterns: it gets numbers."""
    return tl.float32 if interpreted() and dtype == torch.bfloat16 else _TYPES[dtype]


def options(launch: FlashLaunch) -> dict[str, Any]:
    """The constants that say what a launch has and needs."""
    dtype = launch.x.dtype
    return {
        "HAS_DFT": launch.basis is not None,
        "HAS_BIAS": launch.bias is not None,
        "SPARSE": launch.dense is None,
        "HAS_WEIGHT": launch.label_weight is not None,
        "HAS_POS_WEIGHT": launch.pos_weight is not None,
        "HAS_ROW_FACTOR": launch.row_factor is not None,
        "SCALED": launch.out_scale is not None,
        "ACCUMULATE": launch.accumulate,
        "NEED_X": launch.slabs is not None,
        "NEED_WEIGHT": launch.grad_weight is not None,
        "NEED_BIAS": launch.grad_bias is not None,
        "DTYPE": operand(dtype),
        "PRECISION": "tf32" if dtype == torch.float32 and not torch.version.hip else "ieee",
    }
