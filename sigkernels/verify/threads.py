"""One BLAS thread for as long as the verifier works.

numpy and scipy bring a BLAS each, with threads of its own that wait for work by spinning. Called alternately they keep each
other off the processor: on two cores the small factorisations here took fifty times as long.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy  # noqa: F401 (its BLAS and scipy's must be loaded to be found)
import scipy.linalg  # noqa: F401
from threadpoolctl import ThreadpoolController


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[Any]:
    """A ``with`` block in which the BLAS libraries of this process use one thread each; afterwards as many as before."""
    return _libraries().limit(limits=1, user_api="blas")
