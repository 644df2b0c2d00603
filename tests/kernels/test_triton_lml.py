"""The Triton kernel of the LML projection: interpreted on the CPU, and compiled ahead for NVIDIA and AMD.

Both run in a child process, because Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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

COMPILED = """
import sys
sys.path.insert(0, "tests/kernels")
import torch
import triton
import triton_ahead
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sigkernels.backends.triton import lml

kind, arch, warp = sys.argv[1], sys.argv[2], int(sys.argv[3])
target = GPUTarget(kind, int(arch) if arch.isdigit() else arch, warp)
names = ("z", "grad", "out", "nus", "slopes", "totals", "n", "k")
steps = (
    (torch.float32, "*fp32", 1),
    (torch.bfloat16, "*bf16", 2),
    (torch.float64, "*fp64", 0),
    (torch.float32, "*fp32", 3),
)
for dtype, pointer, step in steps:
    signature = dict(zip(names, [pointer] * 3 + ["*fp64"] * 3 + ["i32", "i32"]))
    constants = lml.constants(step, 100_000, dtype)
    signature |= {name: "constexpr" for name in constants}
    source = ASTSource(fn=lml.lml_kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=target, options={"num_warps": 8})
    report = triton_ahead.nvidia(made.asm["ptx"]) if kind == "cuda" else triton_ahead.amd(made.asm["amdgcn"])
    assert report["spills"] == 0, (dtype, step, report)
    assert made.metadata.shared <= 48 * 1024, made.metadata.shared
print("compiled")
"""


def run(code: str, *arguments: str, **environment: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(["."] + ([env["PYTHONPATH"]] if "PYTHONPATH" in env else [])), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_interpreted():
    assert "interpreted" in run(INTERPRETED, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


TARGETS = [("cuda", "80", "32"), ("cuda", "90", "32"), ("cuda", "100", "32"), ("hip", "gfx942", "64")]


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_compiles_ahead(target, tmp_path):
    assert "compiled" in run(COMPILED, *target, TRITON_CACHE_DIR=str(tmp_path))
