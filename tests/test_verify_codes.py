"""Heads with codes in the verifier: the closed form, its certificate, and radii."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels.codes import code_matrix, guarantee, guaranteed_size
from sigkernels.labels import LabelSets
from sigkernels.verify import Verdict, pipeline, verify, witness_check
from sigkernels.verify.certificate import Certificate
from sigkernels.verify.check import prove
from sigkernels.verify.question import Question, dft_matrix
from sigkernels.verify.report import Report
from sigkernels.verify.rules import DecisionRule
from sigkernels.verify.solvers import lp
from sigkernels.verify.solvers.arrays import definite_solver

N, K, CODES, SLACK = 1500, 3, 64, 5
S = 0.3 * np.random.default_rng(0).standard_normal((N, SLACK))
BIAS = 2.0 * np.random.default_rng(1).standard_normal(N)


class Coded:
    """Stands for a head with codes."""


@pytest.fixture
def coded(monkeypatch):
    """``verify`` of a question with codes, built from (slack, bias)."""

    def as_question(head, bias, tol, box, rule, domain, ball):
        return Question(S, bias, K, tol, box or 1e4, rule, CODES, domain, ball), []

    monkeypatch.setattr(pipeline, "as_question", as_question)
    return lambda sets, **options: verify(Coded(), sets, **options)


def sets_of(sizes, n=N):
    draw = np.random.default_rng(sizes)
    return [sorted(draw.choice(n, r, replace=False).tolist()) for r in sizes]


def question(slack=S, bias=None, codes=CODES, k=K):
    return Question(slack, bias, k, 1e-8, 1e4, DecisionRule(), codes)


def test_the_matrix_of_a_question_with_codes():
    q = question()
    want = np.concatenate([dft_matrix(N, K), code_matrix(N, CODES).numpy(), S], axis=1)
    assert np.array_equal(q.matrix, want) and q.d == q.inputs == want.shape[1]
    labels = np.array([3, 900, 64])
    assert np.array_equal(q.rows(labels), want[labels])
    norms = np.linalg.norm(want, axis=1)
    assert np.all(q.norms[0] <= norms * (1 + 1e-14)) and np.all(norms <= q.norms[1] * (1 + 1e-14))
    assert np.allclose(q.norms[0], norms, rtol=1e-12)
    assert not q.is_pure_dft


def test_a_question_that_is_not_formed(monkeypatch):
    x = np.random.default_rng(2).standard_normal((2, question().d))
    want = question().logits(x)
    monkeypatch.setattr(sys.modules[Question.__module__], "DENSE", 10)
    monkeypatch.setattr(sys.modules[Question.__module__], "BLOCK", 10_000)
    assert not question().is_dense
    np.testing.assert_allclose(question().logits(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [None, BIAS, BIAS - 150, BIAS + 150], ids=["plain", "bias", "below", "above"])
def test_small_sets_are_proved_by_the_formula(coded, bias):
    sets = sets_of([0, 1, 2, 3, 4] * 4)
    report = coded(sets, bias=bias)
    assert set(report.verdicts) == {Verdict.ARGMAXABLE} and set(report.stage) == {"codes"}
    assert {report.certificate(i).kind for i in range(len(sets))} == {"codes"}
    assert report.check()
    longest = np.linalg.norm(report.question.matrix, axis=1).max()
    between = (0.0, 0.0) if bias is None else (float(bias.min()), float(bias.max()))
    for i, active in enumerate(sets):
        promised = guarantee(len(active), N, CODES, max_norm=longest, bias=between)
        assert report.radius_lo[i] == pytest.approx(promised.radius, rel=1e-8)
        z = report.question.logits(report.witness(i)[None])[0]
        assert np.array_equal(np.flatnonzero(z > 0), active)


def test_no_closed_form_is_above_the_radius(coded):
    sets = sets_of([1, 2, 3, 4] * 3)
    formula, solved = coded(sets), coded(sets, radius=True)
    assert np.all(formula.radius_lo <= solved.radius_hi)
    assert np.all(solved.radius_hi - solved.radius_lo <= 2e-6 * solved.radius_hi)
    plain = verify(solved.question.matrix, sets, radius=True)
    np.testing.assert_allclose(solved.radius_lo, plain.radius_lo, rtol=3e-6)
    assert solved.check()


def test_larger_sets_go_to_the_other_stages(coded):
    report = coded(sets_of([6, 9, 12]))
    assert report.check() and set(report.verdicts) == {Verdict.ARGMAXABLE} and set(report.stage) == {"newton"}


def test_polynomials_are_summed_exactly_only_where_newton_finds_no_room(monkeypatch):
    waves = Question(S, None, 30, 1e-8, 1e4, DecisionRule(), CODES)
    wide, thin = LabelSets.from_lists(sets_of([7, 9, 14]), N), LabelSets.from_lists(sets_of([24]), N)
    report = pipeline.decide(waves, thin, [])
    assert set(report.verdicts) <= {Verdict.THIN, Verdict.ARGMAXABLE} and report.check()
    # 16 columns of codes give 24 labels no room
    few = Question(np.zeros((N, 0)), None, 24, 1e-8, 1e4, DecisionRule(), 16)
    report = pipeline.decide(few, thin, [])
    assert report.verdicts[0] == Verdict.THIN and report.stage[0].endswith("closed form") and report.check()
    assert [s.name for s in report.stages].index("thin closed form") > [s.name for s in report.stages].index("newton")
    monkeypatch.setattr(witness_check, "_exact_margins", lambda *a: pytest.fail("an exact sum"))
    report = pipeline.decide(waves, wide, [])
    assert set(report.verdicts) == {Verdict.ARGMAXABLE} and set(report.stage) <= {"closed form", "newton"}


def test_what_the_formula_does_not_prove():
    five, one = np.arange(5), np.arange(1)
    assert prove(question(), five, Certificate("codes")).argmaxable is None
    assert "more than the 4" in prove(question(), five, Certificate("codes")).reason
    assert "without codes" in prove(question(codes=0), one, Certificate("codes")).reason
    many = question(np.zeros((2049, 0)))  # beyond c²/2 labels there is no bound for all sets
    assert guaranteed_size(CODES, 2049) == 0 and prove(many, one, Certificate("codes")).argmaxable is None
    large = question(bias=np.full(N, 1e9))  # predictable, but far outside the box
    proof = prove(large, one, Certificate("codes"))
    assert proof.argmaxable and proof.verdict(1e-8) == Verdict.THIN


@pytest.mark.parametrize("matrix", [True, False])
def test_saved_reports_carry_it(coded, tmp_path, matrix):
    report = coded(sets_of([1, 4, 4]), bias=BIAS)
    report.save(tmp_path / "r.npz", matrix=matrix)
    if not matrix:
        with pytest.raises(ValueError, match="without its matrix"):
            Report.load(tmp_path / "r.npz")
        with pytest.raises(ValueError, match="k = 3 and 64 codes"):
            Report.load(tmp_path / "r.npz", np.zeros((N, SLACK)), BIAS)
        return
    loaded = Report.load(tmp_path / "r.npz")
    assert loaded.question.codes == CODES and loaded.check()
    assert {loaded.certificate(i).kind for i in range(3)} == {"codes"}
    assert np.array_equal(loaded.radius_lo, report.radius_lo)


@pytest.mark.parametrize("size", (1, 4, 12))
def test_radii_of_sets_of_every_size_are_closed_without_a_linear_program(size):
    waves = Question(S, None, 30, 1e-8, 1e4, DecisionRule(), CODES)
    sets = LabelSets.from_lists(sets_of([size] * 2), N)
    report = pipeline.decide(waves, sets, [], radius=True)
    assert np.all(report.radius_hi - report.radius_lo <= 1e-6 * report.radius_hi) and report.check()
    assert [stage.name for stage in report.stages if stage.taken][-1] == "radius"


@pytest.mark.parametrize(("shape", "independent"), [((9, 5), 1), ((9, 5), 0), ((5, 9), 1), ((5, 9), 0), ((6, 6), 1)])
def test_least_squares_of_a_vertex(shape, independent):
    draw = np.random.default_rng(shape)
    system = draw.standard_normal(shape)
    if not independent:
        system[:, 1], system[1] = 2 * system[:, 0], -system[0]
    goal, edge, inverse = draw.standard_normal(shape[0]), draw.standard_normal(shape[1]), np.linalg.pinv(system)
    solve, solve_transposed = lp._solvers(system)
    np.testing.assert_allclose(solve(goal), inverse @ goal, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(solve_transposed(edge), edge @ inverse, rtol=1e-9, atol=1e-9)


def test_largest_balls_that_meet_no_edge_are_closed_beside_columns_that_depend_on_each_other():
    """The first column of codes is constant, as that of the DFT: without an edge nothing fixes their difference."""
    n, rng = 103, np.random.default_rng(14)
    bias = -8 + rng.standard_normal(n)
    sets = LabelSets.from_lists([sorted(rng.choice(n, r, replace=False).tolist()) for r in (2, 3, 5, 5)], n)
    for name in ("box", "l2"):
        asked = Question(np.zeros((n, 0)), bias, 0, 1e-8, 1e3, DecisionRule(), 16, ball=name)
        assert np.linalg.matrix_rank(asked.matrix) == asked.d - 1
        report = pipeline.decide(asked, sets, [], radius=True)
        assert set(report.verdicts) == {Verdict.ARGMAXABLE} and report.check()
        assert np.all(report.radius_hi - report.radius_lo <= 1e-6 * report.radius_hi)
        assert name == "box" or [stage.name for stage in report.stages if stage.taken][-1] == "radius"


def test_a_singular_system_is_solved_in_least_squares():
    h = np.stack([np.eye(14), np.ones((14, 14)), np.zeros((14, 14))])
    g = np.stack([np.arange(14.0), np.full(14, 28.0), np.zeros(14)])
    want = np.stack([np.arange(14.0), np.full(14, 2.0), np.zeros(14)])
    np.testing.assert_allclose(definite_solver(np, h)(g), want, atol=1e-12)


@pytest.mark.parametrize("ball", ("box", "l2"))
def test_a_witness_lies_beyond_a_ball_that_a_bias_takes_up(ball):
    rng = np.random.default_rng(0)
    head, bias = sk.DFTHead(34, 40, 2, slack=2, codes=16), 300 * rng.standard_normal(40)
    sets = [[3], [7, 21], [], [5, 6, 7, 8]]
    report = verify(head, sets, bias, ball=ball, box=1.0)
    assert set(report.verdicts) == {"THIN"} and {report.certificate(i).kind for i in range(4)} == {"codes", "roots"}
    W = head.weight_matrix(torch.float64).detach().numpy()
    for i, active in enumerate(sets):
        assert np.flatnonzero(W @ report.witness(i) + bias > 0).tolist() == active
