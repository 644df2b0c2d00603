"""Layers with codes and a label bias: every operation against the dense matrix, on the backends that take them."""

from __future__ import annotations

import pytest
import reference
import torch
from cases import assert_no_worse, dense_loss, problem, public_loss
from conftest import DEVICES

import sigkernels as sk
from sigkernels import backends, ops
from sigkernels.backends import by_name
from sigkernels.layer import Layer, LayerMeta
from sigkernels.ops.topk import rows_of_codes

TAKING = [n for n, reason in sk.backend_status().items() if reason is None and by_name(n).refuses_codes() is None]
REFUSING = [n for n, reason in sk.backend_status().items() if reason is None and n not in TAKING]
SHAPES = {  # n, k, s, batch, codes
    "one-block": (11, 2, 3, 4, 16),
    "odd": (101, 5, 7, 3, 16),
    "random-blocks": (300, 3, 5, 6, 16),
    "no-slack": (777, 4, 0, 5, 64),
    "constant": (1200, 0, 16, 33, 64),
    "wide": (1500, 10, 33, 9, 1024),
    "empty-batch": (40, 3, 4, 0, 16),
}


@pytest.fixture(params=TAKING)
def device(request):
    with sk.backend(request.param):
        yield torch.device(DEVICES[request.param])


@pytest.fixture(params=list(SHAPES), ids=list(SHAPES))
def shape(request):
    *rest, codes = SHAPES[request.param]
    return (*rest,), codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_and_gradients(device, shape, dtype, reduction):
    size, codes = shape
    given = problem(*size, device=device, dtype=dtype, bias=True, codes=codes)
    upstream = torch.randn(size[3], device=device) if reduction == "none" else torch.tensor(1.7, device=device)
    results = []
    for p, loss in ((given, public_loss), (given.to(dtype), dense_loss), (given.to(torch.float64), dense_loss)):
        value = loss(p, p.targets, sk.BCE(), reduction)
        value.backward(upstream.to(value.dtype))
        results.append([value.detach(), *p.grads()])
    if size[3] == 0 and reduction == "mean":
        return  # a mean over nothing
    for name, *parts in zip(("loss", "x", "weight", "bias"), *results, strict=True):
        assert_no_worse(*parts, dtype, name)


@pytest.mark.parametrize("loss", [sk.SigmoidF1(), sk.Asymmetric(), sk.LMLNLL(3)], ids=lambda loss: type(loss).__name__)
def test_other_losses(device, loss):
    p = problem(300, 3, 5, 6, device=device, dtype=torch.float64, bias=True, codes=16)
    ours = public_loss(p, p.targets, loss, "sum")
    ours.backward()
    grads = p.grads()
    matrix = reference.matrix(p.layer)
    plain = sk.functional.linear_loss(p.x, matrix, p.targets, p.layer.bias, loss=loss, reduction="sum")
    plain.backward()
    torch.testing.assert_close(ours, plain)
    for ours_grad, want in zip(grads, p.grads(), strict=True):
        torch.testing.assert_close(ours_grad, want, rtol=1e-9, atol=1e-11)


def test_logits_topk_and_predict(device, shape):
    size, codes = shape
    p = problem(*size, device=device, dtype=torch.float64, bias=True, codes=codes)
    args, options = (p.x, p.layer.weight, size[0], size[1]), {"bias": p.layer.bias, "codes": codes}
    want = reference.logits(p.x, p.layer)
    torch.testing.assert_close(sk.functional.dft_logits(*args, **options), want)
    values, labels = sk.functional.dft_topk(*args, 5, **options)
    want_values, want_labels = reference.topk(p.x, p.layer, 5)
    torch.testing.assert_close(values, want_values)
    assert torch.equal(labels, want_labels)
    assert ops.predict(p.x, p.layer, 0.3).to_lists() == reference.predict(p.x, p.layer, 0.3).to_lists()
    upstream = torch.randn_like(values)
    grads = [torch.autograd.grad(v, p.leaves, upstream) for v in (values, want_values)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("start", "stop"), [(0, 1200), (7, 500), (64, 65), (130, 1199), (1200, 1200)])
