"""The LML projection of logits that lie far apart, against 60 digits."""

from __future__ import annotations

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels.functional import lml, lml_nll

BACKENDS = [name for name in ("torch", "cpu") if name in sk.available_backends()]


def exact_nll(z: list[float], labels: list[int], k: int) -> tuple[float, list[float]]:
    """The loss and its gradient by mpmath."""
    with mpmath.workdps(60):
        z = [mpmath.mpf(v) for v in z]

        def sides(nu):  # P and Q of ops/lml.py: they do not cancel, so 60 digits are enough for any gap
            r = [1 / (1 + mpmath.exp(abs(v + nu))) for v in z]
            above = [v + nu > 0 for v in z]
            p = sum(x for x, a in zip(r, above, strict=True) if not a) + max(sum(above) - k, 0)
            q = sum(x for x, a in zip(r, above, strict=True) if a) + max(k - sum(above), 0)
            return p, q, sum(x * (1 - x) / (q if a else p) for x, a in zip(r, above, strict=True))

        low, high = (mpmath.log(mpmath.mpf(k) / (len(z) - k)) - v for v in (max(z), min(z)))
        for _ in range(20):
            middle = (low + high) / 2
            p, q, _ = sides(middle)
            low, high = (middle, high) if p < q else (low, middle)
        nu = (low + high) / 2
        for _ in range(40):
            p, q, slope = sides(nu)
            step = -mpmath.log(p / q) / slope
            nu += step
            if abs(step) < mpmath.mpf(10) ** -30:
                break
        h = [x * (1 - x) for x in (1 / (1 + mpmath.exp(abs(v + nu))) for v in z)]
        missing = [1 / (1 + mpmath.exp(z[j] + nu)) for j in labels]
        grad = [x / sum(h) * sum(missing) for x in h]
        for j, m in zip(labels, missing, strict=True):
            grad[j] -= m
        return float(sum(mpmath.log1p(mpmath.exp(-z[j] - nu)) for j in labels)), [float(g) for g in grad]


WIDE = {
    "four steps": ([9000.0, 5000.0, 1000.0, -3000.0], [3], 3),
    "four steps, all sides": ([9000.0, 5000.0, 1000.0, -3000.0], [0, 2, 3], 2),
    "two, 1000": ([1000.0, 0.0], [1], 1),
    "two, 1000, the higher": ([500.0, -500.0], [0], 1),
    "two, 1480": ([0.0, 1480.0], [0], 1),
    "two, 3000": ([0.0, 3000.0], [0], 1),
    "near underflow": ([90.0, 91.0, -80.0, -81.5], [0, 2], 2),
    "equal groups": ([400.0, 400.0, 400.0, -300.0, -300.0, -301.0], [1, 4], 3),
    "tenths": ([0.1, 600.3, 601.7, -55.5, 0.9], [0, 1, 3], 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_logits_against_mpmath(backend, name, dtype):
    numbers, labels, k = WIDE[name]
    z = torch.tensor([numbers], dtype=dtype, requires_grad=True)
    want, want_grad = exact_nll(z.detach().double()[0].tolist(), labels, k)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-11
    with sk.backend(backend):
        loss = lml_nll(z, [labels], k)
        loss.backward()
        y = lml(z.detach(), k)
    assert loss.item() == pytest.approx(want, rel=tolerance)
    assert z.grad[0].tolist() == pytest.approx(want_grad, abs=tolerance)
    assert y.double().sum().item() == pytest.approx(k, rel=1e-6)


@given(
    z=st.lists(st.floats(-3000, 3000, width=32).map(round), min_size=2, max_size=6),
    k=st.integers(1, 5),
    label=st.integers(0, 5),
    wide=st.booleans(),
)
def test_any_logits_against_mpmath(z, k, label, wide):
    k, label = 1 + (k - 1) % (len(z) - 1), label % len(z)
    want, want_grad = exact_nll(z, [label], k)
    for name in BACKENDS:
        logits = torch.tensor([z], dtype=torch.float64 if wide else torch.float32, requires_grad=True)
        with sk.backend(name):
            loss = lml_nll(logits, [[label]], k)
            loss.backward()
            assert lml(logits, k).double().sum().item() == pytest.approx(k, rel=1e-6)
        assert loss.item() == pytest.approx(want, rel=2e-6, abs=2e-6)
        assert logits.grad[0].tolist() == pytest.approx(want_grad, abs=5e-6)
