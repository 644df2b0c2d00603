"""torch.func: grad, vjp, jacrev, vmap over rows and functional_call, against plain torch."""

from __future__ import annotations

import pytest
import reference
import torch
from cases import dense_loss, problem
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp, vmap

import sigkernels as sk
from sigkernels.ops.row_loss import entries
from sigkernels.ops.smooth_topk_svm import smooth_topk_svm_reference
from sigkernels.ops.truncated_topk_entropy import truncated_topk_entropy_reference

N, K = 30, 3
LOSSES = {"bce": sk.BCE(), "weighted": sk.BCE(pos_weight=3.0), "asl": sk.Asymmetric(), "focal": sk.Focal()}


@pytest.fixture
def p():
    return problem(N, K, 4, 5, dtype=torch.float64)


def ours(p, loss, reduction="mean", targets=None):
    def call(x, weight):
        return sk.functional.dft_loss(x, weight, p.targets if targets is None else targets, N, K, loss, reduction)

    return call


def plain(p, loss, reduction="mean", targets=None):
    def call(x, weight):
        layer = p.layer._replace(weight=weight)
        return dense_loss(p._replace(x=x, layer=layer), p.targets if targets is None else targets, loss, reduction)

    return call


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_grad(device, name, argnums):
    p = problem(N, K, 4, 5, dtype=torch.float64, device=device)
    args = (p.x, p.layer.weight)
    got = grad_and_value(ours(p, LOSSES[name]), argnums=argnums)(*args)
    want = grad_and_value(plain(p, LOSSES[name]), argnums=argnums)(*args)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_vjp_and_jacrev(p, reduction):
    args = (p.x.detach(), p.layer.weight.detach())
    got, pull = vjp(ours(p, sk.BCE(), reduction), *args)
    want, pull_plain = vjp(plain(p, sk.BCE(), reduction), *args)
    upstream = torch.randn_like(want)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(pull(upstream), pull_plain(upstream))
    for argnum in (0, 1):
        torch.testing.assert_close(
            jacrev(ours(p, sk.BCE(), reduction), argnum)(*args), jacrev(plain(p, sk.BCE(), reduction), argnum)(*args)
        )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_vmap_over_rows(p, reduction):
    y = p.targets.to_dense(torch.float64)
    weight = p.layer.weight.detach()

    def per_row(call):
        return lambda x, target: call(x[None], target[None])

    def row(x, target):
        return ours(p, sk.BCE(), reduction, target)(x, weight)

    def row_plain(x, target):
        return plain(p, sk.BCE(), reduction, target)(x, weight)

    x = p.x.detach()
    torch.testing.assert_close(vmap(per_row(row))(x, y), vmap(per_row(row_plain))(x, y))
    torch.testing.assert_close(vmap(grad(per_row(row)))(x, y), vmap(grad(per_row(row_plain)))(x, y))
    # constant targets, and a mapped dimension that is not the first
    constant = [[1, 7]]
    got = vmap(lambda x: ours(p, sk.BCE(), reduction, constant)(x[None], weight), in_dims=1)(x.T)
    want = torch.stack([ours(p, sk.BCE(), reduction, constant)(row[None], weight) for row in x])
    torch.testing.assert_close(got, want)


def test_the_gradient_of_each_sample(p):
    """Per-sample gradients of the weight, as for differential privacy."""
    y, x = p.targets.to_dense(torch.float64), p.x.detach()

    got = vmap(grad(lambda w, r, t: sk.functional.dft_loss(r[None], w, t[None], N, K)), in_dims=(None, 0, 0))(
        p.layer.weight.detach(), x, y
    )
    want = vmap(grad(lambda w, r, t: plain(p, sk.BCE(), targets=t[None])(r[None], w)), in_dims=(None, 0, 0))(
        p.layer.weight.detach(), x, y
    )
    torch.testing.assert_close(got, want)


def test_a_mapped_loss_still_takes_gradients(p):
    y = p.targets.to_dense(torch.float64)
    rows = vmap(lambda r, t: sk.functional.dft_loss(r[None], p.layer.weight, t[None], N, K))(p.x, y)
    rows.mean().backward()
    got = p.grads()
    plain(p, sk.BCE())(p.x, p.layer.weight).backward()
    torch.testing.assert_close(got, p.grads())


@pytest.mark.parametrize(
    "loss",
    [
        sk.SigmoidF1(beta=2.0),
        sk.UnboundedF1(),
        sk.SigmoidF1(average="pooled"),
        sk.LMLNLL(3),
        sk.TruncatedTopKEntropy(4),
    ],
    ids=repr,
)
def test_other_losses(p, loss):
    """grad and vjp agree with the ordinary backward pass, which the tests of each loss check."""
    args = (p.x.detach(), p.layer.weight.detach())
    got = grad(ours(p, loss), argnums=(0, 1))(*args)
    ours(p, loss)(p.x, p.layer.weight).backward()
    torch.testing.assert_close(list(got), p.grads())


