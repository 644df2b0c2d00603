"""Smooth top-k SVM: against the definition over all subsets, a recursion in logarithms, gradients, edges."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from cases import random_sets
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels.functional import smooth_topk_svm


def published(row: list[float], label: int, k: int, tau: float) -> float:
    """The definition for one label: a sum over all subsets of k labels, and one over those that hold the label."""
    every = list(itertools.combinations(range(len(row)), k))
    score = [sum(row[j] for j in subset) / k + (label not in subset) for subset in every]
    with_label = [s for s, subset in zip(score, every, strict=True) if label in subset]
    return tau * (_log_sum(score, tau) - _log_sum(with_label, tau))


def _log_sum(values: list[float], tau: float) -> float:
    top = max(values)
    return top / tau + math.log(sum(math.exp((v - top) / tau) for v in values))


def by_recursion(row: torch.Tensor, positives: list[int], k: int, tau: float) -> float:
    """Elementary symmetric polynomials one label at a time, logarithms in float64."""
    v = row.double() / (k * tau)
    log_sums = torch.full((k + 1,), -torch.inf, dtype=torch.float64)
    log_sums[0] = 0
    for j in range(len(row)):
        if j not in positives:
            log_sums[1:] = torch.logaddexp(log_sums[1:], log_sums[:-1] + v[j])
    ratio = (log_sums[k] - log_sums[k - 1]).item() if log_sums[k] > -torch.inf else -math.inf
    gaps = torch.tensor([1 / tau + ratio - v[y].item() for y in positives], dtype=torch.float64)
    return tau * torch.nn.functional.softplus(gaps).sum().item()


@given(data=st.data(), n=st.integers(1, 8), tau=st.sampled_from([0.1, 1.0, 3.0]), seed=st.integers(0, 1000))
def test_one_label_is_the_published_loss(data, n, tau, seed):
    torch.manual_seed(seed)
    k, label = data.draw(st.integers(1, n)), data.draw(st.integers(0, n - 1))
    z = 3 * torch.randn(1, n, dtype=torch.float64)
    want = published(z[0].tolist(), label, k, tau)
    assert smooth_topk_svm(z, [[label]], k, tau).item() == pytest.approx(want, rel=1e-10, abs=1e-12)


@given(data=st.data(), n=st.integers(1, 40), scale=st.sampled_from([0.1, 3.0, 1e4]), seed=st.integers(0, 1000))
def test_sets(data, n, scale, seed):
    torch.manual_seed(seed)
    k = data.draw(st.integers(1, n))
    sets = [data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n)) for _ in range(3)]
    z = scale * torch.randn(3, n, dtype=torch.float64)
    want = [by_recursion(row, labels, k, 0.5) for row, labels in zip(z, sets, strict=True)]
    assert smooth_topk_svm(z, sets, k, 0.5, "none").tolist() == pytest.approx(want, rel=1e-10, abs=1e-10)
    assert smooth_topk_svm(z, sets, k, 0.5).item() == pytest.approx(sum(want) / 3, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("k", [1, 5, 100])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_many_labels(k, scale):
    z = scale * torch.randn(2, 1009, dtype=torch.float64)
    want = [by_recursion(row, labels, k, 1.0) for row, labels in zip(z, [[3], [7, 900]], strict=True)]
    assert smooth_topk_svm(z, [[3], [7, 900]], k, reduction="none").tolist() == pytest.approx(want, rel=1e-11)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_gradcheck(k):
    z = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)

    def loss(z):
        return smooth_topk_svm(z, [[0, 4], [], [2], [0, 1, 2, 3, 4, 5]], k, 0.7, "none")

    assert torch.autograd.gradcheck(loss, z)
    assert torch.autograd.gradgradcheck(loss, z)


def test_gradients_of_many_labels_agree_with_autograd_of_the_recursion():
    k, n = 20, 200
    z = (2 * torch.randn(n, dtype=torch.float64)).requires_grad_()
    log_sums = [torch.zeros((), dtype=torch.float64)] + [torch.full((), -1e300, dtype=torch.float64)] * k
    for j in range(1, n):
        step = [torch.logaddexp(log_sums[i], log_sums[i - 1] + z[j] / k) for i in range(1, k + 1)]
        log_sums = [log_sums[0], *step]
    loss = torch.nn.functional.softplus(1 + log_sums[k] - log_sums[k - 1] - z[0] / k)
    (want,) = torch.autograd.grad(loss, z)
    (ours,) = torch.autograd.grad(smooth_topk_svm(z[None], [[0]], k), z)
    torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [5, 100])
def test_low_precision(dtype, k):
    z = (torch.randn(4, 700) * 4).to(dtype).requires_grad_()
    wide = z.detach().double().requires_grad_()
    sets = random_sets(4, 700)
    ours, want = smooth_topk_svm(z, sets, k), smooth_topk_svm(wide, sets, k)
    ours.backward()
    want.backward()
    assert ours.dtype == torch.float32 and z.grad.dtype == dtype
    assert ours.item() == pytest.approx(want.item(), rel=1e-6)
    limits = torch.finfo(dtype)
    assert ((z.grad.double() - wide.grad).abs() <= 2 * limits.eps * wide.grad.abs() + limits.tiny).all()


def test_edges():
    z = torch.tensor([[1e4, -1e4, 3e4, 0.0]], requires_grad=True)
    loss = smooth_topk_svm(z, [[1]], 2)
    loss.backward()
    # so far apart, only the second highest of the others counts
    assert loss.item() == pytest.approx(1 + 1e4, rel=1e-6)
    assert z.grad.tolist()[0] == pytest.approx([0.5, -0.5, 0.0, 0.0], abs=1e-15)
    few = torch.randn(1, 4, requires_grad=True)
    assert smooth_topk_svm(few, [[0, 1]], 3).item() == 0  # two others: both may come first
    assert torch.autograd.grad(smooth_topk_svm(few, [[0, 1]], 3), few)[0].abs().max() == 0
    hidden = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]], requires_grad=True)
    seen = hidden.detach()[:, [0, 1, 3]].requires_grad_()
    losses = [smooth_topk_svm(hidden, [[0]], 2), smooth_topk_svm(seen, [[0]], 2)]
    torch.testing.assert_close(*losses)
    grads = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(losses, (hidden, seen), strict=True)]
    torch.testing.assert_close(grads[0][:, [0, 1, 3]], grads[1])
    assert grads[0][0, 2] == 0
    assert smooth_topk_svm(torch.full((1, 3), torch.nan), [[0]], 2).isnan()
    cube = torch.randn(2, 3, 8)
    assert smooth_topk_svm(cube, [[1]] * 6, 2, reduction="none").shape == (2, 3)
    assert smooth_topk_svm(cube[:0], [], 2, reduction="sum").item() == 0
    before = cube.clone()
    smooth_topk_svm(cube.transpose(0, 1), [[1]] * 6, 2)
    assert torch.equal(cube, before)


def test_weights_from_dense_targets():
    z = torch.randn(2, 9, dtype=torch.float64)
    soft = torch.tensor([[0.0] * 8 + [0.25], [0.5] + [0.0] * 8], dtype=torch.float64)
    hard = smooth_topk_svm(z, [[8], [0]], 3, reduction="none")
    assert torch.allclose(smooth_topk_svm(z, soft, 3, reduction="none"), hard * torch.tensor([0.25, 0.5]))


def test_rows_are_worked_on_in_parts(monkeypatch):
    z, sets = torch.randn(7, 30, requires_grad=True), random_sets(7, 30)
    (whole,) = torch.autograd.grad(smooth_topk_svm(z, sets, 4), z)
    monkeypatch.setattr(sys.modules[smooth_topk_svm.__module__], "CHUNK", 60)
    assert torch.equal(torch.autograd.grad(smooth_topk_svm(z, sets, 4), z)[0], whole)


def test_the_loss_in_a_compiled_function():
    head, h, dense = sk.LinearHead(20, 50), torch.randn(6, 20), (torch.rand(6, 50) < 0.1).float()

    def step(h):
        return head.loss(h, dense, sk.SmoothTopKSVM(3, tau=0.5))

    assert torch.allclose(torch.compile(step, fullgraph=True, backend="aot_eager")(h), step(h))
    assert sk.SmoothTopKSVM(3) == sk.SmoothTopKSVM(3, 1.0) != sk.SmoothTopKSVM(3, 2.0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: smooth_topk_svm(torch.randn(1, 4), [[0]], 0), ValueError, "k must be at least 1"),
        (lambda: smooth_topk_svm(torch.randn(1, 4), [[0]], 5), ValueError, "k = 5"),
        (lambda: smooth_topk_svm(torch.randn(1, 4), [[0]], 2, 0.0), ValueError, "tau must be at least 1e-6, got 0"),
        (lambda: smooth_topk_svm(torch.randn(1, 4), [[0]], 2, "1"), TypeError, "tau must be a number"),
        (lambda: sk.SmoothTopKSVM(0), ValueError, "k must be at least 1"),
        (lambda: sk.SmoothTopKSVM(3, tau=-1), ValueError, "tau must be at least 1e-6, got -1"),
        (lambda: smooth_topk_svm(torch.ones(1, 4, dtype=torch.int64), [[0]], 2), TypeError, "floating point"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
