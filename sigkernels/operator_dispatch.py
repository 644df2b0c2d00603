"""Kernels read memory. Calls that have none to read go through their torch.library operator instead, or are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

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


def refuse_mapped(remedy: str, *tensors: Tensor | None) -> None:
    """Raises where torch.func.vmap maps one of the tensors."""
    if any(t is not None and torch._C._functorch.is_batchedtensor(t) for t in tensors):
        raise RuntimeError(f"torch.func.vmap was asked for what it cannot map: {remedy}")
