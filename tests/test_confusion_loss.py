"""Confusion-matrix losses (sigmoidF1 and its relatives) on every backend."""

from __future__ import annotations

import pytest
import reference
import torch
from cases import assert_no_worse, problem, public_loss, random_sets
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import backends
from sigkernels.losses.confusion import METRICS

AVERAGES = ("label", "pooled")


@pytest.fixture
def device(device):
    """The backends that have these losses."""
    reason = backends.select(torch.empty(0, device=device)).refuses("column_loss", sk.SigmoidF1())
    if reason is not None:
        pytest.skip(reason)
    return device


def dense(p, targets, loss, reduction="mean"):
    """The reference formula on dense logits."""
    z = reference.logits(p.x, p.layer)
    value = loss.value(z, reference.dense_targets(targets, p.layer, z.dtype))
    return value * p.layer.num_labels if reduction == "sum" and loss.average == "label" else value


def compare(p, targets, make, dtype, reduction="mean", settings=()):
    """``make(dtype)`` builds the loss; its tensors are leaves like those of the problem."""
    truth, eager = p.to(torch.float64), p.to(dtype)
    outcomes = []
    for problem_, kind, function in ((p, dtype, public_loss), (eager, dtype, dense), (truth, torch.float64, dense)):
        loss = make(kind)
        leaves = [getattr(loss, name) for name in settings]
        value = function(problem_, targets, loss, reduction)
        value.backward(torch.full_like(value, 1.5))
        outcomes.append([value, *problem_.grads(), *(leaf.grad for leaf in leaves)])
    names = ["loss", "grad_x", "grad_weight"] + (["grad_bias"] if p.layer.bias is not None else []) + list(settings)
    for name, ours, own, want in zip(names, *outcomes, strict=True):
        if want.numel() == 0:
            continue
        if dtype == torch.float64:  # 1 - value cancels, and an unbounded denominator can be small
            assert torch.allclose(ours, want, rtol=1e-9, atol=1e-11 * max(1.0, want.abs().max().item())), name
        else:
            assert_no_worse(ours, own, want, dtype, name)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("on", ["logits", "probability", "unbounded"])
