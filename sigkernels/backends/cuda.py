"""The CUDA backend: the kernels of ``csrc/cuda`` on torch's tensors, memory and current stream.

``fused_pass.py`` has the host side of the fused pass. Nothing synchronises except ``predict``, whose result has a size
that only the device knows.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..losses import ColumnLoss, ConfusionParams, ElementwiseLoss, ElementwiseParams
from . import fused_pass, torch_tiled
from .fused_pass import Columns, Elementwise, Gradients, Targets
from .interface import (
    Backend,
    BackendError,
    ColumnResult,
    LMLSteps,
    LossCall,
    LossResult,
    Operation,
    accumulate_dtype,
)
from .tiles import Chunk, check_size, label_chunks, merge_candidates, set_offsets, sort_logits
from .torch_tiled import without_autocast

_SORT_ELEMENTS = 2**23  # logits in memory at a time when m is too large for the kernels' lists


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
        return None

    def devices(self) -> tuple[str, ...]:
        return ("cuda",)

    def refuses(self, operation: Operation, loss: ElementwiseLoss | ColumnLoss | None = None) -> str | None:
        if operation == "lml":
            return "LML has no CUDA C++ kernel; use 'triton' or 'torch'"
        return self.refuses_loss(loss)

    def fused_loss(self, call: LossCall) -> LossResult:
        return fused_loss(call)

    def column_loss(self, call: LossCall) -> ColumnResult:
        return column_loss(call)

    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        return logits(x, layer)

    def logits_adjoint(self, g: Tensor, layer: Layer) -> Tensor:
        return torch_tiled.logits_adjoint(g, layer)

    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        return topk(x, layer, m)

    def predict(self, x: Tensor, layer: Layer, threshold: float) -> LabelSets:
        return predict(x, layer, threshold)

    def lml(self) -> LMLSteps:
        raise BackendError(str(self.refuses("lml")))


@functools.cache
def _module() -> Any:
    return importlib.import_module("sigkernels._cuda")


@functools.cache
def _resident_blocks(kind: str, device: int) -> int:
    return _module().resident_blocks(kind, device)


class _Problem:
    """A chunk as the kernels see it. Keeps alive what it points to."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        factors, device, stream = chunk.factors, *_where(chunk.slack)
        self.launch = _module().Launch(
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

    @classmethod
    def of(cls, x: Tensor, layer: Layer) -> _Problem:
        return cls(Chunk.of(x, layer, _module().TILE))

    def ranges(self) -> int:
        """Into how many ranges of labels a scan is cut, so that ranges × row groups fill the device."""
        groups = -(-self.chunk.batch // _module().rows_per_group(_kind(self.chunk.slack)))
        return min(max(_blocks(self.chunk.slack) // groups, 1), self.chunk.tiles)


def _kind(x: Tensor) -> str:
    """What the kernels call a dtype: float32 follows torch's setting for tf32."""
    if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return str(x.dtype).removeprefix("torch.")


def _where(x: Tensor) -> tuple[int, int]:
    """(device index, stream) of a tensor; host memory is for the tests that run the kernels on the host."""
    if not x.is_cuda:
        return 0, 0
    return x.device.index, torch.cuda.current_stream(x.device).cuda_stream


def _blocks(x: Tensor) -> int:
    return _resident_blocks(_kind(x), _where(x)[0])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@without_autocast
def logits(x: Tensor, layer: Layer) -> Tensor:
    check_size(layer)
    z = x.new_empty(x.shape[0], layer.num_rows)
    if z.numel():
        problem = _Problem.of(x, layer)
        _module().logits(problem.launch, out=z.data_ptr(), out_stride=z.stride(0))
    return z


class _Engine:
    """The kernels, for ``fused_pass``."""

    @property
    def tile(self) -> int:
        return _module().TILE

    def blocks(self, x: Tensor) -> int:
        return _blocks(x)

    def rows(self, x: Tensor) -> int:
        return _module().rows_per_group(_kind(x))

    def fused_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, launch: Elementwise) -> None:
        _module().fused_loss(
            _Problem(chunk).launch,
            _targets(targets, chunk),
            _gradients(gradients, chunk),
            loss=launch.params.numbers(),
            label_weight=_address(launch.label_weight),
            pos_weight=_address(launch.pos_weight),
            row_factor=launch.row_factor.data_ptr(),
            row_sums=launch.row_sums.data_ptr(),
            blocks=len(launch.row_sums),
        )

    def confusion_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, launch: Columns) -> None:
        _module().confusion_loss(
            _Problem(chunk).launch,
            _targets(targets, chunk),
            _gradients(gradients, chunk),
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
        _module().add_slabs(
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


def _targets(targets: Targets, chunk: Chunk) -> Any:
    dense = targets.dense
    return _module().Targets(
        sparse=dense is None,
        indices=_address(targets.indices),
        positions=_address(targets.at),
        label_start=chunk.layer.label_start,
        dense=_address(dense),
        dense_stride=0 if dense is None else dense.stride(0),
    )


def _gradients(gradients: Gradients, chunk: Chunk) -> Any:
    weight = gradients.weight
    return _module().Gradients(
        out_scale=_address(gradients.out_scale),
        need_x=gradients.slabs is not None,
        slabs=_address(gradients.slabs),
        grad_weight=_address(weight),
        grad_weight_narrow=weight is not None and weight.dtype != accumulate_dtype(chunk.slack.dtype),
        accumulate_weight=gradients.accumulate_weight,
        grad_bias=_address(gradients.bias),
        accumulate_bias=gradients.accumulate_bias,
        scratch=_address(gradients.scratch),
    )


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


def _confusion_settings(params: ConfusionParams, scale: float, dtype: torch.dtype) -> dict[str, float]:
    """The fields of a loss by the names of ``ConfusionParams`` in ``csrc/cuda/launch.h``."""
    settings = {name: getattr(params, name) for name in params._fields if name not in ("pooled", "beta", "eta")}
    settings |= {"tiny": torch.finfo(dtype).tiny, "scale": scale}
    return settings | {"beta": params.number("beta"), "eta": params.number("eta")}


@without_autocast
def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    check_size(layer)
    module = _module()
    batch, m = x.shape[0], min(m, layer.num_rows)  # a label range may be shorter than m
    if not batch:
        return x.new_empty(0, m), torch.empty(0, m, dtype=torch.int64, device=x.device)
    if m > module.LONGEST_LIST:
        return _topk_by_sorting(x, layer, m)
    problem = _Problem.of(x, layer)
    ranges = problem.ranges()
    key_dtype = torch.int64 if x.dtype == torch.float64 else torch.int32
    keys = torch.empty(batch, ranges * m, dtype=key_dtype, device=x.device)
    labels = torch.empty(batch, ranges * m, dtype=torch.int32, device=x.device)
    module.topk(problem.launch, ranges=ranges, m=m, keys=keys.data_ptr(), labels=labels.data_ptr())
    return merge_candidates(keys, labels.to(torch.int64) + layer.label_start, m, x.dtype)


def _topk_by_sorting(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """For long lists: the logits of a chunk at a time, sorted together with the best so far."""
    values, labels = x.new_empty(x.shape[0], 0), x.new_empty(x.shape[0], 0, dtype=torch.int64)
    module = _module()
    whole = Chunk.of(x, layer, module.TILE)
    for first, count in label_chunks(layer, module.TILE, x.shape[0], _SORT_ELEMENTS):
        problem = _Problem(whole.part(whole.rows, first, count))
        part = problem.chunk.layer
        z = x.new_empty(x.shape[0], part.num_rows)
        module.logits(problem.launch, out=z.data_ptr(), out_stride=z.stride(0))
        more, where = sort_logits(z, m, part.label_start)
        # What is kept has lower labels than what comes: a stable sort breaks ties rightly.
        values, order = torch.sort(torch.cat([values, more], 1), dim=1, descending=True, stable=True)
        values, labels = values[:, :m], torch.cat([labels, where], 1).gather(1, order[:, :m])
    return values, labels


@without_autocast
def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    check_size(layer)
    module, batch = _module(), x.shape[0]
    if not batch:
        indices, offsets = (torch.zeros(count, dtype=torch.int64, device=x.device) for count in (0, 1))
        return LabelSets.from_sorted(indices, offsets, layer.num_labels)
    # As torch compares: the threshold is rounded to the dtype of the logits.
    limit = torch.tensor(threshold, dtype=x.dtype).item()
    problem = _Problem.of(x, layer)
    counts = torch.empty(problem.ranges(), batch, dtype=torch.int32, device=x.device)
    module.predict_count(problem.launch, ranges=len(counts), threshold=limit, counts=counts.data_ptr())
    offsets, starts = set_offsets(counts)
    indices = torch.empty(int(offsets[-1]), dtype=torch.int64, device=x.device)
    module.predict_fill(
        problem.launch,
        ranges=len(counts),
        threshold=limit,
        starts=starts.data_ptr(),
        label_start=layer.label_start,
        indices=indices.data_ptr(),
    )
    return LabelSets.from_sorted(indices, offsets, layer.num_labels)
