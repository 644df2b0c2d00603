"""The DFT matrix, its factored tiles, and the facts that the guarantee rests on."""

from __future__ import annotations

import itertools
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import dft_plan as plans
from sigkernels import dft_spans as spans
from sigkernels.dft import dft_rows

sizes = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, (n - 1) // 2)))


@given(sizes)
def test_columns_are_orthonormal(size):
    w = sk.dft_matrix(*size)
    assert w.shape == (size[0], 2 * size[1] + 1)
    torch.testing.assert_close(w.T @ w, torch.eye(w.shape[1], dtype=torch.float64), rtol=0, atol=1e-13)


def test_column_order():
    n, k = 7, 2
    w = sk.dft_matrix(n, k).numpy()
    for i in range(n):
        t = 2 * math.pi * i / n
        waves = [f(j * t) for j in (1, 2) for f in (math.cos, math.sin)]
        np.testing.assert_allclose(w[i], [1 / math.sqrt(n), *(math.sqrt(2 / n) * wave for wave in waves)], atol=1e-15)


def test_maximal_minors_have_one_sign():
    w = sk.dft_matrix(8, 2).numpy()
    minors = [np.linalg.det(w[list(rows)]) for rows in itertools.combinations(range(8), 5)]
    assert min(minors) > 1e-6 or max(minors) < -1e-6


def test_angles_are_reduced_in_integers():
    n, k, i = 1_000_003, 80, 999_983
    row = dft_rows(n, k, np.array([i]))[0]
    # 80·999983 mod 1000003 = 998403, that is -1600
    assert row[-2] == pytest.approx(math.sqrt(2 / n) * math.cos(2 * math.pi * 1600 / n), abs=1e-17)
    assert row[-1] == pytest.approx(-math.sqrt(2 / n) * math.sin(2 * math.pi * 1600 / n), abs=1e-17)


