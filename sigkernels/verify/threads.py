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
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


class _Limit:
    """The limit of this process, which all threads that verify share: the first sets it, the last takes it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._limiter: Any = None

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self._limiter = _libraries().limit(limits=1, user_api="blas")
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._limiter.restore_original_limits()


_limit = _Limit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """A block in which the BLAS libraries of this process use one thread each; after the last such block as many as before."""
    _limit.enter()
    try:
        yield
    finally:
        _limit.leave()
