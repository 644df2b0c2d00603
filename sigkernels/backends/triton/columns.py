"""Confusion-matrix losses of the library path: one launch of ``kernels/columns.py`` for a chunk, two sweeps if pooled."""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
from torch import Tensor

from ...losses import ConfusionLoss, ConfusionParams
from ...losses.kernel_params import UNBOUNDED
from ..interface import ColumnResult, LossCall, gradient_dtype, label_vector, like_setting
from ..library_pass import GradientSums, Slopes
from ..library_walk import Chunk, LabelWalk, without_autocast
from . import configs, interpreted
from .kernels.columns import columns_kernel
from .kernels.targets import mark_kernel
from .pointwise import Targets, entries_of, finish, on, two_floats


@without_autocast
def column_loss(call: LossCall) -> ColumnResult:
    """The loss and its gradients. float16: a slope may lie far outside its range, so products take float32."""
    params = cast(ConfusionParams, call.loss.kernel_params())
    walk = LabelWalk(call.x, call.layer, call.x.dtype != torch.float16)
    columns = _Columns(call, params, walk)
    if params.pooled:
        totals = torch.zeros(3, dtype=torch.float64, device=call.x.device)
        for chunk in walk:
            totals += columns.sums(chunk)
        tp, s, p = totals if call.pool is None else call.pool(totals)
        tiny = torch.finfo(walk.out).tiny
        loss = cast(ConfusionLoss, call.loss)
        fraction, pooled = loss.fraction(tp, s, p, walk.batch * call.layer.num_labels, tiny)
        columns.pooled = torch.stack(list(pooled))
        columns.value = (1 - fraction) * float(call.scale)
        if not any(call.needs):
            return ColumnResult(columns.value, None, None, None)
    sums = GradientSums(walk, call.needs, gradient_dtype(call.x.dtype))
    for chunk in walk:
        slopes = columns.finish(chunk)
        if slopes is not None:
            sums.add(chunk, slopes)
    beta, eta = (
        like_setting(s, grad) for s, grad in zip((params.beta, params.eta), columns.setting_grads, strict=True)
    )
    value = columns.loss(*sums.sum_of_x())
    return ColumnResult(value, *sums.finish(), beta, eta)


class _Columns:
    """The launches of one call, chunk after chunk."""

    def __init__(self, call: LossCall, params: ConfusionParams, walk: LabelWalk) -> None:
        x, layer = call.x, call.layer
        self._call, self._walk, self._params, self._targets = call, walk, params, Targets(call.targets, x)
        given = params.beta, params.eta
        self._settings = [label_vector(s, layer, walk.out) if isinstance(s, Tensor) else None for s in given]
        self._config = configs.columns(x.dtype, walk.batch)
        self._tiles = -(-walk.size // self._config.BN)
        self._values = x.new_empty(self._tiles, dtype=torch.float64)
        words = -(-walk.size // 32) if self._targets.sparse else 1  # a kernel that reads none takes a pointer
        self._marks = x.new_empty(words, walk.batch, dtype=torch.int32)
        self._g = None if walk.operand == walk.out else walk.buffer(walk.operand)
        self.setting_grads = [
            torch.zeros(layer.num_rows, dtype=torch.float64, device=x.device) if need else None
            for need in (*call.needs, False, False)[3:5]
        ]
        self.pooled: Tensor | None = None
        self.value: Tensor | None = None

    def sums(self, chunk: Chunk) -> Tensor:
        """The sums of S·y, S and y over a chunk, ``[3]``."""
        sums = torch.zeros(3, chunk.z.shape[1], dtype=torch.float64, device=chunk.z.device)
        self._launch(chunk, chunk.z, sums, None, sweeps=(True, False))
        return sums.sum(1)

    def finish(self, chunk: Chunk) -> Slopes | None:
        """Adds up the loss, unless it is pooled; ``∂loss/∂z`` where a gradient is needed."""
        needed = any(self._call.needs)
        g = chunk.z if self._g is None else self._walk.view(self._g, chunk.z.shape[1])
        column_sums = None
        if self._call.needs[2]:
            column_sums = torch.zeros(1, chunk.z.shape[1], dtype=self._walk.out, device=g.device)
        self._launch(chunk, g, None, column_sums, sweeps=(self.pooled is None, needed))
        return Slopes(g, column_sums) if needed else None

    def loss(self, wide: Tensor | None, narrow: Tensor | None) -> Tensor:
        """The value; and ``narrow``, where it is given, becomes ``wide`` in its dtype."""
        walk, scale = self._walk, float(self._call.scale)
        if self.value is None and not (walk.batch and walk.rows):
            # Without rows every denominator is 0: value 0, loss 1 for each label.
            self.value = torch.full((), walk.rows * scale, dtype=walk.out, device=walk.x.device)
        if self.value is None:
            self.value = self._values.new_empty((), dtype=walk.out)
            finish(self._values, None, self.value, wide, narrow, 0, 1, self._tiles, scale)
        elif wide is not None and narrow is not None:
            narrow.copy_(wide)
        return self.value

    def _launch(
        self, chunk: Chunk, g: Tensor, sums: Tensor | None, column_sums: Tensor | None, sweeps: tuple[bool, bool]
    ) -> None:
        call, walk, params, z = self._call, self._walk, self._params, chunk.z
        if not z.numel():
            return
        layer, part = call.layer, slice(chunk.start, chunk.stop)
        bias, *settings = (entries_of(t, chunk) for t in (layer.bias, *self._settings))
        grads = [z if grad is None else grad[part] for grad in self.setting_grads]
        indices, offsets, _, *dense = self._targets.of(chunk)
        with on(z):
            if self._targets.sparse:
                words, marks = -(-z.shape[1] // 32), configs.MARKS
                mark_kernel[-(-words // marks["WORDS"]), -(-walk.batch // marks["ROWS"])](
                    indices, offsets, self._marks, layer.label_start + chunk.start, walk.batch, z.shape[1], **marks
                )
            columns_kernel[(triton.cdiv(z.shape[1], self._config.BN),)](
                z, g, z.stride(0), walk.x, walk.x.stride(0), bias, self._marks, *dense, *settings,
                z if self.pooled is None else self.pooled, z if sums is None else sums, self._values,
                z if column_sums is None else column_sums, *grads,
                walk.batch, z.shape[1], walk.constant, *two_floats(float(call.scale)),
                chunk.number, SUMS=sweeps[0], SLOPES=sweeps[1],
                COLUMN_SUMS=call.needs[2] and sweeps[1], **constants(params, walk, self._targets.sparse, call.needs),
                BIAS=layer.bias is not None, ONCE=walk.batch <= self._config.BM, **self._config.options(configs.platform()), enable_fp_fusion=False,
            )  # fmt: skip


def constants(params: ConfusionParams, walk: LabelWalk, sparse: bool, needs: tuple[bool, ...]) -> dict[str, Any]:
    """The compile-time arguments that a whole call shares."""
    beta, eta = (*needs, False, False)[3:5]
    return {
        "APART": walk.apart, "SPARSE": sparse, "FORM": params.form, "MIRRORED": params.mirrored,
        "METRIC": params.metric, "BETA": params.number("beta"), "ETA": params.number("eta"),
        "TINY": torch.finfo(walk.out).tiny, "HAS_BETA": isinstance(params.beta, Tensor),
        "HAS_ETA": isinstance(params.eta, Tensor), "POOLED": params.pooled,
        "NEED_BETA": beta and params.form != UNBOUNDED, "NEED_ETA": eta and params.form != UNBOUNDED,
        "INTERPRETED": interpreted(),
    }  # fmt: skip
