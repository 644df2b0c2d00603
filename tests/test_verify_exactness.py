"""No answer of the verifier contradicts exact rational arithmetic."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import linprog
from verify_oracle import KINDS, degenerate_matrix, is_argmaxable

from sigkernels.verify import verify

YES, NO = {"ARGMAXABLE", "THIN"}, {"UNARGMAXABLE"}


def check_against_oracle(W, sets, bias=None, **options):
    report = verify(W, sets, bias=bias, **options)
    for i, active in enumerate(sets):
        truth = is_argmaxable(W, active, bias)
        verdict = str(report.verdicts[i])
        assert verdict in (YES if truth else NO), (verdict, truth, active)
        if not truth:
            assert report.radius_hi[i] <= 0
    result = report.check()
    assert result, result
    return report


def random_sets(rng, n, count):
    return [np.flatnonzero(rng.random(n) < rng.choice([0.2, 0.5, 0.8])).tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_fuzzed_matrices_agree_with_exact_rational_programs(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    cases = 0
    while cases < 120:
        n, d = int(rng.integers(1, 10)), int(rng.integers(1, 5))
        W = degenerate_matrix(rng, kind, n, d)
        sets = random_sets(rng, n, 8)
        check_against_oracle(W, sets)
        cases += len(sets)


@pytest.mark.parametrize("kind", ("gaussian", "integers", "zero rows", "rank one", "thin"))
def test_fuzzed_affine_regions_agree_with_exact_rational_programs(kind):
    rng = np.random.default_rng(100 + KINDS.index(kind))
    for _ in range(8):
        n, d = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        W = degenerate_matrix(rng, kind, n, d)
        bias = rng.integers(-2, 3, n).astype(float) if kind != "gaussian" else rng.standard_normal(n)
        check_against_oracle(W, random_sets(rng, n, 8), bias)


def test_all_sign_vectors_of_an_integer_matrix():
    W = np.array([[1, 0], [0, 1], [1, 1], [-1, 1], [2, 2]], dtype=float)
    sets = [np.flatnonzero(y).tolist() for y in itertools.product((0, 1), repeat=5)]
    report = check_against_oracle(W, sets)
    assert sum(v == "ARGMAXABLE" for v in report.verdicts) == 8  # four lines through the origin


@pytest.mark.parametrize("shift", (2.0**-30, 2.0**-45))
def test_a_region_thinner_than_the_tolerance_is_thin_and_not_a_no(shift):
    # x > 0, and x < y < (1 + shift) x: a wedge of angle about shift / 2.
    W = np.array([[1.0, 0.0], [-1.0, 1.0], [1.0 + shift, -1.0]])
    report = check_against_oracle(W, [[0, 1, 2]], tol=1e-3)
    assert report.verdicts[0] == "THIN"
    assert 0 < report.radius_lo[0] < 1e-3
    closed = check_against_oracle(W, [[0, 1]], tol=1e-3)
    assert closed.verdicts[0] == "ARGMAXABLE"


def test_a_wedge_beyond_float64_is_still_decided():
    # In units of the last place: the two slopes differ by one bit, so only exact arithmetic tells yes from no.
    slope = np.nextafter(1.0, 2.0)
    W = np.array([[1.0, 0.0], [-1.0, 1.0], [slope, -1.0]])
    assert verify(W, [[0, 1, 2]]).verdicts[0] in ("THIN", "ARGMAXABLE")
    W[2, 0] = 1.0
    assert verify(W, [[0, 1, 2]]).verdicts[0] == "UNARGMAXABLE"


def test_bias_can_push_a_region_out_of_the_box():
    # x > 1e6: argmaxable, but not within the box of 1e4.
    report = check_against_oracle(np.array([[1.0]]), [[0]], bias=np.array([-1e6]))
    assert report.verdicts[0] == "THIN"
    assert report.radius_hi[0] < 0
    assert verify(np.array([[1.0]]), [[0]], bias=np.array([-1e6]), box=1e7).verdicts[0] == "ARGMAXABLE"


def test_the_published_hard_case_is_unargmaxable_with_an_exact_proof():
    """An orthogonalised Vandermonde matrix and five random columns, from the tests of the sigmoid-bottleneck paper.

    Its authors report that their solver fails on it and take the region to be too small to detect: there is none.
    """
    n, columns = 1000, 11
    end = 1e4 ** (1 / columns)
    Q, _ = np.linalg.qr(np.vander(np.linspace(-end, end, n), columns, increasing=True))
    W = np.hstack([Q, np.random.RandomState(11).uniform(-1, 1, (n, 5))])
    report = verify(W, [[0, 2, 5, 10, 13, 18, 23, 25, 32, 45]], box=1e5)
    assert report.verdicts[0] == "UNARGMAXABLE"
    assert report.radius_lo[0] == report.radius_hi[0] == 0
    certificate = report.certificate(0)
    assert certificate.multipliers.dtype == object  # fractions
    signs = np.where(np.isin(certificate.support, [0, 2, 5, 10, 13, 18, 23, 25, 32, 45]), 1, -1)
    for j in range(W.shape[1]):
        terms = zip(certificate.multipliers, signs, certificate.support, strict=True)
        assert sum(m * int(s) * Fraction(float(W[i, j])) for m, s, i in terms) == 0
    assert report.check()


def test_the_default_tolerance_of_a_solver_would_call_an_empty_region_optimal():
    """Why a solver's status is never believed: HiGHS at 1e-7 accepts radius 0 for a set that no input predicts."""
    W = np.random.default_rng(0).standard_normal((60, 3))
    active = [1, 5, 9]
    y = np.full(60, -1.0)
    y[active] = 1.0
    rows = np.column_stack([-y[:, None] * W, np.linalg.norm(W, axis=1)])
    naive = linprog([0, 0, 0, -1], A_ub=rows, b_ub=np.zeros(60), bounds=[(-1e4, 1e4)] * 3 + [(1e-8, None)])
    report = check_against_oracle(W, [active])
    assert report.verdicts[0] == "UNARGMAXABLE"
    assert naive.status == 0  # "optimal", with a radius of at least 1e-8, for a region that does not exist
