"""The contract of the backends: what each of them fills, or refuses with a sentence."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..labels import LabelSets
from ..layer import Layer, LayerMeta
from ..layer_update import LayerUpdate
from ..losses import ColumnLoss, ElementwiseLoss
from ..partial_labels import PartialTargets
from ..sharding import LabelShard

if TYPE_CHECKING:
    from .gpu_paths import LossShape

Operation = Literal["fused_loss", "fused_update", "column_loss", "logits", "logits_adjoint", "topk", "predict", "lml"]


class BackendError(RuntimeError):
    """A backend was asked for that cannot do the job, with one line that says why and what to install."""


class LossCall(NamedTuple):
    """A loss of a layer that is to be computed. Arguments were checked by the public functions."""

    x: Tensor  # [B, D]
    layer: Layer
    targets: LabelSets | Tensor | PartialTargets  # sets of global labels, or [B, m] in [0, 1]
    loss: ElementwiseLoss | ColumnLoss  # its tensors are [] or [n]
    scale: float | Tensor  # or, for elementwise losses, [B]: multiplies the gradients, and a column loss's value
    needs: tuple[bool, ...]  # gradients of x, weight, bias; of a column loss also of beta and eta
    pool: Callable[[Tensor], Tensor] | None = None  # adds up sums [3] of a pooled loss over other shards of the labels


class LossResult(NamedTuple):
    """The outcome of one fused pass; a gradient that nobody asked for is ``None``.

    Gradients have the dtype of the input, except for float16 inputs, where they are float32: a mean over B·n
    terms underflows in float16, so rounding waits until the upstream gradient has been applied.
    """

    rows: Tensor  # [B] float64: the loss of each row, summed over its labels
    grad_x: Tensor | None  # [B, D]
    grad_weight: Tensor | None  # [m, s]
    grad_bias: Tensor | None  # [m]
    total: float | Tensor | None = None  # the sum of the rows, where it is known without another operation
    value: Tensor | None = None  # [] scale · Σ rows in the accumulation dtype, where a kernel has made it

    @property
    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, weight and bias."""
        return self.grad_x, self.grad_weight, self.grad_bias


# (x, weight, bias, indices, offsets of the targets, whether gradients are recorded) → (the loss [], (the gradients of x,
# weight and bias)), or None where these tensors are not what an ordinary call has.
PlainLoss = Callable[
    [Tensor, Tensor, Tensor | None, Tensor, Tensor, bool],
    tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]] | None,
]


class ColumnResult(NamedTuple):
    """The outcome of a column loss; a gradient that nobody asked for is None. dtypes as for LossResult."""

    value: Tensor  # [] in the accumulation dtype or wider
    grad_x: Tensor | None  # [B, D]
    grad_weight: Tensor | None  # [m, s]
    grad_bias: Tensor | None  # [m]
    grad_beta: Tensor | None = None  # float64, [] or [m] as beta is
    grad_eta: Tensor | None = None


class Root(NamedTuple):
    """The solution of the LML projection of each row."""

    nu: Tensor  # [B]: Σ σ(z + nu) = k
    # [B]: Σ h at nu, with h = σ(z + nu)·σ(-z - nu); its logarithm, which is negative, where it underflows
    slope: Tensor


