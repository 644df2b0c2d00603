"""DFT heads: closed-form answers, thin regions, and proofs about the true (irrational) matrix."""

import importlib
import itertools
import math

import mpmath
import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels.signs import alternations
from sigkernels.verify import Certificate, verify
from sigkernels.verify.check import prove
from sigkernels.verify.question import DFT_ERROR, Question, dft_matrix, unit_circle
from sigkernels.verify.witness import alternation_certificate, roots_certificate, runs_of

pytestmark = pytest.mark.filterwarnings("ignore:in_features")


def head(n, k, slack=0, seed=0):
    torch.manual_seed(seed)
    return sk.DFTHead(4, n, k, slack)


@pytest.mark.parametrize("n", (1, 2, 3, 5, 8, 12, 97, 8921))
def test_the_circle_is_within_its_bound(n):
    cos, sin = unit_circle(n)
    with mpmath.workdps(40):
        for m in {0, n // 8, n // 4, n // 3, n // 2, (5 * n) // 8, n - 1}:
            angle = 2 * mpmath.pi * m / n
            assert abs(mpmath.mpf(float(cos[m])) - mpmath.cos(angle)) < 4 * 2.0**-53
            assert abs(mpmath.mpf(float(sin[m])) - mpmath.sin(angle)) < 4 * 2.0**-53


def test_the_matrix_is_that_of_the_head_and_within_its_bound():
    n, k = 101, 7
    W = dft_matrix(n, k)
    assert np.allclose(W, head(n, k).weight_matrix(torch.float64).numpy(), atol=1e-15)
    rng = np.random.default_rng(0)
    with mpmath.workdps(40):
        for i, j in zip(rng.integers(0, n, 40), rng.integers(1, k + 1, 40), strict=True):
            truth = mpmath.sqrt(mpmath.mpf(2) / n) * mpmath.cos(2 * mpmath.pi * int(i) * int(j) / n)
            assert abs(mpmath.mpf(float(W[i, 2 * j - 1])) - truth) < DFT_ERROR * math.sqrt(2 / n)


@pytest.mark.parametrize(("n", "k", "count"), [(30, 1, 31), (30, 2, 466), (60, 2, 1831), (30, 3, 4526)])
def test_every_set_of_at_most_k_labels(n, k, count):
    sets = [list(s) for r in range(k + 1) for s in itertools.combinations(range(n), r)]
    report = verify(head(n, k), sets)
    assert report.counts()["ARGMAXABLE"] == count
    some = np.random.default_rng(0).choice(count, min(count, 300), replace=False)
    W = dft_matrix(n, k)
    for i in some:
        assert np.flatnonzero(W @ report.witness(i) > 0).tolist() == sets[i]


@pytest.mark.parametrize(("n", "k"), [(7, 0), (7, 1), (8, 2), (9, 4)])
def test_without_slack_exactly_the_2k_alternating_vectors(n, k):
    Y = np.array(list(itertools.product((0, 1), repeat=n)))
    report = verify(head(n, k), Y)
    expected = alternations(Y) <= 2 * k
    assert [v == "ARGMAXABLE" for v in report.verdicts] == expected.tolist()
    assert report.counts()["UNARGMAXABLE"] == int((~expected).sum())
    assert report.check()
    # The same by Cover's count: the DFT is in general position.
    assert int(expected.sum()) == 2 * sum(math.comb(n - 1, i) for i in range(2 * k + 1))


def test_a_thin_set_is_proved_by_its_roots():
    n, k = 2001, 30
    active = np.arange(0, 2 * k, 2)  # every other label: 2k roots in a row, a radius far below anything representable
    report = verify(head(n, k), [active])
    assert report.verdicts[0] == "THIN"
    assert report.certificate(0).kind == "roots"
    assert 0 <= report.radius_lo[0] < 1e-8
    assert report.check()


def test_the_radius_of_a_proof_by_roots_is_a_true_lower_bound():
    n, k = 40, 3
    question = Question(np.zeros((n, 0)), None, k, 1e-8, 1e4)
    for active in ([5], [3, 20], [0, 13, 26], [1, 2, 3, 30]):
        certificate = roots_certificate(np.array(active), n)
        proof = prove(question, np.array(active), certificate)
        best = verify(head(n, k), [active], radius=True)
        assert 0 < proof.lo <= best.radius_hi[0]
        tau = 2 * np.pi * (certificate.roots - 0.5) / n
        value = np.abs(np.prod(np.sin((2 * np.pi * np.arange(n)[:, None] / n - tau) / 2), axis=1)).min()
        norm = math.sqrt((2 * k + 1) / n)
        assert proof.lo == pytest.approx(1e4 / math.sqrt(2 * n) * value / norm, rel=1e-6)


@pytest.mark.parametrize("ball", ("box", "l2"))
def test_a_radius_below_zero_beside_alternations_is_proved_again(ball, tmp_path):
    sets = [[0, 2, 4, 6], [1], [3, 5, 8, 10]]  # with k = 3 only the second is possible
    report = verify(head(12, 3), sets, np.full(12, -12.0), ball=ball, box=1.0, radius=True)
    assert report.verdicts.tolist() == ["UNARGMAXABLE", "THIN", "UNARGMAXABLE"]
    assert report.certificate(0).kind == "alternation" and np.all(report.radius_hi < -1.0) and report.check()
    report.save(tmp_path / "r.npz")
    assert sk.Report.load(tmp_path / "r.npz").check()
    report.radius_hi -= 1e-3
    assert not report.check().ok.any()


@pytest.mark.parametrize("ball", ("box", "l2"))
@pytest.mark.parametrize("spread", (0.0, 1e-4))
def test_a_bias_leaves_roots_the_radius_that_its_centre_does(ball, spread):
    n, k, box = 60, 3, 100.0
    bias = -2.0 + spread * np.random.default_rng(0).uniform(-1, 1, n)
    question = Question(np.zeros((n, 0)), bias, k, 1e-8, box, ball=ball)
    W, norm = dft_matrix(n, k), math.sqrt((2 * k + 1) / n)
    for active in ([5], [3, 20], [1, 2, 3, 30], [0, 1]):
        certificate = roots_certificate(np.array(active), n)
        proof = prove(question, np.array(active), certificate)
        assert proof.argmaxable and 0 < proof.lo < proof.hi
        tau = 2 * np.pi * (certificate.roots - 0.5) / n
        y = np.where(np.isin(np.arange(n), active), 1.0, -1.0)
        p = np.prod(np.sin((2 * np.pi * np.arange(n)[:, None] / n - tau) / 2), axis=1)
        x = W.T @ (np.abs(p) * y) * ((box - 2.0 * math.sqrt(n)) / math.sqrt(n if ball == "l2" else 2 * n)) * 0.999
        x[0] += 2.0 * math.sqrt(n)
        assert np.linalg.norm(x, 2 if ball == "l2" else np.inf) <= box
        assert np.min(y * (W @ x + bias)) / norm == pytest.approx(proof.lo, rel=2e-3 if not spread else 0.5)
    outgrown = Question(np.zeros((n, 0)), bias * 10, k, 1e-8, box, ball=ball)
    proof = prove(outgrown, np.array([5]), roots_certificate(np.array([5]), n))
    assert proof.argmaxable and proof.lo == -math.inf  # √n·20 is beyond the ball


def test_another_threshold_leaves_thin_sets_their_radius_and_their_witness():
    n, k = 2001, 10
    sets = [np.arange(0, 2 * k, 2), [5], [0, 900, 1800]]
    before, after = (verify(head(n, k), sets, threshold=threshold) for threshold in (0.5, 0.3))
    assert before.verdicts.tolist() == after.verdicts.tolist() and after.verdicts[0] == "THIN" and after.check()
    assert np.all(after.radius_lo > 0.99 * before.radius_lo) and np.all(after.radius_lo < before.radius_lo)
    after.certificates[1] = roots_certificate(np.array([5]), n)
    logits = dft_matrix(n, k) @ after.witness(1)
    assert np.flatnonzero(logits > after.logit_threshold(1)).tolist() == [5]


@pytest.mark.parametrize("ball", ("box", "l2"))
def test_one_bias_for_all_labels_changes_no_verdict_and_hardly_a_radius(ball):
    n, k, rng = 3000, 4, np.random.default_rng(0)
    layer = head(n, k, 64)
    sets = [rng.choice(n, size, replace=False).tolist() for size in (2, 5, 6, 6, 7, 7, 9, 40)]
    plain = verify(layer, sets, ball=ball, box=1e4)
    assert plain.counts()["ARGMAXABLE"] >= 5 and plain.counts()["UNARGMAXABLE"] >= 1
    for report in (
        verify(layer, sets, np.full(n, -8.0), ball=ball, box=1e4),
        verify(layer, sets, threshold=0.9, ball=ball, box=1e4),
    ):
        assert report.verdicts.tolist() == plain.verdicts.tolist() and report.check()
        possible = report.verdicts == "ARGMAXABLE"
        assert np.all(report.radius_lo[possible] > 0.9 * plain.radius_lo[possible])
    far = verify(layer, sets, np.full(n, 1e6), ball=ball, box=1e4)  # every input of the ball predicts all labels
    yes, no = ("ARGMAXABLE", "THIN"), ("UNARGMAXABLE",)
    assert [v in yes for v in far.verdicts] == [v in yes for v in plain.verdicts]
    assert [v in no for v in far.verdicts] == [v in no for v in plain.verdicts] and far.check()


def test_slack_makes_more_sets_argmaxable_and_keeps_the_guarantee():
    n, k = 40, 2
    rng = np.random.default_rng(0)
    sets = [np.sort(rng.choice(n, size, replace=False)).tolist() for size in (1, 2, 4, 8, 12) for _ in range(6)]
    plain, slack = verify(head(n, k), sets), verify(head(n, k, 12), sets)
    yes = {"ARGMAXABLE", "THIN"}
    assert all(b in yes for a, b in zip(plain.verdicts, slack.verdicts, strict=True) if a in yes)
    assert sum(v in yes for v in slack.verdicts) > sum(v in yes for v in plain.verdicts)
    assert slack.counts()["UNDECIDED"] == 0
    assert slack.check()


def test_the_radius_of_a_wide_head_closes_without_a_linear_program():
    report = verify(head(400, 28, 10), [[5], [7, 90, 91], [3, 100, 200, 333]], radius=True)
    assert [s.name for s in report.stages][-1] == "radius"
    assert np.all(report.radius_hi - report.radius_lo <= 1e-6 * report.radius_hi)
    assert report.check()


def test_unargmaxable_with_slack_is_proved_for_the_true_dft():
    n = 40
    report = verify(head(n, 2, 1), [list(range(0, n, 2))])
    assert report.verdicts[0] == "UNARGMAXABLE"
    assert report.certificate(0).kind == "gordan"
    assert report.check()


def test_notes_say_how_the_dft_was_read():
    report = verify(head(30, 2), [[1]])
    assert any("float64" in note for note in report.notes)
    assert any("projection" in note for note in report.notes)


def test_a_float32_dft_matrix_loses_what_the_head_has():
    """Thin sets are argmaxable for the DFT; for its float32 rounding as a plain matrix they need not be."""
    n, k = 300, 8
    active = np.arange(0, 2 * k, 2)
    assert verify(head(n, k), [active]).verdicts[0] in ("THIN", "ARGMAXABLE")
    x = verify(head(n, k), [active]).witness(0)
    assert set(np.flatnonzero(dft_matrix(n, k).astype(np.float32).astype(np.float64) @ x > 0)) != set(active)


@pytest.mark.parametrize("active", ([], list(range(12)), [0], [11], [0, 11], [3, 4, 5], [0, 2, 4]))
def test_edge_sets(active):
    report = verify(head(12, 3), [active])
    assert report.verdicts[0] == "ARGMAXABLE"
    assert report.check()


def test_runs_of_is_the_same_as_reading_the_circle():
    n = 7
    for y in itertools.product((0, 1), repeat=n):
        active = np.flatnonzero(y)
        runs = runs_of(active, n)
        if 0 < len(active) < n:
            assert sorted((s + i) % n for s, length in runs for i in range(length)) == active.tolist()
        assert len(runs) == sum(y[i] and not y[i - 1] for i in range(n)) or len(active) == n


@pytest.mark.parametrize(
    ("certificate", "reason"),
    [
        (Certificate("roots"), "sign changes"),
        (Certificate("roots", roots=np.array([3, 5])), "sign changes"),
        (Certificate("alternation", support=np.arange(6)), "do not alternate"),
        (Certificate("alternation", support=np.array([0, 1])), "are needed"),
        (Certificate("alternation", support=np.array([0, 3, 4, 7, 8, 99])), "do not exist"),
        (Certificate("alternation"), "are needed"),
    ],
)
def test_forged_combinatorial_proofs_are_rejected(certificate, reason):
    question = Question(np.zeros((20, 0)), None, 2, 1e-8, 1e4)
    proof = prove(question, np.array([3, 7]), certificate)
    assert proof.argmaxable is None
    assert reason in proof.reason


def test_more_roots_than_the_degree_are_rejected():
    question = Question(np.zeros((20, 0)), None, 1, 1e-8, 1e4)
    active = np.array([3, 7])
    assert prove(question, active, roots_certificate(active, 20)).argmaxable is None
    assert prove(question, active, alternation_certificate(active, 20, 1)).argmaxable is False
    slack = Question(np.ones((20, 1)), None, 1, 1e-8, 1e4)
    assert prove(slack, active, alternation_certificate(active, 20, 1)).argmaxable is None
    plain = Question(np.ones((20, 3)), None, -1, 1e-8, 1e4)
    assert prove(plain, active, roots_certificate(active, 20)).argmaxable is None


def test_a_large_head_is_verified_without_forming_its_matrix(monkeypatch):
    small = verify(head(400, 3, 2), [[5], [7, 90], [1, 2, 3, 300]])
    monkeypatch.setattr(importlib.import_module("sigkernels.verify.question"), "DENSE", 1000)
    report = verify(head(400, 3, 2), [[5], [7, 90], [1, 2, 3, 300], list(range(0, 400, 2))])
    assert "matrix" not in vars(report.question)
    assert report.verdicts.tolist() == [*small.verdicts.tolist(), "UNDECIDED"]
    assert np.allclose(report.radius_lo[:3], small.radius_lo)
    assert any("is not formed" in note for note in report.notes)
    assert report.check()


def test_very_many_labels(monkeypatch):
    monkeypatch.setattr(importlib.import_module("sigkernels.verify.question"), "DENSE", 1_000_000)
    sets = [[123_456], [3, 4, 90_000], list(range(0, 30, 2))]
    report = verify(head(200_000, 15), [*sets, list(range(0, 1000, 2))])
    assert [v in ("ARGMAXABLE", "THIN") for v in report.verdicts] == [True, True, True, False]
    assert report.verdicts[3] == "UNARGMAXABLE"
    assert report.check()


def test_slack_of_zeros_is_no_slack():
    head = sk.DFTHead(9, 40, 2, 3)
    with torch.no_grad():
        head.slack_weight.zero_()
    many = [[0, 10, 20], list(range(0, 40, 2))]  # more than k runs
    report = verify(head, [*many, [3, 4, 17]])
    assert [str(v) for v in report.verdicts] == ["UNARGMAXABLE", "UNARGMAXABLE", "ARGMAXABLE"]
    assert report.certificate(0).kind == "alternation" and report.check()
    with torch.no_grad():
        head.slack_weight[7, 1] = 1e-30
    assert not report.check(head)


@pytest.mark.parametrize("box", (1e-8, 1.0, 1e10, 1e20))
def test_without_a_bias_answers_do_not_depend_on_the_size_of_the_box(box):
    n, k, rng = 129, 32, np.random.default_rng(5)
    sets = [np.flatnonzero(rng.random(n) < 0.3) for _ in range(12)]
    head = sk.DFTHead(2 * k + 1, n, k, dtype=torch.float64)
    usual, other = verify(head, sets, radius=True), verify(head, sets, radius=True, box=box, tol=1e-12 * box)
    assert all(v == "ARGMAXABLE" for v in usual.verdicts) and list(other.verdicts) == list(usual.verdicts)
    assert other.radius_lo.astype(float) / box == pytest.approx(usual.radius_lo.astype(float) / 1e4, rel=3e-6)
    assert np.all(other.radius_hi - other.radius_lo <= 1e-6 * other.radius_hi)


def test_wide_and_thin_sets_of_a_large_head():
    rng = np.random.default_rng(0)
    sets = [np.sort(rng.choice(10_000, size, replace=False)) for size in (2, 8, 10, 12, 20, 20)]
    torch.manual_seed(0)
    report = verify(sk.DFTHead(73, 10_000, 20, 32), sets)
    assert [str(v) for v in report.verdicts] == ["ARGMAXABLE"] * 4 + ["THIN"] * 2
    assert report.stage[3] == "newton" and report.check()
    summary = report.summary()
    assert f"radius of the argmaxable sets: at least {report.radius_lo[:4].min():.3g}" in summary
    assert f"radius of the thin sets: at least {report.radius_lo[4:].min():.3g}" in summary
