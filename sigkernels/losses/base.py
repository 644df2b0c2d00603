"""Losses: frozen dataclasses that say what f(z, y) is and hold all of its settings.

An elementwise loss has two formulas with the same meaning, both in plain torch: ``value`` is the readable reference,
differentiable by autograd; ``value_and_grad`` gives f and ∂f/∂z in closed form for the tiled passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..validation import check_memory, check_number

L = TypeVar("L", bound="Loss")


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """What all losses share: their fields are either numbers or tensors with one entry per label.

    The names of the fields stand in two class variables, which torch.compile can read, unlike ``dataclasses.fields``.
    """

    kinds: ClassVar[dict[str, type[Loss]]] = {}  # by class name: how an operator call names its loss
    tensor_fields: ClassVar[tuple[str, ...]] = ("weight", "pos_weight")
    number_fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Loss.kinds[cls.__name__] = cls

    def __post_init__(self) -> None:
        for name in self.tensor_fields:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{name} must be a tensor with one entry per label, got {type(tensor).__name__}; "
                    "wrap it in torch.tensor(…)"
                )
            if tensor.ndim != 1 or not tensor.is_floating_point():
                raise ValueError(
                    f"{name} must be a 1-D floating point tensor with one entry per label, "
                    f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )

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

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """f(z, y) for logits ``z [..., n]`` and targets ``y [..., n]`` in [0, 1], elementwise."""
        raise NotImplementedError(f"{type(self).__name__} has no elementwise value")

    def value_and_grad(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """f and ∂f/∂z, elementwise, in closed form."""
        raise NotImplementedError(f"{type(self).__name__} has no elementwise gradient")

    # -- the same loss elsewhere -----------------------------------------------------------------------------

    def at_labels(self: L, like: Tensor, start: int = 0, stop: int | None = None) -> L:
        """The same loss for the labels ``start … stop-1``, its tensors with the dtype and device of ``like``."""
        tensors = {name: getattr(self, name) for name in self.tensor_fields}
        moved = {
            name: tensor[start:stop].to(dtype=like.dtype, device=like.device)
            for name, tensor in tensors.items()
            if tensor is not None
        }
        return dataclasses.replace(self, **moved) if moved else self  # type: ignore[type-var]

    def check_labels(self, num_labels: int, device: torch.device) -> None:
        """Refuses tensors that do not fit ``num_labels`` labels on ``device``."""
        for name in self.tensor_fields:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape[0] != num_labels:
                raise ValueError(
                    f"{name} of {type(self).__name__} has {tensor.shape[0]} entries for {num_labels} labels; "
                    "give one entry per label"
                )
            if tensor.device != device:
                raise ValueError(
                    f"{name} of {type(self).__name__} is on {tensor.device} and the input on {device}; "
                    f"move it with {name}.to('{device}')"
                )
            check_memory(f"{name} of {type(self).__name__}", tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} of {type(self).__name__} requires a gradient, which this loss does not give; "
                    f"pass {name}.detach()"
                )

    def flatten(self) -> tuple[str, list[float], list[Tensor | None]]:
        """(kind, numbers, tensors): the form in which an operator call carries a loss."""
        numbers = [_as_float(getattr(self, name)) for name in self.number_fields]
        return type(self).__name__, numbers, self.tensors()

    def tensors(self) -> list[Tensor | None]:
        """The tensors among the settings, in the order of ``tensor_fields``."""
        return [getattr(self, name) for name in self.tensor_fields]

    @staticmethod
    def unflatten(kind: str, numbers: Sequence[float], tensors: Sequence[Tensor | None]) -> Loss:
        """The inverse of ``flatten``."""
        cls = Loss.kinds[kind]
        settings = {name: (None if x != x else x) for name, x in zip(cls.number_fields, numbers, strict=True)}
        return cls(**settings, **dict(zip(cls.tensor_fields, tensors, strict=True)))


def _as_float(value: float | bool | None) -> float:
    return float("nan") if value is None else float(value)