def ratio_or_zero(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 0 where b is 0."""
    return torch.where(b > 0, a / b, 0.0)


def spread_at(t: Tensor, h: Tensor, slope: Tensor, total: Tensor) -> Tensor:
    """``h / Σ h`` times total at t = z + ν, by the slope of a root; 0 where every h is 0."""
    return torch.where(slope < 0, torch.exp(-t.abs() - slope) * total, h * ratio_or_zero(total, slope))


class LMLSteps(NamedTuple):
    """The four steps of the LML projection on logits ``z [B, n]``; ``ops/lml.py`` has the mathematics."""

    # (z, k, shard): z holds the columns of a shard, if there is one
    solve: Callable[[Tensor, int, LabelShard | None], Root]
    project: Callable[[Tensor, int], tuple[Tensor, Root]]  # (z, k) → y, root
    pullback: Callable[[Tensor, Tensor, Root], Tensor]  # (grad, z, root) → h ∘ (grad - E[grad])
    spread: Callable[[Tensor, Root, Tensor, Tensor | None], Tensor]  # (z, root, total [B], out) → total·h/Σh


class Backend(abc.ABC):
    """One implementation of the operations. An operation that ``refuses`` gives a sentence for is never called."""

    name: str

    @abc.abstractmethod
    def unavailable(self) -> str | None:
        """``None``, or one sentence: why this backend cannot be used and what to install."""

    @abc.abstractmethod
    def devices(self) -> tuple[str, ...] | None:
        """The device types it takes; ``None`` for any."""

    @abc.abstractmethod
    def refuses(self, operation: Operation, loss: ElementwiseLoss | ColumnLoss | None = None) -> str | None:
        """``None``, or one sentence: why it does not do this, with this loss."""

    @abc.abstractmethod
    def fused_loss(self, call: LossCall) -> LossResult:
        """An elementwise loss of each row and the gradients, in one pass over label tiles."""

    def plain_loss(self, loss: ElementwiseLoss, meta: LayerMeta, reduction: str, slack: int) -> PlainLoss | None:
        """An ordinary step in one call, which checks its tensors itself, or None: this backend has none for this loss.

        ``reduction``: "mean" or "sum". ``slack``: columns of the weight, or -1 for any.
        """
        return None

    def fused_update(self, call: LossCall, update: LayerUpdate) -> LossResult:
        """The same with steps of an optimizer in the place of the gradients of weight and bias, which are None."""
        raise BackendError(str(self.refuses_update()))

    def refuses_update(self) -> str | None:
        """``None``, or one sentence: why it does not step weights inside the pass."""
        return f"the {self.name} backend has no kernel for update=; use 'torch' or 'auto'"

    @abc.abstractmethod
    def column_loss(self, call: LossCall) -> ColumnResult:
        """A column loss and the gradients."""

    @abc.abstractmethod
    def logits(self, x: Tensor, layer: Layer) -> Tensor:
        """``[B, D] → [B, m]``, in the dtype of x."""

    @abc.abstractmethod
    def logits_adjoint(self, g: Tensor, layer: Layer) -> Tensor:
        """``g W``: ``[B, m] → [B, D]``, in the dtype of g."""

    @abc.abstractmethod
    def topk(self, x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
        """The m highest logits of each row and their labels, ``[B, m]`` each; ties go to the lower label."""

    @abc.abstractmethod
    def predict(self, x: Tensor, layer: Layer, threshold: float | Tensor) -> LabelSets:
        """The labels whose logit is above ``threshold``, or above their own of ``[m]``, rounded to the dtype of x."""

    @abc.abstractmethod
    def lml(self) -> LMLSteps:
        """The steps of the LML projection."""

    def refuses_device(self, device: torch.device) -> str | None:
        """``None``, or one sentence: why it does not take tensors of this device."""
        taken = self.devices()
        if taken is None or device.type in taken:
            return None
        return f"it takes {' or '.join(taken)} tensors and the input is on {device}; move it, or use 'torch'"

    def refuses_shape(self, shape: LossShape) -> str | None:
        """``None``, or one sentence: why it has no kernel for elementwise losses of this shape."""
        return None

    def refuses_codes(self) -> str | None:
        """``None``, or one sentence: why it does not take layers with codes."""
        return f"the {self.name} backend has no kernel for codes; use 'torch' or 'auto'"

    def refuses_unknown(self) -> str | None:
        """``None``, or one sentence: why it does not take targets with unknown labels."""
        return f"the {self.name} backend has no kernel for unknown labels; use 'torch' or 'auto'"

    def refuses_loss(self, loss: ElementwiseLoss | ColumnLoss | None) -> str | None:
        """``None``, or one sentence, for backends that have kernels for the losses of this package alone."""
        if loss is None or loss.has_kernel:
            return None
        return (
            f"the {self.name} backend has no kernel for {type(loss).__module__}.{type(loss).__qualname__}; it has BCE, "
            "Focal, Asymmetric, SigmoidF1 and UnboundedF1 themselves, not their subclasses; use 'torch' or 'auto'"
        )


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, else the type itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a backend hands out gradients for inputs of ``dtype``."""
    return torch.float32 if dtype == torch.float16 else dtype


def sum_dtype(device: torch.device) -> torch.dtype:
    """The widest floating point type of a device, in which rows are summed."""
    return torch.float32 if device.type == "mps" else torch.float64


def label_vector(values: float | Tensor | None, layer: Layer, dtype: torch.dtype) -> Tensor | None:
    """The entries of a per-label setting (a number, ``[]`` or ``[n]``) for this layer's labels, ``[m]``."""
    if values is None:
        return None
    device = layer.weight.device
    if not isinstance(values, Tensor):
        return torch.full((layer.num_rows,), values, dtype=dtype, device=device)
    values = values.detach().to(dtype=dtype, device=device).resolve_neg()
    return (values[layer.labels] if values.ndim else values.expand(layer.num_rows)).contiguous()


def like_setting(setting: float | Tensor, grad: Tensor | None) -> Tensor | None:
    """The gradient of a setting, ``[m]``, in the form that the setting has; ``None`` for none."""
    if grad is None or not isinstance(setting, Tensor):
        return None
    return grad if setting.ndim else grad.sum()


class WholeBackend(Backend):
    """A backend that takes codes, unknown labels and steps of an optimizer."""

    def refuses_codes(self) -> str | None:
        return None

    def refuses_unknown(self) -> str | None:
        return None

    def refuses_update(self) -> str | None:
        return None
