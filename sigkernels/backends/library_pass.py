"""The fused pass of the library path: chunks of logits, their pointwise part, and the products of its result.

The pointwise part, from logits to loss and ``∂loss/∂z``, is a backend's own: torch operations (``pointwise_torch.py``) or
Triton kernels (``triton/pointwise.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..layer_update import LayerUpdate
from ..losses import ElementwiseParams
from .interface import LossCall, LossResult, accumulate_dtype, gradient_dtype
from .library_walk import Chunk, GradientOfX, LabelWalk, product, without_autocast
from .torch_update import apply_update


class Slopes(NamedTuple):
    """``∂loss/∂z`` of a chunk, ``[B, c]`` in the dtype of the products, and parts of its sums over the rows, if made."""

    g: Tensor
    column_sums: Tensor | None = None  # [parts, c]


class Rows(NamedTuple):
    """The loss of each row, ``[B]`` float64, and ``scale · Σ rows`` where a kernel has made it on the way."""

    rows: Tensor
    value: Tensor | None = None


class ElementwisePointwise(Protocol):
    """The pointwise part of one call."""

    def __call__(self, chunk: Chunk) -> Slopes | None:
        """Adds up the loss of the rows; ``∂loss/∂z`` where a gradient is needed, good until the next chunk."""

    def finish(self, wide: Tensor | None, narrow: Tensor | None) -> Rows:
        """The rows; and ``narrow``, where it is given, becomes ``wide`` in its dtype."""


class Pointwise(Protocol):
    """What a backend brings to the library path."""

    def narrow(self, device: torch.device) -> bool:
        """Whether it takes ``∂loss/∂z`` to 16 bits, for products of 16-bit inputs as they are."""

    def runs(self, dtype: torch.dtype) -> Callable[[int, int, torch.device], int] | None:
        """Of how many labels a run of the DFT part is, from the rows and the labels of a chunk and the device (``LabelWalk``), where
        the kernel for rounded operands of ``dtype`` adds that part; else ``None``."""

    def elementwise(
        self, call: LossCall, walk: LabelWalk, params: ElementwiseParams | None, row_scale: float | Tensor
    ) -> ElementwisePointwise:
        """``params``: what a kernel takes of the loss, where it has one. ``row_scale``, a number or ``[B]``, multiplies ``∂loss/∂z``."""


class GradientSums:
    """The gradients of a walk over label chunks, from those of the logits of each."""

    walk: LabelWalk
    factor: float | Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self, walk: LabelWalk, needs: tuple[bool, ...], dtype: torch.dtype, factor: float | Tensor = 1.0
    ) -> None:
        """``factor`` is still to be applied to all of them."""
        layer, x = walk.layer, walk.x
        self.walk, self.factor, self._factored = walk, factor, isinstance(factor, Tensor) or factor != 1
        self._x = GradientOfX(walk, dtype) if needs[0] else None
        self.weight = x.new_empty(walk.rows, layer.weight.shape[1], dtype=dtype) if needs[1] else None
        self.bias = x.new_empty(walk.rows, dtype=dtype) if needs[2] else None

    def add(self, chunk: Chunk, slopes: Slopes) -> None:
        """Takes in the gradient of the logits of a chunk."""
        if self._x is not None:
            self._x.add(chunk, slopes.g)
        if self.weight is not None:
            whole = self.walk.size >= self.walk.rows
            part = self.weight if whole else self.weight[chunk.start : chunk.stop]
            product(slopes.g.T, self.walk.slack, part)
            self._scale_(part)
        if self.bias is not None:
            part = self.bias[chunk.start : chunk.stop]
            self._sum_columns(slopes, part)
            self._scale_(part)

    def _sum_columns(self, slopes: Slopes, out: Tensor) -> None:
        sums = slopes.g if slopes.column_sums is None else slopes.column_sums
        if sums.dtype == out.dtype:  # of 16 bits, too, torch adds up in float32
            torch.sum(sums, 0, out=out)
        else:
            out.copy_(torch.sum(sums, 0, dtype=self.walk.out))

    def _scale_(self, grad: Tensor) -> None:
        if self._factored:
            grad.mul_(self.factor)

    def sum_of_x(self) -> tuple[Tensor | None, Tensor | None]:
        """The sum for x where it is wider than the gradient, and memory for that; what is left to be done is a copy."""
        if self._x is None or self._x.grad.dtype == self._x.dtype:
            return None, None
        wide = self._x.grad
        self._x.grad = torch.empty(wide.shape, dtype=self._x.dtype, device=wide.device)
        return wide, self._x.grad

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, weight and bias."""
        grad_x = None if self._x is None else self._x.finish()
        if grad_x is not None:
            self._scale_(grad_x)
        return grad_x, self.weight, self.bias


