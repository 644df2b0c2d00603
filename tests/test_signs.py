"""Counting argmaxable sign vectors, and the closed-form witness of the DFT."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import signs


def brute_runs(active, n):
    y = [i in active for i in range(n)]
    return sum(y[i] and not y[i - 1] for i in range(n))


@st.composite
def circles(draw):
    n = draw(st.integers(1, 24))
    return n, draw(st.sets(st.integers(0, n - 1)))


@given(circles())
@settings(max_examples=200, deadline=None)
def test_runs_are_counted_around_the_circle(case):
    n, active = case
    assert signs.runs([sorted(active)], n).tolist() == [brute_runs(active, n)]


@pytest.mark.parametrize(
    ("y", "count"), [([1], 0), ([1, 1], 0), ([1, -1], 1), ([0, 1, 0, 1], 3), ([True, False, False, True], 2)]
)
def test_alternations(y, count):
    assert signs.alternations(y) == count


@given(circles())
def test_alternations_of_label_sets(case):
    n, active = case
    sets = sk.LabelSets.from_lists([active, [], range(n)], n)
    assert signs.alternations(sets).tolist() == signs.alternations(sets.to_dense().numpy()).tolist()


def test_public_names():
    public = {name for name, thing in vars(signs).items() if getattr(thing, "__module__", "") == signs.__name__}
    assert set(signs.__all__) == {name for name in public if not name.startswith("_")}


@pytest.mark.parametrize("kind", [set, frozenset, tuple, np.array])
def test_a_witness_of_any_kind_of_set(kind):
    assert np.array_equal(signs.dft_witness(kind([3, 4]), 11, 2), signs.dft_witness([3, 4], 11, 2))


def test_alternations_of_a_batch_and_of_nothing():
    assert signs.alternations(np.array([[[1, -1, 1], [1, 1, 1]]])).tolist() == [[2, 0]]
    with pytest.raises(ValueError, match="y must be a vector"):
        signs.alternations(1)


@pytest.mark.parametrize(
    ("n", "d", "count"), [(8, 2, 16), (8, 3, 58), (10, 4, 260), (10, 5, 512), (10, 7, 932), (12, 5, 1124)]
)
def test_covers_count(n, d, count):
    assert signs.count_argmaxable(n, d) == count


def test_covers_count_is_exact_for_large_numbers():
    assert signs.count_argmaxable(5, 9) == 2**5
    assert signs.count_argmaxable(1000, 1000) == 2**1000
    assert signs.count_argmaxable(8, 3, bias=True) == sum(math.comb(8, i) for i in range(4))


@pytest.mark.parametrize(("n", "k", "count"), [(30, 1, 31), (30, 2, 466), (60, 2, 1831)])
def test_every_set_of_at_most_k_labels_is_argmaxable(n, k, count):
    sets = [list(s) for r in range(k + 1) for s in itertools.combinations(range(n), r)]
    assert len(sets) == count
    assert signs.is_argmaxable_dft(sets, n, k).all()


def test_is_argmaxable_dft_equals_at_most_2k_alternations():
    n = 9
    for k in range(4):
        for y in itertools.product((0, 1), repeat=n):
            active = [np.flatnonzero(y).tolist()]
            assert signs.is_argmaxable_dft(active, n, k)[0] == (signs.alternations(y) <= 2 * k)


@given(circles(), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_the_witness_has_the_signs_of_the_set(case, spare):
    n, active = case
    k = brute_runs(active, n) + spare
    if 2 * k + 1 > n:
        k = (n - 1) // 2
    if brute_runs(active, n) > k:
        return
    x = signs.dft_witness(sorted(active), n, k)
    assert x.shape == (2 * k + 1,)
    z = sk.dft_matrix(n, k, dtype=torch.float64).numpy() @ x
    assert set(np.flatnonzero(z > 0)) == active


@pytest.mark.parametrize(("n", "active"), [(8921, [3, 4, 5, 4460, 8920]), (1_000_000, [3, 4, 5, 400_000, 750_000])])
def test_the_witness_at_large_n(n, active):
    x = signs.dft_witness(active, n, 12)
    labels = np.unique([(a + offset) % n for a in active for offset in range(-9, 10)])
    j = np.arange(1, 13)
    angle = 2 * np.pi * ((labels[:, None] * j) % n) / n
    z = x[0] / math.sqrt(n) + math.sqrt(2 / n) * (np.cos(angle) @ x[1::2] + np.sin(angle) @ x[2::2])
    assert set(labels[z > 0]) == set(active)


def test_accepted_forms():
    sets = sk.LabelSets.from_lists([[0, 2], [1, 2]], 4)
    assert signs.runs(sets, 4).tolist() == [2, 1]
    assert signs.runs(np.array([[1, 0, 1, 0], [0, 1, 1, 0]]), 4).tolist() == [2, 1]
    assert signs.runs([], 4).tolist() == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: signs.count_argmaxable(0, 2), ValueError, "n must be at least 1, got 0"),
        (lambda: signs.count_argmaxable(3, 0), ValueError, "d must be at least 1"),
        (lambda: signs.count_argmaxable(3.5, 2), TypeError, "n must be a whole number"),
        (lambda: signs.is_argmaxable_dft([[1]], 4, 2), ValueError, "2k\\+1 ≤ n"),
        (lambda: signs.is_argmaxable_dft([[1]], 4, -1), ValueError, "k must be at least 0"),
        (lambda: signs.is_argmaxable_dft([[7]], 4, 1), ValueError, "out of range"),
        (lambda: signs.runs(sk.LabelSets.from_lists([[1]], 5), 4), ValueError, "num_labels = 5, but 4 labels"),
        (lambda: signs.dft_witness([0, 2, 4], 9, 2), ValueError, "3 runs"),
        (lambda: signs.dft_witness([[0, 2]], 9, 2), ValueError, "one set"),
        (lambda: signs.dft_witness([11], 9, 2), ValueError, "out of range"),
        (lambda: signs.dft_witness(3, 9, 2), TypeError, r"one set, like \[3, 17, 18\], got 3; write \[3\]"),
        (lambda: signs.alternations("ab"), TypeError, "y must hold signs"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
