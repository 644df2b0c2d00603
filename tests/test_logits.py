"""Logits on every backend: values, gradients, second gradients, leading dimensions."""

from __future__ import annotations

import pytest
import reference
import torch
from cases import assert_no_worse, problem
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import ops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["dft", "linear"])
def test_matches_float64_in_every_shape(device, shape, kind, dtype):
    n, k, s, batch = shape
    p = problem(n, k if kind == "dft" else -1, s, batch, device=device, dtype=dtype, bias=kind == "linear")
    truth, eager = p.to(torch.float64), p.to(dtype)
    z, exact, rough = ops.logits(p.x, p.layer), reference.logits(*truth[:2]), reference.logits(*eager[:2])
    assert z.dtype == dtype
    assert_no_worse(z, rough, exact, dtype, "logits")
    upstream = torch.randn_like(z)
    z.backward(upstream)
    exact.backward(upstream.double())
    rough.backward(upstream)
    for ours, own, want in zip(p.grads(), eager.grads(), truth.grads(), strict=True):
        assert ours.dtype == dtype
        if batch:
            assert_no_worse(ours, own, want, dtype, "gradient")


def test_gradcheck_and_gradgradcheck():
    p = problem(17, 3, 4, 3, dtype=torch.float64)

    def f(x, w):
        return sk.functional.dft_logits(x, w, 17, 3)

    torch.autograd.gradcheck(f, (p.x, p.layer.weight))
    torch.autograd.gradgradcheck(f, (p.x, p.layer.weight))


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_linear_in_x(a, b):
    p = problem(41, 4, 3, 2, dtype=torch.float64)
    x, y = p.x.detach()
    weight = p.layer.weight.detach()

    def z(v):
        return sk.functional.dft_logits(v, weight, 41, 4)

    torch.testing.assert_close(z(a * x + b * y), a * z(x) + b * z(y), rtol=1e-10, atol=1e-10)


def test_leading_dimensions(device):
    p = problem(33, 3, 4, 6, device=device)
    z = sk.functional.dft_logits(p.x, p.layer.weight, 33, 3)
    torch.testing.assert_close(
        sk.functional.dft_logits(p.x.reshape(2, 3, -1), p.layer.weight, 33, 3), z.reshape(2, 3, 33)
    )
    torch.testing.assert_close(sk.functional.dft_logits(p.x[0], p.layer.weight, 33, 3), z[0])


def test_not_finite_values_stay_in_their_row(device):
    p = problem(70, 3, 4, 3, device=device)
    with torch.no_grad():
        p.x[1, 0] = float("nan")
    finite = torch.isfinite(ops.logits(p.x, p.layer))
    assert finite[[0, 2]].all() and not finite[1].any()
