"""Memory of weight gradients that is used again.

A fresh ``[m, s]`` array costs a page fault every 4 KiB, which for many labels is more time than the arithmetic. So the
memory of a gradient outlives it: when its last tensor goes (``zero_grad()``), the storage's deleter hands the memory
back, and the next gradient of that size takes it. At most 1 GiB waits; the memory that has waited longest goes first.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

_WORTHWHILE = 2**20  # bytes: less than this the allocator itself keeps
_MOST_BYTES = 2**30  # that wait for their next use
_LINE = 64  # bytes of a cache line, on which gradients start


class _Pool:
    """Free memory by size. Every method may be called from any thread, and by a deleter inside another method."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection while it is held may run a deleter
        self._free: OrderedDict[int, np.ndarray] = OrderedDict()  # by address
        self.nbytes = 0

    def take(self, size: int) -> np.ndarray:
        """Uninitialised memory of ``size`` bytes, on a cache line."""
        with self._lock:
            found = next((at for at, memory in reversed(self._free.items()) if memory.nbytes == size), None)
            if found is not None:
                self.nbytes -= size
                return self._free.pop(found)
        fresh = np.empty(size + _LINE, np.uint8)
        start = -fresh.ctypes.data % _LINE
        return fresh[start : start + size]

    def give_back(self, memory: np.ndarray) -> None:
        """Keeps the memory of a tensor that is gone."""
        with self._lock:
            self._free[memory.ctypes.data] = memory
            self.nbytes += memory.nbytes
            while self.nbytes > _MOST_BYTES:
                self.nbytes -= self._free.popitem(last=False)[1].nbytes

    def forget(self) -> None:
        with self._lock:
            self._free.clear()
            self.nbytes = 0

    def renew_lock(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.renew_lock)


def empty_gradient(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor, on memory that an earlier one has left behind."""
    size = shape.numel() * dtype.itemsize
    if size < _WORTHWHILE:
        return torch.empty(*shape, dtype=dtype)
    memory = _pool.take(size)
    lease = memory.view()  # the tensor's storage holds this, and nobody else does
    weakref.finalize(lease, _pool.give_back, memory).atexit = False
    # resize_ in place of a view: what autograd keeps as .grad may be detached and saved like any other tensor.
    return torch.frombuffer(lease, dtype=dtype).resize_(shape)


def waiting_bytes() -> int:
    """How much memory waits for its next use."""
    return _pool.nbytes


def forget() -> None:
    """Lets all waiting memory go; for those who measure what a step takes."""
    _pool.forget()
