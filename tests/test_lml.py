"""The LML projection and its negative log-likelihood: exact roots, stable gradients, every dtype and shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import random_sets
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import expit

import sigkernels as sk
from sigkernels import backends
from sigkernels.functional import lml, lml_nll
from sigkernels.ops.lml import _lml, _lml_nll

INF = math.inf
BACKENDS = [name for name in ("torch", "cpu") if name in sk.available_backends()]


def oracle(z: torch.Tensor, k: int) -> torch.Tensor:
    """y by scipy's root finder, float64, row by row."""
    rows = []
    for row in z.double().numpy():
        prior = math.log(k / (len(row) - k))
        nu = brentq(
            lambda v, row=row: expit(row + v).sum() - k, prior - row.max() - 1, prior - row.min() + 1, xtol=1e-14
        )
        rows.append(torch.from_numpy(expit(row + nu)))
    return torch.stack(rows)


def implicit(z: torch.Tensor, k: int) -> torch.Tensor:
    """y in plain torch, differentiable by autograd: one Newton step from the root carries the implicit derivative."""
    n = z.shape[-1]
    low = high = math.log(k / (n - k))
    low, high = low - z.detach().amax(-1), high - z.detach().amin(-1)
    for _ in range(200):
        middle = (low + high) / 2
        above = torch.sigmoid(z.detach() + middle[..., None]).sum(-1) > k
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    s = torch.sigmoid(z + low[..., None])
    nu = low - (s.sum(-1) - k) / (s * (1 - s)).sum(-1).detach()
    return torch.sigmoid(z + nu[..., None])


CASES = {
    "few of many": (lambda: torch.randn(3, 501), 4),
    "wide": (lambda: torch.randn(3, 501) * 30, 4),
    "most": (lambda: torch.randn(3, 64) * 3, 63),
    "two": (lambda: torch.randn(5, 2) * 5, 1),
    "half": (lambda: torch.randn(2, 33), 16),
    "equal": (lambda: torch.full((2, 77), 3.25), 5),
    "heavy tails": (lambda: torch.randn(4, 97) / torch.rand(4, 97).sub(0.5), 7),
    "saturated": (lambda: torch.where(torch.arange(99) < 9, 30.0, -30.0) + torch.randn(2, 99), 9),
    "one too many": (lambda: torch.where(torch.arange(99) < 10, 40.0, -40.0) + torch.randn(2, 99), 9),
    "huge": (lambda: torch.randn(2, 50) * 1e4, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_root(device, name):
    make, k = CASES[name]
    z = make()
    y = lml(z.to(device), k).cpu()
    want = oracle(z, k)
    assert (y.double() - want).abs().max() <= 2e-7 * want.max()
    assert ((y.double().sum(1) - k).abs() <= 1e-6 * k).all()
    y64 = lml(z.double().to(device), k).cpu()
    assert (y64 - want).abs().max() <= 1e-12
    assert ((y64.sum(1) - k).abs() <= 1e-13 * k * z.shape[1] ** 0.5).all()


def test_sum_at_a_hundred_thousand_labels(device):
    z = torch.randn(2, 100_000, device=device) * 2
    for k in (1, 50, 5000):
        assert ((lml(z, k).double().sum(1) - k).abs() <= 1e-6 * k).all()


@given(
    z=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=40),
    k=st.integers(1, 39),
)
def test_properties(z, k):
    z = torch.tensor(z)
    k = 1 + (k - 1) % (len(z) - 1)
    for name in BACKENDS:
        with sk.backend(name):
            y, shifted = lml(z, k), lml(z + 7.5, k)
        assert ((y >= 0) & (y <= 1)).all()
        assert abs(y.double().sum().item() - k) <= 1e-6 * k
        assert (y[torch.argsort(z)].diff() >= 0).all()  # the projection keeps the order of the logits
        assert torch.allclose(shifted, y, atol=1e-4)  # a shift of all logits changes nothing


def test_small_y_keep_their_relative_precision(device):
    z = (torch.randn(2, 300) * 12).to(device)
    y, want = lml(z, 5).double().cpu(), lml(z.double(), 5).cpu()
    seen = want > 1e-30
    assert ((y - want).abs()[seen] <= 1e-6 * want[seen]).all()


def test_gradients_match_the_implicit_derivative(device):
    for name, (make, k) in CASES.items():
        if name in ("huge", "saturated", "one too many"):  # there 1-y rounds to 0 in the comparison itself
            continue
        z = make().double()
        mine, theirs = z.clone().to(device).requires_grad_(), z.clone().requires_grad_()
        up = torch.randn_like(z)
        lml(mine, k).backward(up.to(device))
        implicit(theirs, k).backward(up)
        size = theirs.grad.abs().max().clamp(min=1e-3)
        assert (mine.grad.cpu() - theirs.grad).abs().max() <= 1e-9 * size, name
        single = make().to(device).requires_grad_()
        torch.manual_seed(1)
        lml(single, k).backward(torch.ones_like(single))
        assert single.grad.abs().max() <= 1e-5, name  # Σy is constant


def test_gradcheck(device):
    z = torch.randn(2, 6, dtype=torch.float64, device=device, requires_grad=True)
    sets = [[0, 4], [2]]
    assert torch.autograd.gradcheck(lambda z: lml(z, 2), z)
    assert torch.autograd.gradgradcheck(lambda z: lml(z, 2), z)
    nll = lambda z: lml_nll(z, sets, 2, reduction="none")  # noqa: E731
    assert torch.autograd.gradcheck(nll, z)
    assert torch.autograd.gradgradcheck(nll, z)


def test_saturated_rows_have_exact_gradients(device):
    """y is 0 or 1 to the last bit of float32; h = y(1-y) from y would be 0."""
    z = torch.tensor([[20.0, 20.5, -20.0, -21.0]], device=device)
    up = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device)
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaf = z.detach().clone().to(dtype).requires_grad_()
        lml(leaf, 2).backward(up.to(dtype))
        grads.append(leaf.grad.double().cpu())
    assert (grads[1] != 0).all()
    assert ((grads[0] - grads[1]).abs() <= 1e-5 * grads[1].abs().max()).all()
    leaf = (z.detach() * 100).requires_grad_()
    lml(leaf, 2).backward(up)
    assert (leaf.grad == 0).all()  # every h underflows: 0, not NaN


