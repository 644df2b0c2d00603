"""One BLAS thread for as long as the verifier works.

numpy and scipy bring a BLAS each, with threads of its own that wait for work by spinning. Called alternately they keep each
other off the processor: on two cores the small factorisations here took fifty times as long.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy  # noqa: F401 (its BLAS and scipy's must be loaded to be found)
import scipy.linalg  # noqa: F401
from threadpoolctl import ThreadpoolController


@functools.cache
def _libraries() -> list[Any]:
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


def _set_threads(library: Any, count: int | None) -> None:
    if count is None:  # it does not say
        return
    # threadpoolctl from 3.8 on obeys the first thread that ever set a number, as long as it lives, and ignores all
    # others without a word; here a lock keeps the threads apart.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(count)


class _Limit:
    """The limit of this process, which all threads that verify share: the first sets it, the last takes it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: list[int | None] = []

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self._before = [library.num_threads for library in _libraries()]
                for library in _libraries():
                    _set_threads(library, 1)
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for library, count in zip(_libraries(), self._before, strict=True):
                    _set_threads(library, count)


_limit = _Limit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """A block in which the BLAS libraries of this process use one thread each; after the last such block as many as before."""
    _limit.enter()
    try:
        yield
    finally:
        _limit.leave()
