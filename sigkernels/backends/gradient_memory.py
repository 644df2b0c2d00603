"""Memory of weight gradients that is used again.

A fresh ``[m, s]`` array costs a page fault every 4 KiB, which for many labels is more time than the arithmetic. So the
memory of a gradient outlives it: when its last tensor goes (``zero_grad()``), the storage's deleter hands the memory
back, and the next gradient of that size takes it. At most 1 GiB waits; the memory that has waited longest goes first.
``csrc/cpu/gradient_memory.cpp`` keeps it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compiled_core import core

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4}


def empty_gradient(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor, on memory that an earlier one has left behind."""
    return core.empty(rows, columns, _DTYPES[dtype])  # type: ignore[no-any-return]


def waiting_bytes() -> int:
    """How much memory waits for its next use."""
    return core.gradient_memory.waiting_bytes if core else 0


def forget() -> None:
    """Lets all waiting memory go; for those who measure what a step takes."""
    if core:
        core.gradient_memory.forget()
