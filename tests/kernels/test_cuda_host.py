"""The CUDA kernels' own source, executed on the host: every operation, dtype and hard shape against float64.

Launchers, bindings and ``backends/cuda.py`` are the real ones too; only the GPU is a simulation (``shim/cuda_shim.h``).
"""

from __future__ import annotations

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import reference
import torch

import sigkernels as sk
from sigkernels import backends
from sigkernels.backends import LossCall, cuda, gpu_pass
from sigkernels.backends.gpu_kernels import tf32_allowed
from sigkernels.backends.gpu_tiles import tile_factors
from sigkernels.labels import LabelSets
from sigkernels.losses import BCE, Asymmetric, Focal, SigmoidF1

from .problems import SIZES, Size, check, check_confusion, confusion_losses, problem
from .redzone import RedZones
from .toolchain import host_module

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES["float64"] = torch.float64


def prepare(cache: Path) -> None:
    host_module(cache)


def needs_of(p):
    return (True, True, p.layer.bias is not None)


@pytest.fixture(params=list(DTYPES))
def dtype(request: pytest.FixtureRequest):
    """Also sets torch's switch for tf32, which decides between two float32 kernels."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param == "tf32" else "highest")
    yield DTYPES[request.param]
    torch.set_float32_matmul_precision(before)


def fused(backend, p, loss, needs=None):
    return backend.fused_loss(LossCall(p.x, p.layer, p.targets, loss, p.scale, needs or needs_of(p)))


def column(backend, p, loss):
    return backend.column_loss(
        LossCall(p.x, p.layer, p.targets, loss, 1 / p.layer.num_labels, (True,) * 3 + (False,) * 2)
    )


@pytest.mark.parametrize("name", SIZES)
def test_fused_loss(cuda_on_host, dtype, name):
    p = problem(SIZES[name], dtype)
    check(p, BCE(), fused(cuda_on_host, p, BCE()), tf32=tf32_allowed())


@pytest.mark.parametrize("name", SIZES)
def test_scans(cuda_on_host, dtype, name):
    """logits, topk and predict agree with each other exactly and with float64 closely."""
    p = problem(SIZES[name], dtype)
    z = cuda_on_host.logits(p.x, p.layer)
    exact = torch.nn.functional.linear(p.x.double(), _matrix(p.layer))
    exact = exact if p.layer.bias is None else exact + p.layer.bias.double()
    tolerance = {torch.float64: 1e-14, torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, 1e-6)
    tolerance = 2**-9 if tf32_allowed() else tolerance
    assert z.dtype == dtype and float((z.double() - exact).abs().max()) <= tolerance * float(exact.abs().max())
    for m in {1, min(5, z.shape[1]), z.shape[1]}:
        values, labels = cuda_on_host.topk(p.x, p.layer, m)
        want, order = torch.sort(z, dim=1, descending=True, stable=True)
        assert torch.equal(values, want[:, :m])
        assert torch.equal(labels, order[:, :m] + p.layer.label_start)
    threshold = float(z.double().median())
    sets = cuda_on_host.predict(p.x, p.layer, threshold)
    inside = slice(p.layer.label_start, p.layer.label_start + p.layer.num_rows)
    assert torch.equal(sets.to_dense()[:, inside].bool(), z > threshold)
    assert len(LabelSets(sets.indices, sets.offsets, sets.num_labels).indices) == len(sets.indices)


def _matrix(layer):
    return reference.matrix(layer._replace(weight=layer.weight.double()))


LOSSES = {
    "weights": lambda n: BCE(weight=torch.rand(n) + 0.1, pos_weight=4 * torch.rand(n)),
    "smoothing": lambda n: BCE(label_smoothing=0.1, pos_weight=4 * torch.rand(n)),
    "focal": lambda n: Focal(weight=torch.rand(n)),
    "focal, no alpha": lambda n: Focal(gamma=1.5, alpha=None),
    "asymmetric": lambda n: Asymmetric(pos_weight=2 * torch.rand(n)),
    "asymmetric, fractional": lambda n: Asymmetric(gamma_neg=2.5, gamma_pos=0.0, clip=0.1),
    "asymmetric, detached": lambda n: Asymmetric(detach_focus=True),
}


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", [torch.float64, torch.float16], ids=str)
def test_losses(cuda_on_host, name, dense, kind):
    p = problem(Size(7, 130, 5, 11, bias=True), kind, dense=dense)
    loss = LOSSES[name](130)
    check(p, loss, fused(cuda_on_host, p, loss))


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_confusion_losses(cuda_on_host, dense):
    """Both reductions, every metric and form, the gradients of beta and eta included."""
    p = problem(Size(7, 130, 5, 11, bias=True), torch.float64, dense=dense)
    for i, loss in enumerate(confusion_losses(130)):
        check_confusion(cuda_on_host, p, loss, ("mean", "sum")[i % 2])


@pytest.mark.parametrize("name", ["odd", "prime, more rows than a group", "one label", "no slack", "label range"])
def test_confusion_loss_shapes(cuda_on_host, dtype, name):
    p = problem(SIZES[name], dtype)
    p = p._replace(layer=p.layer._replace(bias=torch.full((p.layer.num_rows,), 2.0, dtype=dtype)))
    check_confusion(cuda_on_host, p, SigmoidF1(), "mean", tf32=tf32_allowed())


def test_confusion_loss_without_rows(cuda_on_host):
    p = problem(Size(0, 130, 4, 6, bias=True), torch.float32)
    result = column(cuda_on_host, p, SigmoidF1())
    assert result.value == 1 and not result.grad_weight.any() and not result.grad_bias.any()


def test_dispatch_takes_confusion_losses(cuda_on_host, monkeypatch):
    """Forced and by choice; the pooled average goes through torch's chunked pass on the same device."""
    monkeypatch.setitem(backends._AUTO, "cpu", ("cuda",))
    x, weight = torch.randn(5, 4), torch.randn(70, 4)
    sets = [[1, 2], [69], [], [3], [1]]
    called, launch = [], cuda.CUDAKernels.confusion_loss
    monkeypatch.setattr(cuda.CUDAKernels, "confusion_loss", lambda *a: called.append(a) or launch(*a))
    for average, times in (("label", 1), ("pooled", 0)):
        for forced in ("auto", "cuda"):
            called.clear()
            with sk.backend(forced):
                value = sk.functional.linear_loss(x, weight, sets, loss=SigmoidF1(average=average))
            with sk.backend("torch"):
                want = sk.functional.linear_loss(x, weight, sets, loss=SigmoidF1(average=average))
            torch.testing.assert_close(value, want)
            assert len(called) == times