def test_infinite_and_broken_logits(device):
    z = torch.tensor(
        [
            [INF, 0.0, 1.0, -INF],
            [INF, INF, INF, 0.0],
            [-INF, -INF, -INF, 2.0],
            [math.nan, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0],
            [INF, INF, 3.0, 0.0],
            [1.0, 2.0, -INF, -INF],
        ],
        device=device,
        requires_grad=True,
    )
    y = lml(z, 2)
    y.square().sum().backward()
    y = y.detach().cpu()
    assert y[0, 0] == 1 and y[0, 3] == 0
    assert y[0, 1:3].tolist() == pytest.approx([1 - expit(0.5), expit(0.5)], rel=1e-6)
    assert y[1].isnan().all()  # more are forced than k
    assert y[2].isnan().all()  # fewer are allowed than k
    assert y[3].isnan().all()
    assert y[4].tolist() == [0.5] * 4
    assert y[5].tolist() == [1, 1, 0, 0] and y[6].tolist() == [1, 1, 0, 0]
    grad = z.grad.cpu()
    assert grad[[0, 4, 5, 6]].isfinite().all() and grad[1:4].isnan().all()
    assert grad[0, 0] == 0 and grad[0, 3] == 0
    losses = lml_nll(z.detach(), [[0]] * len(z), 2, "none").cpu()
    assert losses.isnan().tolist() == [False, True, True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    z = (torch.randn(3, 200) * 3).to(device, dtype).requires_grad_()
    wide = z.detach().double().requires_grad_()
    up = torch.randn(3, 200).to(device, dtype)
    y = lml(z, 5)
    y.backward(up)
    want = lml(wide, 5)
    want.backward(up.double())
    eps = torch.finfo(dtype).eps
    assert y.dtype == dtype and z.grad.dtype == dtype
    # each result is rounded once: to half a unit in the last place
    assert ((y.double() - want).abs() <= 0.5001 * eps * want + 1e-7).all()
    assert ((z.grad.double() - wide.grad).abs() <= eps * wide.grad.abs() + 1e-7).all()
    loss = lml_nll(z, random_sets(3, 200).to(device), 5)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(lml_nll(wide, random_sets(3, 200).to(device), 5).item(), rel=1e-5)


def test_shapes(device):
    z = torch.randn(2, 3, 4, 30, device=device)
    y = lml(z, 3)
    assert y.shape == z.shape
    assert torch.equal(y[1, 2, 3], lml(z[1, 2, 3], 3))
    assert torch.equal(lml(z.transpose(0, 2), 3), y.transpose(0, 2))  # not contiguous
    assert lml(z[:0], 3).shape == (0, 3, 4, 30)
    sets = [[1], [], [2, 3]]
    flat = lml_nll(z[0, :, 0], sets, 3, reduction="none")
    assert flat.shape == (3,)
    assert lml_nll(z[0, 0, 0], [[1]], 3).item() == pytest.approx(flat[0].item(), rel=1e-6)
    assert lml_nll(z[:0, 0, 0], [], 3, reduction="sum").item() == 0


def test_every_label_is_chosen(device):
    z = torch.randn(2, 5, device=device, requires_grad=True)
    y = lml(z, 5)
    y.sum().backward()
    assert torch.allclose(y, torch.full_like(y, 1 - 1e-5)) and (z.grad == 0).all()
    z.grad = None
    loss = lml_nll(z, [[1, 2], []], 5, reduction="none")
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-2 * math.log1p(-1e-5), 0.0]) and (z.grad == 0).all()


