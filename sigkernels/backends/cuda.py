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
from ..losses import ConfusionLoss, Loss, SigmoidF1
from . import fused_pass
from .fused_pass import Columns, Elementwise, Gradients, Targets
from .interface import accumulate_dtype
from .tiles import Chunk, check_size, label_chunks, merge_candidates, set_offsets, sort_logits, without_autocast

_SORT_ELEMENTS = 2**23  # logits in memory at a time when m is too large for the kernels' lists


def available() -> str | None:
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


def devices() -> tuple[str, ...]:
    return ("cuda",)


def supports(loss: Loss) -> str | None:
    if isinstance(loss, ConfusionLoss) or type(loss).__name__ in ("BCE", "Focal", "Asymmetric"):
        return None
    return (
        f"the cuda backend has no kernel for {type(loss).__name__}; it has BCE, Focal, Asymmetric and the "
        "confusion-matrix losses"
    )


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

    def fused_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, what: Elementwise) -> None:
        _module().fused_loss(
            _Problem(chunk).launch,
            _targets(targets, chunk),
            _gradients(gradients, chunk),
            loss=_loss_settings(what.loss),
            label_weight=_address(what.label_weight),
            pos_weight=_address(what.pos_weight),
            row_factor=what.row_factor.data_ptr(),
            row_sums=what.row_sums.data_ptr(),
            blocks=len(what.row_sums),
        )

    def confusion_loss(self, chunk: Chunk, targets: Targets, gradients: Gradients, what: Columns) -> None:
        _module().confusion_loss(
            _Problem(chunk).launch,
            _targets(targets, chunk),
            _gradients(gradients, chunk),
            loss=_confusion_settings(what.loss, what.scale, accumulate_dtype(chunk.slack.dtype)),
            beta=_address(what.beta),
            eta=_address(what.eta),
            logits=what.logits.data_ptr(),
            values=what.values.data_ptr(),
            grad_beta=_address(what.grad_beta),
            grad_eta=_address(what.grad_eta),
            blocks=len(what.values),
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


fused_loss = without_autocast(functools.partial(fused_pass.fused_loss, _Engine()))
confusion_loss = without_autocast(functools.partial(fused_pass.confusion_loss, _Engine()))


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


def _confusion_settings(loss: ConfusionLoss, scale: float, dtype: torch.dtype) -> dict[str, float]:
    """The fields of a loss by the names of ``ConfusionParams`` in ``csrc/cuda/launch.h``."""
    names = ("n_tp", "n_s", "n_p", "n_rows", "d_s", "d_p", "d_rows")
    over, under = loss.coefficients
    settings: dict[str, float] = dict(zip(names, (*over, *under), strict=True))
    settings |= {"form": 2, "mirrored": loss.mirrored, "tiny": torch.finfo(dtype).tiny, "scale": scale}
    settings |= {"beta": 1.0, "eta": 0.0}
    if isinstance(loss, SigmoidF1):
        settings["form"] = 0 if loss.on == "logits" else 1
        settings |= {n: float(v) for n in ("beta", "eta") if not isinstance(v := getattr(loss, n), Tensor)}
    return settings


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
