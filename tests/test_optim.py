"""Fused optimizers: the same weights as a plain loss and torch's own optimizers, in every dtype and rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_cases import HEADS, ISAS, KINDS, E, N, bf16_head, close, label_parameters, random_targets, train
from torch import Tensor

import sigkernels as sk
from sigkernels.backends.torch_update import random_bits
from sigkernels.optim import random_key


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", HEADS)
def test_same_weights_as_an_ordinary_optimizer(form: str, kind: str, backend: str) -> None:
    torch.manual_seed(0)
    ours = HEADS[form]()
    theirs = copy.deepcopy(ours)
    fused, plain = KINDS[kind]
    with sk.backend(backend):
        got = train(ours, fused(ours), True)
        want = train(theirs, plain(label_parameters(theirs)), False)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(a, b)
    for a, b in zip(got, want, strict=True):
        close(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_rows_than_a_chunk(kind: str, dtype: torch.dtype) -> None:
    ours = sk.DFTHead(E, N, k=3, slack=7, bias=True, dtype=dtype)
    theirs = copy.deepcopy(ours)
    fused, plain = KINDS[kind]
    train(ours, fused(ours), True, rows=301, steps=2)
    train(theirs, plain(label_parameters(theirs)), False, rows=301, steps=2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    "given",
    [
        {"loss": sk.Focal()},
        {"loss": sk.Asymmetric(), "reduction": "sum"},
        {"loss": sk.BCE(weight=torch.rand(N), pos_weight=torch.rand(N) * 5, label_smoothing=0.1)},
        {"targets": torch.rand(6, N)},
        {"unknown": [[1, 2], [], [0], [5], [], [N - 1]]},
    ],
    ids=["focal", "asymmetric sum", "weights", "dense", "unknown"],
)
def test_losses_and_targets(given: dict[str, Any], backend: str) -> None:
    lr = 0.05 if given.get("reduction") == "sum" else 20.0
    ours = sk.LinearHead(E, N)
    theirs = copy.deepcopy(ours)
    h = torch.randn(6, E)
    targets = given.pop("targets") if "targets" in given else random_targets(6)
    with sk.backend(backend):
        opt = sk.optim.FusedSGD(ours, lr)
        a = ours(h, targets, update=opt, **given)
        b = theirs.loss(h, targets, **given)
    b.backward()
    torch.optim.SGD(theirs.parameters(), lr).step()
    close(a, b)
    close(ours.weight, theirs.weight)
    assert ours.bias is not None and theirs.bias is not None
    close(ours.bias, theirs.bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step by all, of codes and of bfloat16 too: one row fits a narrow kernel, 40 the wide one."""
    monkeypatch.setenv("SIGKERNELS_ISA", isa)
    for form, dtype, rows in (("dft", torch.float32, 40), ("codes", torch.float32, 1), ("linear", torch.bfloat16, 40)):
        torch.manual_seed(0)
        ours = HEADS[form](dtype=dtype)
        theirs = copy.deepcopy(ours)
        fused, _ = KINDS[kind]
        for head, backend in ((ours, "cpu"), (theirs, "torch")):
            with sk.backend(backend):
                train(head, fused(head), True, rows=rows, steps=1)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            if dtype == torch.bfloat16:  # where it multiplies pairs of bfloat16, gradients are rounded before the step
                assert (a - b).abs().mean() < 2**-6 * b.abs().mean()
            else:
                close(a, b)