def test_nll_is_the_log_of_the_projection(device):
    z = (torch.randn(4, 60, dtype=torch.float64) * 3).to(device).requires_grad_()
    sets = random_sets(4, 60).to(device)
    dense = sets.to_dense(torch.float64)
    up = torch.rand(4, dtype=torch.float64, device=device) + 0.5
    (ours,) = torch.autograd.grad(lml_nll(z, sets, 4, "none"), z, up)
    naive = -(dense * lml(z, 4).log()).sum(1)
    (want,) = torch.autograd.grad(naive, z, up)
    assert torch.allclose(lml_nll(z, sets, 4, "none"), naive)
    assert torch.allclose(ours, want, atol=1e-12)
    soft = torch.rand(4, 60, dtype=torch.float64, device=device) * dense
    assert torch.allclose(lml_nll(z, soft, 4, "none"), -(soft * lml(z, 4).log()).sum(1))
    assert torch.allclose(lml_nll(z, sets, 4), naive.mean())
    assert torch.allclose(lml_nll(z, sets, 4, "sum"), naive.sum())


def test_nll_is_finite_where_y_underflows(device):
    z = torch.tensor([[500.0, 400.0, -500.0]], device=device, requires_grad=True)
    loss = lml_nll(z, [[2]], 1)
    loss.backward()
    assert loss.item() == pytest.approx(950.0, rel=1e-6)  # ν = -450 balances the first two
    assert z.grad.isfinite().all() and z.grad[0, 2].item() == pytest.approx(-1)


