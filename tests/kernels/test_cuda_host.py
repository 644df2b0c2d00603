"""The CUDA kernels' own source, executed on the host: every dtype, loss and hard shape against float64.

Launchers, bindings and ``backends/cuda.py`` are the real ones too; only the GPU is a simulation (``shim/cuda_shim.h``).
"""

from __future__ import annotations

import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import sigkernels as sk
from sigkernels import backends
from sigkernels.backends import BackendError, LossCall, cuda
from sigkernels.losses import BCE, Asymmetric, Focal, SigmoidF1

from .problems import Size, check, error, problem
from .redzone import RedZones
from .toolchain import host_module

DTYPES = {"tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Every block shape (rows of a group) and way to copy rows of weight: 16 bytes, 8, 4, and one number at a time.
SIZES = {
    "aligned": Size(32, 160, 2, 64),
    "odd": Size(5, 301, 3, 13, bias=True),
    "prime, many rows": Size(131, 197, 2, 9),
    "rows in groups": Size(261, 67, -1, 6, bias=True),
    "DFT, rows in groups, odd": Size(270, 150, 2, 7),
    "one label": Size(1, 1, -1, 1, bias=True),
    "k=0": Size(3, 65, 0, 4),
    "no DFT": Size(70, 70, -1, 50, bias=True),
    "wide": Size(70, 170, 2, 100, bias=True),
    "widest": Size(133, 96, -1, 128, bias=True),
    "widest, rows in groups": Size(270, 67, 0, 124, bias=True),
    "wide, odd": Size(5, 131, 2, 67),
    "label range": Size(3, 4000, 20, 20, start=130, rows=200),
    "many features": Size(40, 4000, 80, 13, rows=96),
    "many features, more rows": Size(100, 4000, 86, 70, rows=96),
    "features that do not fit": Size(9, 9000, 100, 7, start=40, rows=70),
}


def prepare(cache: Path) -> None:
    host_module(cache)


@pytest.fixture(autouse=True)
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@torch.no_grad()
def fused(backend, p, loss, needs=None):
    needs = needs or (True, True, p.layer.bias is not None)
    result = backend.fused_loss(LossCall(p.x, p.layer, p.targets, loss, p.scale, needs))
    assert result.value is None  # rows have factors of their own
    return result


def agrees(p, loss, result):
    check(p, loss, result, tf32=p.x.dtype == torch.float32)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_fused_loss(cuda_on_host, dtype, name):
    p = problem(SIZES[name], dtype)
    agrees(p, BCE(), fused(cuda_on_host, p, BCE()))


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
def test_losses(cuda_on_host, name, dense):
    for kind in (torch.float32, torch.float16):
        p = problem(Size(37, 70, -1, 11, bias=True), kind, dense=dense)
        loss = LOSSES[name](70)
        agrees(p, loss, fused(cuda_on_host, p, loss))


def same_in_any_order(cuda_on_host, monkeypatch, p, loss) -> None:
    """Threads and blocks in any order give the same bits: no race has shown, no order is relied upon."""
    results = []
    for order in ("forward", "reverse", "random:1", "random:2"):
        monkeypatch.setenv("SHIM_ORDER", order)
        results.append(fused(cuda_on_host, p, loss)[:4])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_thread_order_does_not_matter(cuda_on_host, monkeypatch):
    for kind, loss in ((torch.bfloat16, BCE()), (torch.float32, Focal())):
        same_in_any_order(cuda_on_host, monkeypatch, problem(Size(40, 300, 2, 24, bias=True), kind), loss)


@pytest.mark.parametrize("processors", [1, 2, 40])
def test_any_number_of_blocks(cuda_on_host, monkeypatch, processors):
    """One block walks over several tiles; or there are more blocks than labels to share."""
    monkeypatch.setenv("SHIM_PROCESSORS", str(processors))
    cuda._sizes.cache_clear()
    for size in (Size(9, 500, 2, 13), Size(150, 290, -1, 33)):
        p = problem(size, torch.bfloat16)
        agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
    cuda._sizes.cache_clear()


def test_more_blocks_than_are_added_at_once(cuda_on_host, monkeypatch):
    """169 blocks; many rows go another way than few."""
    monkeypatch.setenv("SHIM_PROCESSORS", "200")
    cuda._sizes.cache_clear()
    for kind, rows in itertools.product(DTYPES.values(), (6, 129)):
        p = problem(Size(rows, 5400, 20, 4), kind)
        agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
    cuda._sizes.cache_clear()


@pytest.mark.parametrize("limit", [99, 163, 227])
def test_block_shapes_of_devices(cuda_on_host, monkeypatch, limit):
    """What fits into the shared memory of a block of sm_120, sm_80 and sm_90."""
    monkeypatch.setenv("SHIM_SHARED", str(limit * 1024))
    cuda._sizes.cache_clear()
    for kind in (torch.bfloat16, torch.float32):
        for size in (Size(140, 200, 2, 40, bias=True), Size(68, 130, 2, 100)):
            p = problem(size, kind)
            agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
    cuda._sizes.cache_clear()


DENSE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DENSE += [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def test_groups_and_launches(cuda_on_host, monkeypatch):
    """Rows in three groups, of one launch or of two."""
    monkeypatch.setenv("SHIM_SHARED", str(99 * 1024))
    cuda._sizes.cache_clear()
    for kind, size in ((torch.float32, Size(150, 70, 0, 100, bias=True)), (torch.bfloat16, Size(300, 70, 0, 66))):
        p = problem(size, kind)
        agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "rows_of_launch", lambda group, slack, blocks: 2 * group)
            cuda._sizes.cache_clear()
            agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
        cuda._sizes.cache_clear()


@pytest.mark.parametrize(
    ("kind", "rows", "slack", "inside"),
    [("bfloat16", 64, 50, 192), ("float16", 128, 50, 192), ("bfloat16", 129, 50, 0), ("tf32", 64, 50, 176), ("tf32", 65, 50, 0)],
)  # fmt: skip
def test_who_makes_the_coefficients(cuda_on_host, monkeypatch, kind, rows, slack, inside):
    """The kernel, of few rows and up to so many features; else a product before it."""
    dtype = DTYPES[kind]
    assert cuda._sizes(kind, rows, slack, 0).features == inside
    products = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **out: products.append(args) or product(*args, **out))
    p = problem(Size(rows, 9000, max(inside - 1, 6) // 2, slack, rows=64), dtype)
    agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
    assert len(products) == (not inside)


def test_rows_of_a_launch():
    """As many groups as have room for their slabs, and at least one."""
    assert cuda.rows_of_launch(256, 64, 132) == 2816
    assert cuda.rows_of_launch(64, 128, 132) * 128 * 132 * 4 <= 96 * 2**20
    assert cuda.rows_of_launch(256, 128, 10_000) == 256


def test_dense_targets_of_any_dtype_and_layout(cuda_on_host):
    """Read as they are: the same numbers as from float64."""
    p = problem(Size(9, 100, 2, 9, bias=True), torch.bfloat16, dense=True)
    want = fused(cuda_on_host, p._replace(targets=(p.targets > 0.5).double()), BCE())
    for kind in DENSE:
        y = (p.targets > 0.5).to(kind)
        for given in (y, y.T.contiguous().T, torch.cat([y, y], dim=1)[:, :100]):
            got = fused(cuda_on_host, p._replace(targets=given), BCE())
            assert all(torch.equal(a, b) for a, b in zip(got[:4], want[:4], strict=True)), kind


def test_labels_of_other_shards(cuda_on_host):
    """Sets hold positives just before the layer's labels and just behind them."""
    p = problem(Size(2, 1000, 3, 4, start=100, rows=200), torch.float16)
    for lists in ([[97, 99, 100, 131, 163, 299], [300, 301, 320]], [[98], list(range(90, 330))]):
        q = p._replace(targets=sk.LabelSets.from_lists(lists, 1000))
        check(q, BCE(), fused(cuda_on_host, q, BCE()))


def test_views(cuda_on_host):
    """x may be part of a wider tensor, at any alignment; weight and bias of longer ones."""
    p = problem(Size(9, 100, -1, 32, bias=True), torch.bfloat16)
    want = fused(cuda_on_host, p, BCE())
    for pad in (1, 2, 8):
        x = torch.nn.functional.pad(p.x, (pad, 3))[:, pad : pad + 32]
        weight = torch.nn.functional.pad(p.layer.weight.flatten(), (pad, 0))[pad:].view(100, 32)
        got = fused(cuda_on_host, p._replace(x=x, layer=p.layer._replace(weight=weight)), BCE())
        assert all(torch.equal(a, b) for a, b in zip(got[:4], want[:4], strict=True)), pad


def test_only_what_is_needed(cuda_on_host):
    for start in (0, 64):  # with a row of waves, and the last labels of a layer
        p = problem(Size(5, 130, 2, 6, bias=True, start=start, rows=66), torch.bfloat16)
        full = fused(cuda_on_host, p, BCE())
        for needs in itertools.product((False, True), repeat=3):
            part = fused(cuda_on_host, p, BCE(), needs=needs)
            assert torch.equal(part.rows, full.rows)
            for needed, got, want in zip(needs, part.gradients, full.gradients, strict=True):
                assert (got is not None) == needed
                assert not needed or torch.equal(got, want)


def test_empty(cuda_on_host):
    p = problem(Size(0, 130, 4, 6, bias=True), torch.float16)
    result = fused(cuda_on_host, p, BCE())
    assert result.rows.shape == (0,) and result.grad_x.shape == p.x.shape
    assert not result.grad_weight.any() and not result.grad_bias.any()
    assert {grad.dtype for grad in result.gradients} == {torch.float32}


def test_infinite_logits(cuda_on_host):
    """A logit at either end of the range costs nothing on the right side, infinity on the wrong one."""
    p = problem(Size(2, 4, -1, 1, bias=True), torch.float32, dense=True)
    layer = p.layer._replace(bias=torch.tensor([float("inf"), float("-inf")] * 2), weight=torch.zeros(4, 1))
    for dense in (False, True):
        y = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0]])
        targets = y if dense else sk.LabelSets.from_dense(y)
        result = fused(cuda_on_host, p._replace(layer=layer, targets=targets), BCE())
        assert result.rows.tolist() == [0, float("inf")]
        want = p.scale[1] * torch.tensor([0, -1.0, 0, 0])
        torch.testing.assert_close(result.grad_bias, want, rtol=2**-10, atol=0)


