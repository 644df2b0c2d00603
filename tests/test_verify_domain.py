"""Inputs without negative entries: features after a ReLU rule out more than the matrix alone."""

import numpy as np
import pytest
from verify_oracle import KINDS, degenerate_matrix, is_argmaxable, is_top

import sigkernels as sk
from sigkernels.verify import Report, verify

YES = ("ARGMAXABLE", "THIN")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", (False, True))
def test_fuzzed_questions_agree_with_exact_rational_programs(kind, biased):
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(4):
        n, d = int(rng.integers(1, 8)), int(rng.integers(1, 4))
        W = degenerate_matrix(rng, kind, n, d)
        bias = rng.integers(-2, 3, n).astype(float) if biased else None
        sets = [np.flatnonzero(rng.random(n) < rng.choice([0.2, 0.5, 0.8])).tolist() for _ in range(6)]
        report = verify(W, sets, bias=bias, domain="nonnegative")
        assert report.check(), report.check()
        assert [v in YES for v in report.verdicts] == [is_argmaxable(W, s, bias, nonnegative=True) for s in sets]
        assert report.counts()["UNDECIDED"] == report.counts()["NOT_EPS"] == 0


def test_what_some_nonnegative_input_predicts_is_possible():
    rng = np.random.default_rng(0)
    W = rng.standard_normal((40, 6))
    sets = [np.flatnonzero(W @ x > 0).tolist() for x in rng.random((30, 6))]
    sets += [np.flatnonzero(W @ x > 0).tolist() for x in -rng.random((30, 6))]
    report = verify(W, sets, domain="nonnegative", radius=True)
    assert all(v == "ARGMAXABLE" for v in report.verdicts[:30])
    assert "UNARGMAXABLE" in report.verdicts[30:] and "UNARGMAXABLE" not in verify(W, sets).verdicts
    yes = np.array([v == "ARGMAXABLE" for v in report.verdicts])
    for i in np.flatnonzero(yes):
        x = report.witness(i)
        assert x.min() > 0 and np.flatnonzero(W @ x > 0).tolist() == sets[i]
        assert x.min() >= report.radius_lo[i] and x.max() <= 1e4  # the whole ball is nonnegative
    assert np.all(report.radius_hi[yes] - report.radius_lo[yes] <= 1e-6 * report.radius_hi[yes])
    assert np.all(report.radius_hi[yes] <= verify(W, sets, radius=True).radius_hi[yes] * (1 + 1e-6))


@pytest.mark.parametrize("kind", ("gaussian", "integers", "duplicates"))
def test_the_threshold_of_a_rule_may_be_negative(kind):
    rng = np.random.default_rng(1)
    W = degenerate_matrix(rng, kind, 7, 3)
    report = verify(W, [[i] for i in range(7)], rule="argmax", domain="nonnegative")
    assert report.check()
    for i, verdict in enumerate(report.verdicts):
        # W x for x ≥ 0: difference rows and one slack variable for each feature.
        others = np.delete(np.arange(7), i)
        truth = is_argmaxable(W[i] - W[others], range(6), nonnegative=True)
        assert (verdict in YES) == truth
        assert not truth or is_top(W, [i])
        if truth:
            assert (W @ report.witness(i)).argmax() == i and report.witness(i).shape == (3,)


def test_reports_carry_the_domain(tmp_path):
    W = np.array([[1.0, 1.0], [1.0, -1.0]])
    report = verify(W, [[], [0], [0, 1]], domain="nonnegative")
    assert report.verdicts.tolist() == ["UNARGMAXABLE", "ARGMAXABLE", "ARGMAXABLE"]
    assert verify(W, [[]]).verdicts[0] == "ARGMAXABLE"
    assert "2 labels, 2 features" in report.summary() and "without negative entries" in report.summary()
    report.save(tmp_path / "r.npz")
    loaded = Report.load(tmp_path / "r.npz")
    assert loaded.check() and loaded.question.domain == "nonnegative" and loaded.check(W) and not loaded.check(-W)
    report.save(tmp_path / "bare.npz", matrix=False)
    assert Report.load(tmp_path / "bare.npz", W).check()


def test_a_proof_for_nonnegative_inputs_does_not_hold_for_all():
    report = verify(np.array([[1.0, 1.0]]), [[]], domain="nonnegative")
    assert report.verdicts[0] == "UNARGMAXABLE"
    report.question = verify(np.array([[1.0, 1.0]]), [[0]]).question
    assert not report.check()


def test_bad_domains():
    with pytest.raises(ValueError, match="domain='relu': use one of 'all', 'nonnegative'"):
        verify(np.eye(2), [[0]], domain="relu")
    with pytest.raises(ValueError, match="output of its projection"):
        verify(sk.DFTHead(5, 9, 2), [[0]], domain="nonnegative")
