"""Poly-1 binary cross-entropy: the published formula, its gradient, and heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import dense_loss, problem, public_loss

import sigkernels as sk


@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 1.0, 2.5])
def test_formula(epsilon):
    z, y = 4 * torch.randn(5, 7, dtype=torch.float64), torch.rand(5, 7, dtype=torch.float64).round()
    p = torch.sigmoid(z)
    p_t = torch.where(y == 1, p, 1 - p)
    want = F.binary_cross_entropy_with_logits(z, y, reduction="none") + epsilon * (1 - p_t)
    loss = sk.Poly1BCE(epsilon)
    torch.testing.assert_close(loss.value(z, y), want)
    torch.testing.assert_close(loss.value_and_grad(z, y)[0], want)


def test_gradient():
    z, y = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.rand(5, 7, dtype=torch.float64)
    loss = sk.Poly1BCE(0.7, weight=torch.rand(7), pos_weight=3.0).at_labels(z)
    (want,) = torch.autograd.grad(loss.value(z, y).sum(), z)
    torch.testing.assert_close(loss.value_and_grad(z.detach(), y)[1], want)
    assert torch.autograd.gradcheck(lambda z: loss.value(z, y), z)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_on_a_layer(reduction):
    p = problem(300, 4, 9, 6, dtype=torch.float64)
    loss = sk.Poly1BCE(weight=torch.rand(300, dtype=torch.float64))
    ours, want = (f(p, p.targets, loss, reduction) for f in (public_loss, dense_loss))
    torch.testing.assert_close(ours, want)
    grads = [torch.autograd.grad(value.sum(), p.leaves) for value in (ours, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_extremes_and_refusals():
    z, y = torch.tensor([[1e4, -1e4, 1e4, -1e4]]), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    f, g = sk.Poly1BCE().value_and_grad(z, y)
    assert f.tolist() == [[0.0, 10001.0, 10001.0, 0.0]] and g.tolist() == [[0.0, -1.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match=r"epsilon must be at least -1, got -1\.5"):
        sk.Poly1BCE(-1.5)
