"""The Triton kernels in Triton's interpreter, on CPU tensors, against float64 and between red zones.

The interpreter must be chosen before the kernels are imported, so all of this runs in a child process: started by the
first test, which re-runs this file with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sigkernels import losses
from sigkernels.backends import LossCall
from sigkernels.labels import LabelSets
from sigkernels.losses import BCE

from .problems import Size, check, check_confusion, confusion_losses, error, problem
from .redzone import RedZones
from .toolchain import ENVIRONMENT, run

INTERPRETED = os.environ.get("TRITON_INTERPRET", "") not in ("", "0")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process, with TRITON_INTERPRET=1")
# Of the suite that every backend passes (tests/test_<op>.py) the part that an interpreter can do in seconds.
SHARED_SUITE = [f"tests/test_{op}.py" for op in ("fused_loss", "confusion_loss", "logits", "topk", "predict")]
SHARED_PART = "triton and (odd or one-label or empty-batch or every_form or infinite)"


@functools.cache
def children() -> dict[str, subprocess.CompletedProcess[str]]:
    """Both parts at once: each is one thread."""
    parts = {"kernels": [Path(__file__)], "shared suite": [*SHARED_SUITE, "-k", SHARED_PART]}
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
    environment = {**ENVIRONMENT, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with ThreadPoolExecutor(len(parts)) as pool:
        done = pool.map(lambda what: run([*pytest_, *what], env=environment), parts.values())
        return dict(zip(parts, done, strict=True))


def prepare(cache: Path) -> None:
    if not INTERPRETED and importlib.util.find_spec("triton"):
        children()


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
@pytest.mark.parametrize("part", ["kernels", "shared suite"])
def test_in_the_interpreter(part):
    pytest.importorskip("triton", minversion="3.7")
    done = children()[part]
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 10, done.stdout[-500:]


@pytest.fixture
def triton():
    from sigkernels import backends

    backend = backends.by_name("triton")
    assert backend.unavailable() is None
    return backend


def fused(triton, p, loss, needs=None):
    needs = needs or (True, True, p.layer.bias is not None)
    return triton.fused_loss(LossCall(p.x, p.layer, p.targets, loss, p.scale, needs))


SIZES = {
    "odd": Size(5, 300, 20, 13),
    "one label": Size(1, 1, 0, 1),
    "2k+1=n, no slack": Size(4, 101, 50, 0),
    "two row blocks, bias, no DFT": Size(66, 70, -1, 40, bias=True),
    "label range": Size(3, 1000, 30, 20, start=130, rows=200),
}


@inside
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_fused_loss(triton, dtype, name):
    if dtype in (torch.bfloat16, torch.float64) and name not in ("odd", "label range"):
        pytest.skip("the float32 and float16 runs cover this shape")
    p = problem(SIZES[name], dtype)
    check(p, BCE(), fused(triton, p, BCE()))


@inside
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_losses(triton, dense):
    n = 70
    for loss in (
        BCE(weight=torch.rand(n) + 0.1, pos_weight=4 * torch.rand(n), label_smoothing=0.1),
        losses.Focal(weight=torch.rand(n)),
        losses.Focal(gamma=1.5, alpha=None),
        losses.Asymmetric(pos_weight=2 * torch.rand(n)),
        losses.Asymmetric(gamma_neg=2.5, gamma_pos=0.0, clip=0.1, detach_focus=True),
    ):
        p = problem(Size(4, n, 5, 11, bias=True), torch.float64, dense=dense)
        check(p, loss, fused(triton, p, loss))


@inside
def test_confusion_losses(triton):
    for i, loss in enumerate(confusion_losses(70)):
        p = problem(Size(5, 70, 5, 11, bias=True), torch.float64, dense=i % 3 == 0)
        check_confusion(triton, p, loss, ("mean", "sum")[i % 2])


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_confusion_loss_dtypes(triton, dtype):
    for size in (Size(40, 130, 7, 9, bias=True), Size(3, 1000, 30, 20, start=130, rows=100)):
        check_confusion(triton, problem(size, dtype), losses.SigmoidF1(eta=2.0), "mean")


@inside
def test_more_rows_than_a_launch(triton, monkeypatch):
    """Slabs beyond their budget: the rows are cut into launches, whose gradients of weight and bias add up."""
    from sigkernels.backends import gpu_pass

    monkeypatch.setattr(gpu_pass, "_SLAB_BYTES", 1)
    p = problem(Size(130, 70, 3, 5, bias=True), torch.bfloat16)
    check(p, BCE(), fused(triton, p, BCE()))


@inside
def test_scans(triton):
    for dtype in (torch.float32, torch.float64):
        p = problem(Size(34, 150, 9, 11, bias=True), dtype)
        z = triton.logits(p.x, p.layer)
        for m in (1, 5, 70):  # 70: longer than the kernel's lists
            values, labels = triton.topk(p.x, p.layer, m)
            assert error(values, z.sort(1, descending=True)[0][:, :m].double()) < 1e-6
            assert error(z.gather(1, labels), values.double()) < 1e-6
        threshold = float(z.median()) + 1e-4
        assert torch.equal(triton.predict(p.x, p.layer, threshold).to_dense().bool(), z > threshold)


@inside
def test_ties_nan_and_signed_zero(triton):
    """Ties go to the lower label, NaN counts as highest, -0 equals 0; a NaN logit is above no threshold."""
    row = torch.tensor([0.0, -0.0, 1.0, float("nan"), 1.0, float("-inf"), float("inf"), 1.0]).repeat(10)
    p = problem(Size(1, len(row), -1, 1), torch.float32)
    layer, x = p.layer._replace(weight=torch.ones(len(row), 1), bias=row), torch.zeros(1, 1)
    want, order = torch.sort(row[None], dim=1, descending=True, stable=True)
    for m in (5, 64):
        values, labels = triton.topk(x, layer, m)
        assert torch.equal(labels, order[:, :m])
        torch.testing.assert_close(values, want[:, :m], equal_nan=True)
    assert triton.predict(x, layer, 0.0).indices.tolist() == (row > 0).nonzero()[:, 0].tolist()


@inside
def test_chunks_of_labels(triton, monkeypatch):
    from sigkernels.backends import gpu_pass, gpu_scans
    from sigkernels.backends.triton import launch

    monkeypatch.setattr(gpu_scans, "_SORT_ELEMENTS", 5 * 64)
    monkeypatch.setattr(gpu_pass, "_LAUNCH_ELEMENTS", 5 * 128)
    monkeypatch.setattr(launch, "_PARTS", 2)
    p = problem(Size(5, 300, 20, 13, bias=True), torch.float32)
    check(p, BCE(), fused(triton, p, BCE()))
    check_confusion(triton, p, losses.SigmoidF1(), "mean")
    assert (
        error(
            triton.topk(p.x, p.layer, 100)[0], triton.logits(p.x, p.layer).sort(1, descending=True)[0][:, :100].double()
        )
        < 1e-6
    )
    z = triton.logits(p.x, p.layer)
    assert error(triton.topk(p.x, p.layer, 4)[0], z.sort(1, descending=True)[0][:, :4].double()) < 1e-6
    assert (triton.predict(p.x, p.layer, 0.5).to_dense().bool() != (z > 0.5)).sum() == 0


@inside
def test_only_what_is_needed(triton):
    p = problem(Size(5, 70, 4, 6, bias=True), torch.float32)
    full = fused(triton, p, BCE())
    for needs in itertools.product((False, True), repeat=3):
        part = fused(triton, p, BCE(), needs=needs)
        assert torch.equal(part.rows, full.rows)
        for needed, got, want in zip(needs, part.gradients, full.gradients, strict=True):
            assert (got is not None) == needed
            assert not needed or torch.equal(got, want)


@inside
def test_red_zones(triton, monkeypatch):
    """The interpreter checks no bounds: the zones around every input and output do."""
    zones = RedZones()
    for dtype in (torch.float32, torch.float16):
        p = problem(Size(35, 97, 7, 9, bias=True), dtype)
        layer = p.layer._replace(weight=zones.around(p.layer.weight), bias=zones.around(p.layer.bias))
        assert isinstance(p.targets, LabelSets)
        sets = LabelSets.from_sorted(zones.around(p.targets.indices), p.targets.offsets, p.targets.num_labels)
        p = p._replace(x=zones.around(p.x), layer=layer, targets=sets)
        with monkeypatch.context() as patch:
            zones.install(patch)
            result = fused(triton, p, BCE())
            values, _ = triton.topk(p.x, p.layer, 6)
            triton.predict(p.x, p.layer, 0.0)
            z = triton.logits(p.x, p.layer)
        assert torch.isfinite(z).all() and torch.isfinite(values).all()
        check(p, BCE(), result)
    zones.check()
