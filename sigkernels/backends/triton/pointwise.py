"""The pointwise part of the library path in Triton: one launch for a chunk of labels, and one at the end of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from ...labels import LabelSets
from ...losses import ElementwiseParams
from ...partial_labels import PartialTargets
from ..interface import LossCall, label_vector
from ..library_pass import Rows, Slopes
from ..library_walk import Chunk, LabelWalk
from . import configs, interpreted
from .kernels.elementwise import elementwise_kernel, finish_kernel
from .kernels.losses import settings


class TritonPointwise:
    """For the elementwise losses of this package."""

    def narrow(self, device: torch.device) -> bool:
        return True

    def runs(self, dtype: torch.dtype) -> Callable[[int, int, torch.device], int] | None:
        return configs.run_labels if dtype != torch.float32 or configs.platform() == "cuda" else None

    def elementwise(self, call: LossCall, walk: LabelWalk, row_scale: float | Tensor) -> TritonElementwise:
        return TritonElementwise(call, walk, row_scale)


class Targets:
    """The tensors of targets as kernels take them; a kernel that does not touch an argument still takes a pointer."""

    unknown: bool
    sparse: bool

    def __init__(self, targets: LabelSets | Tensor | PartialTargets, spare: Tensor) -> None:
        flags = None
        self.unknown = isinstance(targets, PartialTargets)
        if isinstance(targets, PartialTargets):
            targets, flags = targets.for_kernels()
        self.sparse = isinstance(targets, LabelSets)
        self._dense = targets if isinstance(targets, Tensor) else spare
        if self._dense.dtype == torch.bool:
            self._dense = self._dense.view(torch.uint8)
        sets = targets.unchecked() if isinstance(targets, LabelSets) else (spare, spare)
        self._sets = (*sets, spare if flags is None else flags.view(torch.uint8))

    def of(self, chunk: Chunk) -> tuple[Any, ...]:
        """``indices, offsets, unknown, dense, dense_stride, dense_step``."""
        if self.sparse:
            return *self._sets, self._dense, 0, 0
        part = self._dense[:, chunk.start : chunk.stop]
        return *self._sets, part, *part.stride()


class TritonElementwise:
    """The losses of the rows of one call, chunk after chunk."""

    def __init__(self, call: LossCall, walk: LabelWalk, row_scale: float | Tensor) -> None:
        x, layer, params = call.x, call.layer, call.loss.kernel_params()
        assert isinstance(params, ElementwiseParams)
        self._call, self._walk, self._targets = call, walk, Targets(call.targets, x)
        self._scale, self._scale_low = two_floats(1.0 if isinstance(row_scale, Tensor) else row_scale)
        self._value_scale = call.scale if isinstance(call.scale, float) else None
        self._row_scale = row_scale.to(walk.out).contiguous() if isinstance(row_scale, Tensor) else None
        weights = params.weight, params.pos_weight
        self._weights = [label_vector(w, layer, walk.out) if isinstance(w, Tensor) else None for w in weights]
        numbers = [1.0 if w is None or isinstance(w, Tensor) else float(w) for w in weights]
        self._config = configs.elementwise(x.dtype)
        self._blocks = triton.cdiv(walk.batch, self._config.BM)
        tiles = triton.cdiv(walk.size, self._config.BN)
        if walk.run:
            self._parts, self._each = triton.cdiv(walk.size, walk.run), walk.run // self._config.BN
        else:
            self._parts, self._each = configs.parts(tiles, self._blocks, x.device)
        self._row_sums = x.new_empty(self._parts, walk.batch, dtype=walk.out)
        self._totals = x.new_empty(self._parts * self._blocks, dtype=walk.out)
        self._g = None if walk.operand == walk.out else walk.buffer(walk.operand)
        self._constants = settings(params) | {
            "BIAS": layer.bias is not None, "APART": walk.apart,
            "WAVES": walk.run > 0, "GRAD_WAVES": walk.run > 0 and call.needs[0],
            "SPARSE": self._targets.sparse, "UNKNOWN": self._targets.unknown,
            "LABEL_WEIGHT": self._weights[0] is not None, "LABEL_POS_WEIGHT": self._weights[1] is not None,
            "WEIGHT": numbers[0], "POS_WEIGHT": numbers[1], "ROW_SCALE": self._row_scale is not None,
            "GRADIENT": any(call.needs),
            "ROUGH": x.dtype == torch.bfloat16, "INTERPRETED": interpreted(),
        }  # fmt: skip

    def __call__(self, chunk: Chunk) -> Slopes | None:
        call, walk, layer, z = self._call, self._walk, self._call.layer, chunk.z
        g = z if self._g is None else walk.view(self._g, z.shape[1])
        part = slice(chunk.start, chunk.stop)
        bias, *weights = (z if t is None else t[part] for t in (layer.bias, *self._weights))
        coef = walk.coefficients(chunk) if walk.run else z
        grad_coef = walk.grad_coefficients(chunk) if walk.run and call.needs[0] else coef
        if walk.batch:
            with on(z):
                # The last chunk may have fewer parts: the sums of the others stay as they are.
                elementwise_kernel[(self._blocks, triton.cdiv(z.shape[1], self._each * self._config.BN))](
                    z, g, z.stride(0), walk.x, walk.x.stride(0), walk.tables.basis, coef, grad_coef, coef.stride(0),
                    bias, *self._targets.of(chunk), *weights,
                    z if self._row_scale is None else self._row_scale, self._row_sums, self._totals,
                    walk.batch, z.shape[1], layer.label_start + chunk.start, walk.constant, self._scale,
                    self._scale_low, self._each, chunk.number, **self._constants, **self._config.options(configs.platform()),
                )  # fmt: skip
        return Slopes(g) if any(call.needs) else None

    def finish(self, wide: Tensor | None, narrow: Tensor | None) -> Rows:
        walk, sums, scale = self._walk, self._row_sums, self._value_scale
        if not sums.numel() or not walk.layer.num_rows:
            if wide is not None and narrow is not None:
                narrow.copy_(wide)
            return Rows(torch.zeros(walk.batch, dtype=torch.float64, device=sums.device))
        rows = sums.new_empty(walk.batch, dtype=torch.float64)
        value = None if scale is None else sums.new_empty((), dtype=walk.out)
        size = 0 if wide is None else wide.numel()
        programs = min(triton.cdiv(size, configs.FINISH["SHARE"]), configs.FINISHERS)
        with on(sums):
            finish_kernel[(max(triton.cdiv(walk.batch, configs.FINISH["BLOCK"]), programs),)](
                sums, self._totals, rows, rows if value is None else value, rows if wide is None else wide,
                rows if narrow is None else narrow, walk.batch, self._parts, self._totals.numel(), size,
                *two_floats(scale or 0.0), TOTAL=scale is not None, CONVERT=wide is not None,
                INTERPRETED=interpreted(), **configs.FINISH,
            )  # fmt: skip
        return Rows(rows, value)


def on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Where kernels of tensors like this one are launched."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def two_floats(number: float) -> tuple[float, float]:
    """``number`` as the sum of two float32, as which numbers reach a kernel: for float64 passes."""
    high = float(np.float32(number))
    return high, number - high if abs(high) < torch.inf else 0.0
