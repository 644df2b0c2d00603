"""Memory of weight gradients that is used again.

A fresh ``[m, s]`` array costs a page fault every 4 KiB, which for many labels is more time than the arithmetic. So the
memory of a gradient outlives it: once it was dropped (``zero_grad()``) the next gradient of the same weight takes it,
and it is let go with that weight: at most what ``zero_grad(set_to_none=False)`` would hold.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_WORTHWHILE = 2**20  # bytes: less than this the allocator itself keeps
_LINE = 64  # bytes of a cache line, on which gradients start

_kept: dict[int, deque[np.ndarray]] = {}  # id of a weight → the memory of its last gradient


def _pop(home: deque[np.ndarray]) -> tuple[np.ndarray | None, int]:
    """The kept memory, out of the reach of other threads, and how many references there are: each tensor on it is one."""
    try:
        memory = home.pop()
    except IndexError:
        return None, 0
    return memory, sys.getrefcount(memory)


_UNUSED = _pop(deque([np.empty(0, np.uint8)]))[1]  # references to memory that no tensor uses: up to the interpreter


def gradient_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor of the shape of ``weight``, on memory that an earlier one has left behind."""
    size = weight.numel() * dtype.itemsize
    if size < _WORTHWHILE:
        return torch.empty(weight.shape, dtype=dtype)
    home = _kept.get(id(weight))
    if home is None:
        home = _kept[id(weight)] = deque(maxlen=1)
        weakref.finalize(weight, _kept.pop, id(weight), None).atexit = False
    memory, references = _pop(home)
    if memory is None or references != _UNUSED or memory.nbytes != size:
        fresh = np.empty(size + _LINE, np.uint8)
        start = -fresh.ctypes.data % _LINE
        memory = fresh[start : start + size]
    # In place of a view: what autograd keeps as .grad may be detached and saved like any other tensor.
    gradient = torch.frombuffer(memory, dtype=dtype).resize_(weight.shape)
    home.append(memory)
    return gradient


def forget() -> None:
    """Lets all kept memory go; for those who measure what a step takes."""
    for home in _kept.values():
        home.clear()
