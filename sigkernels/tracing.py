"""Kernels read memory. This says which calls have none to read, and go through their torch.library operator instead."""

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


def check_memory(name: str, tensor: Tensor) -> None:
    """Refuses tensors whose numbers do not lie in one dense array of this process."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}; call {name}.to_dense()")
    if type(tensor) is not Tensor and type(tensor) is not Parameter and _is_distributed(tensor):
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, spread over processes, and the kernels read plain memory. Under FSDP2 "
            'call torch.distributed.fsdp.register_fsdp_forward_method(head, "loss") once, and the same for each other '
            "method that is called outside forward; else pass full_tensor() or to_local(). "
            "DFTHead(…, process_group=…) spreads labels over processes by itself"
        )


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "to_local")  # DTensor, without importing it