def test_metrics(device, metric, average, on):
    p = problem(83, 3, 5, 9, device=device, dtype=torch.float64)
    for reduction in ("mean", "sum"):
        for targets in (p.targets, torch.rand(9, 83, device=device, dtype=torch.float64)):
            if on == "unbounded":
                compare(p, targets, lambda _: sk.UnboundedF1(metric, average), torch.float64, reduction)
                continue
            beta, eta = torch.rand(83, device=device) * 2 + 0.2, torch.randn(83, device=device)

            def make(dtype, beta=beta, eta=eta):
                leaves = (t.detach().to(dtype).requires_grad_() for t in (beta, eta))
                return sk.SigmoidF1(*leaves, metric, average, on)

            compare(p, targets, make, torch.float64, reduction, ("beta", "eta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("average", AVERAGES)
def test_every_dtype(device, average, dtype):
    p = problem(131, -1, 9, 6, device=device, dtype=dtype, bias=True)
    compare(p, p.targets, lambda _: sk.SigmoidF1(average=average), dtype)


def test_every_shape(device, shape):
    n, k, s, batch = shape
    p = problem(n, k, s, batch, device=device, dtype=torch.float64)
    for average in AVERAGES:
        compare(
            p, p.targets, lambda _, average=average: sk.SigmoidF1(beta=2.0, eta=-1.0, average=average), torch.float64
        )


def test_more_rows_than_one_chunk_of_a_kernel(device):
    """The sums of a label run over all rows of the batch, however many there are."""
    p = problem(37, 2, 3, 700, device=device)
    compare(p, p.targets, lambda _: sk.SigmoidF1(), torch.float32)


def test_scalar_tensors_can_be_learned(device):
    p = problem(50, 2, 3, 8, device=device, dtype=torch.float64)
    for average in AVERAGES:

        def make(dtype, average=average):
            beta, eta = (torch.tensor(v, dtype=dtype, device=device, requires_grad=True) for v in (1.3, -0.4))
            return sk.SigmoidF1(beta, eta, average=average)

        compare(p, p.targets, make, torch.float64, settings=("beta", "eta"))
    head = sk.DFTHead(12, 30, k=2, slack=3).to(device)
    beta = torch.nn.Parameter(torch.ones((), device=device))
    head.loss(torch.randn(4, 12, device=device), random_sets(4, 30).to(device), sk.SigmoidF1(beta=beta)).backward()
    assert beta.grad.isfinite() and beta.grad != 0


def test_only_the_settings_are_learned(device):
    p = problem(20, 2, 3, 4, device=device)
    beta = torch.ones(20, device=device, requires_grad=True)
    frozen = (p.x.detach(), p.layer.weight.detach())
    sk.functional.dft_loss(*frozen, p.targets, 20, 2, sk.SigmoidF1(beta=beta)).backward()
    assert beta.grad.isfinite().all() and beta.grad.abs().max() > 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("filled", [False, True])
def test_empty_denominators_are_zero_not_nan(device, metric, average, dtype, filled):
    """No positives, only positives, and logits so large that every S is 0 or 1."""
    weight = torch.tensor([[1.0], [50.0], [-50.0], [200.0], [-200.0]], device=device).to(dtype).requires_grad_()
    x = torch.ones(3, 1, device=device).to(dtype).requires_grad_()
    sets = [list(range(5))] * 3 if filled else [[]] * 3
    for loss in (sk.SigmoidF1(metric=metric, average=average), sk.UnboundedF1(metric, average)):
        value = sk.functional.linear_loss(x, weight, sets, loss=loss)
        value.backward()
        assert value.isfinite() and x.grad.isfinite().all() and weight.grad.isfinite().all()


def test_a_label_without_positives_counts_as_value_zero(device):
    x, weight = torch.ones(2, 1, device=device), torch.zeros(2, 1, device=device, requires_grad=True)
    value = sk.functional.linear_loss(x, weight, [[0], [0]], loss=sk.SigmoidF1())
    # label 0: tp = 1, fn = 1, fp = 0: f1 = 2/3; label 1: f1 = 0
    assert value.item() == pytest.approx(1 - (2 / 3 + 0) / 2)
    value.backward()
    assert weight.grad[1].item() == 0 and weight.grad[0].item() < 0


def test_published_pseudo_code(device):
    """Averages over labels of 1 - 2tp/(2tp+fn+fp+1e-16), and σ applied twice with on="probability"."""
    z, y = torch.randn(6, 15, dtype=torch.float64) * 2, (torch.rand(6, 15) < 0.4).double()
    for u, on in ((z, "logits"), (torch.sigmoid(z), "probability")):
        s = 1 / (1 + torch.exp(-1.7 * (u + 0.3)))
        tp, fp, fn = (s * y).sum(0), (s * (1 - y)).sum(0), ((1 - s) * y).sum(0)
        published = (1 - 2 * tp / (2 * tp + fn + fp + 1e-16)).mean()
        x, weight = z.to(device), torch.eye(15, dtype=torch.float64, device=device)
        ours = sk.functional.linear_loss(x, weight, y.to(device), loss=sk.SigmoidF1(1.7, 0.3, on=on))
        assert ours.item() == pytest.approx(published.item(), rel=1e-12)


@given(seed=st.integers(0, 10_000), batch=st.integers(1, 6), n=st.integers(1, 9))
def test_values_lie_between_zero_and_one(seed, batch, n):
    torch.manual_seed(seed)
    x, weight = torch.randn(batch, 2) * 5, torch.randn(n, 2) * 5
    y = (torch.rand(batch, n) < 0.5).float()
    for metric in METRICS:
        for average in AVERAGES:
            value = sk.functional.linear_loss(x, weight, y, loss=sk.SigmoidF1(metric=metric, average=average)).item()
            assert -1e-6 <= value <= 1 + 1e-6


def test_compiles_whole():
    p = problem(40, 2, 3, 5)
    beta = torch.ones(40, requires_grad=True)

    def step(x, weight, beta):
        return sk.functional.dft_loss(x, weight, p.targets, 40, 2, sk.SigmoidF1(beta=beta))

    inputs = (p.x, p.layer.weight, beta)
    got = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for a, b in zip(got, torch.autograd.grad(step(*inputs), inputs), strict=True):
        assert torch.allclose(a, b)


def test_inputs_are_left_alone_and_runs_repeat(device):
    p = problem(60, 2, 3, 7, device=device)
    soft = torch.rand(7, 60, device=device)
    before = [t.detach().clone() for t in (p.x, p.layer.weight, soft)]
    grads = []
    for _ in range(2):
        public_loss(p, soft, sk.SigmoidF1(), "mean").backward()
        grads.append(p.grads())
    assert all(torch.equal(a, b) for a, b in zip((p.x, p.layer.weight, soft), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("average", AVERAGES)
def test_a_retained_graph_gives_its_gradients_again(device, average):
    """They are handed out once without a copy: the second time they are made anew."""
    p = problem(60, 2, 3, 7, device=device)
    beta = torch.full((60,), 1.2, device=device, requires_grad=True)
    inputs = (p.x, p.layer.weight, beta)
    value = public_loss(p, p.targets, sk.SigmoidF1(beta, average=average), "mean")
    first = torch.autograd.grad(value, inputs, retain_graph=True)
    kept = [grad.clone() for grad in first]
    doubled = torch.autograd.grad(value, inputs, torch.full_like(value, 2.0))
    for a, b, c in zip(first, kept, doubled, strict=True):
        assert torch.equal(a, b) and torch.equal(2 * a, c)


def test_refusals(device):
    p = problem(20, 2, 3, 4, device=device)
    with pytest.raises(ValueError, match="a row has no loss of its own"):
        public_loss(p, p.targets, sk.SigmoidF1(), "none")
    with pytest.raises(ValueError, match="beta of SigmoidF1 has 7 entries for 20 labels"):
        public_loss(p, p.targets, sk.SigmoidF1(beta=torch.ones(7, device=device)), "mean")
    with pytest.raises(RuntimeError, match="second derivative"):
        value = public_loss(p, p.targets, sk.SigmoidF1(), "mean")
        (grad,) = torch.autograd.grad(value, p.x, create_graph=True)
        grad.sum().backward()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: sk.SigmoidF1(metric="f2"), ValueError, "metric"),
        (lambda: sk.SigmoidF1(average="micro"), ValueError, "average"),
        (lambda: sk.SigmoidF1(on="logit"), ValueError, "on must be"),
        (lambda: sk.SigmoidF1(beta="1"), TypeError, "beta"),
        (lambda: sk.SigmoidF1(beta=-1), ValueError, "beta must be positive, got -1"),
        (lambda: sk.SigmoidF1(beta=0.0), ValueError, "beta must be positive, got 0.0"),
        (lambda: sk.SigmoidF1(metric=["f1"]), ValueError, r"metric must be one of f1, .* got \['f1'\]"),
        (lambda: sk.SigmoidF1(average=("label",)), ValueError, "average must be one of"),
        (lambda: sk.SigmoidF1(on=["logits"]), ValueError, "on must be"),
        (lambda: sk.SigmoidF1(eta=torch.ones(2, 2)), ValueError, "eta"),
        (lambda: sk.SigmoidF1(eta=torch.ones(2, dtype=torch.int64)), ValueError, "eta"),
        (lambda: sk.UnboundedF1(metric="auc"), ValueError, "metric"),
    ],
)
def test_bad_settings(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("metric", ["precision", "npv"])
@pytest.mark.parametrize("batch", [1, 3])
def test_equal_soft_targets_have_no_gradient(monkeypatch, backend, metric, batch):
    """precision is then the target itself, whatever the logits are: rounding must not leave a gradient."""
    if (reason := sk.backend_status()[backend]) is not None:
        pytest.skip(reason)
    p = problem(83, 3, 5, batch)
    targets = torch.rand(1, 83).expand(batch, 83).contiguous()
    monkeypatch.setattr(sk.backends, "_ENVIRONMENT", backend)
    value = public_loss(p, targets, sk.SigmoidF1(1.7, metric=metric, on="probability"), "mean")
    value.backward()
    want = (targets[0] if metric == "npv" else 1 - targets[0]).double().mean()
    assert abs(value.item() - want.item()) < 1e-6
    assert p.x.grad.abs().max() == 0


@pytest.mark.parametrize("on", ["logits", "probability"])
def test_infinite_slopes_and_offsets(device, on):
    """S is then a step, as torch's own sigmoid makes it; batches that do not fill a vector are no exception."""
    p = problem(6, -1, 4, 5, device=device)
    beta = torch.tensor([float("inf"), -float("inf"), 1.0, 1.0, float("inf"), 2.0], device=device)
    eta = torch.tensor([0.0, -0.5, float("inf"), -float("inf"), -0.25, 0.0], device=device)
    loss = sk.SigmoidF1(beta, eta, on=on)
    value = public_loss(p, p.targets, loss, "mean")
    assert value.isfinite()
    torch.testing.assert_close(value, dense(p, p.targets, loss), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on", ["logits", "probability"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_beta_is_a_step_without_gradients(device, on, sign):
    torch.manual_seed(0)
    x, w = torch.randn(6, 5, device=device), torch.randn(9, 5, device=device)
    y = (torch.rand(6, 9, device=device) < 0.3).float()
    beta, eta = torch.full((9,), 1.5, device=device), torch.full((9,), -0.4, device=device)
    beta[3] = sign * torch.inf
    want = sk.SigmoidF1(beta=beta, eta=eta, on=on).value(x @ w.T, y)
    leaves = [t.clone().requires_grad_() for t in (x, w, beta, eta)]
    loss = sk.SigmoidF1(beta=leaves[2], eta=leaves[3], on=on)
    value = sk.functional.linear_loss(leaves[0], leaves[1], y, loss=loss)
    value.backward()
    torch.testing.assert_close(value.detach(), want)
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    for leaf in leaves[1:]:
        assert not leaf.grad[3].any()
        assert leaf.grad[[0, 1, 2, 4, 5, 6, 7, 8]].any()
