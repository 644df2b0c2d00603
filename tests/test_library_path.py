"""The library path as an accelerator runs it: on meta tensors, where whoever looks at a value fails, and counted.

The numbers are those of the tests of each operation, which run the same walk on the CPU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sigkernels as sk
from sigkernels import losses
from sigkernels.backends import (
    LossCall,
    by_name,
    library_pass,
    library_scans,
    library_tables,
    library_walk,
    pointwise_torch,
)
from sigkernels.backends.interface import Backend
from sigkernels.labels import LabelSets
from sigkernels.layer import Layer, LayerMeta
from sigkernels.partial_labels import PartialTargets

META = torch.device("meta")
# n=8921 of the benchmarks is one chunk on any device that has an L2 cache of 32 MiB; the other shape is several.
ONE, MANY = (8921, 80, 50, 64), (200_000, 20, 64, 64)


@pytest.fixture(autouse=True)
def no_autocast_of_meta(monkeypatch):
    """There is none for meta tensors, and here it would do nothing."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())


class Launches(TorchDispatchMode):
    """Counts what a device would be given to do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.largest = 0  # bytes of what is laid together

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.name()).removeprefix("aten::").split(".")[0]
        if not func.is_view and name not in ("empty", "new_empty", "detach"):
            self.counts[name] += 1
        result = func(*args, **(kwargs or {}))
        if name == "cat":
            self.largest = max(self.largest, result.nbytes)
        return result


def call(n: int, k: int, s: int, batch: int, loss: Any, dtype: torch.dtype = torch.bfloat16, **kw: Any) -> LossCall:
    """A loss of label sets on a device where values cannot be read."""
    meta = LayerMeta(n, k, codes=kw.get("codes", 0))
    x = torch.empty(batch, meta.fixed_columns + s, dtype=dtype, device=META)
    layer = Layer(torch.empty(n, s, dtype=dtype, device=META), torch.empty(n, dtype=dtype, device=META), meta)
    indices, offsets = (torch.empty(size, dtype=torch.int64, device=META) for size in (5 * batch, batch + 1))
    needs = (True, True, kw.get("bias", False), False, False)
    return LossCall(
        x, layer, LabelSets.from_sorted(indices, offsets, n), loss, 1 / (batch * n), needs[: kw.get("of", 3)]
    )


@pytest.fixture
def narrow(monkeypatch):
    """Products as a GPU has them: 16-bit operands as they are, each a launch."""
    products: Counter[str] = Counter()

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        assert a.dtype == b.dtype == torch.bfloat16 and out.shape == (a.shape[0], b.shape[1])
        products["add" if add else "write"] += 1

    for module in (library_walk, library_pass):
        monkeypatch.setattr(module, "product", product)
    for module in (library_walk, library_scans, pointwise_torch):
        monkeypatch.setattr(module, "multiplies_narrow", lambda device: True)
    return products


@pytest.mark.parametrize("shape", [ONE, MANY], ids=["one chunk", "many chunks"])
def test_nothing_waits_for_the_device(shape):
    """Every loss in torch operations: sets, dense and unknown targets, weights, codes."""
    torch_backend = by_name("torch")
    n, _, _, batch = shape
    for loss in (losses.BCE(pos_weight=torch.empty(n, device=META)), losses.Focal(), losses.Poly1BCE()):
        made = torch_backend.fused_loss(call(*shape, loss, bias=True, codes=256))
        assert made.rows.shape == (batch,) and made.grad_weight.dtype == torch.bfloat16
    sets = call(*shape, losses.BCE())
    assert isinstance(sets.targets, LabelSets)
    unknown = torch.empty(5 * batch, dtype=torch.bool, device=META)
    torch_backend.fused_loss(sets._replace(targets=PartialTargets(sets.targets, unknown)))
    for loss in (losses.SigmoidF1(), losses.UnboundedF1(average="pooled")):
        torch_backend.column_loss(call(*shape, loss, of=5))
    torch_backend.topk(sets.x, sets.layer, 5)


def test_memory_is_of_a_chunk():
    """No tensor of the size of all logits is made, by any operation."""
    n, _, _, batch = MANY
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                largest = max(largest, made.numel())
            return made

    sets = call(*MANY, losses.BCE())
    with Sizes():
        by_name("torch").fused_loss(sets)
        by_name("torch").topk(sets.x, sets.layer, 5)
    assert largest < max(n * 64, batch * n // 8) + 1


def triton_launches(monkeypatch) -> tuple[Backend, Counter[str]]:
    """The backend, and a count of the kernels that it launches from now on."""
    pytest.importorskip("triton")
    from sigkernels.backends.triton import columns, pointwise

    kernels: Counter[str] = Counter()

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: kernels.update([self.name])

    for module, name in (
        (pointwise, "elementwise_kernel"), (pointwise, "finish_kernel"), (columns, "columns_kernel"), (columns, "mark_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Kernel(name))
    return by_name("triton"), kernels


def test_launches_of_a_column_loss(narrow, monkeypatch):
    """Nothing but products and kernels: eight of one chunk."""
    backend, kernels = triton_launches(monkeypatch)
    for shape, chunks in ((ONE, 1), (MANY, 4)):
        backend.column_loss(call(*shape, losses.SigmoidF1(), of=5))  # makes the tables
        narrow.clear(), kernels.clear()
        with Launches() as others:
            backend.column_loss(call(*shape, losses.SigmoidF1(), of=5))
        assert kernels == {"mark_kernel": chunks, "columns_kernel": chunks, "finish_kernel": 1} and not others.counts
        assert sum(narrow.values()) == 5 * chunks + (2 if chunks > 1 else 0)


def test_launches_of_a_step(narrow, monkeypatch):
    """Seven of one chunk; of many, four each, and two products and one kernel for all."""
    backend, kernels = triton_launches(monkeypatch)
    for shape, chunks in ((ONE, 1), (MANY, 4)):
        backend.fused_loss(call(*shape, losses.BCE()))  # makes the tables
        narrow.clear(), kernels.clear()
        with Launches() as others:
            result = backend.fused_loss(call(*shape, losses.BCE()))
        assert result.value is not None
        assert kernels == {"elementwise_kernel": chunks, "finish_kernel": 1}
        assert sum(narrow.values()) == 3 * chunks + 2 and not others.counts  # the kernel adds the DFT part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_launches_of_logits(dtype):
    """One product, for which the columns of a chunk are laid together; no array but the logits is larger than a chunk."""
    for (n, k, s, batch), chunks in ((ONE, 1), (MANY, {torch.bfloat16: 3, torch.float32: 5}[dtype])):
        p = call(n, k, s, batch, losses.BCE(), dtype)
        plain = Layer(torch.empty(n, s, dtype=dtype, device=META), None, LayerMeta(n, -1))
        for layer, want in (
            (p.layer, {"cat": chunks, "addmm": chunks}),
            (p.layer._replace(bias=None), {"cat": chunks, "mm": chunks}),
            (plain, {"mm": 1}),
        ):
            x = p.x[:, -layer.in_columns :]
            library_scans.logits(x, layer)  # makes the tables
            with Launches() as launches:
                z = library_scans.logits(x, layer)
            assert z.shape == (batch, n) and launches.counts == Counter(want)
            assert launches.largest <= 0.6 * 2**25  # of the cache
            library_scans.logits_adjoint(z, layer)
            with Launches() as launches:
                library_scans.logits_adjoint(z, layer)
            assert launches.counts == Counter(mm=1 + (layer.k >= 0))


def test_chunks_of_a_device():
    """All about as long, aligned, and none beyond the share of the cache."""
    for n, k, batch in (
        (8921, 80, 64),
        (20_000, 50, 256),
        (131_072, -1, 1024),
        (1_000_000, 50, 16),
        (1, 0, 1),
        (300, 2, 0),
    ):
        limits = library_tables.chunk_limits(torch.empty(0, device=META))
        size = library_tables._chunk_labels(LayerMeta(n, k), n, batch, torch.bfloat16, 6, limits)
        assert size == n or size % 128 == 0
        assert batch * (size - 128) * 6 <= limits[0]
        last = n - (-(-n // size) - 1) * size
        assert 0 < last <= size and (size == n or last > size - 128 * (n // size + 1))


def test_many_chunks_agree_with_one(monkeypatch):
    """Factors of the DFT against its columns, on the CPU in float64."""
    torch.manual_seed(0)
    n, k, s, batch = 3000, 9, 5, 4
    x = torch.randn(batch, 2 * k + 1 + s, dtype=torch.float64)
    weight = torch.randn(n, s, dtype=torch.float64)
    y = sk.LabelSets.from_lists([[1, 2999], [], [128], [127, 129]], n)
    results = []
    for labels in (4096, 128, 700):
        monkeypatch.setattr(library_tables, "_CPU_LABELS", (labels, labels))
        call_ = LossCall(x, Layer(weight, None, LayerMeta(n, k)), y, losses.BCE(), 0.1, (True, True, False))
        results.append(by_name("torch").fused_loss(call_))
    for result in results[1:]:
        for got, want in zip(result[:3], results[0][:3], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("adds", [False, True])
def test_products_of_narrow_operands(monkeypatch, adds):
    """What a GPU is asked for, and the same sums by whichever of its products there is."""
    asked = []

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        asked.append("mm")
        made = a.to(out_dtype) @ b.to(out_dtype)
        return made if out is None else out.copy_(made)

    def addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor) -> None:
        asked.append("addmm")
        assert c is out and out_dtype == out.dtype
        out.add_(a.to(out_dtype) @ b.to(out_dtype))

    a, b = torch.randn(3, 5).bfloat16(), torch.randn(5, 4).bfloat16()
    want = a.double() @ b.double()
    monkeypatch.setattr(library_walk, "multiplies_narrow", lambda device: True)
    monkeypatch.setattr(library_walk, "adds_narrow", lambda device: adds)
    out = torch.full((3, 4), torch.nan)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", mm)
        patch.setattr(torch, "addmm", addmm)
        library_walk.product(a, b, out)
        library_walk.product(a, b, out, add=True)
    assert asked == ["mm", "addmm" if adds else "mm"]
    torch.testing.assert_close(out.double(), 2 * want, rtol=1e-5, atol=1e-5)
    assert not library_walk._works(torch.mm, torch.device("cpu"))
