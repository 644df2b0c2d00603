"""Focal and asymmetric loss on every backend: formulas, gradients, settings, hard numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from cases import assert_no_worse, dense_loss, problem, public_loss, random_sets

import sigkernels as sk

LOSSES = {
    "focal": sk.Focal(),
    "focal unweighted": sk.Focal(alpha=None),
    "focal gamma 0": sk.Focal(gamma=0.0, alpha=None),
    "focal gamma 0.5": sk.Focal(gamma=0.5, alpha=0.9),
    "asl": sk.Asymmetric(),
    "asl detached": sk.Asymmetric(detach_focus=True),
    "asl fractional": sk.Asymmetric(gamma_neg=2.5, gamma_pos=0.5, clip=0.2),
    "asl plain": sk.Asymmetric(gamma_neg=0, gamma_pos=0, clip=0),
    "asl gamma 1": sk.Asymmetric(gamma_neg=1, gamma_pos=0, clip=0.05),
}


def focal_as_published(z, y, gamma=2.0, alpha=0.25):
    """The formula of the paper as vision libraries write it: from probabilities."""
    p = torch.sigmoid(z)
    ce = F.binary_cross_entropy_with_logits(z, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    f = ce * (1 - p_t) ** gamma
    return (alpha * y + (1 - alpha) * (1 - y)) * f


def asl_as_published(z, y, gamma_neg=4.0, gamma_pos=1.0, clip=0.05, eps=1e-8, detach=True):
    """The formula as its authors' code evaluates it."""
    p = torch.sigmoid(z)
    q = (1 - p + clip).clamp(max=1)
    log = y * p.clamp(min=eps).log() + (1 - y) * q.clamp(min=eps).log()
    focus = (1 - (p * y + q * (1 - y))) ** (gamma_pos * y + gamma_neg * (1 - y))
    return -log * (focus.detach() if detach else focus)


