"""What all losses share: frozen dataclasses that say what is minimised and hold all of its settings.

Three bases say what a loss is a function of: ``ElementwiseLoss`` of one logit and its target, ``ColumnLoss`` of all
logits of a label, ``RowLoss`` of all logits of a row. A loss hands over its kernel parameters only as exactly the class
that defines them: a subclass is computed by its own formula, in torch, and never as its parent.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from ..validation import check_memory, check_number
from .kernel_params import ConfusionParams, ElementwiseParams

Reduction = Literal["mean", "sum", "none"]
L = TypeVar("L", bound="Loss")

_classes: weakref.WeakValueDictionary[str, type[Loss]] = weakref.WeakValueDictionary()
_taken: set[str] = set()  # names are never given twice, so that none can mean another class later
_DECODE: dict[str, Callable[[Any], Any]] = {
    "i": int,
    "b": bool,
    "s": lambda text: text.replace("%7C", "|").replace("%25", "%"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A frozen dataclass whose fields are numbers, or tensors with one entry per label.

    Example:
        >>> isinstance(sk.BCE(), sk.Loss)
        True
        >>> sk.Focal(gamma=2.0) == sk.Focal(gamma=2.0)
        True
    """

    _name: ClassVar[str]  # unique among the classes of this process: how an operator call names its loss
    has_kernel: ClassVar[bool] = False  # kernel_params is this very class's, not one of a class it derives from
    takes_gradients: ClassVar[tuple[str, ...]] = ()  # fields that may be learned

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if wrong := {"__init__", "__slots__"} & vars(cls).keys():
            what = "slots" if "__slots__" in wrong else "an __init__ of its own"
            raise TypeError(
                f"{cls.__name__} has {what}: the settings of a loss are the fields of a frozen dataclass, so that it can be "
                "copied. Decorate it with @dataclasses.dataclass(frozen=True, eq=False), and derive other values from the "
                "fields in __post_init__"
            )
        plain = f"{cls.__module__}.{cls.__qualname__}"
        names = itertools.chain([plain], (f"{plain}#{count}" for count in itertools.count(2)))
        cls._name = next(name for name in names if name not in _taken)
        _taken.add(cls._name)
        _classes[cls._name] = cls
        cls.has_kernel = "kernel_params" in vars(cls)

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            self._check_setting(name, value)

    def _check_setting(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, (bool, str)):
            return
        if isinstance(value, Tensor):
            if value.ndim > 1 or not value.is_floating_point():
                raise ValueError(
                    f"{name} must be a 1-D floating point tensor with one entry per label, or a number, "
                    f"got {value.dtype} of shape {tuple(value.shape)}"
                )
        elif isinstance(value, (list, tuple)) or getattr(value, "ndim", None) not in (None, 0):
            raise TypeError(
                f"{name} must be a tensor with one entry per label, or a number, got {type(value).__name__}; "
                "wrap it in torch.tensor(…)"
            )
        else:
            self._take_numbers(name)

    def _take_numbers(self, *names: str) -> None:
        """Checks that these settings are finite numbers, and makes plain ones of numpy's."""
        for name in names:
            given = getattr(self, name)
            plain = check_number(name, given)
            if plain is not given:
                object.__setattr__(self, name, plain)

    def __eq__(self, other: object) -> bool:
        """The same kind of loss with equal numbers and the very same tensors."""
        if type(other) is not type(self):
            return NotImplemented
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((type(self), *(value for value in vars(self).values() if not isinstance(value, Tensor))))

    def incomplete(self) -> str | None:
        """``None``, or what a subclass still has to define."""
        return f"{type(self).__name__} defines no loss by itself; derive from ElementwiseLoss, ColumnLoss or RowLoss"

    def _without(self, base: type[Loss], formula: str, each: str) -> str | None:
        """``None`` where ``formula`` is defined below its base, else how to define it."""
        if getattr(type(self), formula) is not getattr(base, formula):
            return None
        return f"{type(self).__name__} has no formula; define {formula}(self, z, y), the loss of each {each}, in torch"

    def kernel_params(self) -> ElementwiseParams | ConfusionParams | None:
        """The kernel's parameters, or ``None``: this class has a formula of its own."""
        return None

    # -- the same loss elsewhere -----------------------------------------------------------------------------

    def at_labels(self: L, like: Tensor, start: int = 0, stop: int | None = None) -> L:
        """The same loss for the labels ``start … stop-1``, its tensors with the dtype and device of ``like``."""
        moved = {
            field.name: (tensor[start:stop] if tensor.ndim else tensor).to(dtype=like.dtype, device=like.device)
            for field in dataclasses.fields(self)
            if field.init and isinstance(tensor := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **moved) if moved else self

    def check_labels(self, num_labels: int, device: torch.device) -> None:
        """Refuses tensors that do not fit ``num_labels`` labels on ``device``."""
        for field, tensor in vars(self).items():
            if not isinstance(tensor, Tensor):
                continue
            name = f"{field} of {type(self).__name__}"
            if tensor.ndim and tensor.shape[0] != num_labels:
                raise ValueError(
                    f"{name} has {tensor.shape[0]} entries for {num_labels} labels; "
                    "give one entry per label, or one number for all"
                )
            if tensor.device != device and tensor.ndim:
                raise ValueError(
                    f"{name} is on {tensor.device} and the input on {device}; move it with {field}.to('{device}')"
                )
            check_memory(name, tensor)
            if tensor.requires_grad and field not in self.takes_gradients and torch.is_grad_enabled():
                raise ValueError(f"{name} requires a gradient, which this loss does not give; pass {field}.detach()")

    def tensors(self) -> list[Tensor]:
        """The tensors among the settings, in the order of the fields."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def learned(self) -> tuple[Tensor | None, Tensor | None]:
        """The tensors that may take gradients, at most two."""
        return None, None

    def flatten(self) -> tuple[str, list[float], list[Tensor]]:
        """(class, kinds of its settings, strings and whole numbers; other numbers; tensors): how an operator call carries a
        loss.

        Tensors that may be learned are not among them: they are inputs of their own. What ``__post_init__`` derives is
        derived again.
        """
        kinds, strings = "", ""
        numbers: list[float] = []
        tensors: list[Tensor] = []
        for field in dataclasses.fields(self):
            if not field.init:
                continue
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, Tensor):
                kinds += "l" if name in self.takes_gradients else "t"
                if name not in self.takes_gradients:
                    tensors.append(value)
            elif value is None:
                kinds += "n"
            elif isinstance(value, str):
                kinds += "s"
                strings += "|" + value.replace("%", "%25").replace("|", "%7C")
            elif isinstance(value, int) and not isinstance(value, bool):  # which may have more digits than a float
                kinds += "i"
                strings += "|" + str(value)
            else:
                kinds += "b" if isinstance(value, bool) else "f"
                numbers.append(float(value))
        return f"{self._name}|{kinds}{strings}", numbers, tensors

    @staticmethod
    def unflatten(
        name: str, numbers: Sequence[float], tensors: Sequence[Tensor], learned: Sequence[Tensor | None] = ()
    ) -> Loss:
        """The inverse of ``flatten``."""
        name, kinds, *strings = name.split("|")
        cls = _classes.get(name)
        if cls is None:
            raise RuntimeError(f"the loss {name} is not defined in this process; import its module first")
        fields = [field.name for field in dataclasses.fields(cls) if field.init]
        given: dict[str, Any] = {"l": iter([t for t in learned if t is not None]), "t": iter(tensors)}
        given |= dict.fromkeys("si", iter(strings)) | dict.fromkeys("fb", iter(numbers))
        settings: dict[str, Any] = {}
        for field, kind in zip(fields, kinds, strict=True):
            value = None if kind == "n" else next(given[kind])
            settings[field] = _DECODE[kind](value) if kind in _DECODE else value
        return cls(**settings)


@dataclasses.dataclass(frozen=True, eq=False)
class ElementwiseLoss(Loss):
    """A loss of one logit and its target, added up over labels and rows.

    A subclass is a frozen dataclass with ``value``; its fields are numbers or ``[n]`` tensors, which ``value`` sees cut
    to the labels at hand. ``value_and_grad`` is optional: without it the gradient is autograd's of ``value``.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True, eq=False)
        ... class Squared(sk.ElementwiseLoss):
        ...     scale: float = 1.0
        ...
        ...     def value(self, z, y):  # [B, m] → [B, m]
        ...         return self.scale * (torch.sigmoid(z) - y) ** 2
        >>> sk.functional.linear_loss(torch.zeros(2, 3), torch.zeros(5, 3), [[1], []], loss=Squared())
        tensor(0.2500)
    """

    _closed_form: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A closed form of the gradient belongs to the value it was written for, not to one that overrides it.
        value, gradient = (
            next(i for i, base in enumerate(cls.__mro__) if name in vars(base)) for name in ("value", "value_and_grad")
        )
        cls._closed_form = gradient <= value and cls.value_and_grad is not ElementwiseLoss.value_and_grad

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """f(z, y) for logits ``z [..., m]`` and targets ``y [..., m]`` in [0, 1], elementwise and differentiable."""
        raise NotImplementedError(self.incomplete())

    def value_and_grad(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """f and ∂f/∂z, elementwise."""
        f, leaf = tile_value(self.value, z, y, z.shape, type(self).__name__)
        return f.detach(), tile_gradients(f, torch.ones_like(f), [leaf], type(self).__name__)[0]

    def tile(self, z: Tensor, y: Tensor, with_grad: bool) -> tuple[Tensor, Tensor | None]:
        """f and, where it is wanted, ∂f/∂z of a tile of labels; the closed form where there is one."""
        if self._closed_form:
            return _checked_pair(self.value_and_grad(z, y), z.shape, type(self).__name__)
        if not with_grad:
            return check_shape(self.value(z, y), z.shape, type(self).__name__), None
        return ElementwiseLoss.value_and_grad(self, z, y)

    def incomplete(self) -> str | None:
        return self._without(ElementwiseLoss, "value", "logit")


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnLoss(Loss):
    """A loss of all logits of a label: one value per label, made of all rows of the batch; they are averaged.

    A subclass defines ``column_values``. A row has no loss of its own: ``reduction="none"`` is refused.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True, eq=False)
        ... class MissedShare(sk.ColumnLoss):
        ...     def column_values(self, z, y):  # [B, m] → [m]
        ...         return ((1 - torch.sigmoid(z)) * y).mean(0)
        >>> sk.functional.linear_loss(torch.zeros(2, 3), torch.zeros(5, 3), [[1], []], loss=MissedShare())
        tensor(0.0500)
    """

    @property
    def is_pooled(self) -> bool:
        """Whether all labels make one value, which only the losses of this package do."""
        return False

    def column_values(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss of each label, ``[m]``, from logits ``z [B, m]`` and targets ``y [B, m]``; differentiable."""
        raise NotImplementedError(self.incomplete())

    def incomplete(self) -> str | None:
        return self._without(ColumnLoss, "column_values", "label")