def test_module():
    layer = sk.LML(3)
    z = torch.randn(2, 9)
    assert torch.equal(layer(z), lml(z, 3)) and "k=3" in repr(layer)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: lml(torch.randn(4), 0), ValueError, "k must be at least 1"),
        (lambda: lml(torch.randn(4), 5), ValueError, "k = 5 .* n = 4"),
        (lambda: lml(torch.randn(4), 1.5), TypeError, "whole number"),
        (lambda: lml(torch.arange(4), 1), TypeError, "floating point"),
        (
            lambda: lml(torch.zeros(4).to(torch.float8_e5m2), 1),
            TypeError,
            "z must be floating point.*float8_e5m2.*float",
        ),
        (lambda: lml(torch.eye(4).to_sparse(), 1), TypeError, "z must be a dense tensor.*to_dense"),
        (lambda: lml([1.0, 2.0], 1), TypeError, "tensor"),
        (lambda: lml(torch.tensor(1.0), 1), ValueError, "dimension"),
        (lambda: sk.LML(-1), ValueError, "k must be at least 1"),
        (lambda: lml_nll(torch.randn(2, 4), [[1]], 2), ValueError, "1 label sets for 2 rows"),
        (lambda: lml_nll(torch.randn(2, 4), [[1], [4]], 2), ValueError, "label 4"),
        (lambda: lml_nll(torch.randn(2, 4), torch.full((2, 4), 2.0), 2), ValueError, "0, 1"),
        (lambda: lml_nll(torch.randn(2, 4), [[1], [2]], 2, "max"), ValueError, "reduction"),
        (lambda: sk.LinearHead(2, 4).loss(torch.randn(1, 2), [[1]], sk.LMLNLL(5)), ValueError, "k = 5 .* 4 labels"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_inputs_are_left_alone_and_runs_repeat(device):
    z = torch.randn(3, 50, device=device, requires_grad=True)
    before = z.detach().clone()
    first = torch.autograd.grad(lml(z, 3).square().sum(), z)[0]
    again = torch.autograd.grad(lml(z, 3).square().sum(), z)[0]
    assert torch.equal(z.detach(), before) and torch.equal(first, again)
    y = lml(z, 3).square().sum()
    assert torch.equal(*(torch.autograd.grad(y, z, retain_graph=True)[0] for _ in range(2)))


def test_compiles_whole():
    z = torch.randn(3, 20, requires_grad=True)
    dense = torch.rand(3, 20)
    seen: list[str] = []

    def backend(graph, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def record(g, example):
            seen.extend(str(node.target) for node in g.graph.nodes)
            return make_boxed_func(g.forward)

        return aot_autograd(fw_compiler=record, bw_compiler=record)(graph, inputs)

    def step(z):
        return lml(z * 2, 3).square().sum() + lml_nll(z, dense, 3)

    whole = torch.compile(step, fullgraph=True, backend=backend)
    (got,) = torch.autograd.grad(whole(z), z)
    (want,) = torch.autograd.grad(step(z), z)
    assert torch.allclose(got, want)
    for name in ("lml.", "lml_backward.", "lml_nll.", "lml_nll_backward."):
        assert any(f"sigkernels.{name}" in target for target in seen), seen


def test_operators_are_registered_soundly():
    z = torch.randn(2, 7, requires_grad=True)
    sets = random_sets(2, 7)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(_lml.operator, (z, 3), test_utils=tests)
    torch.library.opcheck(_lml_nll.operator, (z, sets.indices, sets.offsets, None, 3), test_utils=tests)


def test_a_backend_without_a_kernel_is_refused_or_passed_over(monkeypatch):
    cuda = backends.by_name("cuda")
    monkeypatch.setattr(backends, "_unavailable", lambda name: "no" if name == "triton" else None)
    monkeypatch.setattr(cuda, "devices", lambda: ("cpu",))
    with sk.backend("cuda"), pytest.raises(RuntimeError, match=r"no CUDA C.. kernel for LML; use 'triton'"):
        sk.functional.lml(torch.randn(2, 9), 3)
    monkeypatch.setitem(backends._AUTO, "cpu", ("cuda", "triton", "torch"))
    assert backends.select(torch.randn(2, 9), "lml").name == "torch"


def test_k_may_be_any_integer():
    z = torch.randn(2, 6)
    for k in (np.int64(2), torch.tensor(2)):
        assert torch.equal(lml(z, k), lml(z, 2))
        assert sk.LML(k).k == 2 and type(sk.LML(k).k) is int
