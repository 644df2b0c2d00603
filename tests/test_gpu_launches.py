"""What a GPU step launches, counted on tensors without data: the host code looks at no value, and never waits."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"
pytestmark = pytest.mark.skipif(
    not BENCH.exists() or importlib.util.find_spec("triton") is None, reason="needs the source tree and triton"
)
MOST = 8  # launches of a step where one launch has all rows
CASES = [(8921, 80, 50, 64), (20_000, 50, 100, 256), (1_000_000, 50, 64, 256), (100_000, -1, 64, 256)]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_launches")


def names(taken) -> list[str]:
    return [getattr(launch, "name", "product") for launch in taken]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group", [64, 256])
@pytest.mark.parametrize("turns", [False, True], ids=["product", "turns"])
@pytest.mark.parametrize("features", [0, 192], ids=["product", "inside"])
def test_a_flash_step(launches, case, dtype, bias, group, turns, features):
    from sigkernels.backends.flash_kernels import FlashSizes

    sizes = FlashSizes(64, 256, 108, group, marks=False, turns=turns, features=features)
    taken = launches.flash_launches(launches.call(*case, dtype, bias), sizes)
    assert [name for name in names(taken) if name != "product"] == ["flash", "finish", "scale"]
    inside = features and case[3] <= group
    assert names(taken).count("product") == ((0 if inside else 1) + (not turns) if case[1] >= 0 else 0)
    # Nothing is as large as the logits, and nobody passes over a gradient.
    weight = case[0] * case[2] * dtype.itemsize
    assert all(launch.nbytes < weight for launch in taken if isinstance(launch, launches.Other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_a_library_step_of_one_chunk(launches, case, dtype):
    taken = launches.library_launches(launches.call(*case, dtype), l2_bytes=40 * 2**20)
    assert len(taken) <= MOST, taken
    assert names(taken).count("elementwise") == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dft", [False, True])
def test_a_library_step_of_many_chunks(launches, dtype, dft):
    """Per chunk three products and a kernel; per step a kernel and the upstream gradient. A DFT part takes two products for
    every few chunks, as many as its coefficients take the memory of one for."""
    case = (131_072, 50 if dft else -1, 768, 1024)
    taken = launches.library_launches(launches.call(*case, dtype), l2_bytes=40 * 2**20)
    chunks = names(taken).count("elementwise")
    assert chunks > 8
    assert len(taken) <= 4 * chunks + 2 + (2 * -(-chunks // 8) if dft else 0), names(taken)
    logits = case[0] * case[3] * 4
    assert all(launch.nbytes < logits / 8 for launch in taken if isinstance(launch, launches.Other))
    products = [launch for launch in taken if isinstance(launch, launches.Product)]
    assert max(product.rows * product.columns * product.out_bytes for product in products) < logits / 8
