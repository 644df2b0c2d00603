"""The pointwise part of the library path in Triton: one launch for a chunk of labels, and one at the end of a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...label_forms import checked_sets
from ...labels import LabelSets
from ...layer import Layer
from ...losses import ElementwiseParams
from ...partial_labels import PartialTargets
from ..interface import LossCall, label_vector
from ..library_pass import Rows, Slopes
from ..library_walk import Chunk, LabelWalk
from . import configs, interpreted
from .kernels.elementwise import elementwise_kernel, finish_kernel
from .kernels.losses import settings

_HERE = contextlib.nullcontext()


class TritonPointwise:
    """For the elementwise losses of this package."""

    def narrow(self, device: torch.device) -> bool:
        return True

    def runs(self, dtype: torch.dtype) -> Callable[[int, int, torch.device], int] | None:
        return configs.run_labels if dtype != torch.float32 or configs.platform() == "cuda" else None

    def elementwise(
        self, call: LossCall, walk: LabelWalk, params: ElementwiseParams | None, row_scale: float | Tensor
    ) -> TritonElementwise:
        assert params is not None  # other losses are refused
        return TritonElementwise(call, walk, params, row_scale)


class Targets:
    """The tensors of targets as kernels take them; a kernel that does not touch an argument still takes a pointer."""

    unknown: bool
    sparse: bool

    def __init__(self, targets: LabelSets | Tensor | PartialTargets, spare: Tensor) -> None:
        flags = self._dense = spare
        self.unknown = isinstance(targets, PartialTargets)
        if isinstance(targets, PartialTargets):
            targets, given = targets.for_kernels()
            flags = spare if given is None else given.view(torch.uint8)
        self.sparse = isinstance(targets, LabelSets)
        if isinstance(targets, LabelSets):
            self._sets = (*checked_sets(targets), flags)
        else:
            self._dense = targets.view(torch.uint8) if targets.dtype == torch.bool else targets
            self._sets = (spare, spare, flags)

    def of(self, chunk: Chunk) -> tuple[Any, ...]:
        """``indices, offsets, unknown, dense, dense_stride, dense_step``."""
        if self.sparse:
            return *self._sets, self._dense, 0, 0
        part = self._dense[:, chunk.start : chunk.stop]
        return *self._sets, part, *part.stride()


class Cut(NamedTuple):
    """How the launches of a call are laid out."""

    blocks: int  # of rows
    parts: int  # of the labels of a chunk
    each: int  # tiles of a part
    labels: int  # of a part
    keywords: dict[str, Any]  # constants and options of a launch


@functools.lru_cache(maxsize=1024)
def cut_of(
    params: ElementwiseParams, dtype: torch.dtype, batch: int, size: int, run: int, device: torch.device, bias: bool, apart: bool,
    grad_x: bool, sparse: bool, unknown: bool, label_weight: bool, label_pos_weight: bool, weight: float, pos_weight: float,
    row_scale: bool, gradient: bool,
) -> Cut:  # fmt: skip
    """The same at every step: worked out once. ``size`` labels of a chunk, ``run`` of a run or 0."""
    config = configs.elementwise(dtype)
    blocks = -(-batch // config.BM)
    if run:
        parts, each = -(-size // run), run // config.BN
    else:
        parts, each = configs.parts(-(-size // config.BN), blocks, device)
    keywords = settings(params) | {
        "BIAS": bias, "APART": apart, "WAVES": run > 0, "GRAD_WAVES": run > 0 and grad_x, "SPARSE": sparse, "UNKNOWN": unknown,
        "LABEL_WEIGHT": label_weight, "LABEL_POS_WEIGHT": label_pos_weight, "WEIGHT": weight, "POS_WEIGHT": pos_weight,
        "ROW_SCALE": row_scale, "GRADIENT": gradient, "ROUGH": dtype == torch.bfloat16, "INTERPRETED": interpreted(),
    }  # fmt: skip
    return Cut(blocks, parts, each, each * config.BN, keywords | config.options(configs.platform()))


class TritonElementwise:
    """The losses of the rows of one call, chunk after chunk."""

    def __init__(self, call: LossCall, walk: LabelWalk, params: ElementwiseParams, row_scale: float | Tensor) -> None:
        x, layer = call.x, call.layer
        self._call, self._walk, self._targets = call, walk, Targets(call.targets, x)
        self._scale, self._scale_low = two_floats(1.0 if isinstance(row_scale, Tensor) else row_scale)
        self._value_scale = call.scale if isinstance(call.scale, float) else None
        self._row_scale = row_scale.to(walk.out).contiguous() if isinstance(row_scale, Tensor) else None
        self._weight, weight = _per_label(params.weight, layer, walk.out)
        self._pos_weight, pos_weight = _per_label(params.pos_weight, layer, walk.out)
        if params.weight is not None or params.pos_weight is not None:
            params = params._replace(weight=None, pos_weight=None)
        self._g = None if walk.operand == walk.out else walk.buffer(walk.operand)
        self._needed = True in call.needs
        self._cut = cut_of(
            params, x.dtype, walk.batch, walk.size, walk.run, x.device, layer.bias is not None, walk.apart, call.needs[0],
            self._targets.sparse, self._targets.unknown, self._weight is not None, self._pos_weight is not None, weight,
            pos_weight, self._row_scale is not None, self._needed,
        )  # fmt: skip
        self._losses = x.new_empty(self._cut.parts, self._cut.blocks + walk.batch, dtype=walk.out)

    def __call__(self, chunk: Chunk) -> Slopes | None:
        walk, layer, z, cut = self._walk, self._call.layer, chunk.z, self._cut
        labels = z.shape[1]
        g = z if self._g is None else walk.view(self._g, labels)
        coef = walk.coefficients(chunk) if walk.run else z
        if walk.batch:
            with on(z):
                # The last chunk may have fewer parts: the sums of the others stay as they are.
                elementwise_kernel[(cut.blocks, -(-labels // cut.labels))](
                    z, g, z.stride(0), walk.x, walk.x.stride(0), walk.tables.basis, coef, coef.stride(0),
                    entries_of(layer.bias, chunk), *self._targets.of(chunk), entries_of(self._weight, chunk),
                    entries_of(self._pos_weight, chunk), z if self._row_scale is None else self._row_scale, self._losses,
                    cut.parts, walk.batch, labels, layer.meta.label_start + chunk.start, walk.constant, self._scale,
                    self._scale_low, cut.each, chunk.number, **cut.keywords,
                )  # fmt: skip
        return Slopes(g) if self._needed else None

    def finish(self, wide: Tensor | None, narrow: Tensor | None) -> Rows:
        walk, losses, scale, cut = self._walk, self._losses, self._value_scale, self._cut
        if not walk.batch or not walk.rows:
            if wide is not None and narrow is not None:
                narrow.copy_(wide)
            return Rows(torch.zeros(walk.batch, dtype=torch.float64, device=losses.device))
        rows = losses.new_empty(walk.batch, dtype=torch.float64)
        value = None if scale is None else losses.new_empty((), dtype=walk.out)
        finish(losses, rows, value, wide, narrow, walk.batch, cut.parts, cut.blocks, scale or 0.0)
        return Rows(rows, value)


def finish(
    losses: Tensor, rows: Tensor | None, value: Tensor | None, wide: Tensor | None, narrow: Tensor | None, batch: int, parts: int,
    blocks: int, scale: float,
) -> None:  # fmt: skip
    """The last launch of a step: what the kernel ``finish`` makes of ``losses``; what is not there is not made."""
    size = 0 if wide is None else wide.numel()
    programs = max(-(-batch // configs.FINISH["BLOCK"]), min(-(-size // configs.FINISH["SHARE"]), configs.FINISHERS), 1)
    with on(losses):
        finish_kernel[(programs,)](
            losses, losses if rows is None else rows, losses if value is None else value, losses if wide is None else wide,
            losses if narrow is None else narrow, batch, parts, blocks, size, *two_floats(scale), TOTAL=value is not None,
            CONVERT=wide is not None, INTERPRETED=interpreted(), **configs.FINISH,
        )  # fmt: skip


def _per_label(setting: float | Tensor | None, layer: Layer, dtype: torch.dtype) -> tuple[Tensor | None, float]:
    """A setting as an entry per label, or as the number that it is for all of them."""
    if isinstance(setting, Tensor):
        return label_vector(setting, layer, dtype), 1.0
    return None, 1.0 if setting is None else float(setting)


def entries_of(setting: Tensor | None, chunk: Chunk) -> Tensor:
    """Its entries for the labels of a chunk, one after another; where there is none, a tensor that the kernel does not touch."""
    return chunk.z if setting is None else setting[chunk.start : chunk.stop].contiguous()


def on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Where kernels of tensors like this one are launched."""
    elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else _HERE


@functools.lru_cache(maxsize=1024)
def two_floats(number: float) -> tuple[float, float]:
    """``number`` as the sum of two float32, as which numbers reach a kernel: for float64 passes."""
    high = float(np.float32(number))
    return high, number - high if abs(high) < torch.inf else 0.0