@dataclasses.dataclass(frozen=True, eq=False)
class RowLoss(Loss):
    """A loss of all logits of a row: ``[B, n]`` logits are made, once.

    A subclass defines ``row_values``. ``"none"`` gives the loss of each row, ``"sum"`` their sum, ``"mean"`` their mean
    over the rows: there are no terms per label that could be averaged over.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True, eq=False)
        ... class Softmax(sk.RowLoss):
        ...     def row_values(self, z, y):  # [B, n] → [B]
        ...         return -(y * torch.log_softmax(z, 1)).sum(1)
        >>> sk.functional.linear_loss(torch.zeros(2, 3), torch.zeros(4, 3), [[1], [2]], loss=Softmax())
        tensor(1.3863)
    """

    def row_values(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss of each row, ``[B]``, from logits ``z [B, n]`` and targets ``y [B, n]``; differentiable."""
        raise NotImplementedError(self.incomplete())

    def incomplete(self) -> str | None:
        return self._without(RowLoss, "row_values", "row")


# -- a user's formula on a tile of labels ------------------------------------------------------------------------------


class _Recording:
    """Lets autograd record inside an operator, whose implementation torch runs below autograd."""

    def __enter__(self) -> None:
        nothing = torch._C.DispatchKeySet.from_raw_repr(0)
        self._guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), nothing)
        self._mode, self._enabled = torch.inference_mode(False), torch.enable_grad()
        for context in (self._guard, self._mode, self._enabled):
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in (self._enabled, self._mode, self._guard):
            context.__exit__(*error)


def tile_value(formula: Any, z: Tensor, y: Tensor, shape: torch.Size, name: str) -> tuple[Tensor, Tensor]:
    """``formula(z, y)`` and the leaf in z's place that it can be differentiated by."""
    with _Recording():
        leaf = (z.clone() if z.is_inference() else z.detach()).requires_grad_()
        return check_shape(formula(leaf, y), shape, name), leaf


def tile_gradients(f: Tensor, upstream: Tensor, leaves: Sequence[Tensor], name: str) -> list[Tensor]:
    """``upstream · ∂f/∂leaf`` for each leaf; zero for one that f does not depend on."""
    with _Recording():
        if not f.requires_grad:
            raise ValueError(
                f"the formula of {name} gives a tensor that does not depend on the logits as autograd sees it: leave out "
                "detach(), item() and what is not differentiable, or use it without gradients"
            )
        _refuse_other_leaves(f, leaves, name)
        grads = torch.autograd.grad(f, leaves, upstream, allow_unused=True)
        return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]