class UpdatingSums(GradientSums):
    """The same with a step of weight and bias in the place of their gradients: those of one chunk at a time exist."""

    def __init__(
        self, walk: LabelWalk, needs: tuple[bool, ...], dtype: torch.dtype, factor: float | Tensor, update: LayerUpdate
    ) -> None:
        super().__init__(walk, (needs[0], False, False), dtype, factor)
        self.update = update

    def add(self, chunk: Chunk, slopes: Slopes) -> None:
        super().add(chunk, slopes)
        label, out, count = self.walk.layer.label_start + chunk.start, self.walk.out, chunk.stop - chunk.start
        if self.update.weight is not None:
            grad = slopes.g.new_empty(count, chunk.weight.shape[1], dtype=out)
            product(slopes.g.T, self.walk.slack, grad)
            self._scale_(grad)
            apply_update(self.update.weight, grad, chunk.start, label)
        if self.update.bias is not None:
            grad = slopes.g.new_empty(count, dtype=out)
            self._sum_columns(slopes, grad)
            self._scale_(grad)
            apply_update(self.update.bias, grad, chunk.start, label)


@without_autocast
def fused_loss(call: LossCall, pointwise: Pointwise, update: LayerUpdate | None = None) -> LossResult:
    """An elementwise loss and its gradients, or with ``update`` steps of weight and bias in the place of theirs."""
    x, known = call.x, call.loss.kernel_params()
    params = known if isinstance(known, ElementwiseParams) else None
    narrow = pointwise.narrow(x.device)
    row_scale: float | Tensor = call.scale
    factor: float | Tensor = 1.0
    if narrow and x.dtype == torch.float16:
        if params is not None:
            row_scale, factor = _float16_scales(call, params)
        else:
            narrow = False  # how large a gradient this formula makes is not known
    walk = LabelWalk(x, call.layer, narrow, pointwise.runs(x.dtype))
    dtype = gradient_dtype(x.dtype)
    if update is None:
        sums = GradientSums(walk, call.needs, dtype, factor)
    else:
        sums = UpdatingSums(walk, call.needs, dtype, factor, update)
    part = pointwise.elementwise(call, walk, params, row_scale)
    for chunk in walk:
        slopes = part(chunk)
        if slopes is not None:
            sums.add(chunk, slopes)
    rows, value = part.finish(*sums.sum_of_x())
    return LossResult(rows, *sums.finish(), value=value)


def _float16_scales(call: LossCall, params: ElementwiseParams) -> tuple[float | Tensor, float | Tensor]:
    """What multiplies ``∂loss/∂z``, so that it keeps to the range of float16, and what is left for the gradients."""
    scale, dtype, device = call.scale, accumulate_dtype(call.x.dtype), call.x.device
    settings = [(s, least) for s, least in ((params.weight, 0.0), (params.pos_weight, 1.0)) if s is not None]
    if isinstance(scale, float) and not any(isinstance(setting, Tensor) for setting, _ in settings):
        factor = abs(scale)
        for setting, least in settings:
            factor *= max(abs(float(setting)), least)
        factor = factor if 0 < factor < torch.inf else 1.0
        return scale / factor, factor
    out = torch.as_tensor(scale, dtype=dtype).abs().amax() if call.x.shape[0] else torch.ones((), dtype=dtype)
    out = out.to(device)
    for setting, least in settings:
        large = setting.to(device=device, dtype=dtype).abs().amax() if isinstance(setting, Tensor) else abs(setting)
        out = out * (large.clamp(min=least) if isinstance(large, Tensor) else max(large, least))
    out = torch.where((out > 0) & torch.isfinite(out), out, torch.ones_like(out))
    return scale / out if isinstance(scale, Tensor) else (scale / out).expand(call.x.shape[0]), out
