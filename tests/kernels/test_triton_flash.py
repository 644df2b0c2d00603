"""The flash kernel in Triton's interpreter against float64 and between red zones.

The interpreter must be chosen before the kernels are imported: the first test re-runs this file in a child process with
``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sigkernels import losses
from sigkernels.backends import LossCall, flash_pass, gpu_paths
from sigkernels.backends.flash_kernels import RANK
from sigkernels.backends.gpu_paths import LossShape
from sigkernels.labels import LabelSets
from sigkernels.losses import BCE

from .problems import Size, check, error, problem
from .redzone import RedZones
from .toolchain import ENVIRONMENT, run

INTERPRETED = os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


@functools.cache
def child() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    return run(command, env={**ENVIRONMENT, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


def prepare(cache: Path) -> None:
    if not INTERPRETED and importlib.util.find_spec("triton"):
        child()


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_in_the_interpreter():
    pytest.importorskip("triton", minversion="3.7")
    done = child()
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 20, done.stdout[-500:]


SIZES = {
    "odd": Size(5, 401, 2, 13, bias=True),
    "one label": Size(1, 1, -1, 1, bias=True),
    "k=0": Size(3, 65, 0, 4),
    "many rows": Size(131, 197, 5, 16),
    "no DFT": Size(17, 130, -1, 50),
    "label range": Size(3, 4000, 30, 20, start=130, rows=300),
}
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process, with TRITON_INTERPRET=1")


@pytest.fixture
def flash(monkeypatch):
    """The launches; float32 is tf32."""
    from sigkernels.backends.triton import flash

    monkeypatch.setattr(gpu_paths, "tf32_allowed", lambda: True)
    return flash


def run_of(flash, call):
    """The outcome, or why there is none."""
    kernels = flash.kernels_for(call, LossShape.of(call.x, call.layer.weight, call.layer.meta))
    return kernels if isinstance(kernels, str) else flash_pass.fused_loss(call, kernels)


@torch.no_grad()
def fused(p, loss, flash, needs=None):
    call = LossCall(p.x, p.layer, p.targets, loss, p.scale, needs or (True, True, p.layer.bias is not None))
    result = run_of(flash, call)
    assert result.value is None  # rows have factors of their own
    return result


@inside
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_loss(flash, dtype, name):
    if dtype == torch.float16 and name not in ("odd", "many rows"):
        pytest.skip("the others cover this shape")
    p = problem(SIZES[name], dtype)
    check(p, BCE(), fused(p, BCE(), flash), tf32=dtype == torch.float32)


@inside
def test_value(flash):
    """With one factor for all rows the last kernel makes the loss itself."""
    p = problem(SIZES["label range"], torch.bfloat16)
    with torch.no_grad():
        result = run_of(flash, LossCall(p.x, p.layer, p.targets, BCE(), 0.37, (True, True, False)))
    assert result.value.dtype == torch.float32 and error(result.value, 0.37 * result.rows.sum()) < 1e-6


@inside
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_losses(flash, dense):
    n = 200
    for loss in (
        BCE(weight=torch.rand(n) + 0.1, pos_weight=4 * torch.rand(n), label_smoothing=0.1),
        losses.Focal(weight=torch.rand(n)),
        losses.Focal(gamma=1.5, alpha=None),
        losses.Asymmetric(pos_weight=2 * torch.rand(n)),
        losses.Asymmetric(gamma_neg=2.5, gamma_pos=0.0, clip=0.1, detach_focus=True),
    ):
        p = problem(Size(4, n, 2, 11, bias=True), torch.float16, dense=dense)
        check(p, loss, fused(p, loss, flash))


@inside
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16], ids=str)
def test_dense_targets_of_any_type(flash, dtype):
    p = problem(Size(4, 100, 2, 5), torch.float16, dense=True)
    p = p._replace(targets=(p.targets > 0.7).to(dtype))
    result = fused(p, BCE(), flash)
    check(p._replace(targets=p.targets.half()), BCE(), result)


@inside
def test_labels_of_other_shards(flash):
    """Sets hold positives just before the layer's labels and just behind them; bit 31 of a word is its sign."""
    p = problem(Size(2, 1000, 3, 4, start=100, rows=200), torch.float16)
    for lists in ([[97, 99, 100, 131, 163, 299], [300, 301, 320]], [[98], list(range(90, 330))]):
        q = p._replace(targets=LabelSets.from_lists(lists, 1000))
        check(q, BCE(), fused(q, BCE(), flash))


