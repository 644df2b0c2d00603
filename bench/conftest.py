"""Fixtures of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def tf32() -> Iterator[None]:
    """float32 products of torch in tensor cores, as people run them on GPUs."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    yield
    matmul.fp32_precision = before
