"""The Triton kernel of the LML projection, interpreted on the CPU; ``test_triton_compiled.py`` has it compiled ahead.

In a child process, because Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os
import sys

import pytest

from .toolchain import ROOT, must

pytest.importorskip("triton")

INTERPRETED = """
import math
import torch
from sigkernels.backends import torch_lml as exact
from sigkernels.backends.triton import lml as triton

torch.manual_seed(0)
inf, nan = math.inf, math.nan
EDGES = torch.tensor(
    [[inf, 0, 1, -inf], [nan, 0, 0, 0], [1e3, 1e3, -1e3, -1e3], [inf, inf, inf, 0], [-inf, -inf, -inf, 0]]
)
CASES = [
    (torch.randn(3, 100) * 3, 4),
    (torch.randn(2, 5000) * 5, 40),
    (torch.where(torch.arange(99) < 9, 30.0, -30.0) + torch.randn(2, 99), 9),
    (torch.randn(3, 2) * 4, 1),
    (EDGES, 2),
    (torch.tensor([[9e3, 5e3, 1e3, -3e3], [700, 0, -1, -2], [2, 1, 0, -1], [300, 299, 0, 0]]), 2),
]


def with_red_zone(t):
    # what lies around a tensor is NaN and must be neither read nor written
    buffer = torch.full((t.numel() + 64,), nan, dtype=t.dtype)
    inner = buffer[32 : 32 + t.numel()].view(t.shape)
    inner.copy_(t)
    return inner, lambda: bool(buffer[:32].isnan().all() and buffer[-32:].isnan().all())


def close(ours, want, tolerance):
    size = torch.nan_to_num(want, 0, 0, 0).abs().max().clamp(min=1e-30)
    same_nan = torch.equal(ours.isnan(), want.isnan())
    return same_nan and bool((torch.nan_to_num(ours.double() - want).abs() <= tolerance * size).all())


for z, k in CASES:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13), (torch.float16, 1e-3)):
        rows, untouched = with_red_zone(z.to(dtype))
        wide = rows.double()
        y, root = triton.project(rows, k)
        want, root_want = exact.project(wide, k)
        assert close(y, want, tolerance), (dtype, z.shape)
        again = triton.solve(rows, k)
        assert torch.equal(again.nu.nan_to_num(7), root.nu.nan_to_num(7))
        seen = root_want.slope > 1e-20
        assert close(root.nu[seen], root_want.nu[seen], 1e-6 if dtype != torch.float64 else 1e-14)
        grad, total = torch.randn_like(rows), torch.randn(len(z), dtype=torch.float64)
        got, back = triton.pullback(grad, rows, root), exact.pullback(grad.double(), wide, root_want)
        # h (g - E[g]) cancels where a row has few labels: the error goes with h g; 6e-8 is float16's smallest number
        size = torch.nan_to_num(root_want.slope).max() * grad.abs().max()
        assert torch.equal(got.isnan(), back.isnan())
        assert torch.nan_to_num(got.double() - back).abs().max() <= tolerance * size + (dtype == torch.float16) * 6e-8
        assert close(triton.spread(rows, root, total), exact.spread(wide, root_want, total), tolerance)
        out = rows.clone()
        triton.spread(out, root, total, out)
        assert torch.equal(out.nan_to_num(7), triton.spread(rows, root, total).nan_to_num(7))
        assert untouched() and torch.equal(rows.double().nan_to_num(7), wide.nan_to_num(7))
assert triton.project(torch.empty(0, 9), 3)[0].shape == (0, 9)
print("interpreted")
"""


def test_interpreted():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    assert "interpreted" in must([sys.executable, "-c", INTERPRETED], env=environment, cwd=ROOT, timeout=300).stdout
