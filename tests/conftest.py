"""Shared fixtures: which backends a test runs on, and the shapes that every operation is tried with."""

from __future__ import annotations

import os
from typing import NamedTuple

# Before OpenMP starts with torch: beside other work on the same cores, threads that spin make tests ten times as slow; on
# idle cores threads that sleep cost a tenth.
if hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

import sigkernels as sk
from sigkernels.backends import by_name

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")


def device_of(backend: str) -> str:
    """Where a backend's tensors go; a GPU backend that is interpreted or simulated says that it takes CPU tensors."""
    taken = by_name(backend).devices() or ("cpu",)
    return "cpu" if "cpu" in taken else taken[0]


DEVICES = {name: device_of(name) for name in sk.backend_status()}


class Shape(NamedTuple):
    n: int
    k: int
    s: int
    batch: int


SHAPES = {
    "aligned": Shape(256, 8, 16, 32),
    "odd": Shape(101, 5, 7, 3),
    "prime": Shape(997, 20, 13, 5),
    "one-label": Shape(1, 0, 2, 3),
    "empty-batch": Shape(40, 3, 4, 0),
    "one-row": Shape(300, 4, 9, 1),
    "k=0": Shape(50, 0, 4, 6),
    "2k+1=n": Shape(11, 5, 3, 4),
    "no-slack": Shape(64, 4, 0, 5),
    "many-tiles": Shape(1500, 10, 33, 70),
}


@pytest.fixture(params=list(SHAPES), ids=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.gpu if DEVICES[name] == "cuda" else ())
        for name in sk.backend_status()
        if name != "cuda"  # which has one operation; tests/kernels/test_cuda_host.py runs it on a GPU
    ]
)
def device(request: pytest.FixtureRequest):
    """Runs the test with each backend that can be used here; the value is the device its tensors go to."""
    reason = sk.backend_status()[request.param]
    if reason is not None:
        pytest.skip(reason)
    with sk.backend(request.param):
        yield torch.device(DEVICES[request.param])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