def test_a_range_of_the_labels(device, start, stop):
    whole = problem(1200, 3, 5, 6, device=device, dtype=torch.float64, bias=True, codes=64)
    part = whole.layer.part(start, stop)
    z = ops.logits(whole.x, part)
    torch.testing.assert_close(z, reference.logits(whole.x, whole.layer)[:, start:stop])
    g = torch.randn_like(z)
    (grad,) = torch.autograd.grad(z, whole.x, g)
    torch.testing.assert_close(grad, g @ reference.matrix(part))


def test_gradcheck(device):
    p = problem(45, 2, 3, 3, device=device, dtype=torch.float64, bias=True, codes=16)

    def layer(weight, bias):
        return Layer(weight, bias, p.layer.meta)

    assert torch.autograd.gradcheck(lambda x, w, b: ops.logits(x, layer(w, b)), p.leaves)
    assert torch.autograd.gradgradcheck(lambda x, w, b: ops.logits(x, layer(w, b)), p.leaves)
    assert torch.autograd.gradcheck(
        lambda x, w, b: ops.layer_loss(x, layer(w, b), p.targets, sk.BCE(), "none"), p.leaves
    )
    assert torch.autograd.gradcheck(lambda x, w, b: ops.topk(x, layer(w, b), 4)[0], p.leaves)


def test_compiled():
    with sk.backend("torch"):
        p = problem(100, 2, 3, 4, bias=True, codes=16)
        dense = p.targets.to_dense(torch.float32)

        def step(x, weight, bias):
            values, _ = sk.functional.dft_topk(x, weight, 100, 2, 3, bias=bias, codes=16)
            loss = sk.functional.dft_loss(x, weight, dense, 100, 2, bias=bias, codes=16)
            return loss + values.sum() + sk.functional.dft_logits(x, weight, 100, 2, bias=bias, codes=16).sum()

        whole = torch.compile(step, fullgraph=True, backend="aot_eager")
        grads = [torch.autograd.grad(f(*p.leaves), p.leaves) for f in (whole, step)]
        for ours, want in zip(*grads, strict=True):
            torch.testing.assert_close(ours, want)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(rows_of_codes, (torch.tensor([[1, 2], [90, 5]]), 16), test_utils=tests)


def test_the_same_bits_every_time_and_after_inference_mode():
    with sk.backend("torch"):
        p = problem(500, 3, 5, 6, codes=64)
        with torch.inference_mode():
            first = ops.logits(p.x, p.layer).clone()
        second = ops.logits(p.x, p.layer)
        assert torch.equal(first, second.detach())
        second.sum().backward()


@pytest.mark.parametrize("name", REFUSING)
def test_backends_without_codes_refuse_by_name(name):
    p = problem(100, 2, 3, 4, device=DEVICES[name], codes=16)
    with sk.backend(name), pytest.raises(backends.BackendError, match=f"the {name} backend has no kernel for codes"):
        public_loss(p, p.targets, sk.BCE(), "mean")
    assert public_loss(p, p.targets, sk.BCE(), "mean").isfinite()  # auto takes one that has it


def test_refusals():
    x, weight = torch.randn(2, 24), torch.randn(50, 3)
    with pytest.raises(ValueError, match=r"codes must be one of .*, got 20; for 50 labels use codes=16"):
        sk.functional.dft_logits(x, weight, 50, 2, codes=20)
    with pytest.raises(ValueError, match=r"2k\+1\+codes\+s = 5 \+ 64 \+ 3 = 72, got shape"):
        sk.functional.dft_logits(x, weight, 50, 2, codes=64)
    with pytest.raises(ValueError, match=r"bias must have shape \[50\], got \(4,\)"):
        sk.functional.dft_loss(x, weight, [[1], [2]], 50, 2, codes=16, bias=torch.zeros(4))
    with pytest.raises(TypeError, match="bias must be a tensor or None, got list"):
        sk.functional.dft_topk(x, weight, 50, 2, 3, codes=16, bias=[0.0] * 50)
    with pytest.raises(TypeError, match="bias must be a tensor or None, got BCE; did you mean loss=…"):
        sk.functional.linear_loss(torch.randn(1, 4), torch.randn(9, 4), [[1]], sk.BCE())
    assert LayerMeta(50, 2, codes=16).fixed_columns == 21 and LayerMeta(50, -1).fixed_columns == 0
