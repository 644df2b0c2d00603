"""Checks of single arguments that every part shares; an error names the argument, the value and the remedy."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from torch import Tensor


def whole(name: str, value: Any, least: int | None = None) -> int:
    """``value`` as an int: Python's and numpy's integers and integer tensors of one entry pass, bools do not."""
    if type(value) is not int:  # the usual case first: torch.compile follows it
        value = _index(name, value)
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def _index(name: str, value: Any) -> int:
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        if not is_bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be a whole number, got {value!r}")


def number(name: str, value: Any, remedy: str = "give a Python number") -> float:
    """``value`` as a finite number; numpy's and tensors ``[]`` pass, bools, strings, None and other tensors do not."""
    if type(value) is not float and type(value) is not int:
        if isinstance(value, Tensor) and value.ndim == 0 and not value.requires_grad and not value.is_complex():
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r}; {remedy}")
        value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}; {remedy}")
    return value
