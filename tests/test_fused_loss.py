"""The fused loss on every backend: values, gradients, reductions, targets, hard shapes and hard numbers."""

from __future__ import annotations

import pytest
import torch
from cases import LOW, assert_no_worse, dense_loss, problem, public_loss, random_sets
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels.ops.missing_derivatives import DOUBLE_BACKWARD

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]


def losses(n: int, device) -> dict[str, sk.Loss]:
    weight, pos_weight = torch.rand(n, device=device) + 0.5, torch.rand(n, device=device) * 3
    return {
        "plain": sk.BCE(),
        "weight": sk.BCE(weight=weight),
        "pos_weight": sk.BCE(pos_weight=pos_weight),
        "smooth": sk.BCE(label_smoothing=0.1),
        "all": sk.BCE(weight=weight, pos_weight=pos_weight, label_smoothing=0.2),
    }


def compare(p, targets, loss, reduction, dtype):
    """Ours in ``dtype`` against dense torch in float64, beside dense torch in ``dtype``."""
    truth, eager = p.to(torch.float64), p.to(dtype)
    value = public_loss(p, targets, loss, reduction)
    upstream = torch.rand_like(value) + 0.5
    value.backward(upstream)
    exact = dense_loss(truth, targets, loss, reduction)
    exact.backward(upstream.double())
    rough = dense_loss(eager, targets, loss, reduction)
    rough.backward(upstream.to(rough.dtype))
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if p.x.shape[0] or reduction != "mean":  # the mean over nothing is NaN, as torch has it
        assert_no_worse(value, rough, exact, dtype, f"{reduction} loss")
    names = ("grad_x", "grad_weight", "grad_bias")
    for name, ours, own, want in zip(names, p.grads(), eager.grads(), truth.grads(), strict=False):
        assert ours.dtype == dtype
        if p.x.shape[0]:
            assert_no_worse(ours, own, want, dtype, f"{reduction} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dft", "linear"])
def test_matches_float64_in_every_shape(device, shape, kind, dtype):
    n, k, s, batch = shape
    p = problem(n, k if kind == "dft" else -1, s, batch, device=device, dtype=dtype, bias=kind == "linear")
    for reduction in REDUCTIONS:
        compare(p, p.targets, sk.BCE(), reduction, dtype)