def _refuse_other_leaves(f: Tensor, leaves: Sequence[Tensor], name: str) -> None:
    """Raises where f depends on a tensor that takes a gradient, and would never get it."""
    nodes, seen = [f.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is known for known in leaves):
            raise ValueError(
                f"the formula of {name} uses a tensor of shape {list(leaf.shape)} that requires a gradient, which this loss "
                "does not give; use it detached, or take the loss of the logits head(h)"
            )
        nodes += [before for before, _ in node.next_functions]


def _checked_pair(pair: Any, shape: Sequence[int], name: str) -> tuple[Tensor, Tensor]:
    """Refuses what is not (f, ∂f/∂z) of a tile: another shape could be broadcast, other numbers rounded."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(
            f"value_and_grad of {name} must give a tuple of two tensors, f and ∂f/∂z, got {type(pair).__name__}"
        )
    for part in pair:
        if not isinstance(part, Tensor) or part.shape != torch.Size(shape) or not part.is_floating_point():
            given = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise ValueError(
                f"value_and_grad of {name} must give f and ∂f/∂z as floating point tensors of shape {list(shape)}, got {given}"
            )
    return pair


def check_shape(f: Any, shape: Sequence[int], name: str) -> Tensor:
    """Refuses a formula's value of another shape, such as one that is already averaged."""
    if not isinstance(f, Tensor) or f.shape != torch.Size(shape):
        given = f"shape {list(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
        raise ValueError(f"the formula of {name} must give a tensor of shape {list(shape)}, not reduced, got {given}")
    return f
