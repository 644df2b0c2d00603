"""The CUDA backend: the kernels of ``csrc/cuda`` on torch's tensors, memory and current stream.

The fused pass runs on persistent blocks. Each owns a range of labels, reads its rows of the weight once and writes
their gradient; its part of ``grad_x`` goes to a private slab, and torch adds the slabs in a fixed order. Nothing
synchronises except ``predict``, whose result has a size that only the device knows.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer
from ..losses import Loss
from .interface import LossResult, accumulate_dtype, gradient_dtype
from .tiles import (
    Factors,
    SparseTargets,
    TileFactors,
    check_size,
    chunk_of,
    gradient_factors,
    label_chunks,
    label_vector,
    merge_candidates,
    set_offsets,
    slack_features,
    sort_logits,
    tile_factors,
)

_SLAB_BYTES = 64 * 2**20  # of private grad_x slabs: bounds the rows of one launch
_SCAN_ELEMENTS = 2**26  # rows · labels of one launch: bounds the coefficients of the DFT part
_SORT_ELEMENTS = 2**23  # logits in memory at a time when m is too large for the kernels' lists


def available() -> str | None:
    try:
        module = _module()
    except ImportError as error:
        return (
            f"sigkernels._cuda is not built ({error}); install a CUDA toolkit and reinstall with "
            "SIGKERNELS_CUDA=1 pip install --no-binary sigkernels sigkernels"
        )
    if not torch.cuda.is_available() or torch.version.hip:
        return f"torch sees no CUDA device ({module.devices()}); install a CUDA build of torch and a driver"
    return None


def devices() -> tuple[str, ...]:
    return ("cuda",)


def supports(loss: Loss) -> str | None:
    if type(loss).__name__ in ("BCE", "Focal", "Asymmetric"):
        return None
    return f"the cuda backend has no kernel for {type(loss).__name__}; it has BCE, Focal and Asymmetric"


@functools.cache
def _module() -> Any:
    return importlib.import_module("sigkernels._cuda")


@functools.cache
def _resident_blocks(kind: str, device: int) -> int:
    return _module().resident_blocks(kind, device)


class _Problem:
    """One chunk of labels and rows, as the kernels see it. Keeps alive what it points to."""

    def __init__(self, x: Tensor, slack: Tensor, layer: Layer, first: int, count: int) -> None:
        module = _module()
        self.factors = tile_factors(layer, module.TILE)
        self.part = chunk_of(layer, module.TILE, first, count)
        self.first, self.count = first, count
        self.x, self.slack = x, slack
        self.c = self.factors.coefficients(x, first, count).contiguous() if self.factors.rank else slack
        self.weight = self.part.weight.contiguous()
        self.bias = None if self.part.bias is None else self.part.bias.contiguous()
        device, stream = _where(x)
        self.launch = module.Launch(
            device=device,
            stream=stream,
            dtype=_kind(x),
            x=slack.data_ptr(),
            weight=self.weight.data_ptr(),
            c=self.c.data_ptr(),
            u=self.factors.u.data_ptr(),
            bias=_address(self.bias),
            batch=x.shape[0],
            labels=self.part.num_rows,
            slack=slack.shape[1],
            rank=self.factors.rank,
        )

    def ranges(self, rows_per_group: int) -> int:
        """Into how many ranges of labels a scan is cut, so that ranges × row groups fill the device."""
        groups = -(-self.x.shape[0] // rows_per_group)
        return min(max(_blocks(self.x) // groups, 1), self.count)


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


def logits(x: Tensor, layer: Layer) -> Tensor:
    check_size(layer)
    z = x.new_empty(x.shape[0], layer.num_rows)
    if z.numel():
        problem = _Problem(x, slack_features(x, layer), layer, 0, -(-layer.num_rows // _module().TILE))
        _module().logits(problem.launch, out=z.data_ptr(), out_stride=z.stride(0))
    return z


def fused_loss(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: Loss,
    row_scale: float | Tensor,
    needs: tuple[bool, bool, bool],
    grad_weight_into: Tensor | None = None,
) -> LossResult:
    check_size(layer)
    reason = supports(loss)
    if reason is not None:
        raise ValueError(f"{reason}; use backend 'torch'")
    return _FusedLoss(x, layer, targets, loss, row_scale, needs).run(grad_weight_into)


class _FusedLoss:
    """One fused pass: chunks of rows and labels, their launches, and what is added up after each."""

    def __init__(
        self,
        x: Tensor,
        layer: Layer,
        targets: LabelSets | Tensor,
        loss: Loss,
        row_scale: float | Tensor,
        needs: tuple[bool, bool, bool],
    ) -> None:
        self.x, self.layer, self.loss, self.needs = x, layer, loss, needs
        self.acc, self.out_dtype = accumulate_dtype(x.dtype), gradient_dtype(x.dtype)
        self.slack = slack_features(x, layer)
        self.sparse = SparseTargets(targets) if isinstance(targets, LabelSets) else None
        self.dense = None if isinstance(targets, LabelSets) else targets.to(self.acc).contiguous()
        self.scale: Factors = gradient_factors(x, row_scale, loss)
        self.settings = _loss_settings(loss)
        self.rows = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
        self.grad_x = torch.zeros(x.shape, dtype=self.acc, device=x.device) if needs[0] else None
        bias = torch.zeros if not x.shape[0] else torch.empty
        self.grad_bias = bias(layer.num_rows, dtype=self.acc, device=x.device) if needs[2] else None

    def run(self, grad_weight_into: Tensor | None) -> LossResult:
        batch = self.x.shape[0]
        grad_weight = self._grad_weight_buffer(grad_weight_into) if self.needs[1] else None
        adds = grad_weight is not None and grad_weight is grad_weight_into
        if batch and self.layer.num_rows:
            step = self._rows_per_launch()
            for row in range(0, batch, step):
                rows = slice(row, min(row + step, batch))
                chunk = label_chunks(self.layer, _module().TILE, step, _SCAN_ELEMENTS)
                for first, count in chunk:
                    self._launch(rows, first, count, grad_weight, adds)
        if grad_weight is not None:
            if grad_weight_into is not None and not adds:
                grad_weight = grad_weight_into.add_(grad_weight)
            grad_weight = grad_weight if adds or grad_weight_into is not None else grad_weight.to(self.out_dtype)
        return LossResult(
            self.rows,
            None if self.grad_x is None else self.grad_x.to(self.out_dtype),
            grad_weight,
            None if self.grad_bias is None else self.grad_bias.to(self.out_dtype),
        )

    def _grad_weight_buffer(self, into: Tensor | None) -> Tensor:
        """Where the kernel puts grad_weight.

        A 16-bit buffer will do while one group of rows is the whole batch: each entry is then written once.
        """
        one_group = self.x.shape[0] <= _module().rows_per_group(_kind(self.x))
        narrow = one_group and self.out_dtype == self.x.dtype
        if (
            into is not None
            and into.is_contiguous()
            and (into.dtype == self.acc or (narrow and into.dtype == self.x.dtype))
        ):
            return into
        make = torch.empty if self.x.shape[0] else torch.zeros
        return make(self.layer.weight.shape, dtype=self.out_dtype if narrow else self.acc, device=self.x.device)

    def _rows_per_launch(self) -> int:
        """Rows whose private slabs fit the budget, in whole groups."""
        group = _module().rows_per_group(_kind(self.x))
        slab_bytes = _blocks(self.x) * max(self.slack.shape[1], 1) * self.acc.itemsize
        return max(_SLAB_BYTES // slab_bytes // group, 1) * group

    def _launch(self, rows: slice, first: int, count: int, grad_weight: Tensor | None, adds: bool) -> None:
        module, device = _module(), self.x.device
        problem = _Problem(self.x[rows], self.slack[rows], self.layer, first, count)
        part, batch = problem.part, rows.stop - rows.start
        inside = slice(first * module.TILE, first * module.TILE + part.num_rows)
        # As few blocks as keep the busiest one as short: fewer slabs, the same time.
        blocks = -(-count // -(-count // _blocks(self.x)))
        row_sums = torch.empty(blocks, batch, dtype=torch.float64, device=device)
        slab_rows = batch if self.grad_x is not None else 0
        slabs = torch.empty(blocks, slab_rows, self.slack.shape[1], dtype=self.acc, device=device)
        grad_c = torch.empty(slab_rows, count * problem.factors.rank, dtype=self.acc, device=device)
        positions = None if self.sparse is None else self.sparse.at(part, module.TILE, rows.start, batch)
        dense = None if self.dense is None else self.dense[rows, inside]
        weight = label_vector(getattr(self.loss, "weight", None), part, self.acc)
        pos_weight = label_vector(getattr(self.loss, "pos_weight", None), part, self.acc)
        grad_weight = None if grad_weight is None else grad_weight[inside]
        grad_bias = None if self.grad_bias is None else self.grad_bias[inside]
        module.fused_loss(
            problem.launch,
            sparse=self.sparse is not None,
            indices=0 if self.sparse is None else self.sparse.indices.data_ptr(),
            positions=_address(positions),
            label_start=part.label_start,
            dense=_address(dense),
            dense_stride=0 if dense is None else dense.stride(0),
            loss=self.settings,
            label_weight=_address(weight),
            pos_weight=_address(pos_weight),
            row_factor=self.scale.row[rows].data_ptr(),
            out_scale=_address(self.scale.out),
            row_sums=row_sums.data_ptr(),
            need_x=self.grad_x is not None,
            slabs=slabs.data_ptr(),
            grad_c=grad_c.data_ptr(),
            grad_weight=_address(grad_weight),
            grad_weight_narrow=grad_weight is not None and grad_weight.dtype != self.acc,
            accumulate_weight=adds or rows.start > 0,
            grad_bias=_address(grad_bias),
            accumulate_bias=rows.start > 0,
            blocks=blocks,
        )
        self.rows[rows] += row_sums.sum(0)
        if self.grad_x is not None:
            self._add_grad_x(self.grad_x[rows], slabs, grad_c, problem.factors, first, count)

    def _add_grad_x(
        self, grad_x: Tensor, slabs: Tensor, grad_c: Tensor, factors: TileFactors, first: int, count: int
    ) -> None:
        columns = self.layer.dft_columns
        out = 1 if self.scale.out is None else self.scale.out
        grad_x[:, columns:] += slabs.sum(0) * out
        if factors.rank:
            grad_x[:, :columns] += factors.coefficients_adjoint(grad_c, first, count) * out


def _loss_settings(loss: Any) -> dict[str, float]:
    """The fields of a loss by the names of ``LossParams`` in ``csrc/core/losses.h``."""
    settings: dict[str, float] = dict(
        kind=0, label_smoothing=0.0, gamma_pos=0.0, gamma_neg=0.0, alpha_pos=1.0, alpha_neg=1.0, clip=0.0, eps=1e-8
    )
    settings["detach_focus"] = False
    name = type(loss).__name__
    if name == "BCE":
        settings["label_smoothing"] = loss.label_smoothing
    elif name == "Focal":
        settings.update(kind=1, gamma_pos=loss.gamma, gamma_neg=loss.gamma)
        if loss.alpha is not None:
            settings.update(alpha_pos=loss.alpha, alpha_neg=1 - loss.alpha)
    else:
        settings.update(kind=2, gamma_pos=loss.gamma_pos, gamma_neg=loss.gamma_neg, clip=loss.clip or 0.0)
        settings.update(eps=loss.eps, detach_focus=loss.detach_focus)
    return settings


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    check_size(layer)
    module = _module()
    batch, m = x.shape[0], min(m, layer.num_rows)  # a label range may be shorter than m
    if not batch:
        return x.new_empty(0, m), torch.empty(0, m, dtype=torch.int64, device=x.device)
    if m > module.LONGEST_LIST:
        return _topk_by_sorting(x, layer, m)
    slack = slack_features(x, layer)
    key_dtype = torch.int64 if x.dtype == torch.float64 else torch.int32
    keys, labels = [], []
    for first, count in label_chunks(layer, module.TILE, batch, _SCAN_ELEMENTS):
        problem = _Problem(x, slack, layer, first, count)
        ranges = problem.ranges(module.rows_per_group(_kind(x)))
        best = torch.empty(batch, ranges * m, dtype=key_dtype, device=x.device)
        best_labels = torch.empty(batch, ranges * m, dtype=torch.int32, device=x.device)
        module.topk(problem.launch, ranges=ranges, m=m, keys=best.data_ptr(), labels=best_labels.data_ptr())
        keys.append(best)
        labels.append(best_labels.to(torch.int64) + problem.part.label_start)
    return merge_candidates(torch.cat(keys, 1), torch.cat(labels, 1), m, x.dtype)


def _topk_by_sorting(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """For long lists: the logits of a chunk at a time, sorted together with the best so far."""
    values, labels = x.new_empty(x.shape[0], 0), x.new_empty(x.shape[0], 0, dtype=torch.int64)
    slack, module = slack_features(x, layer), _module()
    for first, count in label_chunks(layer, module.TILE, x.shape[0], _SORT_ELEMENTS):
        problem = _Problem(x, slack, layer, first, count)
        z = x.new_empty(x.shape[0], problem.part.num_rows)
        module.logits(problem.launch, out=z.data_ptr(), out_stride=z.stride(0))
        more, where = sort_logits(z, m, problem.part.label_start)
        # What is kept has lower labels than what comes: a stable sort breaks ties rightly.
        values, order = torch.sort(torch.cat([values, more], 1), dim=1, descending=True, stable=True)
        values, labels = values[:, :m], torch.cat([labels, where], 1).gather(1, order[:, :m])
    return values, labels


def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    check_size(layer)
    module, batch = _module(), x.shape[0]
    if not batch:
        indices, offsets = (torch.zeros(count, dtype=torch.int64, device=x.device) for count in (0, 1))
        return LabelSets._trusted(indices, offsets, layer.num_labels)
    # As torch compares: the threshold is rounded to the dtype of the logits.
    limit = torch.tensor(threshold, dtype=x.dtype).item()
    slack = slack_features(x, layer)
    chunks = list(label_chunks(layer, module.TILE, batch, _SCAN_ELEMENTS))
    counts = []
    for first, count in chunks:
        problem = _Problem(x, slack, layer, first, count)
        ranges = problem.ranges(module.rows_per_group(_kind(x)))
        part = torch.empty(ranges, batch, dtype=torch.int32, device=x.device)
        module.predict_count(problem.launch, ranges=ranges, threshold=limit, counts=part.data_ptr())
        counts.append(part)
    offsets, starts = set_offsets(torch.cat(counts))
    indices = torch.empty(int(offsets[-1]), dtype=torch.int64, device=x.device)
    for (first, count), start in zip(chunks, starts.split([len(part) for part in counts]), strict=True):
        problem = _Problem(x, slack, layer, first, count)
        module.predict_fill(
            problem.launch,
            ranges=len(start),
            threshold=limit,
            starts=start.data_ptr(),
            label_start=problem.part.label_start,
            indices=indices.data_ptr(),
        )
    return LabelSets._trusted(indices, offsets, layer.num_labels)