def test_is_an_inverse_fft():
    n, k = 30, 4
    x = torch.randn(2 * k + 1, dtype=torch.float64)
    coefficients = torch.zeros(n // 2 + 1, dtype=torch.complex128)
    coefficients[0] = x[0]
    coefficients[1 : k + 1] = torch.complex(x[1::2], -x[2::2]) / math.sqrt(2)
    z = torch.fft.irfft(coefficients, n, norm="ortho")
    torch.testing.assert_close(sk.dft_matrix(n, k) @ x, z)


def test_a_range_of_rows():
    whole = sk.dft_matrix(50, 6)
    assert torch.equal(sk.dft_matrix(50, 6, start=7, stop=19), whole[7:19])
    assert sk.dft_matrix(50, 6, dtype=torch.float32).dtype == torch.float32


@given(sizes, st.integers(1, 40), st.integers(-100, 100))
def test_rotation_identity(size, tile, start):
    """Every tile is the tile around label 0 after a rotation of the coefficients."""
    n, k = size
    made = plans.plan(n, k, tile, 1e-16)
    mirrored = made.u[::-1] * np.where(np.arange(made.rank) < made.even_rank, 1, -1)
    np.testing.assert_allclose(made.u @ made.v, mirrored @ made.v, atol=1e-13)
    cos, sin = made.rotations(np.array([start]))
    x = np.random.default_rng(0).standard_normal(2 * k + 1)
    rotated = x.copy()
    rotated[1::2] = cos[0] * x[1::2] + sin[0] * x[2::2]
    rotated[2::2] = cos[0] * x[2::2] - sin[0] * x[1::2]
    want = dft_rows(n, k, start + np.arange(tile)) @ x
    np.testing.assert_allclose(made.u @ (made.v @ rotated), want, atol=1e-13)


def coefficients_of(span, x, start):
    """What U multiplies in each tile of a span, as the compiled core works it out."""
    cos, sin = (table[0] for table in span.rotations(np.array([start])))
    even, odd = np.r_[x[0], cos * x[1::2] + sin * x[2::2]], cos * x[2::2] - sin * x[1::2]
    if len(span.v_even):
        even, odd = span.v_even @ even, span.v_odd @ odd
    even, odd = span.even @ even, span.odd @ odd
    rank, even_rank, pairs = span.shared.rank, span.shared.even_rank, span.tiles // 2
    coefficients = np.empty((span.tiles, rank))
    sign = np.where(np.arange(rank) < even_rank, 1, -1)
    for pair in range(pairs):
        rows, later = slice(pair * rank, (pair + 1) * rank), span.tiles - pairs + pair
        coefficients[later] = even[rows] + odd[rows]
        coefficients[span.tiles - 1 - later] = sign * (even[rows] - odd[rows])
    if span.tiles % 2:
        coefficients[pairs] = np.r_[even[pairs * rank :], odd[pairs * rank :]]
    return coefficients


@given(sizes, st.integers(1, 40), st.integers(1, 9), st.integers(-100, 100))
def test_spans_of_tiles(size, tile, tiles, start):
    n, k = size
    x = np.random.default_rng(0).standard_normal(2 * k + 1)
    span = spans.span_plan(n, k, tile, tiles, 1e-16)
    logits = coefficients_of(span, x, start) @ span.shared.u.T
    want = dft_rows(n, k, start + np.arange(tiles * tile)) @ x
    np.testing.assert_allclose(logits.ravel(), want, atol=1e-12)


@pytest.mark.parametrize(
    ("n", "k", "tiles"), [(8921, 80, 5), (20_000, 50, 6), (1_000_000, 50, 8), (300, 80, 1), (900, 0, 3)]
)
def test_spans_depend_on_few_numbers(n, k, tiles):
    span = spans.span_plan(n, k, 240, tiles, 2e-8)
    every = span.even.shape[0] * (k + 1) + span.odd.shape[0] * k
    few = sum(a.size for a in (span.v_even, span.v_odd, span.even, span.odd))
    assert few < 0.8 * every if n > 1000 else not len(span.v_even)
    x = np.random.default_rng(0).standard_normal(2 * k + 1)
    logits = coefficients_of(span, x, 77) @ span.shared.u.T
    want = dft_rows(n, k, 77 + np.arange(tiles * 240)) @ x
    assert abs(logits.ravel() - want).max() <= 1e-6 * abs(want).max()


@pytest.mark.parametrize(("n", "k", "rank"), [(8921, 80, 14), (20_000, 50, 10), (1_000_000, 80, 6)])
def test_tiles_have_a_small_rank(n, k, rank):
    made = plans.plan(n, k, 192, 1e-8)
    assert made.rank <= rank
    exact = math.sqrt(2) * dft_rows(2 * n, k, 2 * np.arange(192) - 191)
    assert np.linalg.norm(made.u @ made.v - exact, 2) <= 2e-8 * np.linalg.norm(exact, 2)


def test_plans_are_shared_bounded_and_read_only(monkeypatch):
    assert plans.plan(100, 5, 16, 1e-8) is plans.plan(100, 5, 16, 1e-8)
    made = []
    threads = [threading.Thread(target=lambda: made.append(plans.plan(501, 7, 32, 1e-9))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(made[0].u, other.u) for other in made)
    with pytest.raises(ValueError, match="read-only"):
        made[0].u[0, 0] = 1
    monkeypatch.setattr(plans._plans, "most_bytes", 20_000)
    for n in range(200, 230):
        plans.plan(n, 5, 64, 1e-8)
    assert plans._plans.nbytes <= 20_000


def test_prior():
    head = sk.DFTHead(30, 1000, k=10, slack=3)
    probability = torch.sigmoid(head(torch.zeros(1, 30)))
    torch.testing.assert_close(probability, torch.full((1, 1000), 0.01))


@pytest.mark.parametrize(
    ("n", "k", "error", "match"),
    [
        (10, 5, ValueError, "2k\\+1 = 11 ≤ num_labels = 10"),
        (9, 5, ValueError, "Use k ≤ 4"),
        (10, -1, ValueError, "k must be at least 0, got -1"),
        (0, 0, ValueError, "num_labels must be at least 1"),
        (10, 1.0, TypeError, "k must be a whole number, got 1.0"),
        ("10", 1, TypeError, "num_labels must be a whole number"),
    ],
)
def test_refusals(n, k, error, match):
    with pytest.raises(error, match=match):
        sk.dft_matrix(n, k)