def test_small_losses_are_not_lost(cuda_on_host):
    """At a prior of one in a million most of the loss is in logarithms of 1 + 1e-6."""
    p = problem(Size(2, 3000, -1, 1, bias=True), torch.float32)
    layer = p.layer._replace(bias=torch.full((3000,), -13.8), weight=torch.zeros(3000, 1))
    result = fused(cuda_on_host, p._replace(layer=layer, targets=sk.LabelSets.from_lists([[], []], 3000)), BCE())
    want = 3000 * torch.nn.functional.softplus(torch.tensor(-13.8, dtype=torch.float32).double())
    assert error(result.rows, want.expand(2)) < 1e-6


def test_float16_range(cuda_on_host):
    """A mean over many terms underflows in float16, and a large pos_weight overflows it: gradients survive both."""
    p = problem(Size(4, 130, 2, 6), torch.float16)._replace(scale=torch.full((4,), 1e-9))
    agrees(p, BCE(), fused(cuda_on_host, p, BCE()))
    loss = BCE(pos_weight=torch.full((130,), 1e6), weight=torch.full((130,), 1e-3))
    p = p._replace(scale=torch.tensor([1.0, -1.0, 0.0, 2.0]))
    result = fused(cuda_on_host, p, loss)
    assert result.grad_x.dtype == torch.float32
    check(p._replace(x=p.x.float(), layer=p.layer._replace(weight=p.layer.weight.float())), loss, result, tf32=True)


