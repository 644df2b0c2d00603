"""The operations of the Triton backend: from tensors to launches. ``fused_pass.py`` has the order of the fused pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...labels import LabelSets
from ...layer import Layer
from ...losses import ConfusionParams, ElementwiseParams
from .. import fused_pass
from ..fused_pass import Columns, Elementwise, Gradients, Targets
from ..interface import ColumnResult, LossCall, LossResult, accumulate_dtype
from ..tiles import Chunk, check_size, label_chunks, merge_candidates, set_offsets, sort_logits
from ..torch_tiled import without_autocast
from . import configs, interpreted
from .configs import TILE
from .kernels import losses, scans
from .kernels.confusion_loss import confusion_loss_kernel
from .kernels.fused_loss import fused_loss_kernel
from .kernels.gradients import add_slabs_kernel

_SORT_ELEMENTS = 2**23  # logits in memory at a time when m is too large for the kernel's lists
_SPLITS = 256  # programs that share one block of rows in a scan
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
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 and not torch.version.hip
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


@without_autocast
def logits(x: Tensor, layer: Layer) -> Tensor:
    check_size(layer)
    z = x.new_empty(x.shape[0], layer.num_rows)
    if z.numel():
        _logits_into(z, Chunk.of(x, layer, TILE))
    return z


def _logits_into(z: Tensor, chunk: Chunk) -> None:
    _scan("logits", scans.logits_kernel, chunk, chunk.tiles, z, z.stride(0))


class _Engine:
    """The kernels, for ``fused_pass``."""

    tile = TILE

    def blocks(self, x: Tensor) -> int:
        if not x.is_cuda:
            return 3
        return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count

    def rows(self, x: Tensor) -> int:
        return _ROWS

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
            HAS_POS_WEIGHT=launch.pos_weight is not None, ACCUMULATE=gradients.accumulate_weight,
            ACCUMULATE_BIAS=gradients.accumulate_bias, **_gradient_constants(gradients), **constants,
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


@without_autocast
def fused_loss(call: LossCall) -> LossResult:
    params = call.loss.kernel_params()
    assert isinstance(params, ElementwiseParams)
    return fused_pass.fused_loss(_Engine(), call, params)


@without_autocast
def column_loss(call: LossCall) -> ColumnResult:
    params = call.loss.kernel_params()
    assert isinstance(params, ConfusionParams)
    return fused_pass.column_loss(_Engine(), call, params)


@without_autocast
def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    check_size(layer)
    batch, m = x.shape[0], min(m, layer.num_rows)  # a label range may be shorter than m
    if not batch:
        return x.new_empty(0, m), torch.empty(0, m, dtype=torch.int64, device=x.device)
    if m > configs.MAX_LIST:
        return _topk_by_sorting(x, layer, m)
    chunk = Chunk.of(x, layer, TILE)
    splits = min(chunk.tiles, _SPLITS)
    key_dtype = torch.int64 if x.dtype == torch.float64 else torch.int32
    keys = torch.empty(batch, splits * m, dtype=key_dtype, device=x.device)
    labels = torch.empty(batch, splits * m, dtype=torch.int32, device=x.device)
    most = max(2, triton.next_power_of_2(m))
    _scan("topk", scans.topk_kernel, chunk, splits, keys, labels, m, splits, M=most)
    # An unfilled place has the lowest key and a negative label: it can never reach the m best.
    return merge_candidates(keys, labels.to(torch.int64) + layer.label_start, m, x.dtype)


def _topk_by_sorting(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """For long lists: the logits of a chunk at a time, sorted together with the best so far."""
    whole = Chunk.of(x, layer, TILE)
    values, labels = x.new_empty(x.shape[0], 0), x.new_empty(x.shape[0], 0, dtype=torch.int64)
    for first, count in label_chunks(layer, TILE, x.shape[0], _SORT_ELEMENTS):
        chunk = whole.part(whole.rows, first, count)
        z = x.new_empty(x.shape[0], chunk.layer.num_rows)
        _logits_into(z, chunk)
        more, where = sort_logits(z, m, chunk.layer.label_start)
        # What is kept has lower labels than what comes: a stable sort breaks ties rightly.
        values, order = torch.sort(torch.cat([values, more], 1), dim=1, descending=True, stable=True)
        values, labels = values[:, :m], torch.cat([labels, where], 1).gather(1, order[:, :m])
    return values, labels


@without_autocast
def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    check_size(layer)
    batch = x.shape[0]
    if not batch:
        indices, offsets = (torch.zeros(count, dtype=torch.int64, device=x.device) for count in (0, 1))
        return LabelSets.from_sorted(indices, offsets, layer.num_labels)
    chunk = Chunk.of(x, layer, TILE)
    # As torch compares: the threshold is rounded to the dtype of the logits.
    limit = torch.full((1,), threshold, dtype=x.dtype, device=x.device).to(accumulate_dtype(x.dtype))
    per_split = -(-chunk.tiles // _SPLITS)
    counts = torch.empty(-(-chunk.tiles // per_split), batch, dtype=torch.int32, device=x.device)

    def scan(starts: Tensor, indices: Tensor, fill: bool) -> None:
        arguments = (limit, counts, starts, indices, layer.label_start, per_split)
        _scan("predict", scans.predict_kernel, chunk, len(counts), *arguments, FILL=fill)

    scan(counts, counts, False)
    offsets, starts = set_offsets(counts)
    indices = torch.empty(int(offsets[-1]), dtype=torch.int64, device=x.device)
    scan(starts, indices, True)
    return LabelSets.from_sorted(indices, offsets, layer.num_labels)