def test_own_loss_goes_through_torch() -> None:
    class Squared(sk.ElementwiseLoss):
        def value(self, z: Tensor, y: Tensor) -> Tensor:
            return (z - y) ** 2

        def value_and_grad(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return (z - y) ** 2, 2 * (z - y)

    ours = sk.LinearHead(E, N)
    theirs = copy.deepcopy(ours)
    train(ours, sk.optim.FusedSGD(ours, 5.0), True, loss=Squared())
    train(theirs, torch.optim.SGD(theirs.parameters(), 5.0), False, loss=Squared())
    close(ours.weight, theirs.weight)


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(1, 300), s=st.integers(1, 70), rows=st.integers(1, 40), kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 99)
)  # fmt: skip
def test_any_shape(n: int, s: int, rows: int, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    ours = sk.LinearHead(s, n, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    h, y = torch.randn(rows, s, dtype=torch.float64), random_targets(rows, seed, n)
    fused, plain = KINDS[kind]
    a, b = fused(ours), plain(theirs.parameters())
    for _ in range(2):
        ours.loss(h, y, update=a).backward()
        a.step()
        theirs.loss(h, y).backward()
        b.step()
        b.zero_grad()
    close(ours.weight, theirs.weight, torch.float64)


# -- bfloat16 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest", "kahan"])
def test_backends_round_alike(kind: str, rounding: str) -> None:
    """The same random bits: all but a few entries, whose exact values differ by rounding of float32, are equal."""
    heads = []
    for backend in ("cpu", "torch"):
        head = bf16_head()
        opt = KINDS[kind][0](head)
        for group in opt.param_groups:
            group["rounding"] = rounding
        with sk.backend(backend):
            train(head, opt, True, steps=1)
        heads.append(head)
    same = (heads[0].weight == heads[1].weight).float().mean()
    assert same > 0.98
    torch.testing.assert_close(heads[0].weight, heads[1].weight, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_stochastic_rounding_is_unbiased(backend: str) -> None:
    """A weight decay far below half a unit in the last place: nearest rounding keeps every weight as it is."""
    decay, moved = 1e-4, {}
    for rounding in ("stochastic", "nearest"):
        head = sk.LinearHead(64, 2000, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            head.weight.fill_(1.171875)
        opt = sk.optim.FusedSGD(head, 1.0, weight_decay=decay, rounding=rounding, seed=3)
        with sk.backend(backend):  # x is 0: no gradient but the decay's
            head.loss(torch.zeros(1, 64, dtype=torch.bfloat16), [[]], update=opt)
        moved[rounding] = float((1.171875 - head.weight.detach().double()).mean())
        values = set(head.weight.unique().tolist())
        assert values == ({1.171875} if rounding == "nearest" else {1.171875, 1.171875 - 2**-7})
    step = 1.171875 * decay
    p = step / 2**-7  # the share of weights that go down
    error = 2**-7 * (p * (1 - p) / 128_000) ** 0.5
    assert abs(moved["stochastic"] - step) < 5 * error
    assert moved["nearest"] == 0


@pytest.mark.parametrize("fused", [sk.optim.FusedSGD, sk.optim.FusedAdamW])
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_weight_decay_does_not_vanish_in_bfloat16(fused: Any, rounding: str) -> None:
    head = sk.LinearHead(64, 300, bias=False, dtype=torch.bfloat16)
    before = head.weight.detach().double().norm()
    opt = fused(head, 1e-2, weight_decay=0.05, rounding=rounding)
    for _ in range(100):
        head.loss(torch.zeros(1, 64, dtype=torch.bfloat16), [[]], update=opt)
        opt.step()
    assert float(head.weight.detach().double().norm() / before) == pytest.approx((1 - 5e-4) ** 100, rel=2e-3)


def test_kahan_follows_float32() -> None:
    wide = sk.LinearHead(E, N).to(torch.bfloat16).float()
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    a, b = sk.optim.FusedSGD(wide, 1e-3), sk.optim.FusedSGD(narrow, 1e-3, rounding="kahan")
    h, y = torch.randn(6, E).to(torch.bfloat16), random_targets(6)
    for _ in range(50):
        wide.loss(h.float(), y, update=a, reduction="sum")
        narrow.loss(h, y, update=b, reduction="sum")
        a.step()
        b.step()
    exact = narrow.weight.float() + b.state[narrow.weight]["compensation"]
    error = (exact - wide.weight).norm() / wide.weight.norm()
    assert error < 2e-3
    assert (narrow.weight.float() - wide.weight).norm() / wide.weight.norm() < 4e-3


def test_same_bits_on_any_number_of_threads_and_again() -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            head = bf16_head(n=3001)
            opt = sk.optim.FusedAdamW(head, 0.01, seed=5)
            for step in range(2):
                h = torch.randn(16, E, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
                head.loss(h, random_targets(16, step, 3001), update=opt)
                opt.step()
            results.append(head.weight.detach().clone())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


def test_seed_and_step_change_the_bits() -> None:
    like = torch.zeros(50, 64)
    keys = {random_key(seed, step, index) for seed in range(4) for step in range(4) for index in range(2)}
    assert len(keys) == 32
    bits = torch.stack([random_bits(key, 0, like) & 0xFFFF for key in sorted(keys)]).double()
    spread = bits.std() / 65536
    assert abs(bits.mean() / 65536 - 0.5) < 0.01 and abs(spread - 12**-0.5) < 0.01
    flat = bits.flatten(1)
    correlation = torch.corrcoef(flat) - torch.eye(32)
    assert correlation.abs().max() < 0.1
    rows = torch.corrcoef((random_bits(7, 0, torch.zeros(200, 500)) & 0xFFFF).double())
    assert (rows - torch.eye(200)).abs().max() < 0.3


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**33))
def test_random_bits_fit_in_32(key: int, label: int) -> None:
    bits = random_bits(key, label, torch.zeros(3, 5))
    assert bits.min() >= 0 and bits.max() < 2**32
    assert torch.equal(random_bits(key, label + 1, torch.zeros(2, 5)), bits[1:])


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend,fused,dtype,share",
    [
        ("cpu", sk.optim.FusedSGD, torch.float32, 0.25),
        ("cpu", sk.optim.FusedAdagrad, torch.bfloat16, 0.25),
        ("torch", sk.optim.FusedSGD, torch.float32, 0.75),  # a few chunks of labels, whatever n is
    ],
)
def test_no_array_of_the_size_of_the_gradient(backend: str, fused: Any, dtype: torch.dtype, share: float) -> None:
    from sigkernels.memory import peak_bytes

    if backend not in sk.available_backends():
        pytest.skip("the compiled core is not built")
    n = 60_000
    head = sk.LinearHead(256, n, dtype=dtype)
    opt = fused(head, 1e-3)
    h, y = torch.randn(8, 256, dtype=dtype, requires_grad=True), random_targets(8, 0, n)

    def step() -> None:
        head.loss(h, y, update=opt).backward()
        opt.step()
        h.grad = None

    with sk.backend(backend):
        added = peak_bytes(step, repeats=1)
    if added is None:
        pytest.skip("peak memory is read from /proc of Linux, which is not here")
    assert added < share * n * 256 * dtype.itemsize
