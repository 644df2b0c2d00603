"""Memory of weight gradients that is used again.

A fresh ``[m, s]`` array costs a page fault every 4 KiB, which for many labels is more time than the arithmetic. So the
memory of a dropped gradient (``zero_grad()``) is kept for the next gradient of the same weight, and is let go with that
weight: at most what ``zero_grad(set_to_none=False)`` would hold.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

_WORTHWHILE = 2**20  # bytes: less than this the allocator itself keeps
_LINE = 64  # bytes of a cache line, on which gradients start

_Memory = tuple[np.ndarray, int]  # bytes, and which of them is the first on a cache line
_kept: dict[int, deque[_Memory]] = {}  # id of a weight → memory that no tensor uses


class _Lease(np.ndarray):
    """Bytes that go home when the last tensor on them is gone."""

    home: deque[_Memory] | None = None
    memory: _Memory

    def __del__(self) -> None:
        if self.home is not None:
            self.home.append(self.memory)


def gradient_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor of the shape of ``weight``, on memory that an earlier one has left behind."""
    size = weight.numel() * dtype.itemsize
    if size < _WORTHWHILE:
        return torch.empty(weight.shape, dtype=dtype)
    home = _kept.get(id(weight))
    if home is None:
        home = _kept[id(weight)] = deque(maxlen=1)
        weakref.finalize(weight, _kept.pop, id(weight), None).atexit = False
    try:
        memory = home.pop()
    except IndexError:  # all of it is in use
        memory = None
    if memory is None or memory[0].nbytes != size + _LINE:
        fresh = np.empty(size + _LINE, np.uint8)
        memory = fresh, -fresh.ctypes.data % _LINE
    lease = memory[0].view(_Lease)
    lease.home, lease.memory = home, memory
    # Not a view of another tensor: what autograd keeps as .grad may be detached and saved like any other.
    storage = torch.from_numpy(lease).untyped_storage()
    out = torch.empty(0, dtype=dtype)
    return out.set_(storage, memory[1] // dtype.itemsize, weight.shape, (weight.shape[1], 1))


def forget() -> None:
    """Lets all kept memory go; for those who measure what a step takes."""
    for home in _kept.values():
        home.clear()