def test_red_zones(cuda_on_host, monkeypatch):
    zones = RedZones()
    for kind in (torch.float32, torch.bfloat16):
        for s in (9, 32):
            p = problem(Size(70, 197, 2, s, bias=True), kind)
            layer = p.layer._replace(weight=zones.around(p.layer.weight), bias=zones.around(p.layer.bias))
            p = p._replace(x=zones.around(p.x), layer=layer)
            with monkeypatch.context() as patch:
                zones.install(patch)
                result = fused(cuda_on_host, p, BCE())
            agrees(p, BCE(), result)
    zones.check()


def test_inputs_are_left_alone(cuda_on_host):
    p = problem(Size(5, 130, 2, 6, bias=True), torch.float32)
    before = [t.clone() for t in (p.x, p.layer.weight, p.layer.bias, p.targets.indices, p.targets.offsets)]
    fused(cuda_on_host, p, BCE())
    after = (p.x, p.layer.weight, p.layer.bias, p.targets.indices, p.targets.offsets)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_refusals(cuda_on_host):
    """By name, with what does it instead; a forced backend does not hand over to another one."""
    with sk.backend("cuda"):
        for size, kind, why in (
            (Size(2, 130, -1, 129), torch.bfloat16, "1 to 128 slack columns, not 129"),
            (Size(2, 130, 2, 0), torch.bfloat16, "1 to 128 slack columns, not 0"),
            (Size(2, 130, 60, 4), torch.bfloat16, "more than rank"),
            (Size(2, 130, -1, 4), torch.float64, "not torch.float64"),
        ):
            p = problem(size, kind)
            with pytest.raises(BackendError, match=rf"backend 'cuda' .*{why}.*; use 'triton', 'torch' or 'auto'"):
                fused(cuda_on_host, p, BCE())
        x, weight = torch.randn(2, 4), torch.randn(9, 4)
        for call, what in (
            (lambda: sk.functional.linear_topk(x, weight, 2), "topk"),
            (lambda: sk.functional.linear_loss(x, weight, [[1], []], loss=SigmoidF1()), "column losses"),
        ):
            with pytest.raises(
                BackendError, match=rf"no CUDA C\+\+ kernel for {what}; use 'triton', 'torch' or 'auto'"
            ):
                call()
        torch.set_float32_matmul_precision("highest")
        with pytest.raises(BackendError, match="float32 where torch allows tf32"):
            sk.functional.linear_loss(x, weight, [[1], []])