@pytest.mark.parametrize("loss", [sk.SigmoidF1(beta=2.0), sk.UnboundedF1(), sk.LMLNLL(3), sk.TruncatedTopKEntropy(4)])
def test_vmap_of_losses_of_rows_and_columns(p, loss):
    """Each entry of the mapped dimension is a batch of its own, for the values and for both gradients."""
    batches = torch.stack([p.x.detach(), p.x.detach().flip(0), 2 * p.x.detach()])
    weight = p.layer.weight.detach()
    of_both = grad_and_value(ours(p, loss), argnums=(0, 1))
    got = vmap(of_both, in_dims=(0, None))(batches, weight)
    one_by_one = [of_both(x, weight) for x in batches]
    torch.testing.assert_close(got[1], torch.stack([value for _, value in one_by_one]))
    for at in (0, 1):
        torch.testing.assert_close(got[0][at], torch.stack([grads[at] for grads, _ in one_by_one]))
    torch.testing.assert_close(vmap(ours(p, loss), in_dims=(0, None))(batches, weight), got[1])


def test_learned_settings(p):
    def of(beta):
        return ours(p, sk.SigmoidF1(beta=beta))(p.x.detach(), p.layer.weight.detach())

    beta = torch.rand(N, dtype=torch.float64) + 0.5
    leaf = beta.clone().requires_grad_()
    of(leaf).backward()
    torch.testing.assert_close(grad(of)(beta), leaf.grad)


def test_logits_and_topk(p):
    weight = p.layer.weight.detach()

    def z(x):
        return sk.functional.dft_logits(x, weight, N, K)

    def plain_z(x):
        return reference.logits(x, p.layer._replace(weight=weight))

    x = p.x.detach()
    torch.testing.assert_close(jacrev(z)(x), jacrev(plain_z)(x))
    torch.testing.assert_close(vmap(lambda r: z(r[None])[0])(x), plain_z(x))
    twice = [jacrev(jacrev(lambda x, f=f: f(x).square().sum()))(x) for f in (z, plain_z)]
    torch.testing.assert_close(*twice)
    values, _ = vmap(lambda r: sk.functional.dft_topk(r[None], weight, N, K, 3))(x)
    torch.testing.assert_close(values[:, 0], plain_z(x).topk(3).values)
    got = grad(lambda x: sk.functional.dft_topk(x, weight, N, K, 3)[0].sum())(x)
    torch.testing.assert_close(got, grad(lambda x: plain_z(x).topk(3).values.sum())(x))


@pytest.mark.parametrize("make", [lambda: sk.DFTHead(16, N, K, 4), lambda: sk.LinearHead(16, N)], ids=["dft", "linear"])
def test_functional_call(p, make):
    head, h = make(), torch.randn(5, 16)
    parameters = {name: tensor.detach() for name, tensor in head.named_parameters()}

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, h):
            return self.head.loss(h, p.targets)

    named = {f"head.{name}": tensor for name, tensor in parameters.items()}
    got = grad(lambda named: functional_call(Loss(), named, (h,)))(named)
    head.loss(h, p.targets).backward()
    for name, tensor in head.named_parameters():
        torch.testing.assert_close(got[f"head.{name}"], tensor.grad)


SETS = [[1, 4], [], [29], [0, 1, 2], [7]]
OF_LOGITS = {
    "lml": (lambda z: sk.functional.lml(z, 3).square().sum(), lambda z: plain_lml(z, 3).square().sum()),
    "lml_nll": (
        lambda z: sk.functional.lml_nll(z, SETS, 3),
        lambda z: -(plain_lml(z, 3).log() * dense_sets()).sum() / 5,
    ),
    "entropy": (
        lambda z: sk.functional.truncated_topk_entropy(z, SETS, 3),
        lambda z: truncated_topk_entropy_reference(z, at_sets(), 3).mean(),
    ),
    "svm": (
        lambda z: sk.functional.smooth_topk_svm(z, SETS, 3),
        lambda z: smooth_topk_svm_reference(z, at_sets(), 3, 1.0).mean(),
    ),
}


def dense_sets():
    return sk.LabelSets.from_lists(SETS, N).to_dense(torch.float64)


def at_sets():
    return entries(*sk.LabelSets.from_lists(SETS, N).checked(), None, N)


def plain_lml(z, k):
    """By Newton's method, which autograd follows."""
    nu = torch.full_like(z[:, :1], torch.tensor(k / (N - k)).log().item()) - z.detach().mean(1, keepdim=True)
    for _ in range(60):
        y = torch.sigmoid(z + nu)
        nu = nu - (y.sum(1, keepdim=True) - k) / (y * (1 - y)).sum(1, keepdim=True)
    return torch.sigmoid(z + nu)


