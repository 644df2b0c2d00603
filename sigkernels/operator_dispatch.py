"""Kernels read memory. Calls that have none to read go through their torch.library operator instead: which ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

P = ParamSpec("P")
R = TypeVar("R")

_modes = torch._C._len_torch_dispatch_stack


def by_operator(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a call on these tensors, all on one device, is traced or has no data.

    That is so under torch.compile, under a dispatch mode (FakeTensorMode, make_fx), on the meta device, and for
    subclasses of Tensor that handle operators themselves.
    """
    if torch.compiler.is_compiling() or _modes() or x.is_meta:
        return True
    for tensor in (x, *others):
        kind: Any = type(tensor)
        if kind is Tensor or kind is Parameter or tensor is None:  # nearly always: this runs at every step
            continue
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return True
    return False


def eager_only(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which torch.compile leaves alone.

    As torch.compiler.disable, which imports the whole compiler (two seconds) at once: here it does so only when
    something is being compiled.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call
