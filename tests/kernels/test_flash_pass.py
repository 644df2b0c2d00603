"""The host side of the flash kernels, with the contract in plain torch in their place."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sigkernels import losses
from sigkernels.backends import LossCall, flash_pass, gpu_paths
from sigkernels.backends.flash_kernels import FlashSizes
from sigkernels.backends.gpu_paths import LossShape
from sigkernels.losses import BCE

from .flash_reference import ReferenceKernels
from .problems import Size, check, compare, error, problem, truth

SIZES = {
    "aligned": Size(32, 2048, 10, 64),
    "odd": Size(5, 1301, 11, 13, bias=True),
    "prime": Size(131, 1009, 7, 9),
    "one label": Size(1, 1, -1, 1, bias=True),
    "k=0": Size(3, 65, 0, 4),
    "no DFT": Size(6, 70, -1, 128, bias=True),
    "label range": Size(3, 4000, 30, 20, start=130, rows=700),
}


@torch.no_grad()
def fused(p, loss, kernels=None, needs=None):
    """The pass on the reference kernels: blocks of few tiles, so that there are several."""
    call = LossCall(p.x, p.layer, p.targets, loss, p.scale, needs or (True, True, p.layer.bias is not None))
    kernels = kernels or ReferenceKernels(FlashSizes(tile=32, rows=64, blocks=7, group=64, marks=False, turns=False))
    assert flash_pass.rank_refusal(p.layer.meta, p.layer.num_rows, p.x.dtype, kernels.sizes(p.x, 1, True)) is None
    return without_value(flash_pass.fused_loss(call, kernels), call.scale)


def without_value(result, scale):
    """What the truth has, after a look at the value."""
    if isinstance(scale, torch.Tensor):
        assert result.value is None
    else:
        assert result.value.dtype == torch.float32 and error(result.value, scale * result.rows.sum()) < 1e-6
    return result._replace(value=None)


@pytest.mark.parametrize("turns", [False, True], ids=["product", "turns"])
@pytest.mark.parametrize("group", [64, 24], ids="groups of {}".format)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fused_loss(dtype, name, group, turns):
    p = problem(SIZES[name], dtype)
    kernels = ReferenceKernels(FlashSizes(tile=32, rows=64, blocks=7, group=group, marks=False, turns=turns))
    check(p, BCE(), fused(p, BCE(), kernels), tf32=dtype == torch.float32)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_coefficients_inside(dtype, name):
    """Kernels that make the coefficients of the DFT themselves, of all features or of fewer than there are."""
    p = problem(SIZES[name], dtype)
    columns = 2 * SIZES[name].k + 1
    for features, inside in ((columns, p.x.shape[0] <= 64), (columns - 1, False)):
        kernels = ReferenceKernels(FlashSizes(32, 64, 7, 64, marks=False, turns=True, features=features))
        check(p, BCE(), fused(p, BCE(), kernels), tf32=dtype == torch.float32)
        assert kernels.inside == (inside if columns > 0 else None)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_losses(dense):
    n = 1500
    for loss in (
        BCE(weight=torch.rand(n) + 0.1, pos_weight=4 * torch.rand(n), label_smoothing=0.1),
        losses.Focal(weight=torch.rand(n)),
        losses.Focal(gamma=1.5, alpha=None, pos_weight=3.0),
        losses.Asymmetric(gamma_neg=2.5, gamma_pos=0.0, clip=0.1, detach_focus=True),
    ):
        p = problem(Size(4, n, 5, 11, bias=True), torch.float16, dense=dense)
        check(p, loss, fused(p, loss))


def test_constant_is_right_to_float32():
    """The prior of every label: in 16 bits it would be off by a hundredth."""
    p = problem(Size(2, 5000, 3, 4), torch.bfloat16)
    x = torch.zeros_like(p.x)
    x[:, 0] = -700.0
    p = p._replace(x=x)
    exact = truth(p, BCE())
    assert error(fused(p, BCE()).rows, exact.rows) < 1e-6


def test_rows_in_several_launches():
    p = problem(Size(150, 700, 3, 5, bias=True), torch.bfloat16)
    whole, parts = (ReferenceKernels(FlashSizes(32, rows, 5, rows, marks=False, turns=False)) for rows in (150, 64))
    results = [fused(p, BCE(), kernels) for kernels in (whole, parts)]
    assert whole.calls == ["fused_loss", "finish"] and parts.calls == whole.calls * 3
    for result in results:
        check(p, BCE(), result)
    call = LossCall(p.x, p.layer, p.targets, BCE(), 1.0, (False,) * 3)
    with torch.no_grad():
        values = [flash_pass.fused_loss(call, kernels).value for kernels in (whole, parts)]
    assert values[1] is None and error(values[0], results[1].rows.sum()) < 1e-6


def test_a_number_for_all_rows():
    """The scale of a mean stays out of the kernel's products."""
    for dtype in (torch.float32, torch.float16):
        q = problem(Size(6, 300, 3, 5, bias=True), dtype)
        q = q._replace(scale=torch.full_like(q.scale, 1e-7))
        for loss in (BCE(), BCE(weight=torch.rand(300), pos_weight=1e6)):
            call = LossCall(q.x.detach(), q.layer, q.targets, loss, 1e-7, (True, True, True))
            kernels = ReferenceKernels(FlashSizes(32, 64, 7, 64, marks=False, turns=False))
            with torch.no_grad():
                made = without_value(flash_pass.fused_loss(call, kernels), call.scale)
            # Eager float16 loses such a factor, and its range.
            compare(q, made, truth(q, loss), truth(q, loss, torch.float32), tf32=True)