def test_thread_order_does_not_matter(cuda_on_host, monkeypatch):
    """Threads and blocks in any order give the same bits: no race has shown, no order is relied upon."""
    for kind in (torch.float32, torch.bfloat16):
        p = problem(Size(131, 300, 9, 70, bias=True), kind)
        results = []
        for order in ("forward", "reverse", "random:1", "random:2"):
            monkeypatch.setenv("SHIM_ORDER", order)
            values, labels = cuda_on_host.topk(p.x, p.layer, 7)
            sets = cuda_on_host.predict(p.x, p.layer, 0.0)
            passes = (*fused(cuda_on_host, p, BCE())[:4], *column(cuda_on_host, p, SigmoidF1())[:4])
            results.append((*passes, values, labels, sets.indices, sets.offsets))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("processors", [1, 2, 40])
def test_any_number_of_blocks(cuda_on_host, monkeypatch, processors):
    monkeypatch.setenv("SHIM_PROCESSORS", str(processors))
    cuda._resident_blocks.cache_clear()
    p = problem(Size(9, 500, 20, 13), torch.float32)
    check(p, BCE(), fused(cuda_on_host, p, BCE()))
    z = cuda_on_host.logits(p.x, p.layer)
    assert torch.equal(cuda_on_host.topk(p.x, p.layer, 3)[0], z.sort(1, descending=True)[0][:, :3])
    cuda._resident_blocks.cache_clear()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_factors_that_do_not_fit(cuda_on_host, host_kernels, name):
    """U and V stay in shared memory where they fit; a large k reads V, and a large rank also U, from memory."""
    size = Size(3, 2003, 1001, 5) if name == "float64" else Size(3, 4003, 300, 5)
    p = problem(size, DTYPES[name])
    factors = tile_factors(p.layer, host_kernels.TILE)
    free = host_kernels.block_shared_memory(name) - host_kernels.shared_memory(name)["fused_loss"]
    assert factors.u.nbytes + factors.v.nbytes > free
    assert name != "float64" or factors.u.nbytes > free
    check(p, BCE(), fused(cuda_on_host, p, BCE()))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
