"""topk on every backend: the same as a stable sort of the logits."""

from __future__ import annotations

import pytest
import reference
import torch
from cases import problem
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import ops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["dft", "linear"])
def test_is_the_topk_of_the_logits(device, shape, kind, dtype):
    n, k, s, batch = shape
    p = problem(n, k if kind == "dft" else -1, s, batch, device=device, dtype=dtype, bias=kind == "linear")
    for m in {1, min(n, 7), n} if n < 300 else {1, 7, 64}:
        values, labels = ops.topk(p.x, p.layer, m)
        want, _ = reference.topk(p.x, p.layer, m)
        assert values.shape == labels.shape == (batch, m) and labels.dtype == torch.int64
        torch.testing.assert_close(values, want)
        torch.testing.assert_close(reference.logits(p.x, p.layer).gather(1, labels), values)
        assert all(len(set(row)) == m for row in labels.tolist())


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=40), st.data())
def test_ties_go_to_the_lower_label(values, data):
    m = data.draw(st.integers(1, len(values)))
    weight = torch.tensor(values, dtype=torch.float32)[:, None]
    got, labels = sk.functional.linear_topk(torch.ones(1, 1), weight, m)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:m]
    assert labels[0].tolist() == order
    assert got[0].tolist() == [values[i] for i in order]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_ties_across_tiles_zeros_and_nans(device, dtype):
    weight = torch.zeros(3000, 1, device=device, dtype=dtype)
    weight[1::2] = -0.0
    weight[2500] = float("nan")
    values, labels = sk.functional.linear_topk(torch.ones(2, 1, device=device, dtype=dtype), weight, 5)
    assert labels.tolist() == [[2500, 0, 1, 2, 3]] * 2
    assert values[:, 0].isnan().all() and (values[:, 1:] == 0).all()


@pytest.mark.parametrize("kind", ["dft", "linear"])
def test_gradients_reach_the_values(device, kind):
    p = problem(45, 4 if kind == "dft" else -1, 5, 4, device=device, dtype=torch.float64, bias=kind == "linear")
    q = p.to(torch.float64)
    values, labels = ops.topk(p.x, p.layer, 6)
    upstream = torch.randn_like(values)
    values.backward(upstream)
    reference.logits(q.x, q.layer).gather(1, labels).backward(upstream)
    for ours, want in zip(p.grads(), q.grads(), strict=True):
        torch.testing.assert_close(ours, want)


def test_leading_dimensions(device):
    p = problem(33, 3, 4, 6, device=device)
    values, labels = sk.functional.dft_topk(p.x.reshape(2, 3, -1), p.layer.weight, 33, 3, 4)
    flat = sk.functional.dft_topk(p.x, p.layer.weight, 33, 3, 4)
    assert torch.equal(values, flat[0].reshape(2, 3, 4)) and torch.equal(labels, flat[1].reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("m", "error", "match"),
    [
        (0, ValueError, "m must lie in 1 … num_labels = 33, got 0"),
        (34, ValueError, "got 34"),
        (1.5, TypeError, "m must be"),
    ],
)
def test_refusals(m, error, match):
    p = problem(33, 3, 4, 6)
    with pytest.raises(error, match=match):
        sk.functional.dft_topk(p.x, p.layer.weight, 33, 3, m)
    with pytest.raises(error, match=match):
        sk.functional.linear_topk(p.x[:, :4], p.layer.weight, m)