def test_public_functions(cuda_on_host):
    """From the outside, forward and backward."""
    assert backends.by_name("cuda") is cuda_on_host
    x, weight = torch.randn(5, 4).bfloat16().requires_grad_(), torch.randn(70, 4).bfloat16()
    losses = []
    for name in ("cuda", "torch"):
        with sk.backend(name):
            losses.append(sk.functional.linear_loss(x, weight, [[1, 2], [69], [], [3], [1]]))
    grads = [torch.autograd.grad(loss, x)[0] for loss in losses]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert error(grads[0], grads[1].double()) < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_on_a_device(dtype, dense):
    """The same shapes and losses on a GPU."""
    backends._unavailable.cache_clear()  # of what the simulation left there
    if (reason := backends.backend_status()["cuda"]) is not None:
        pytest.skip(reason)
    for loss in (BCE(), BCE(pos_weight=3.0, label_smoothing=0.1), Focal(), Asymmetric()):
        for size in SIZES.values():
            p = problem(size, dtype, dense)
            layer = p.layer._replace(
                weight=p.layer.weight.cuda(), bias=None if p.layer.bias is None else p.layer.bias.cuda()
            )
            there = p._replace(x=p.x.cuda(), layer=layer, targets=p.targets.to("cuda"), scale=p.scale.cuda())
            result = fused(backends.by_name("cuda"), there, loss)
            agrees(p, loss, type(result)(*(None if part is None else part.cpu() for part in result)))


def _finish_on(kernels, device):
    """The smallest launch: no slabs, one row."""
    sums, totals, rows = torch.ones(2, 1), torch.ones(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    numbers = dict(x_stride=1, batch=1, labels=33, slack=1, block_labels=32, blocks=2, dense_type="")
    numbers |= dict(scale=1.0, row_sums=sums.data_ptr(), totals=totals.data_ptr())
    fields = cuda.FlashFields(**dict.fromkeys(cuda.FlashFields._fields, 0) | numbers)
    flash = kernels.Flash("bfloat16", BCE().kernel_params()[: len(cuda.LOSS_FIELDS)], fields)
    kernels.finish(
        device, 0, flash, grad_x=0, grad_features=0, features=0, stride=0, wide=False, rows=rows.data_ptr(), value=0
    )
    assert rows.tolist() == [2]


def test_fields_are_handed_over_in_their_order(host_kernels):
    assert cuda.FlashFields._fields == host_kernels.FLASH_FIELDS and host_kernels.LOSS_FIELDS == cuda.LOSS_FIELDS
    loss = BCE().kernel_params()[: len(cuda.LOSS_FIELDS)]
    with pytest.raises(ValueError, match="all their fields"):
        host_kernels.Flash("bfloat16", loss, (0,) * 5)


def test_a_launch_makes_no_context_on_another_device(host_kernels):
    """A thread that has used no GPU launches on device 1: nothing is made on device 0, and nothing stays current."""
    shim = ctypes.CDLL(host_kernels.__file__)

    def launch(current):
        before = shim.shim_contexts()
        shim.shim_set_context(current)
        _finish_on(host_kernels, 1)
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
            _finish_on(host_kernels, device)
        assert shim.shim_attributes_set() == before + 1