def test_add_slabs(cuda_on_host, kind):
    """The second kernel: a sum in a fixed order, scaled, on top of what is there or not."""
    kernels = cuda_on_host.kernels()
    for count, size in ((1, 1), (7, 33), (19, 1000), (3, 0)):
        slabs, out = torch.randn(count, size, dtype=kind), torch.full((size,), 7.0, dtype=kind)
        kernels.add_slabs(slabs, out, None, False)
        torch.testing.assert_close(out, slabs.sum(0))
        kernels.add_slabs(slabs, out, torch.tensor(0.5, dtype=kind), True)
        torch.testing.assert_close(out, 1.5 * slabs.sum(0))


def test_chunks_of_rows_and_labels(cuda_on_host, monkeypatch):
    """Small budgets cut one pass into many launches, which add up to the same result."""
    monkeypatch.setattr(gpu_pass, "_SLAB_BYTES", 1)
    monkeypatch.setattr(gpu_pass, "_LAUNCH_ELEMENTS", 128 * 100)
    for kind in (torch.float32, torch.bfloat16):
        p = problem(Size(140, 400, 12, 9, bias=True), kind)
        check(p, BCE(), fused(cuda_on_host, p, BCE()))
        z = cuda_on_host.logits(p.x, p.layer)
        values, labels = cuda_on_host.topk(p.x, p.layer, 4)
        assert torch.equal(values, z.sort(1, descending=True)[0][:, :4])
        assert torch.equal(z.gather(1, labels), values)
        assert torch.equal(cuda_on_host.predict(p.x, p.layer, 0.5).to_dense().bool(), z > 0.5)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.bfloat16, torch.float32], ids=str)
