"""The losses of whole rows, beside the functions of logits that they are made of: on heads, compiled, as operators."""

from __future__ import annotations

import pytest
import torch
from cases import random_sets

import sigkernels as sk
from sigkernels.functional import lml_nll, smooth_topk_svm, truncated_topk_entropy
from sigkernels.ops.smooth_topk_svm import _svm
from sigkernels.ops.truncated_topk_entropy import _entropy

LOSSES = {
    "lml": (sk.LMLNLL(4), lambda z, y, reduction: lml_nll(z, y, 4, reduction)),
    "svm": (sk.SmoothTopKSVM(3, tau=0.5), lambda z, y, reduction: smooth_topk_svm(z, y, 3, 0.5, reduction)),
    "entropy": (sk.TruncatedTopKEntropy(3), lambda z, y, reduction: truncated_topk_entropy(z, y, 3, reduction)),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_on_a_head(name, reduction, device):
    loss, function = LOSSES[name]
    head = sk.DFTHead(20, 50, k=3, slack=4, bias=True, dtype=torch.float64).to(device)
    h = torch.randn(6, 20, dtype=torch.float64, device=device)
    sets = random_sets(6, 50).to(device)
    up = torch.rand(6 if reduction == "none" else (), dtype=torch.float64, device=device) + 0.5
    values, grads = [], []
    for value in (head.loss(h, sets, loss, reduction=reduction), function(head(h), sets, reduction)):
        head.zero_grad()
        value.backward(up)
        values.append(value)
        grads.append([p.grad.clone() for p in head.parameters()])
    assert torch.allclose(*values)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        assert torch.allclose(head.loss(h, sets, loss, reduction=reduction), values[0])


@pytest.mark.parametrize("name", LOSSES)
def test_compiles_whole(name):
    function = LOSSES[name][1]
    z, dense = torch.randn(3, 20, requires_grad=True), (torch.rand(3, 20) < 0.2).float()

    def step(z):
        return function(z * 2, dense, "mean")

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.allclose(*(torch.autograd.grad(f(z), z)[0] for f in (whole, step)))


@pytest.mark.parametrize(("operator", "settings"), [(_svm, [1.0]), (_entropy, [])], ids=["svm", "entropy"])
def test_operators_are_registered_soundly(operator, settings):
    z, sets = torch.randn(3, 20, requires_grad=True), random_sets(3, 20)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = (z, sets.indices, sets.offsets, None, 3, settings)
    torch.library.opcheck(operator.values.operator, call, test_utils=tests)
    torch.library.opcheck(operator.gradient.operator, (torch.ones(3), *call), test_utils=tests)