@pytest.mark.parametrize("name", ["weight", "pos_weight", "smooth", "all"])
@pytest.mark.parametrize("form", ["sets", "soft", "hard"])
def test_settings_of_bce(device, name, form):
    p = problem(130, 6, 5, 9, device=device)
    targets = {"sets": p.targets, "soft": torch.rand(9, 130, device=device), "hard": p.targets.to_dense()}[form]
    for reduction in REDUCTIONS:
        compare(p, targets, losses(130, device)[name], reduction, torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(device, reduction):
    if device.type != "cpu":
        pytest.skip("numerical gradients are checked on the CPU")
    p = problem(23, 3, 4, 3, dtype=torch.float64)
    loss = losses(23, "cpu")["all"]
    loss = sk.BCE(loss.weight.double(), loss.pos_weight.double(), 0.1)
    torch.autograd.gradcheck(
        lambda x, w: sk.functional.dft_loss(x, w, p.targets, 23, 3, loss, reduction), (p.x, p.layer.weight)
    )
    q = problem(23, -1, 4, 3, dtype=torch.float64, bias=True)
    torch.autograd.gradcheck(
        lambda x, w, b: sk.functional.linear_loss(x, w, q.targets, b, loss, reduction),
        (q.x, q.layer.weight, q.layer.bias),
    )


def test_equals_torch_bce_with_logits():
    p = problem(60, -1, 8, 7, bias=True)
    weight, pos_weight = torch.rand(60), torch.rand(60)
    z = torch.nn.functional.linear(p.x, p.layer.weight, p.layer.bias)
    want = torch.nn.functional.binary_cross_entropy_with_logits(
        z, p.targets.to_dense(), weight=weight, pos_weight=pos_weight
    )
    got = public_loss(p, p.targets, sk.BCE(weight, pos_weight), "mean")
    torch.testing.assert_close(got, want)


def test_every_form_of_targets_gives_the_same(device):
    p = problem(80, 4, 3, 6, device=device)
    want = public_loss(p, p.targets, sk.BCE(), "sum")
    dense = p.targets.to_dense()
    forms = [
        dense,
        dense.bool(),
        dense.int(),
        dense.double(),
        dense.to_sparse_csr(),
        p.targets.to_lists(),
        p.targets.to_scipy(),
    ]
    for targets in forms:
        torch.testing.assert_close(public_loss(p, targets, sk.BCE(), "sum"), want)


def test_leading_dimensions(device):
    p = problem(50, 3, 4, 12, device=device)
    x = p.x.detach().reshape(3, 4, -1)
    flat = public_loss(p, p.targets, sk.BCE(), "none")
    args = (p.layer.weight, p.targets, 50, 3)
    torch.testing.assert_close(sk.functional.dft_loss(x, *args, reduction="none"), flat.reshape(3, 4))
    dense = p.targets.to_dense().reshape(3, 4, 50)
    one = sk.functional.dft_loss(x[0, 0], p.layer.weight, dense[0, 0], 50, 3, reduction="none")
    torch.testing.assert_close(one, flat[0].reshape(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_huge_logits_are_exact(device, dtype):
    x = torch.tensor([[1e4], [-1e4], [30.0], [-30.0]], device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(3, 1, device=device, dtype=dtype, requires_grad=True)
    value = sk.functional.linear_loss(x, weight, [[0], [0], [1], [1]], reduction="none")
    wide = torch.tensor([1e4, 1e4, 30.0, 30.0], dtype=torch.float64)
    tail = torch.exp(-wide)
    want = torch.stack([2 * wide[0], wide[1] + 0 * tail[1], 2 * wide[2] + 3 * tail[2], wide[3] + 3 * tail[3]])
    torch.testing.assert_close(value.double().cpu(), want, rtol=2e-7, atol=0)
    value.sum().backward()
    sigma = torch.sigmoid(x.detach().double())
    y = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64, device=device)[:, None]
    torch.testing.assert_close(x.grad.double(), 3 * sigma - y, rtol=1e-6, atol=1e-12)


def test_small_losses_keep_their_digits(device):
    x = torch.full((1, 1), -15.0, device=device)
    value = sk.functional.linear_loss(x, torch.ones(1000, 1, device=device), [[]], reduction="sum")
    want = 1000 * torch.log1p(torch.exp(torch.tensor(-15.0, dtype=torch.float64)))
    assert abs(value.item() / want.item() - 1) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_inputs_propagate(device, bad):
    p = problem(300, 4, 6, 5, device=device)
    with torch.no_grad():
        p.x[2, -1] = bad
    rows = public_loss(p, p.targets, sk.BCE(), "none")
    assert not torch.isfinite(rows[2])
    assert torch.isfinite(rows[[0, 1, 3, 4]]).all()
    rows[[0, 1, 3, 4]].sum().backward()


def test_same_bits_every_run(device):
    p = problem(1500, 10, 33, 70, device=device)

    def run():
        value = public_loss(p, p.targets, sk.BCE(), "mean")
        value.backward()
        return [value, *p.grads()]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(device, needs):
    p = problem(90, 4, 5, 6, device=device)
    x, weight = (t.detach().requires_grad_(need) for t, need in zip(p.leaves, needs, strict=True))
    value = sk.functional.dft_loss(x, weight, p.targets, 90, 4)
    assert value.requires_grad == any(needs)
    torch.testing.assert_close(value, public_loss(p, p.targets, sk.BCE(), "mean"))
    if any(needs):
        value.backward()
    assert [x.grad is not None, weight.grad is not None] == list(needs)
    with torch.no_grad():
        assert not public_loss(p, p.targets, sk.BCE(), "mean").requires_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_gives_the_same_again(device, reduction):
    p = problem(90, 4, 5, 6, device=device)
    value = public_loss(p, p.targets, sk.BCE(), reduction)
    upstream = torch.full_like(value, 3.0)
    value.backward(upstream, retain_graph=True)
    first = p.grads()
    value.backward(upstream)
    for a, b in zip(first, p.grads(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


def test_inputs_are_never_changed(device):
    p = problem(90, 4, 5, 6, device=device)
    before = [leaf.detach().clone() for leaf in p.leaves]
    public_loss(p, p.targets, sk.BCE(), "sum").backward()
    for leaf, old in zip(p.leaves, before, strict=True):
        assert torch.equal(leaf, old)


def test_double_backward_says_what_to_do(device):
    p = problem(30, 3, 4, 3, device=device)
    for reduction in REDUCTIONS:
        value = public_loss(p, p.targets, sk.BCE(), reduction).sum()
        (grad,) = torch.autograd.grad(value, p.x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()
    assert "dft_logits" in DOUBLE_BACKWARD


def test_strided_inputs(device):
    p = problem(120, 4, 6, 8, device=device)
    want = public_loss(p, p.targets, sk.BCE(), "sum")
    want.backward()
    grads = p.grads()
    x = p.x.detach().T.contiguous().T.requires_grad_()
    weight = p.layer.weight.detach().T.contiguous().T.requires_grad_()
    wide = torch.randn(8, 40, device=device)
    wide[:, 7 : 7 + x.shape[1]] = p.x.detach()
    for view in (x, wide[:, 7 : 7 + x.shape[1]].requires_grad_()):
        value = sk.functional.dft_loss(view, weight, p.targets, 120, 4, reduction="sum")
        value.backward()
        torch.testing.assert_close(value, want)
        torch.testing.assert_close(weight.grad, grads[1])
        weight.grad = None
    torch.testing.assert_close(x.grad, grads[0])


def test_label_ranges_add_up_to_the_whole(device):
    from sigkernels import backends, ops

    p = problem(1000, 7, 5, 6, device=device, dtype=torch.float64)
    loss = sk.BCE(weight=torch.rand(1000, device=device, dtype=torch.float64))
    module = backends.select(p.x, "fused_loss", loss)
    needs = (True, True, False)
    call = backends.LossCall(p.x.detach(), p.layer, p.targets, loss, 1.0, needs)
    whole = module.fused_loss(call)
    parts = []
    for start, stop in ((0, 313), (313, 314), (314, 1000)):
        part = p.layer._replace(weight=p.layer.weight.detach()).part(start, stop)
        parts.append(module.fused_loss(call._replace(layer=part)))
        torch.testing.assert_close(ops.logits(p.x, part), ops.logits(p.x, p.layer)[:, start:stop])
        values, labels = module.topk(p.x.detach(), part, 1)
        torch.testing.assert_close(values, ops.logits(p.x, part).max(1, keepdim=True).values)
        assert ((labels >= start) & (labels < stop)).all()
    torch.testing.assert_close(sum(part.rows for part in parts), whole.rows)
    torch.testing.assert_close(sum(part.grad_x for part in parts), whole.grad_x)
    torch.testing.assert_close(torch.cat([part.grad_weight for part in parts]), whole.grad_weight)


@given(st.permutations(range(7)), st.integers(0, 3))
def test_a_permuted_batch_has_permuted_losses(order, seed):
    torch.manual_seed(seed)
    p = problem(60, 3, 4, 7)
    index = torch.tensor(order)
    rows = public_loss(p, p.targets, sk.BCE(), "none")
    moved = sk.functional.dft_loss(p.x[index], p.layer.weight, p.targets[index], 60, 3, reduction="none")
    torch.testing.assert_close(moved, rows[index], rtol=4 * LOW[torch.float32], atol=0)


def call(**changes):
    p = problem(20, 2, 3, 4)
    args = dict(x=p.x, slack_weight=p.layer.weight, targets=p.targets, num_labels=20, k=2) | changes
    return sk.functional.dft_loss(**args)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (dict(x=[1.0]), TypeError, "x must be a tensor"),
        (dict(x=torch.zeros(4, 7)), ValueError, r"2k\+1\+s = 5 \+ 3 = 8.*\(4, 7\)"),
        (dict(x=torch.zeros(4, 8, dtype=torch.int64)), TypeError, "x must be float16.*int64"),
        (dict(x=torch.zeros(4, 8, dtype=torch.float64)), TypeError, "one dtype.*autocast"),
        (dict(x=torch.zeros(4, 8, device="meta")), ValueError, "move both to one device"),
        (dict(slack_weight=torch.zeros(19, 3)), ValueError, r"slack_weight must have shape.*\(19, 3\)"),
        (dict(slack_weight=torch.zeros(20)), ValueError, "slack_weight must be two-dimensional"),
        (dict(slack_weight=None), TypeError, "slack_weight must be a tensor"),
        (dict(k=10), ValueError, "2k\\+1 = 21 ≤ num_labels = 20.*Use k ≤ 9"),
        (dict(k=-1), ValueError, "k must be at least 0"),
        (dict(k=2.5), TypeError, "k must be a whole number"),
        (dict(num_labels=0), ValueError, "num_labels must be at least 1"),
        (dict(targets=random_sets(3, 20)), ValueError, "3 label sets for 4 rows"),
        (dict(targets=random_sets(4, 21)), ValueError, "num_labels = 21, but 20 labels"),
        (dict(targets=torch.zeros(4, 19)), ValueError, r"dense targets must have shape \[4, 20\]"),
        (dict(targets=torch.full((4, 20), 1.5)), ValueError, r"lie in \[0, 1\].*1.5"),
        (dict(targets=torch.full((4, 20), float("nan"))), ValueError, r"lie in \[0, 1\]"),
        (dict(targets=torch.full((4, 20), 2)), ValueError, "targets holds 2"),
        (dict(targets=torch.zeros(4, 20, dtype=torch.complex64)), TypeError, "bool, integer or floating"),
        (dict(targets=torch.zeros(4, 20, requires_grad=True)), ValueError, "targets require a gradient"),
        (dict(targets=[[0], [1], [20], []]), ValueError, "label 20 in row 2"),
        (dict(targets=3), TypeError, "targets must be LabelSets"),
        (dict(targets="abcd"), TypeError, "targets must be LabelSets"),
        (dict(loss=sk.BCE), TypeError, r"did you mean BCE\(\)"),
        (dict(loss="sum"), TypeError, "did you mean reduction='sum'"),
        (dict(loss="bce"), TypeError, "loss must be a sigkernels loss"),
        (dict(loss=sk.BCE(weight=torch.ones(5))), ValueError, "weight of BCE has 5 entries for 20 labels"),
        (dict(loss=sk.BCE(weight=torch.ones(20, requires_grad=True))), ValueError, "detach"),
        (dict(reduction="avg"), ValueError, "reduction must be one of mean, sum, none"),
    ],
)
def test_bad_arguments(changes, error, match):
    with pytest.raises(error, match=match):
        call(**changes)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: sk.BCE(label_smoothing=1.5), ValueError, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        (lambda: sk.BCE(weight=[1.0]), TypeError, "weight must be a tensor"),
        (lambda: sk.BCE(pos_weight=torch.ones(2, 2)), ValueError, "pos_weight must be a 1-D"),
        (lambda: sk.BCE(weight=torch.ones(3, dtype=torch.int64)), ValueError, "weight must be a 1-D floating"),
        (
            lambda: sk.functional.linear_loss(torch.ones(2, 3), torch.ones(4, 3), [[], []], torch.ones(5)),
            ValueError,
            "bias",
        ),
        (
            lambda: sk.functional.linear_loss(torch.ones(2, 3), torch.ones(0, 3), [[], []]),
            ValueError,
            "at least one row",
        ),
    ],
)
def test_bad_settings(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_lazily_negated_tensors(device):
    """``conj().imag`` holds the numbers of the other sign, and a bit that says so."""

    def negated(*shape):
        made = torch.randn(*shape, dtype=torch.complex64, device=device).conj().imag
        assert made.is_neg()
        return made

    x, weight, bias, factors = negated(4, 7), negated(30, 7), negated(30), negated(30).square()
    targets = torch._neg_view(-torch.rand(4, 30, device=device).round())
    factors = torch._neg_view(-factors)
    assert targets.is_neg() and factors.is_neg() and bool((targets >= 0).all())
    for loss in (sk.BCE(factors, factors), sk.SigmoidF1(factors)):
        got = sk.functional.linear_loss(x, weight, targets, bias, loss)
        plain = type(loss)(*(v.resolve_neg() if isinstance(v, torch.Tensor) else v for v in vars(loss).values()))
        want = sk.functional.linear_loss(*(t.resolve_neg() for t in (x, weight, targets, bias)), plain)
        assert torch.equal(got, want)
    assert torch.equal(sk.functional.linear_topk(x, weight, 3)[1], sk.functional.linear_topk(x + 0, weight + 0, 3)[1])
    leaf = torch.randn(4, 7, dtype=torch.complex64, device=device, requires_grad=True)
    sk.functional.linear_loss(leaf.conj().imag, weight, targets).backward()
    other = leaf.detach().clone().requires_grad_()
    sk.functional.linear_loss(-other.imag, weight, targets).backward()
    torch.testing.assert_close(leaf.grad, other.grad)