def test_dense_targets_of_any_dtype_and_layout(cuda_on_host, monkeypatch, kind):
    """Converted a chunk at a time: the same numbers as from float64 at once."""
    monkeypatch.setattr(gpu_pass, "_DENSE_ELEMENTS", 9 * 64)
    p = problem(Size(9, 300, 12, 9, bias=True), torch.float64, dense=True)
    y = (p.targets > 0.5).to(kind)
    want = fused(cuda_on_host, p._replace(targets=y.double()), BCE())
    for given in (y, y.T.contiguous().T):
        got = fused(cuda_on_host, p._replace(targets=given), BCE())
        for a, b in zip(got[:4], want[:4], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_only_what_is_needed(cuda_on_host):
    p = problem(Size(5, 130, 4, 6, bias=True), torch.float32)
    full = fused(cuda_on_host, p, BCE())
    for needs in itertools.product((False, True), repeat=3):
        part = fused(cuda_on_host, p, BCE(), needs=needs)
        assert torch.equal(part.rows, full.rows)
        for needed, got, want in zip(needs, part.gradients, full.gradients, strict=True):
            assert (got is not None) == needed
            assert not needed or torch.equal(got, want)


def test_empty_batch(cuda_on_host):
    p = problem(Size(0, 130, 4, 6, bias=True), torch.float32)
    result = fused(cuda_on_host, p, BCE())
    assert result.rows.shape == (0,) and result.grad_x.shape == p.x.shape
    assert not result.grad_weight.any() and not result.grad_bias.any()
    assert cuda_on_host.logits(p.x, p.layer).shape == (0, 130)
    assert cuda_on_host.topk(p.x, p.layer, 3)[1].shape == (0, 3)
    assert len(cuda_on_host.predict(p.x, p.layer, 0.0)) == 0


def test_ties_nan_and_signed_zero(cuda_on_host):
    """Ties go to the lower label, NaN counts as highest, -0 equals 0; a NaN logit is above no threshold."""
    rows = torch.tensor([[0.0, -0.0, 1.0, float("nan"), 1.0, float("-inf"), float("inf"), 1.0]]).repeat(1, 20)
    p = problem(Size(1, rows.shape[1], -1, 1), torch.float32)
    layer = p.layer._replace(weight=torch.ones(rows.shape[1], 1), bias=rows[0])
    x = torch.zeros(1, 1)
    for m in (5, 32, 33, rows.shape[1]):
        values, labels = cuda_on_host.topk(x, layer, m)
        want, order = torch.sort(rows, dim=1, descending=True, stable=True)
        assert torch.equal(labels, order[:, :m])
        torch.testing.assert_close(values, want[:, :m], equal_nan=True)
    above = cuda_on_host.predict(x, layer, 0.0)
    assert above.indices.tolist() == (rows[0] > 0).nonzero()[:, 0].tolist()


def test_float16_range(cuda_on_host):
    """A mean over many terms underflows in float16, and a large pos_weight overflows it: gradients survive both."""
    p = problem(Size(4, 130, 4, 6), torch.float16)._replace(scale=torch.full((4,), 1e-9))
    check(p, BCE(), fused(cuda_on_host, p, BCE()))
    loss = BCE(pos_weight=torch.full((130,), 1e6), weight=torch.full((130,), 1e-3))
    p = p._replace(scale=torch.tensor([1.0, -1.0, 0.0, 2.0]))
    result = fused(cuda_on_host, p, loss)
    assert result.grad_x.dtype == torch.float32
    check(p._replace(x=p.x.float(), layer=p.layer._replace(weight=p.layer.weight.float())), loss, result, tf32=True)


def test_red_zones(cuda_on_host, monkeypatch):
    zones = RedZones()
    for kind in (torch.float32, torch.bfloat16):
        p = problem(Size(131, 197, 7, 9, bias=True), kind)
        layer = p.layer._replace(weight=zones.around(p.layer.weight), bias=zones.around(p.layer.bias))
        p = p._replace(x=zones.around(p.x), layer=layer)
        with monkeypatch.context() as patch:
            zones.install(patch)
            result = fused(cuda_on_host, p, BCE())
            cuda_on_host.topk(p.x, p.layer, 6)
            cuda_on_host.predict(p.x, p.layer, 0.0)
            z = cuda_on_host.logits(p.x, p.layer)
        assert torch.isfinite(z).all()
        check(p, BCE(), result)
    zones.check()


def test_autocast_stays_outside(cuda_on_host):
    p = problem(Size(5, 130, 4, 6, bias=True), torch.float32)
    plain = fused(cuda_on_host, p, BCE())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fused(cuda_on_host, p, BCE())
    assert all(torch.equal(a, b) for a, b in zip(plain[:4], cast[:4], strict=True))


def test_inputs_are_left_alone(cuda_on_host):
    p = problem(Size(5, 130, 4, 6, bias=True), torch.float32)
    before = [t.clone() for t in (p.x, p.layer.weight, p.layer.bias, p.targets.indices, p.targets.offsets)]
    fused(cuda_on_host, p, BCE())
    after = (p.x, p.layer.weight, p.layer.bias, p.targets.indices, p.targets.offsets)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_red_zones_notice_a_write():
    zones = RedZones()
    inside = zones.around(torch.zeros(3, 4))
    zones.check()
    inside.as_strided((1,), (1,), inside.storage_offset() + inside.numel()).fill_(0)
    with pytest.raises(AssertionError, match="outside its output"):
        zones.check()


def _add_slabs_on(kernels, device):
    slabs, out = torch.ones(2, 3), torch.zeros(3)
    addresses = dict(slabs=slabs.data_ptr(), out=out.data_ptr(), scale=0)
    kernels.add_slabs(device=device, stream=0, **addresses, count=2, size=3, wide=False, accumulate=False)
    assert out.tolist() == [2, 2, 2]


def test_a_launch_makes_no_context_on_another_device(host_kernels):
    """A thread that has used no GPU launches on device 1: nothing is made on device 0, and nothing stays current."""
    shim = ctypes.CDLL(host_kernels.__file__)

    def launch(current):
        before = shim.shim_contexts()
        shim.shim_set_context(current)
        _add_slabs_on(host_kernels, 1)
        return shim.shim_contexts() & ~before, shim.shim_context()

    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(launch, 0).result() == (0b10, 0)
        assert fresh.submit(launch, 3).result() == (0, 3)  # device 2 was current


def test_shared_memory_is_allowed_once_per_device(host_kernels):
    """The setting belongs to the kernel on a device: set at every launch it would race between threads."""
    shim = ctypes.CDLL(host_kernels.__file__)
    for device in (2, 3):
        before = shim.shim_attributes_set()
        for _ in range(3):
            _add_slabs_on(host_kernels, device)
        assert shim.shim_attributes_set() == before + 1
