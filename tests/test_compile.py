"""torch.library and torch.compile: every operation stays whole, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from cases import problem

import sigkernels as sk
from sigkernels.ops.fused_loss import fused_loss_operator
from sigkernels.ops.logits import logits_operator
from sigkernels.ops.predict import predict_operator
from sigkernels.ops.topk import topk_operator

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def fused_loss_arguments(reduction, needs, dtype=torch.float32, dense=False):
    p = problem(40, 3, 4, 5, dtype=dtype)
    targets = (None, None, p.targets.to_dense()) if dense else (p.targets.indices, p.targets.offsets, None)
    flat = sk.BCE(weight=torch.rand(40), label_smoothing=0.1).flatten()
    return (p.x, p.layer.weight, None, None, None, *targets, None, *flat, p.layer.meta, reduction, needs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dense", [False, True])
def test_opcheck_fused_loss(reduction, dense):
    arguments = fused_loss_arguments(reduction, [True, True, False, False, False], dense=dense)
    torch.library.opcheck(fused_loss_operator, arguments)


def test_opcheck_others():
    p = problem(40, 3, 4, 5)
    torch.library.opcheck(logits_operator, (p.x, *p.layer))
    torch.library.opcheck(topk_operator, (p.x, *p.layer, 3))
    with torch.no_grad():
        torch.library.opcheck(predict_operator, (p.x.detach(), p.layer.weight.detach(), *p.layer[1:], 0.5, None))
    q = problem(40, -1, 4, 5, bias=True)
    torch.library.opcheck(logits_operator, (q.x, *q.layer))


# One case down to machine code, the hardest; the others as far as the graphs of forward and backward, which are ours.
@pytest.mark.parametrize(
    ("kind", "dynamic", "backend"),
    [
        ("dft", True, "inductor"),
        ("dft", False, "aot_eager"),
        ("linear", True, "aot_eager"),
        ("linear", False, "aot_eager"),
    ],
)
def test_heads_compile_whole(kind, dynamic, backend):
    head = sk.DFTHead(24, 60, k=4, slack=5) if kind == "dft" else sk.LinearHead(24, 60)

    def step(h, sets, weight):
        loss = head.loss(h, sets) + head.loss(h, sets, sk.BCE(pos_weight=weight), "none").mean()
        return loss, head.topk(h, 3), head(h).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch in (4, 6):
        h, weight = torch.randn(batch, 24, requires_grad=True), torch.rand(60)
        sets = sk.LabelSets.from_lists([[i, i + 7] for i in range(batch)], 60)
        results = []
        for function in (step, compiled):
            loss, (values, labels), total = function(h, sets, weight)
            (loss + values.sum() + total).backward()
            grads = [h.grad, *(p.grad for p in head.parameters())]
            h.grad = None
            head.zero_grad()
            results.append([loss, values, labels, total, *grads])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


def test_predict_compiles_whole():
    head = sk.DFTHead(24, 60, k=4, slack=5)
    h = torch.randn(4, 24) * 40

    def labels(h):
        sets = head.predict(h)
        return sets.indices, sets.offsets

    for got, want in zip(torch.compile(labels, fullgraph=True, backend="aot_eager")(h), labels(h), strict=True):
        assert torch.equal(got, want)


def test_autocast_inside_compile():
    head = sk.DFTHead(24, 60, k=4, slack=5)
    h, sets = torch.randn(4, 24), sk.LabelSets.from_lists([[1], [2], [], [3]], 60)

    def step(h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return head.loss(h, sets)

    torch.testing.assert_close(
        torch.compile(step, fullgraph=True, backend="aot_eager")(h), step(h), rtol=1e-2, atol=1e-3
    )


def test_settings_in_tensors_compile_once():
    """docs/losses.md, "Settings that change while you train"; a number compiles anew."""
    head, h, y = sk.DFTHead(24, 60, k=4, slack=5), torch.randn(3, 24), sk.LabelSets.from_lists([[1], [], [5, 7]], 60)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda loss: head.loss(h, y, loss), fullgraph=True, backend=counter)
    for value in (1.0, 1.5, 2.0, 3.0):
        for loss in (sk.SigmoidF1(beta=torch.tensor(value)), sk.BCE(pos_weight=torch.tensor(value))):
            torch.testing.assert_close(step(loss), head.loss(h, y, loss))
    assert counter.frame_count == 2
