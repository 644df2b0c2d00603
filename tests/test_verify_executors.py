"""``verify(executor=…)`` on the executors of other packages: the answers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sigkernels as sk


def check(executor: Any) -> None:
    matrix = np.repeat(np.random.default_rng(1).integers(-2, 3, (6, 3)).astype(float), 2, axis=0)
    sets = [[0, 1], [0, 3], [2, 3, 4, 5], [1], list(range(12))]
    serial, parallel = (sk.verify(matrix, sets, radius=True, executor=e) for e in (None, executor))
    assert parallel.verdicts.tolist() == serial.verdicts.tolist()
    assert np.allclose(parallel.radius_hi, serial.radius_hi)
    assert parallel.check()


def test_dask():
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        check(client.get_executor())
