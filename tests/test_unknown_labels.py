"""Losses with labels that are not annotated: the same as torch on the known entries alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from cases import random_sets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import sigkernels as sk
from sigkernels.backends import forced_name

N = 37


@dataclasses.dataclass(frozen=True, eq=False)
class Squared(sk.ElementwiseLoss):
    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return (z.sigmoid() - y).square()


LOSSES = [
    sk.BCE(),
    sk.BCE(weight=torch.linspace(0.1, 2, N).double(), pos_weight=3.0, label_smoothing=0.1),
    sk.BCE(weight=torch.linspace(0.1, 2, N).double()),
    sk.Focal(),
    sk.Asymmetric(),
    sk.Poly1BCE(),
    Squared(),
]


def masked(loss, z, y, unknown, reduction):
    """What torch makes of a mask, NaN logits included."""
    f = loss.at_labels(z).value(torch.where(unknown, 0.0, z), y).masked_fill(unknown, 0.0)
    if reduction == "none":
        return f.sum(1)
    return f.sum() / ((~unknown).sum() if reduction == "mean" else 1)


def head_of(kind, dtype=torch.float64):
    torch.manual_seed(0)
    if kind == "linear":
        return sk.LinearHead(9, N, dtype=dtype)
    return sk.DFTHead(30, N, k=3, slack=4, codes=16, bias=True, dtype=dtype)


def gradients(head, h, value):
    return torch.autograd.grad(value, [h, *head.parameters()])


def forms(y, unknown):
    """The same targets as sets, soft or not, and the unknown ones in every form."""
    sets, missing = sk.LabelSets.of(y.bool(), N), sk.LabelSets.of(unknown, N)
    nan = y.masked_fill(unknown, torch.nan)
    return [
        (sets, missing),
        (sets, unknown),
        (sets, missing.to_lists()),
        (y, missing),
        (y, unknown),
        (nan, unknown),
        (nan.numpy(), missing),
    ]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("kind", ["linear", "dft"])
def test_every_form_is_torch_with_a_mask(device, kind, loss):
    if torch.device(device).type != "cpu" or (forced_name() != "torch" and not loss.has_kernel):
        pytest.skip("refused by these kernels; torch does it")
    head = head_of(kind)
    h = (torch.randn(7, head.in_features).double() * 2).requires_grad_()
    y, unknown = (torch.rand(7, N) < 0.2).double(), torch.rand(7, N) < 0.3
    for (targets, missing), reduction in zip(forms(y, unknown), itertools.cycle(("mean", "none", "sum")), strict=False):
        upstream = torch.linspace(0.5, 2, 7).double() if reduction == "none" else torch.tensor(1.5).double()
        want = masked(loss, head(h), y, unknown, reduction)
        got = head.loss(h, targets, loss, reduction, unknown=missing)
        torch.testing.assert_close(got, want)
        want_grads = gradients(head, h, (want * upstream).sum())
        torch.testing.assert_close(gradients(head, h, (got * upstream).sum()), want_grads)


def test_logits_that_are_not_finite_say_nothing_where_they_are_unknown(device):
    if torch.device(device).type != "cpu":
        pytest.skip("refused by the GPU kernels; torch does it")
    weight = torch.randn(N, 3).double()
    weight[4], weight[9], weight[20] = torch.inf, torch.nan, 1e300
    weight.requires_grad_()
    x = torch.ones(5, 3).double()
    unknown = [[4, 9, 20]] * 5
    for targets in (random_sets(5, N), random_sets(5, N).to_dense(torch.float64)):
        for loss in (sk.BCE(), sk.Focal(), sk.Asymmetric(), sk.BCE(label_smoothing=0.1)):
            value = sk.functional.linear_loss(x, weight, targets, loss=loss, unknown=unknown)
            (grad,) = torch.autograd.grad(value, weight)
            assert bool(value.isfinite()) and bool(grad.isfinite().all())
            assert not grad[[4, 9, 20]].any()


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from(["sparse", "soft"]))
def test_what_the_unknown_labels_hold_does_not_matter(seed, batch, form):
    g = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(batch, 4, generator=g), torch.randn(N, 4, generator=g)
    unknown, y = torch.rand(batch, N, generator=g) < 0.4, torch.rand(batch, N, generator=g)
    y = (y < 0.3).float() if form == "sparse" else y
    values = []
    for fill in (0.0, 1.0):
        filled = y.masked_fill(unknown, fill)
        targets = sk.LabelSets.of(filled.bool(), N) if form == "sparse" else filled
        values.append(sk.functional.linear_loss(x, weight, targets, unknown=unknown))
    assert values[0].equal(values[1]) or bool(unknown.all())
    want = F.binary_cross_entropy_with_logits((x @ weight.T)[~unknown], y[~unknown])
    torch.testing.assert_close(values[0], want, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(device, dtype):
    if torch.device(device).type != "cpu":
        pytest.skip("refused by the GPU kernels; torch does it")
    head = head_of("dft", dtype)
    h = torch.randn(300, head.in_features, dtype=dtype, requires_grad=True)  # more than one chunk of rows
    sets, missing = random_sets(300, N), random_sets(300, N, most=20, seed=1)
    value = head.loss(h, sets, unknown=missing)
    value.backward()
    assert value.dtype == torch.float32 and h.grad.dtype == dtype
    z = head(h).double()
    want = masked(sk.BCE(), z, sets.to_dense(torch.float64), missing.to_dense(torch.bool), "mean")
    torch.testing.assert_close(value.double(), want, rtol=2e-3, atol=1e-5)


def test_gradcheck_and_operator():
    torch.manual_seed(1)
    x, weight, bias = (torch.randn(*shape).double().requires_grad_() for shape in ((3, 4), (11, 4), (11,)))
    sets, missing = random_sets(3, 11), random_sets(3, 11, seed=3)
    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(
            lambda *a, r=reduction: sk.functional.linear_loss(a[0], a[1], sets, a[2], reduction=r, unknown=missing),
            (x, weight, bias),
        )
    value = sk.functional.linear_loss(x, weight, sets, bias, unknown=missing)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        grad.sum().backward()


@pytest.mark.parametrize(("dense", "mask"), [(False, False), (True, True), (False, True), (True, False)])
def test_compiled(dense, mask):
    head = head_of("linear", torch.float32)
    h, sets, missing = torch.randn(4, 9), random_sets(4, N), random_sets(4, N, seed=5)
    targets, unknown = sets.to_dense() if dense else sets, missing.to_dense(torch.bool) if mask else missing

    def step(h, unknown):
        return head.loss(h, targets, sk.Focal(), unknown=unknown)

    value = torch.compile(step, fullgraph=True, backend="aot_eager")(h, unknown)
    value.backward()
    grad = head.weight.grad.clone()
    torch.testing.assert_close(value, step(h, unknown))
    head.zero_grad()
    step(h, unknown).backward()
    torch.testing.assert_close(grad, head.weight.grad)
    nan = sets.to_dense().masked_fill(missing.to_dense(torch.bool), torch.nan)
    with pytest.raises(ValueError, match=r"unknown=targets.isnan\(\)"):
        torch.compile(lambda h: head.loss(h, nan), backend="eager")(h)


def test_nothing_known_is_nan_and_nothing_unknown_changes_nothing():
    head, h, sets = head_of("linear"), torch.randn(4, 9).double(), random_sets(4, N)
    assert head.loss(h, sets, unknown=torch.ones(4, N, dtype=torch.bool)).isnan()
    assert head.loss(h, sets, reduction="sum", unknown=torch.ones(4, N, dtype=torch.bool)) == 0
    torch.testing.assert_close(head.loss(h, sets, unknown=[[]] * 4), head.loss(h, sets))
    both = head.loss(h, [[1], [], [], []], unknown=[[1], [], [], []])  # the mask wins
    torch.testing.assert_close(both, head.loss(h, [[]] * 4, unknown=[[1], [], [], []]))
    stacked = h.reshape(2, 2, 9), sets.to_dense().reshape(2, 2, N), sets.to_dense(torch.bool).reshape(2, 2, N)
    assert head.loss(*stacked[:2], reduction="none", unknown=stacked[2]).shape == (2, 2)
    torch.testing.assert_close(head(h, sets, unknown=[[2]] * 4), head.loss(h, sets, unknown=[[2]] * 4))


@pytest.mark.parametrize(
    "loss", [sk.SigmoidF1(), sk.LMLNLL(2), sk.SmoothTopKSVM(2)], ids=lambda loss: type(loss).__name__
)
def test_losses_of_columns_and_rows_refuse_by_name(loss):
    head, h, sets = head_of("linear"), torch.randn(2, 9).double(), random_sets(2, N)
    with pytest.raises(ValueError, match=f"{type(loss).__name__} is made of whole"):
        head.loss(h, sets, loss, unknown=[[1], []])


@pytest.mark.parametrize(
    ("targets", "unknown", "words"),
    [
        ([[0], [1]], [[0]], "1 label sets for 2 rows"),
        ([[0], [1]], [[0], [N]], "out of range"),
        (torch.zeros(2, N), torch.zeros(2, 3, dtype=torch.bool), "shape of the targets"),
        (torch.full((2, N), 2.0), [[0], []], r"\[0, 1\]"),
        (torch.zeros(2, N), [[0]], "1 label sets for 2 rows"),
    ],
)
def test_refused(targets, unknown, words):
    with pytest.raises(ValueError, match=words):
        head_of("linear").loss(torch.zeros(2, 9).double(), targets, unknown=unknown)