def compare(p, targets, loss, reduction, dtype):
    truth, eager = p.to(torch.float64), p.to(dtype)
    value = public_loss(p, targets, loss, reduction)
    up = torch.rand_like(value) + 0.5
    value.backward(up)
    exact = dense_loss(truth, targets, loss, reduction)
    exact.backward(up.double())
    rough = dense_loss(eager, targets, loss, reduction)
    rough.backward(up.to(rough.dtype))
    assert_no_worse(value, rough, exact, dtype, f"{reduction} loss")
    for name, ours, own, want in zip(("x", "weight", "bias"), p.grads(), eager.grads(), truth.grads(), strict=False):
        assert_no_worse(ours, own, want, dtype, f"{reduction} grad_{name}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["focal", "asl"])
@pytest.mark.parametrize("kind", ["dft", "linear"])
def test_every_dtype_and_reduction(device, kind, name, dtype):
    p = problem(97, 4 if kind == "dft" else -1, 9, 5, device=device, dtype=dtype, bias=kind == "linear")
    for reduction in ("mean", "sum", "none"):
        compare(p, p.targets, LOSSES[name], reduction, dtype)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", ["sets", "soft"])
def test_settings(device, name, form):
    n = 131
    loss = LOSSES[name]
    for weighted in (False, True):
        if weighted:
            settings = {n: v for n, v in vars(loss).items() if n not in ("weight", "pos_weight")}
            weight, pos_weight = torch.rand(n, device=device) + 0.5, torch.rand(n, device=device) * 3
            loss = type(loss)(**settings, weight=weight, pos_weight=pos_weight)
        p = problem(n, 6, 5, 8, device=device)
        targets = p.targets if form == "sets" else torch.rand(8, n, device=device)
        compare(p, targets, loss, "sum", torch.float32)


@pytest.mark.parametrize("name", LOSSES)
def test_closed_form_gradient_is_the_derivative(name):
    z = (torch.randn(4, 50, dtype=torch.float64) * 4).requires_grad_()
    y = torch.rand(4, 50, dtype=torch.float64)
    f, g = LOSSES[name].value_and_grad(z.detach(), y)
    reference = LOSSES[name].value(z, y)
    (want,) = torch.autograd.grad(reference.sum(), z)
    assert torch.allclose(f, reference.detach(), rtol=1e-13, atol=1e-15)
    assert torch.allclose(g, want, rtol=1e-12, atol=1e-15)


def test_published_formulas():
    z = (torch.randn(5, 40, dtype=torch.float64) * 3).requires_grad_()
    y = (torch.rand(5, 40) < 0.3).double()
    pairs = {
        "focal": (sk.Focal(), focal_as_published(z, y)),
        "asl": (sk.Asymmetric(), asl_as_published(z, y, detach=False)),
        "asl detached": (sk.Asymmetric(detach_focus=True), asl_as_published(z, y)),
    }
    for name, (ours, published) in pairs.items():
        value = ours.value(z, y)
        assert torch.allclose(value, published, rtol=1e-9, atol=1e-12), name
        grads = [torch.autograd.grad(f.sum(), z, retain_graph=True)[0] for f in (value, published)]
        assert torch.allclose(*grads, rtol=1e-9, atol=1e-12), name


def test_where_we_differ_from_published_code():
    """Exact gradient by default (theirs is detached), and no loss of precision where σ is 0 or 1 to the last bit."""
    z = torch.tensor([[0.5]], requires_grad=True)
    y = torch.zeros(1, 1)
    exact, theirs = (
        torch.autograd.grad(f.sum(), z)[0].item() for f in (sk.Asymmetric().value(z, y), asl_as_published(z, y))
    )
    assert exact != pytest.approx(theirs, rel=0.1)
    z = torch.tensor([[20.0]], requires_grad=True)
    y = torch.ones(1, 1)
    value, published = sk.Focal(gamma=1, alpha=None).value(z, y), focal_as_published(z, y, gamma=1, alpha=0.5) * 2
    assert value.item() == pytest.approx(math.exp(-40), rel=1e-4)
    assert published.item() == 0.0  # 1 - p_t has cancelled


def test_gamma_zero_is_bce(device):
    p = problem(60, 3, 4, 6, device=device)
    bce, focal, asl = (
        public_loss(p, p.targets, loss, "mean")
        for loss in (sk.BCE(), sk.Focal(gamma=0, alpha=None), sk.Asymmetric(0, 0, clip=None, eps=1e-30))
    )
    assert focal.item() == pytest.approx(bce.item(), rel=1e-6)
    assert asl.item() == pytest.approx(bce.item(), rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_extreme_logits_are_finite(device, name, dtype):
    """Logits up to ±6e4 through a weight of one column."""
    weight = torch.tensor([[1.0], [30.0], [-30.0], [6e4], [-6e4], [0.0]], device=device).to(dtype).requires_grad_()
    x = torch.tensor([[1.0], [-1.0]], device=device).to(dtype).requires_grad_()
    for sets in ([[], []], [[0, 1, 2, 3, 4, 5]] * 2):
        value = sk.functional.linear_loss(x, weight, sets, loss=LOSSES[name])
        value.backward()
        assert value.isfinite() and x.grad.isfinite().all() and weight.grad.isfinite().all()
        x.grad = weight.grad = None


def test_no_state_and_no_grad_mode_left_behind(device):
    loss = sk.Asymmetric(detach_focus=True)
    p = problem(40, 2, 3, 4, device=device)
    before = dict(vars(loss))
    assert torch.is_grad_enabled()
    public_loss(p, p.targets, loss, "mean").backward()
    assert torch.is_grad_enabled() and vars(loss) == before
    with torch.no_grad():
        assert not public_loss(p, p.targets, loss, "mean").requires_grad
        assert not torch.is_grad_enabled()


def test_on_a_head_and_compiled(device):
    head = sk.DFTHead(24, 64, k=4, slack=3).to(device)
    h, sets = torch.randn(5, 24, device=device), random_sets(5, 64).to(device)
    for loss in (sk.Focal(), sk.Asymmetric()):
        value = head.loss(h, sets, loss)
        dense = loss.value(head(h), sets.to_dense()).mean()
        assert value.item() == pytest.approx(dense.item(), rel=1e-5)
        whole = torch.compile(lambda h, loss=loss: head.loss(h, sets, loss), fullgraph=True, backend="aot_eager")
        assert whole(h).item() == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sk.Focal(gamma=-1), "gamma"),
        (lambda: sk.Focal(gamma=math.nan), "gamma"),
        (lambda: sk.Focal(alpha=1.5), "alpha"),
        (lambda: sk.Asymmetric(gamma_neg=-1), "gamma_neg"),
        (lambda: sk.Asymmetric(gamma_pos=math.inf), "gamma_pos"),
        (lambda: sk.Asymmetric(clip=1.0), "clip"),
        (lambda: sk.Asymmetric(eps=0.0), "eps"),
        (lambda: sk.Focal(weight=torch.ones(2, 2)), "weight"),
    ],
)
def test_bad_settings(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("loss", [sk.BCE(), sk.BCE(pos_weight=torch.ones(1)), sk.Focal(gamma=0, alpha=None)], ids=repr)
@pytest.mark.parametrize("z", [20.0, 40.0, -20.0, -40.0])
def test_what_is_left_of_a_sure_label_keeps_its_digits(device, loss, z, dtype):
    loss = loss.at_labels(torch.empty(0, device=device, dtype=dtype))
    x = torch.tensor([[z]], device=device, dtype=dtype, requires_grad=True)
    for y in (float(z > 0), 1e-3):
        value = sk.functional.linear_loss(x, x.new_ones(1, 1), x.new_full((1, 1), y), loss=loss)
        value.backward()
        y = torch.full((), y, dtype=dtype).double().item()  # as it was given
        rest = math.exp(-abs(z))
        far = (1 - y) if z > 0 else y
        assert value.item() == pytest.approx(math.log1p(rest) + far * abs(z), rel=1e-5)
        assert x.grad.item() == pytest.approx((1 if z > 0 else -1) * (far - rest / (1 + rest)), rel=1e-5)
        x.grad = None


@pytest.mark.parametrize("name", ["bce", "pos_weight", "no weight", "all positive", *LOSSES])
@pytest.mark.parametrize("z", [math.inf, -math.inf])
@pytest.mark.parametrize("y", [0.0, 1.0, 0.25])
def test_infinite_logits_give_the_limit(device, name, z, y):
    """A label is switched off by a bias of -inf: where it is no target, it costs nothing and pulls at nothing."""
    made = {
        "bce": sk.BCE(),
        "pos_weight": sk.BCE(pos_weight=torch.full((1,), 3.0, device=device)),
        "no weight": sk.BCE(weight=torch.zeros(1, device=device)),
        "all positive": sk.Focal(alpha=1.0),
    }
    loss = {**made, **LOSSES}[name]
    results = []
    for c in (z, math.copysign(1e4, z)):
        x, weight = (torch.zeros(1, 1, device=device, requires_grad=True) for _ in range(2))
        bias = torch.tensor([c], device=device, requires_grad=True)
        value = sk.functional.linear_loss(x, weight, torch.full((1, 1), y, device=device), bias, loss)
        value.backward()
        results.append((value.item(), bias.grad.item()))
    (value, grad), (near, near_grad) = results
    assert value == (pytest.approx(near, rel=1e-6) if near < 100 else math.inf)
    assert grad == pytest.approx(near_grad, rel=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("loss", [sk.BCE, sk.Focal, sk.Asymmetric])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_nan_logit_reaches_the_value_whatever_its_weight(backend, loss, sparse):
    y = torch.tensor([[1.0, 0.0, 1.0]])
    targets = sk.LabelSets.from_dense(y) if sparse else y
    for nan_at in range(3):
        weight = torch.ones(3)
        weight[nan_at] = 0
        logits = torch.tensor([[1.0], [2.0], [-1.0]])
        logits[nan_at] = torch.nan
        with sk.backend(backend):
            assert sk.functional.linear_loss(torch.ones(1, 1), logits, targets, loss=loss(weight=weight)).isnan()
