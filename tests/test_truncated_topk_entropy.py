"""Truncated top-k entropy: against a plain loop, against softmax cross-entropy, gradients, edges."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from cases import random_sets
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels.functional import truncated_topk_entropy


def by_hand(row: list[float], positives: list[int], k: int) -> float:
    """The definition with a full sort, in Python's own floats."""
    others = sorted(z for j, z in enumerate(row) if j not in positives)
    kept = others[: len(row) - k]
    return sum(math.log1p(sum(math.exp(z - row[y]) for z in kept)) for y in positives)


@given(data=st.data(), n=st.integers(1, 12), seed=st.integers(0, 1000))
def test_definition(data, n, seed):
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, n))
    sets = [data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n)) for _ in range(3)]
    z = torch.randn(3, n, dtype=torch.float64) * 3
    want = [by_hand(row, labels, k) for row, labels in zip(z.tolist(), sets, strict=True)]
    assert truncated_topk_entropy(z, sets, k, "none").tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert truncated_topk_entropy(z, sets, k).item() == pytest.approx(sum(want) / 3, rel=1e-12, abs=1e-12)
    assert truncated_topk_entropy(z, sets, k, "sum").item() == pytest.approx(sum(want), rel=1e-12, abs=1e-12)


def test_k_one_is_cross_entropy():
    z = torch.randn(5, 30, requires_grad=True)
    labels = torch.randint(0, 30, (5,))
    ours = truncated_topk_entropy(z, labels[:, None].tolist(), 1)
    theirs = F.cross_entropy(z, labels)
    assert torch.allclose(ours, theirs)
    grads = [torch.autograd.grad(loss, z)[0] for loss in (ours, theirs)]
    assert torch.allclose(*grads, atol=1e-7)


def test_a_positive_among_the_top_k_costs_little():
    z = torch.tensor([[9.0, 8.0, 7.0, -30.0, -30.0]])
    assert truncated_topk_entropy(z, [[2]], 3).item() < 1e-10
    assert truncated_topk_entropy(z, [[2]], 2).item() > 1


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_gradcheck(k):
    z = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)

    def loss(z):
        return truncated_topk_entropy(z, [[0, 4], [], [2]], k, "none")

    assert torch.autograd.gradcheck(loss, z)
    assert torch.autograd.gradgradcheck(loss, z)


def test_weights_from_dense_targets():
    z = torch.randn(2, 9, dtype=torch.float64)
    soft = torch.tensor([[0.0] * 8 + [0.25], [0.5] + [0.0] * 8], dtype=torch.float64)
    hard = truncated_topk_entropy(z, [[8], [0]], 3, "none")
    assert torch.allclose(truncated_topk_entropy(z, soft, 3, "none"), hard * torch.tensor([0.25, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_low_precision(dtype):
    z = (torch.randn(4, 100) * 4).to(dtype).requires_grad_()
    wide = z.detach().double().requires_grad_()
    sets = random_sets(4, 100)
    ours, want = truncated_topk_entropy(z, sets, 5), truncated_topk_entropy(wide, sets, 5)
    ours.backward()
    want.backward()
    assert ours.dtype == torch.float32 and z.grad.dtype == dtype
    assert ours.item() == pytest.approx(want.item(), rel=1e-5)
    eps = torch.finfo(dtype).eps
    assert ((z.grad.double() - wide.grad).abs() <= 4 * eps * wide.grad.abs() + 1e-6).all()


def test_large_logits_and_shapes():
    z = torch.tensor([[1e4, -1e4, 3e4, 0.0]], requires_grad=True)
    loss = truncated_topk_entropy(z, [[1]], 2)
    loss.backward()
    assert loss.item() == pytest.approx(2e4) and z.grad.tolist() == [[1.0, -1.0, 0.0, 0.0]]
    cube = torch.randn(2, 3, 8)
    assert truncated_topk_entropy(cube, [[1]] * 6, 2, "none").shape == (2, 3)
    assert truncated_topk_entropy(cube[:0], [], 2, "sum").item() == 0
    before = cube.clone()
    truncated_topk_entropy(cube.transpose(0, 1), [[1]] * 6, 2)
    assert torch.equal(cube, before)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: truncated_topk_entropy(torch.randn(1, 4), [[0]], 0), ValueError, "k must be at least 1"),
        (lambda: truncated_topk_entropy(torch.randn(1, 4), [[0]], 5), ValueError, "k = 5"),
        (lambda: truncated_topk_entropy(torch.randn(1, 4), [[7]], 2), ValueError, "label 7"),
        (lambda: truncated_topk_entropy(torch.ones(1, 4, dtype=torch.int64), [[0]], 2), TypeError, "floating point"),
        (lambda: sk.TruncatedTopKEntropy(0), ValueError, "k must be at least 1"),
        (lambda: sk.LMLNLL(1.5), TypeError, "whole number"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