@inside
def test_far_logits(flash):
    """Where σ is 0 or 1 to the last bit: small losses are kept, infinite ones are infinite, and NaN stays in its row."""
    layer = problem(Size(1, 7, -1, 1), torch.float32).layer
    layer = layer._replace(weight=torch.tensor([[0.0], [1], [-1], [15], [-15], [30], [-30]]))
    x = torch.tensor([[1.0], [1.0], [1e30], [float("nan")]])
    sets = LabelSets.from_lists([[], [0, 2, 3, 6], [1], []], 7)
    call = LossCall(x, layer, sets, BCE(), 1.0, (True, False, False))
    rows = run_of(flash, call).rows
    want = BCE().value(x.double() @ layer.weight.double().T, sets.to_dense(torch.float64)).sum(1)
    torch.testing.assert_close(rows, want, rtol=2e-6, atol=0, equal_nan=True)
    layer = layer._replace(weight=torch.full((70, 1), -1.0), meta=layer.meta._replace(num_labels=70))
    x = torch.tensor([[16.0], [20.0], [80.0]])
    call = LossCall(x, layer, LabelSets.from_lists([[], [], []], 70), BCE(), 1.0, (True, False, False))
    rows = run_of(flash, call).rows
    torch.testing.assert_close(rows, 70 * (-x[:, 0].double()).exp().log1p(), rtol=2e-6, atol=0)


@inside
def test_rows_in_several_launches(flash, monkeypatch):
    monkeypatch.setitem(flash.SHAPES, ("16-bit", True), (flash.Shape(64, 32, 4, 2, 1),))
    for dtype in (torch.bfloat16, torch.float16):
        p = problem(Size(70, 200, 3, 5, bias=True), dtype)
        check(p, BCE(), fused(p, BCE(), flash))


@inside
def test_only_what_is_needed(flash):
    p = problem(Size(5, 200, 2, 6, bias=True), torch.bfloat16)
    full = fused(p, BCE(), flash)
    for needs in ((False, False, False), (True, False, False), (False, True, False), (False, False, True)):
        part = fused(p, BCE(), flash, needs=needs)
        assert torch.equal(part.rows, full.rows)
        for needed, got, want in zip(needs, part.gradients, full.gradients, strict=True):
            assert (got is not None) == needed
            assert not needed or torch.equal(got, want)


@inside
def test_red_zones(flash, monkeypatch):
    """The interpreter checks no bounds: the zones around every input and output do."""
    zones = RedZones()
    for dtype, dense in ((torch.float16, False), (torch.bfloat16, True)):
        p = problem(Size(35, 97, 2, 9, bias=True), dtype, dense)
        layer = p.layer._replace(weight=zones.around(p.layer.weight), bias=zones.around(p.layer.bias))
        if isinstance(p.targets, LabelSets):
            given = zones.around(p.targets.indices), zones.around(p.targets.offsets), p.targets.num_labels
            targets = LabelSets.from_sorted(*given)
        else:
            targets = zones.around(p.targets)
        p = p._replace(x=zones.around(p.x), layer=layer, targets=targets)
        with monkeypatch.context() as patch:
            zones.install(patch)
            patch.setattr(flash_pass.Plan, "scratch", parts_apart(zones))
            result = fused(p, BCE(), flash)
        check(p, BCE(), result)
    zones.check()


@inside
def test_same_bits(flash):
    p = problem(Size(70, 300, 3, 5, bias=True), torch.bfloat16)
    for got, again in zip(fused(p, BCE(), flash)[:4], fused(p, BCE(), flash)[:4], strict=True):
        assert torch.equal(got, again)


@inside
def test_what_it_does_not_do(flash):
    def reason(size, dtype=torch.bfloat16, loss=None):
        p = problem(size, dtype)
        return run_of(flash, LossCall(p.x, p.layer, p.targets, loss or BCE(), 1.0, (True, True, False)))

    assert not isinstance(reason(Size(512, 300, -1, 5)), str) and "rows" in str(reason(Size(513, 300, -1, 5)))
    assert "columns" in str(reason(Size(2, 300, -1, 65))) and "columns" in str(reason(Size(2, 300, -1, 200)))
    assert "128 rows" in str(reason(Size(129, 300, -1, 5), loss=losses.Focal()))
    assert "tf32" in str(reason(Size(2, 300, -1, 5), torch.float32, losses.Focal()))
    assert "rank" in str(reason(Size(2, 300, 100, 5)))


def parts_apart(zones):
    """Scratch whose parts have a zone around each."""

    def scratch(plan, x):
        def part(where):
            if where is None:
                return None
            dtype, nbytes = where[1] or x.dtype, plan.blocks * RANK * x.dtype.itemsize  # of a row
            return zones.like((plan.rows[where[0]], nbytes // dtype.itemsize), dtype)

        return flash_pass.Scratch(*map(part, plan.parts))

    return scratch
