"""``verify(executor=…)`` on the executors of other packages: the answers of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import sigkernels as sk
from sigkernels.verify import solver_stages
from sigkernels.verify.threads import one_blas_thread


def check(executor: Any) -> None:
    matrix = np.repeat(np.random.default_rng(1).integers(-2, 3, (6, 3)).astype(float), 2, axis=0)
    sets = [[0, 1], [0, 3], [2, 3, 4, 5], [1], list(range(12))]
    serial, parallel = (sk.verify(matrix, sets, radius=True, executor=e) for e in (None, executor))
    assert parallel.verdicts.tolist() == serial.verdicts.tolist()
    assert np.allclose(parallel.radius_hi, serial.radius_hi)
    assert parallel.check()


def blas_threads(_items: list[int]) -> list[int]:
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


def test_workers_use_one_blas_thread():
    """Threads of a BLAS wait by spinning, and would take the time of the other workers."""
    with ProcessPoolExecutor(1) as pool:
        found = list(solver_stages._spread(pool, blas_threads, (), [0]))
    assert found and set(found) == {1}


def test_dask():
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        check(client.get_executor())


def test_threads_that_verify_at_once_leave_blas_as_it_was():
    """The one that begins last sees the limit of the other: it must not be what it restores."""
    first, second = threading.Event(), threading.Event()

    def begin_first() -> None:
        with one_blas_thread():
            first.set()
            assert second.wait(60)

    with threadpool_limits(2, user_api="blas"):
        before = blas_threads([])
        thread = threading.Thread(target=begin_first)
        thread.start()
        assert first.wait(60)
        with one_blas_thread():
            second.set()
            thread.join()
            assert set(blas_threads([])) <= {1}  # this one is still at work
        assert blas_threads([]) == before
