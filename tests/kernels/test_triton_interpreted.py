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

import sigkernels as sk
from sigkernels import losses
from sigkernels.backends import LossCall
from sigkernels.labels import LabelSets
from sigkernels.losses import BCE, LMLNLL, SigmoidF1
from sigkernels.ops import layer_loss, topk

from .problems import Size, check, check_confusion, confusion_losses, error, problem, truth
from .redzone import RedZones
from .toolchain import ENVIRONMENT, run

INTERPRETED = os.environ.get("TRITON_INTERPRET", "") not in ("", "0")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process, with TRITON_INTERPRET=1")
# Of the suite that every backend passes (tests/test_<op>.py) the part that an interpreter can do in seconds.
SHARED_OPS = ("fused_loss", "confusion_loss", "logits", "topk", "predict", "unknown_labels", "codes_kernel", "optim")
SHARED_SUITE = [f"tests/test_{op}.py" for op in SHARED_OPS]
SHARED_PART = "triton and (odd or one-label or empty-batch or every_form or infinite)"


@functools.cache
def children() -> dict[str, subprocess.CompletedProcess[str]]:
    """Both parts at once: each is one thread."""
    parts = {"kernels": [Path(__file__)], "shared suite": [*SHARED_SUITE, "-k", SHARED_PART]}
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
    environment = {**ENVIRONMENT, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with ThreadPoolExecutor(len(parts)) as pool:
        done = pool.map(lambda part: run([*pytest_, *part], env=environment), parts.values())
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


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 128 labels, the least."""
    from sigkernels.backends import library_tables

    monkeypatch.setattr(library_tables, "_CPU_ELEMENTS", 1)
    monkeypatch.setattr(library_tables, "_CPU_LABELS", (128, 128))


@pytest.fixture(params=["all rows at once", "blocks of rows"])
def rows_of_columns(request, monkeypatch):
    """Both ways of the kernel of column losses."""
    from sigkernels.backends.triton import configs

    if request.param == "blocks of rows":
        monkeypatch.setattr(configs, "_COLUMNS", {False: (), True: ()})


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
@pytest.mark.usefixtures("rows_of_columns")
def test_confusion_losses(triton):
    for i, loss in enumerate(confusion_losses(70)):
        p = problem(Size(5, 70, 5, 11, bias=True), torch.float64, dense=i % 3 == 0)
        check_confusion(triton, p, loss, ("mean", "sum")[i % 2])


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_confusion_loss_dtypes(triton, dtype):
    """The last size has more rows than a program takes at once."""
    for size in (
        Size(40, 130, 7, 9, bias=True),
        Size(3, 1000, 30, 20, start=130, rows=100),
        Size(515, 40, 3, 2),
        Size(1030, 20, 3, 2, bias=True),
    ):
        check_confusion(triton, problem(size, dtype), losses.SigmoidF1(eta=2.0), "mean")


@inside
@pytest.mark.usefixtures("rows_of_columns")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", [losses.UnboundedF1(), losses.UnboundedF1("precision")], ids=str)
def test_denominators_that_nearly_vanish(triton, dtype, form):
    """Slopes of 1/denominator are far outside the range of float16, and must not reach it as such."""
    p = problem(Size(2, 40, -1, 3, bias=True), torch.float64)
    # one label whose logits nearly cancel: with targets of the first row only where the denominator is not made of them
    x = torch.tensor([[1.0, 0.5, -0.25], [1.0, 0.5, -0.25]], dtype=torch.float64)
    weight = p.layer.weight.clone()
    weight[7] = torch.tensor([2.0**-9, 2.0**-12, 0.0])
    layer = p.layer._replace(weight=weight.to(dtype), bias=torch.zeros(40, dtype=dtype))
    p = p._replace(x=x.to(dtype), layer=layer, targets=LabelSets.from_lists([[], []], 40))
    check_confusion(triton, p, form, "mean")


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
def test_chunks_of_labels(triton, small_chunks):
    p = problem(Size(5, 300, 20, 13, bias=True), torch.float32)
    check(p, BCE(), fused(triton, p, BCE()))
    check_confusion(triton, p, losses.SigmoidF1(), "mean")
    z = triton.logits(p.x, p.layer)
    for m in (4, 100):  # 100: longer than the kernel's lists
        values, labels = triton.topk(p.x, p.layer, m)
        assert error(values, z.sort(1, descending=True)[0][:, :m].double()) < 1e-6
        assert error(z.gather(1, labels), values.double()) < 1e-6
    assert torch.equal(triton.predict(p.x, p.layer, 0.5).to_dense().bool(), z > 0.5)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_chunks_share_a_factor(triton, small_chunks, dtype):
    """The DFT of several chunks through one factor, in the dtype of the products; pooled losses sweep twice."""
    p = problem(Size(5, 500, 4, 3, bias=True), dtype)
    check(p, losses.Asymmetric(), fused(triton, p, losses.Asymmetric()))


RUNS = {
    "several groups of chunks": Size(3, 700, 4, 3, bias=True),
    "label range, two row blocks": Size(19, 1000, 6, 13, start=130, rows=200),
    "no slack": Size(3, 300, 3, 0),
}


@inside
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_adds_the_dft_part(triton, small_chunks, monkeypatch, dtype, name):
    """In runs of labels, with the gradient of their coefficients; of float32 as tf32, whose operands are rounded."""
    from sigkernels.backends import library_walk
    from sigkernels.backends.triton import configs

    monkeypatch.setattr(library_walk, "rounds_float32", lambda x: True)
    p = problem(RUNS[name], dtype)
    walk = library_walk.LabelWalk(p.x, p.layer, True, configs.run_labels)
    assert walk.run == 64 and walk.size == 128 and walk.rank == 32
    assert name != "several groups of chunks" or walk.group * walk.size < p.layer.num_rows
    for loss in (BCE(), losses.Asymmetric()) if dtype == torch.bfloat16 else (BCE(),):
        whole = fused(triton, p, loss)
        if dtype == torch.float32:
            for got, want in zip(whole[:4], truth(p, loss), strict=False):
                assert got is None or not got.numel() or error(got, want) < 2**-10
        else:
            check(p, loss, whole)
        part = fused(triton, p, loss, needs=(False, True, False))
        assert part.grad_x is None and torch.equal(part.grad_weight, whole.grad_weight)


@inside
@pytest.mark.usefixtures("rows_of_columns")
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("metric", ["f1", "npv"])
def test_pooled(triton, small_chunks, dense, metric):
    """Two sweeps; the torch backend, which has its own tests, says what is right."""
    from sigkernels.backends import by_name

    beta = torch.tensor(1.5, dtype=torch.float64)
    p = problem(Size(5, 300, 4, 3, bias=True), torch.float64, dense=dense)
    call = LossCall(p.x, p.layer, p.targets, losses.SigmoidF1(beta, 0.2, metric, "pooled"), 1.0, (True,) * 4 + (False,))
    got, want = triton.column_loss(call), by_name("torch").column_loss(call)
    for ours, right in zip(got, want, strict=True):
        assert error(ours, right) < 1e-12
    nothing = triton.column_loss(call._replace(needs=(False,) * 5))
    assert torch.equal(nothing.value, got.value) and nothing.grad_x is None


@inside
def test_codes_as_columns(triton, small_chunks):
    """On a device codes are extra columns, of every block that a chunk touches."""
    for start, rows in ((0, 300), (37, 200)):
        p = problem(Size(5, 300, 3, 4, start=start, rows=rows), torch.float64)
        layer = p.layer._replace(meta=p.layer.meta._replace(codes=16))
        x = torch.cat([p.x[:, :7], torch.randn(5, 16, dtype=torch.float64), p.x[:, 7:]], 1)
        p = p._replace(x=x, layer=layer)
        check(p, BCE(), fused(triton, p, BCE()))


@inside
@pytest.mark.parametrize("loss", [BCE(), losses.SigmoidF1()], ids=["elementwise", "columns"])
def test_dense_targets_of_any_dtype_and_layout(triton, loss):
    """They are read as they are: no copy in another dtype, no contiguous one."""
    p = problem(Size(5, 70, 4, 6, bias=True), torch.float32)
    y = torch.rand(5, 70) < 0.3

    def result(targets):
        scale = p.scale if isinstance(loss, BCE) else 1.0
        call = LossCall(
            p.x, p.layer, targets, loss, scale, (True, True, True, False, False)[: 3 if scale is p.scale else 5]
        )
        return (triton.fused_loss(call) if isinstance(loss, BCE) else triton.column_loss(call))[:4]

    want = result(y.float())
    forms = [y, *(y.to(dtype) for dtype in (torch.uint8, torch.int64, torch.bfloat16, torch.float64))]
    for targets in (*forms, y.T.contiguous().T, torch.cat([y, y], 1)[:, :70], y.float().T.contiguous().T):
        for got, right in zip(result(targets), want, strict=True):
            assert torch.equal(got, right)


@inside
@pytest.mark.parametrize("loss", [BCE(), losses.SigmoidF1()], ids=["elementwise", "columns"])
def test_a_bias_whose_entries_lie_apart(triton, loss):
    p = problem(Size(5, 70, 4, 6, bias=True), torch.float32)
    apart = torch.full((70, 3), torch.nan)
    apart[:, 1] = p.layer.bias

    def results(layer):
        with sk.backend("triton"):
            value = layer_loss(p.x, layer, p.targets, loss, "mean")
            return value, *topk(p.x, layer, 5)

    for got, want in zip(results(p.layer._replace(bias=apart[:, 1])), results(p.layer), strict=True):
        assert torch.equal(got, want)


@inside
def test_row_scale_and_float16_range(triton):
    """A mean over many terms is below the range of float16, and label weights may lead out of it."""
    n = 70
    for weight in (None, 3e6, torch.rand(n) * 1e6):
        loss = BCE(weight=weight)
        p = problem(Size(4, n, 5, 11, bias=True), torch.float16)
        p = p._replace(scale=torch.full((4,), 1e-9, dtype=torch.float64))
        whole = triton.fused_loss(LossCall(p.x, p.layer, p.targets, loss, 1e-9, (True, True, True)))
        assert error(whole.value[None], 1e-9 * whole.rows.sum()[None]) < 1e-6
        for result in (whole, fused(triton, p, loss)):
            for got, want in zip(result[:4], truth(p, loss), strict=False):
                assert error(got, want) < 2**-11


@inside
def test_same_bits_every_time(triton):
    p = problem(Size(70, 300, 20, 13, bias=True), torch.bfloat16)
    first, again = (fused(triton, p, losses.Focal()) for _ in range(2))
    for a, b in zip(first[:4], again[:4], strict=True):
        assert torch.equal(a, b)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_upstream_gradient(dtype):
    """Three arrays in one launch; others are handed back; nothing is written where it is 1."""
    from sigkernels.backends.triton import scale

    made = [torch.randn(*shape).to(dtype) for shape in ((5, 7), (3000, 3), (11,), (2,))]
    made.append(torch.randn(4, 4).to(dtype).T)
    for factor in (1.0, -2.0):
        grads = [grad.clone(memory_format=torch.preserve_format) for grad in made]
        left = scale.scale_(grads, torch.tensor(factor))
        assert [grad is kept for grad, kept in zip(grads[3:], left, strict=True)] == [True, True]
        for i, (got, before) in enumerate(zip(grads, made, strict=True)):
            assert torch.equal(got, before * factor if i < 3 else before)
    odd = torch.ones(3, dtype=torch.float16)
    assert scale.scale_([made[0].clone(), odd], torch.tensor(3.0)) == [odd] or dtype == torch.float16


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
@pytest.mark.parametrize("loss", [BCE(), SigmoidF1(), LMLNLL(2)], ids=lambda loss: type(loss).__name__)
def test_sets_that_are_none_are_refused(triton, loss):
    """On a CPU, where the interpreter runs; the kernels would follow them beyond their arrays."""
    with sk.backend("triton"):
        for indices, offsets in (([1, 5], [0, 10**6, 2]), ([1, 10**9], [0, 1, 2])):
            sets = LabelSets.from_sorted(torch.tensor(indices), torch.tensor(offsets), 9)
            with pytest.raises(ValueError, match="not valid label sets"):
                sk.functional.linear_loss(torch.randn(2, 4), torch.randn(9, 4), sets, loss=loss)


@inside
@pytest.mark.usefixtures("rows_of_columns")
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
            check_confusion(triton, p, losses.SigmoidF1(), "mean")
        assert torch.isfinite(z).all() and torch.isfinite(values).all()
        check(p, BCE(), result)
    zones.check()