def test_only_what_is_needed():
    p = problem(Size(5, 700, 4, 6, bias=True), torch.bfloat16)
    full = fused(p, BCE())
    for needs in itertools.product((False, True), repeat=3):
        part = fused(p, BCE(), needs=needs)
        assert torch.equal(part.rows, full.rows)
        for needed, got, want in zip(needs, part.gradients, full.gradients, strict=True):
            assert (got is not None) == needed
            assert not needed or torch.equal(got, want)


def test_strided_inputs():
    p = problem(Size(5, 700, 4, 6), torch.bfloat16, dense=True)
    wide = torch.cat([p.targets, p.targets], 1)
    q = p._replace(x=p.x.T.contiguous().T, targets=wide[:, :700])
    for got, want in zip(fused(q, BCE())[:3], fused(p, BCE())[:3], strict=True):
        assert torch.equal(got, want)


def test_refusals(monkeypatch):
    def reason(size=None, dtype=torch.bfloat16, loss=None):
        p = problem(size or Size(3, 300, 3, 5), dtype)
        call = LossCall(p.x, p.layer, p.targets, loss or BCE(), 1.0, (True, True, False))
        return flash_pass.refusal(call, LossShape.of(p.x, p.layer.weight, p.layer.meta))

    assert reason() is None
    assert "128 slack columns" in reason(Size(3, 300, 3, 129)) and "not 0" in reason(Size(3, 300, 3, 0))
    assert "fp32_precision" in reason(dtype=torch.float32) and "float64" in reason(dtype=torch.float64)
    monkeypatch.setattr(gpu_paths, "tf32_allowed", lambda: True)
    assert reason(dtype=torch.float32) is None
    assert "SigmoidF1" in reason(loss=losses.SigmoidF1()) and "Poly1BCE" in reason(loss=losses.Poly1BCE())
    assert "nothing" in reason(Size(0, 300, 3, 5))
    sizes = FlashSizes(64, 64, 100, 64, marks=False, turns=False)
    for k, refused in ((10, False), (150, True)):
        layer = problem(Size(1, 1000, k, 4), torch.bfloat16).layer
        assert bool(flash_pass.rank_refusal(layer.meta, layer.num_rows, torch.bfloat16, sizes)) == refused


class Launches(TorchDispatchMode):
    """The operations of torch that would be launches, or wait for the device."""

    VIEWS = (
        "slice",
        "split",
        "select",
        "view",
        "t.",
        "transpose",
        "as_strided",
        "empty",
        "new_empty",
        "detach",
        "alias",
        "unsqueeze",
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if not name.startswith(self.VIEWS):
            self.names.append(name.split(".")[0])
        return func(*args, **(kwargs or {}))


class NoKernels(ReferenceKernels):
    """The launches are counted and do nothing."""

    def fused_loss(self, launch):
        self.calls.append("fused_loss")

    def finish(self, launch, results):
        self.calls.append("finish")


@pytest.mark.parametrize("features", [0, 9], ids=["product", "inside"])
@pytest.mark.parametrize("turns", [False, True], ids=["product", "turns"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_launches_of_a_step(dtype, turns, features):
    """Two kernels, and up to two products, in however many groups a block takes the rows."""
    p = problem(Size(8, 700, 4, 16, bias=True), dtype)
    call = LossCall(p.x.detach(), p.layer, p.targets, BCE(), 1e-3, (True, True, True))
    kernels = NoKernels(FlashSizes(32, 64, 7, 8 if features else 4, marks=False, turns=turns, features=features))
    flash_pass.fused_loss(call, kernels)  # makes the tables
    with torch.no_grad(), Launches() as launches:
        flash_pass.fused_loss(call, kernels)
    assert launches.names == ([] if features else ["mm"]) + ([] if turns else ["addmm_"])
    assert kernels.calls[-2:] == ["fused_loss", "finish"]