@pytest.mark.parametrize("name", OF_LOGITS)
def test_functions_of_logits(name):
    """grad, vjp, vmap and second derivatives of what takes logits; forward mode, which made 0 of them, is refused."""
    ours, plain = OF_LOGITS[name]
    z = torch.randn(5, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(grad_and_value(ours)(z), grad_and_value(plain)(z))
    both = [vjp(f, z)[1](torch.tensor(2.0, dtype=torch.float64))[0] for f in (ours, plain)]
    torch.testing.assert_close(*both)
    many = torch.stack([z, 2 * z, z.flip(0)])
    torch.testing.assert_close(vmap(grad(ours))(many), torch.stack([grad(plain)(part) for part in many]))
    twice = [grad(lambda z, f=f: (grad(f)(z) * z).sum())(z) for f in (ours, plain)]
    torch.testing.assert_close(*twice)
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        jvp(ours, (z,), (z,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        ours(forward_ad.make_dual(z, z))


def test_a_gradient_that_is_differentiated_again_is_exact_in_wide_gaps():
    z = torch.tensor([[1480.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = sk.functional.lml_nll(z, [[1]], 1)
    for create_graph in (True, False):
        (got,) = torch.autograd.grad(loss, z, create_graph=create_graph)
        torch.testing.assert_close(got.detach(), torch.tensor([[0.5, -0.5]], dtype=torch.float64))


@pytest.mark.parametrize("dense", [False, True])
def test_unknown_labels(p, dense):
    weight, unknown = p.layer.weight.detach(), [[0, 5], [], [29], [1, 2], [7]]
    sets = sk.LabelSets.from_lists(SETS, N)
    targets, mask = (
        sets.to_dense(torch.float64) if dense else sets,
        ~sk.LabelSets.from_lists(unknown, N).to_dense(torch.bool),
    )

    def ours(x, weight, reduction="mean"):
        return sk.functional.dft_loss(x, weight, targets, N, K, reduction=reduction, unknown=unknown)

    def plain(x, weight, reduction="mean"):
        z = reference.logits(x, p.layer._replace(weight=weight))
        f = torch.nn.functional.binary_cross_entropy_with_logits(z, dense_sets(), reduction="none") * mask
        return f.sum() / mask.sum() if reduction == "mean" else f.sum(1)

    args = (p.x.detach(), weight)
    torch.testing.assert_close(grad_and_value(ours, (0, 1))(*args), grad_and_value(plain, (0, 1))(*args))
    torch.testing.assert_close(
        jacrev(lambda x: ours(x, weight, "none"))(args[0]), jacrev(lambda x: plain(x, weight, "none"))(args[0])
    )
    many = torch.stack([args[0], -args[0]])
    got, want = (vmap(grad(f), in_dims=(0, None))(many, weight) for f in (ours, plain))
    torch.testing.assert_close(got, want)
    masks, more = ~mask.expand(2, *mask.shape), {"loss": sk.BCE(), "unknown": unknown}
    for mapped in (
        lambda x, m: sk.functional.linear_loss(x, torch.ones(N, x.shape[1]).to(x), targets, unknown=m),
        lambda x, m: sk.functional.linear_loss(
            x, torch.ones(N, x.shape[1]).to(x), sk.LabelSets.from_sorted(m[0].long()[:5], torch.arange(6), N), **more
        ),
    ):
        with pytest.raises(RuntimeError, match=r"cannot map: .*unknown labels; call the loss once for each"):
            vmap(mapped)(many, masks)
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        jvp(lambda x: ours(x, weight), args[:1], args[:1])
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(lambda x: grad(ours)(x, weight).square().sum())(args[0])


def test_predict_is_not_mapped(p):
    head = sk.LinearHead(8, N)
    with pytest.raises(RuntimeError, match="call predict on all rows at once"):
        vmap(lambda h: head.predict(h[None]).indices)(torch.randn(3, 8))


def test_what_is_not_there_says_so(p):
    args = (p.x.detach(), p.layer.weight.detach())
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(lambda x: grad(ours(p, sk.BCE()))(x, args[1]).square().sum())(args[0])
    with pytest.raises(RuntimeError, match=r"no forward-mode derivatives.*head\.to_linear"):
        jvp(lambda x: ours(p, sk.BCE())(x, args[1]), (args[0],), (torch.ones_like(args[0]),))
    for forward in (sk.functional.dft_logits, lambda *given: sk.functional.dft_topk(*given, 2)[0]):
        with pytest.raises(RuntimeError, match=r"no forward-mode derivatives.*head\.to_linear"):
            jvp(lambda x, f=forward: f(x, args[1], N, K), (args[0],), (torch.ones_like(args[0]),))
