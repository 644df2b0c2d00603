"""The launches of the flash kernels in Triton, and how a problem is cut for them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...labels import LabelSets
from ...losses import ElementwiseParams
from ...losses.kernel_params import BCE_KIND
from ..flash_kernels import RANK, FlashLaunch, FlashResults, FlashSizes
from ..flash_pass import rank_refusal, refusal
from ..gpu_paths import LossShape
from ..interface import LossCall
from . import interpreted
from .kernels.flash import finish_kernel, flash_kernel
from .kernels.losses import settings
from .pointwise import on

_MARKS = {"WORDS": 8, "ENTRIES": 16}  # words that are cleared, and entries of each row that are read, at a time
_FEW = 128  # rows
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
    ("16-bit", True): (Shape(64, 64, 4, 2, 2), Shape(128, 64, 8, 3, 1), Shape(256, 32, 8, 2, 1)),
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


def kernels_for(call: LossCall, shape: LossShape) -> TritonFlash | str:
    """The kernels for this loss, or one sentence: why it takes the library path."""
    if (reason := refusal(call, shape)) is not None:
        return reason
    params = call.loss.kernel_params()
    assert isinstance(params, ElementwiseParams)
    return _kernels_of(shape, is_plain(params, isinstance(call.targets, LabelSets)))


@functools.lru_cache(maxsize=1024)
def _kernels_of(of: LossShape, plain: bool) -> TritonFlash | str:
    return _refusal_of(of, plain) or TritonFlash(shape(_kind(of.dtype), width(of.slack), of.rows, plain))


def _refusal_of(of: LossShape, plain: bool) -> str | None:
    if of.slack > WIDEST:
        return f"the flash kernel in Triton takes up to {WIDEST} slack columns, not {of.slack}"
    if torch.version.hip:
        return "the shapes of the flash kernel in Triton were chosen for NVIDIA's devices"
    if (_kind(of.dtype), plain) not in SHAPES:
        return "the flash kernel in Triton multiplies tf32 for BCE of label sets without weights alone"
    chosen = shape(_kind(of.dtype), width(of.slack), of.rows, plain)
    if of.rows > _LAUNCHES * chosen.BM:
        return f"the flash kernel in Triton takes up to {_LAUNCHES * chosen.BM} rows of this loss, not {of.rows}"
    if of.device.type == "cuda" and chosen.shared > _shared_memory(of.device):
        return f"the flash kernel in Triton takes {chosen.shared} bytes of shared memory, more than a block has here"
    return rank_refusal(of.meta, of.labels, of.dtype, _sizes(chosen, of.device))


@functools.cache
def _sizes(chosen: Shape, device: torch.device) -> FlashSizes:
    blocks = 3  # the interpreter's
    if device.type == "cuda":
        blocks = chosen.resident * torch.cuda.get_device_properties(device).multi_processor_count
    return FlashSizes(chosen.BN, chosen.BM, blocks, chosen.BM, marks=True, turns=False)


def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def _kind(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 else "16-bit"


class TritonFlash(NamedTuple):
    """``FlashKernels`` in Triton."""

    chosen: Shape  # of all launches of a call

    def sizes(self, x: Tensor, slack: int, dft: bool) -> FlashSizes:
        return _sizes(self.chosen, x.device)

    def fused_loss(self, launch: FlashLaunch) -> None:
        x = launch.x
        batch, slack = x.shape
        optional = (
            launch.bias, launch.basis, launch.coef, launch.indices, launch.offsets, launch.marks, launch.dense, launch.label_weight,
            launch.pos_weight, launch.row_factor, launch.out_scale,
            launch.grad_weight, launch.grad_bias, launch.grad_coef, launch.slabs,
        )  # fmt: skip
        pointers = [x if tensor is None else tensor for tensor in optional]
        dense, params = launch.dense, launch.params
        if params.weight is not None or params.pos_weight is not None:
            params = params._replace(weight=None, pos_weight=None)
        if dense is not None and dense.dtype == torch.bool:
            pointers[6] = dense.view(torch.uint8)
        with on(x):
            flash_kernel[(launch.blocks,)](
                x, launch.weight, *pointers, launch.row_sums, launch.totals, x.stride(0), launch.blocks * RANK,
                0 if dense is None else dense.stride(0), launch.label_start, batch, launch.weight.shape[0],
                launch.block_labels, launch.scale, **_keywords(
                    self.chosen, params, slack, x.dtype, launch.basis is not None, launch.bias is not None, dense is None,
                    launch.label_weight is not None, launch.pos_weight is not None, launch.row_factor is not None,
                    launch.out_scale is not None, launch.accumulate, launch.slabs is not None,
                    launch.grad_weight is not None, launch.grad_bias is not None,
                ),
            )  # fmt: skip

    def finish(self, launch: FlashLaunch, results: FlashResults) -> None:
        grad_x, _, rows, value = results
        batch, slack = launch.x.shape
        spare, dtype, scaled = launch.row_sums, launch.x.dtype, launch.out_scale is not None
        keywords = _finish_keywords(batch <= _FEW, slack, grad_x is not None, scaled, value is not None, dtype)
        block = keywords["BLOCK"]
        with on(launch.x):
            finish_kernel[((0 if grad_x is None else -(-batch * slack // block)) + -(-batch // block),)](
                spare if launch.slabs is None else launch.slabs, launch.row_sums, launch.totals,
                spare if launch.out_scale is None else launch.out_scale, spare if grad_x is None else grad_x, rows,
                rows if value is None else value, 0 if grad_x is None else grad_x.stride(0), batch, launch.blocks,
                launch.scale, **keywords,
            )  # fmt: skip


def sums(batch: int) -> dict[str, int]:
    """Outputs of a program of the last kernel, and blocks that it adds up at a time."""
    return {"BLOCK": 32, "PARTS": 64} if batch <= _FEW else {"BLOCK": 64, "PARTS": 32}


@functools.lru_cache(maxsize=256)
def _finish_keywords(
    few: bool, slack: int, need_x: bool, scaled: bool, value: bool, dtype: torch.dtype
) -> dict[str, Any]:
    return sums(_FEW if few else _FEW + 1) | {
        "SLACK": slack, "NEED_X": need_x, "SCALED": scaled, "HAS_VALUE": value, "DTYPE": operand(dtype),
    }  # fmt: skip


def layout(chosen: Shape) -> dict[str, int]:
    """A shape as keywords of a launch."""
    keywords = {name: getattr(chosen, name) for name in ("BM", "BN", "num_warps", "STAGES")}
    return keywords if torch.version.hip else keywords | {"maxnreg": _REGISTERS}


def operand(dtype: torch.dtype) -> Any:
    """What the kernel multiplies. The interpreter's bfloat16 arithmetic works on bit patterns: it gets numbers."""
    return tl.float32 if interpreted() and dtype == torch.bfloat16 else _TYPES[dtype]


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied."""
    return "tf32" if dtype == torch.float32 and not torch.version.hip else "ieee"


@functools.lru_cache(maxsize=256)
def _keywords(
    chosen: Shape, params: ElementwiseParams, slack: int, dtype: torch.dtype, dft: bool, bias: bool, sparse: bool, label_weight: bool,
    pos_weight: bool, row_factor: bool, scaled: bool, accumulate: bool, need_x: bool, need_weight: bool, need_bias: bool,
) -> dict[str, Any]:  # fmt: skip
    """The constants and options of a launch: the same at every step, made once."""
    return settings(params) | layout(chosen) | _MARKS | {
        "SLACK": slack, "WIDTH": width(slack), "HAS_DFT": dft, "HAS_BIAS": bias,
        "SPARSE": sparse, "HAS_WEIGHT": label_weight, "HAS_POS_WEIGHT": pos_weight, "HAS_ROW_FACTOR": row_factor,
        "SCALED": scaled, "ACCUMULATE": accumulate, "NEED_X": need_x, "NEED_WEIGHT": need_weight, "NEED_BIAS": need_bias,
        "DTYPE": operand(dtype), "PRECISION": precision(dtype),
    }  # fmt: skip
