"""Calls without memory to read: fake, traced and meta tensors go through the operators, with the same results."""

from __future__ import annotations

import pytest
import torch
from cases import problem, public_loss
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import sigkernels as sk
from sigkernels.layer import LayerMeta
from sigkernels.ops.logits import logits_adjoint_operator
from sigkernels.ops.missing_derivatives import DOUBLE_BACKWARD

pytestmark = pytest.mark.filterwarnings("ignore")

N, LISTS = 50, [[1], [2, 3], [], [5]]
HEADS = {"linear": lambda **kw: sk.LinearHead(8, N, **kw), "dft": lambda **kw: sk.DFTHead(16, N, k=3, slack=4, **kw)}
LOSSES = [sk.BCE(), sk.Focal(), sk.SigmoidF1(), sk.LMLNLL(3), sk.TruncatedTopKEntropy(3)]
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)


@pytest.fixture(params=list(HEADS))
def make(request):
    return HEADS[request.param]


@each_loss
def test_fake_tensors(make, loss):
    with FakeTensorMode():
        head = make()
        h = torch.randn(4, head.in_features, requires_grad=True)
        head.loss(h, LISTS, loss).backward()
        for dtype in (torch.float32, torch.int64):
            assert head.loss(h, torch.zeros(4, N, dtype=dtype), loss).shape == ()
        assert head(h).shape == (4, N)
        assert head.topk(h, 3)[1].shape == (4, 3)
    for tensor in (h, *head.parameters()):
        assert tensor.grad.shape == tensor.shape and type(tensor.grad).__name__ == "FakeTensor"


def test_one_fake_tensor_is_enough():
    head, h = HEADS["linear"](), torch.randn(4, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        sets, weight = sk.LabelSets.from_lists(LISTS, N), torch.rand(N)
    for targets, loss in ((sets, sk.BCE()), (sets, sk.SigmoidF1()), (sets, sk.LMLNLL(2)), (LISTS, sk.BCE(weight))):
        assert type(head.loss(h, targets, loss)).__name__ == "FakeTensor"


@each_loss
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_make_fx_keeps_operators_whole(make, loss, mode):
    head, sets = make(), sk.LabelSets.from_lists(LISTS, N)

    def step(h):
        (grad,) = torch.autograd.grad(head.loss(h, sets, loss), h)
        return grad, head(h)

    first, second = (torch.randn(4, head.in_features, requires_grad=True) for _ in range(2))
    traced = make_fx(step, tracing_mode=mode, _allow_non_fake_inputs=True)(first)
    assert "sigkernels" in traced.code
    for got, want in zip(traced(second), step(second), strict=True):
        torch.testing.assert_close(got, want)


def test_a_dispatch_mode_sees_the_operator():
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    p = problem(40, 3, 4, 5)
    want = public_loss(p, p.targets, sk.BCE(), "mean")
    want.backward()
    grads = p.grads()
    with Log():
        value = public_loss(p, p.targets, sk.BCE(), "mean")
    value.backward()
    assert "sigkernels.fused_loss.default" in seen
    torch.testing.assert_close([value, *p.grads()], [want, *grads])


@each_loss
def test_meta_tensors(make, loss):
    head, sets = make(device="meta"), sk.LabelSets.from_lists(LISTS, N).to("meta")
    h = torch.empty(4, head.in_features, device="meta")
    assert head(h).is_meta and head(h).shape == (4, N)
    assert head.topk(h, 3)[0].shape == (4, 3)
    value = head.loss(h, sets, loss)
    assert value.is_meta and value.shape == ()
    value.backward()
    assert head.loss(h, torch.zeros(4, N, device="meta", dtype=torch.bool), loss).is_meta
    assert all(parameter.grad.shape == parameter.shape for parameter in head.parameters())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", ["compiled", "traced", "eager"])
def test_double_backward_is_refused_on_every_path(reduction, how):
    torch._dynamo.reset()
    p = problem(40, 3, 4, 5)

    def loss(x, weight):
        return sk.functional.dft_loss(x, weight, p.targets, 40, 3, reduction=reduction).sum()

    if how == "compiled":
        loss = torch.compile(loss, backend="eager", fullgraph=True)
    elif how == "traced":
        loss = make_fx(loss)(p.x, p.layer.weight)
    grads = torch.autograd.grad(loss(p.x, p.layer.weight), (p.x, p.layer.weight), create_graph=True)
    assert all(grad.abs().max() > 0 for grad in grads)
    with pytest.raises(RuntimeError, match=DOUBLE_BACKWARD[:40]):
        sum(grad.square().sum() for grad in grads).backward()


def test_double_backward_of_logits_through_the_operator():
    p = problem(12, 2, 3, 4, dtype=torch.float64)
    g = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    args = (LayerMeta(12, 2),)
    assert torch.autograd.gradcheck(lambda g, w: logits_adjoint_operator(g, w, *args), (g, p.layer.weight))
    torch.library.opcheck(logits_adjoint_operator, (g, p.layer.weight, *args))


@pytest.mark.parametrize("wrap", [lambda head: head, lambda head: torch.nn.Sequential(torch.nn.ReLU(), head)])
def test_scripting_a_head_names_the_remedy(wrap):
    for head in (sk.DFTHead(8, 20, k=2, slack=3), sk.LinearHead(8, 20)):
        with pytest.raises(
            RuntimeError, match=r"torch.jit.script cannot compile .*torch.jit.trace\(head, h\).*torch.export"
        ):
            torch.jit.script(wrap(head))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("what", ["mean", "none", "rows", "unknown", "predict"])
def test_exports_with_any_number_of_rows(make, what, strict):
    """torch.export without strict=True took the number of rows of dense targets and predictions for a constant."""
    calls = {
        "mean": lambda head, h, y: head.loss(h, y),
        "none": lambda head, h, y: head.loss(h, y, reduction="none"),
        "rows": lambda head, h, y: head.loss(h, y, sk.LMLNLL(3)),
        "unknown": lambda head, h, y: head.loss(h, y, unknown=y > 0),
        "predict": lambda head, h, y: head.predict(h).to_dense() + y,
    }

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = make()

        def forward(self, h, y):
            return calls[what](self.head, h, y)

    model = Model()

    def arguments(*rows):
        return torch.randn(*rows, model.head.in_features), torch.rand(*rows, N).round()

    rows = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, arguments(4), dynamic_shapes=(rows, rows), strict=strict).module()
    given = arguments(7)
    torch.testing.assert_close(exported(*given), model(*given))
