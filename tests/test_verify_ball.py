"""Margins on the l2 ball: against a general solver, with certificates checked by other means than the package's."""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction

import array_api_strict as strict
import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from verify_oracle import KINDS, degenerate_matrix, is_argmaxable

import sigkernels as sk
from sigkernels.cli import main
from sigkernels.verify import Certificate, Report, verify
from sigkernels.verify.input_ball import L2Ball
from sigkernels.verify.solvers.largest_balls import Item, balls
from sigkernels.verify.solvers.least_norm import HullProblem, active_set

YES = ("ARGMAXABLE", "THIN")


def margin_by_a_general_solver(W, active, bias=None, size=1.0):
    """The best ``min_i y_i(w_i·x + c_i)/‖w_i‖`` over ``‖x‖ ≤ size`` that SLSQP finds from several starts."""
    y = np.where(np.isin(np.arange(len(W)), active), 1.0, -1.0)
    norms = np.linalg.norm(W, axis=1)
    a, c = y[:, None] * W / norms[:, None], np.zeros(len(W)) if bias is None else y * bias / norms
    constraints = [
        {
            "type": "ineq",
            "fun": lambda v: a @ v[:-1] + c - v[-1],
            "jac": lambda v: np.column_stack([a, -np.ones(len(a))]),
        },
        {"type": "ineq", "fun": lambda v: size**2 - v[:-1] @ v[:-1], "jac": lambda v: np.append(-2 * v[:-1], 0.0)},
    ]
    gradient = np.append(np.zeros(W.shape[1]), -1.0)
    best = -np.inf
    for start in (a.mean(axis=0), np.linalg.lstsq(a, np.ones(len(a)), rcond=None)[0]):
        x = start * (0.5 * size / max(np.linalg.norm(start), 1e-12))
        options = {"ftol": 1e-14, "maxiter": 500}
        first = np.append(x, (a @ x + c).min())
        found = minimize(lambda v: -v[-1], first, jac=lambda v: gradient, constraints=constraints, options=options).x
        x = found[:-1] * min(1.0, size / np.linalg.norm(found[:-1]))
        best = max(best, float((a @ x + c).min()))
    return best


def as_exact(W, active, bias=None):
    """Signed rows and biases as fractions."""
    sign = [1 if i in set(map(int, active)) else -1 for i in range(len(W))]
    rows = [[s * Fraction(float(v)) for v in row] for s, row in zip(sign, W, strict=True)]
    return rows, [Fraction(0)] * len(W) if bias is None else [
        s * Fraction(float(v)) for s, v in zip(sign, bias, strict=True)
    ]


def real(value):
    return mpmath.mpf(value.numerator) / value.denominator


def bounds_by_high_precision(W, active, certificate, bias=None, size=1.0):
    """What the vectors of a certificate prove on the l2 ball, to 50 digits."""
    with mpmath.workdps(50):
        rows, offsets = as_exact(W, active, bias)
        norms = [mpmath.sqrt(real(sum(v * v for v in row))) for row in rows]
        lo, hi = mpmath.mpf("-inf"), mpmath.mpf("inf")
        for part in (certificate, certificate.bounds):
            if part is None:
                continue
            if part.witness is not None:
                x = [Fraction(v) for v in part.witness]
                length = mpmath.sqrt(real(sum(v * v for v in x)))
                scale = mpmath.mpf(1) if bias is not None else mpmath.mpf(size) / max(length, mpmath.mpf(size))
                if length * scale <= size * (1 + mpmath.mpf(10) ** -40):
                    values = [
                        real(sum(a * b for a, b in zip(row, x, strict=True)) + c) * scale / norm
                        for row, c, norm in zip(rows, offsets, norms, strict=True)
                    ]
                    lo = max(lo, min(values))
            if part.multipliers is not None:
                weights = [Fraction(v) for v in part.multipliers]
                assert min(weights) > 0
                total = [
                    sum(m * rows[i][j] for i, m in zip(part.support, weights, strict=True)) for j in range(len(W[0]))
                ]
                offset = real(sum(m * offsets[i] for i, m in zip(part.support, weights, strict=True)))
                value = size * mpmath.sqrt(real(sum(v * v for v in total))) + offset
                hi = min(hi, value / sum(real(m) * norms[i] for i, m in zip(part.support, weights, strict=True)))
        return lo, hi


def one_row_alone(W, bias=None):
    """The largest margin that each label by itself allows on the unit ball."""
    return 1.0 if bias is None else float(np.min(1.0 + np.abs(bias) / np.linalg.norm(W, axis=1)))


def augmented(W, rule="threshold", domain="all"):
    """The matrix whose signs a rule asks for, and the labels of the domain, as the docs say."""
    W = np.asarray(W, dtype=float)
    unit = 2.0 ** round(np.log2(np.median(np.linalg.norm(W, axis=1))))
    width = W.shape[1]
    if rule != "threshold":
        W = np.column_stack([W, np.full(len(W), unit)])
    extra = 0
    if domain == "nonnegative":
        extra = width
        W = np.concatenate([W, np.eye(width, W.shape[1])])
    return W, extra


def sets_of(rng, W, count, bias=0.0):
    return [np.flatnonzero(W @ x + bias > 0).tolist() for x in rng.standard_normal((count, W.shape[1]))]


@pytest.mark.parametrize("domain", ("all", "nonnegative"))
@pytest.mark.parametrize("rule", ("threshold", "topk", "argmax"))
@pytest.mark.parametrize("biased", (False, True))
def test_margins_equal_those_of_a_general_solver(rule, domain, biased):
    rng = np.random.default_rng(3)
    n, d = 14, 3
    W = rng.standard_normal((n, d))
    bias = 0.3 * rng.standard_normal(n) if biased else None
    sets = (
        [[i] for i in range(n)]
        if rule == "argmax"
        else [*sets_of(rng, W, 6, 0.0 if bias is None else bias), [], [0, 1]]
    )
    report = verify(W, sets, bias=bias, rule=rule, domain=domain, ball="l2", radius=True)
    assert report.check(), report.check()
    full, extra = augmented(W, rule, domain)
    full_bias = None if bias is None else np.append(bias, np.zeros(extra))
    closed = 0
    for i, active in enumerate(sets):
        active = [*active, *range(n, n + extra)]
        truth = margin_by_a_general_solver(full, active, full_bias)
        assert report.radius_lo[i] <= max(truth, 0.0 if bias is None else -np.inf) + 1e-6
        assert report.radius_hi[i] >= truth - 1e-6
        if report.verdicts[i] in YES or biased:
            assert report.radius_hi[i] - report.radius_lo[i] <= 1e-6 * abs(report.radius_hi[i])
            assert abs(report.radius_lo[i] - truth) <= 1e-6
            closed += 1
        else:
            assert report.radius_hi[i] <= 0
    assert closed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", (False, True))
def test_fuzzed_questions_agree_with_exact_rational_programs(kind, biased):
    rng = np.random.default_rng(20 + KINDS.index(kind))
    for domain in ("all", "nonnegative"):
        for _ in range(2):
            n, d = int(rng.integers(1, 8)), int(rng.integers(1, 4))
            W = degenerate_matrix(rng, kind, n, d)
            bias = rng.integers(-2, 3, n).astype(float) if biased else None
            sets = [np.flatnonzero(rng.random(n) < rng.choice([0.2, 0.5, 0.8])).tolist() for _ in range(4)]
            report = verify(W, sets, bias=bias, ball="l2", domain=domain, radius=True)
            assert report.check(), report.check()
            truth = [is_argmaxable(W, s, bias, nonnegative=domain != "all") for s in sets]
            assert [v in YES for v in report.verdicts] == truth
            assert np.all(report.radius_lo <= report.radius_hi)
            if domain == "all" and np.all(np.any(W, axis=1)):
                for i, active in enumerate(sets):
                    lo, hi = bounds_by_high_precision(W, active, report.certificate(i), bias)
                    assert report.radius_lo[i] <= max(lo, -np.inf if biased else 0)
                    hi = min(hi, 0 if report.verdicts[i] == "UNARGMAXABLE" else one_row_alone(W, bias))
                    assert report.radius_hi[i] >= hi


def test_a_margin_whose_value_is_known():
    report = verify(np.eye(3), [[0, 1, 2], [0]], ball="l2", radius=True)  # (1, 1, 1)/√3
    np.testing.assert_allclose(report.radius_lo, 3**-0.5, rtol=1e-6)
    np.testing.assert_allclose(report.radius_hi, 3**-0.5, rtol=1e-6)
    assert np.linalg.norm(report.witness(0)) <= 1.0
    shifted = verify(np.array([[1.0], [-2.0]]), [[], [0], [0, 1]], bias=[-3.0, 2.0], ball="l2", box=2.0, radius=True)
    # x < 3 and x > 1: the middle x = 2 is 1 from each. x > 3 and x > 1: at x = 2, 1 short of 3. x > 3 and x < 1: never.
    np.testing.assert_allclose(shifted.radius_lo, [1.0, -1.0, -1.0], rtol=1e-6)
    assert shifted.verdicts.tolist() == ["ARGMAXABLE", "THIN", "UNARGMAXABLE"]
    assert shifted.check()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 5), st.floats(1e-3, 1e3))
def test_margins_follow_the_size_of_the_ball_and_not_that_of_the_rows(seed, n, d, factor):
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((n, d))
    sets = sets_of(rng, W, 3)
    one = verify(W, sets, ball="l2", radius=True)
    rows = verify(W * rng.uniform(0.5, 2.0, (n, 1)) * factor, sets, ball="l2", radius=True)
    np.testing.assert_allclose(rows.radius_lo, one.radius_lo, rtol=3e-6)
    wide = verify(W, sets, ball="l2", box=factor, radius=True)
    np.testing.assert_allclose(wide.radius_lo, factor * one.radius_lo, rtol=3e-6)
    # ‖x‖₂ ≤ 1 lies in |x_j| ≤ 1, which lies in ‖x‖₂ ≤ √d.
    box = verify(W, sets, box=1.0, radius=True)
    assert np.all(one.radius_lo <= box.radius_hi) and np.all(box.radius_lo <= d**0.5 * one.radius_hi)
    nonnegative = verify(W, sets, ball="l2", domain="nonnegative", radius=True)
    assert np.all(nonnegative.radius_lo <= one.radius_hi)
    assert one.check() and wide.check() and nonnegative.check()


def test_the_rows_of_the_domain_are_part_of_the_certificate():
    W = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    report = verify(W, [[0]], ball="l2", domain="nonnegative", radius=True)  # x₁ > 0 > x₂ is not nonnegative
    assert report.verdicts[0] == "UNARGMAXABLE" and report.radius_hi[0] <= 0
    assert any(report.certificate(0).support >= len(W))
    possible = verify(W[2:], [[0]], ball="l2", domain="nonnegative", radius=True)  # x₁ - x₂ ≥ √2 x₂ at the best x
    x = np.array([1 + 2**0.5, 1.0])
    np.testing.assert_allclose(possible.radius_lo[0], x[1] / np.linalg.norm(x), rtol=1e-6)
    bounds = possible.certificate(0)
    support = bounds.support if bounds.support is not None else bounds.bounds.support
    assert sorted(support.tolist()) == [0, 2]
    assert possible.check() and not verify(W[2:], [[0]], ball="l2").check(-W[2:])


# Forgeries


@pytest.fixture
def closed_report():
    rng = np.random.default_rng(5)
    W = rng.standard_normal((30, 5))
    return verify(W, sets_of(rng, W, 4), ball="l2", radius=True)


def vectors(certificate):
    """Where the multipliers of the radius are: in the certificate or in its bounds."""
    return certificate if certificate.multipliers is not None else certificate.bounds


def with_certificate(report, i, **changes):
    whole = report.certificates[i]
    part = vectors(whole)
    forged = replace(part, **changes)
    report.certificates[i] = forged if part is whole else replace(whole, bounds=forged)


def test_bounds_that_the_vectors_do_not_give_are_refused(closed_report):
    assert closed_report.check()
    for name, factor in (("radius_lo", 1 + 1e-7), ("radius_hi", 1 - 1e-7)):
        column = getattr(closed_report, name)
        before = column.copy()
        column *= factor
        assert not np.any(closed_report.check().ok)
        column[:] = before


def test_forged_vectors_are_refused(closed_report):
    originals = list(closed_report.certificates)
    part = vectors(originals[0])
    other = originals[1].witness
    rng = np.random.default_rng(0)
    for forged in (
        {"multipliers": part.multipliers * rng.uniform(0.99, 1.01, len(part.multipliers))},
        {"multipliers": part.multipliers[::-1].copy()},
        {"multipliers": -part.multipliers},
        {"multipliers": np.full(len(part.support), np.nan)},
        {"support": (part.support + 1) % 30},
        {"support": np.zeros_like(part.support)},
        {"multipliers": None, "support": None},
    ):
        with_certificate(closed_report, 0, **forged)
        assert not closed_report.check().ok[0]
        closed_report.certificates[:] = originals
    bounds = originals[0].bounds
    swapped = replace(originals[0], witness=other, bounds=None if bounds is None else replace(bounds, witness=other))
    closed_report.certificates[0] = swapped
    assert not closed_report.check().ok[0]
    longer = originals[0].witness * 2.0  # a longer input proves no more: it is measured in the ball
    moved = None if bounds is None or bounds.witness is None else replace(bounds, witness=bounds.witness * 2.0)
    closed_report.certificates[0] = replace(originals[0], witness=longer, bounds=moved or bounds)
    closed_report.radius_lo[0] *= 1.5
    assert not closed_report.check().ok[0]


def test_a_proof_holds_for_its_own_ball_rule_and_domain_alone():
    rng = np.random.default_rng(6)
    W = rng.standard_normal((30, 5))
    sets = sets_of(rng, W, 4)
    in_box, in_l2 = verify(W, sets, box=1.0, radius=True), verify(W, sets, ball="l2", radius=True)
    other = {
        "box": in_box.question,
        "smaller ball": verify(W, sets, ball="l2", box=0.5).question,
        "topk": verify(W, sets, ball="l2", rule="topk").question,
        "domain": verify(W, sets, ball="l2", domain="nonnegative").question,
        "threshold": verify(W, sets, ball="l2", threshold=0.9).question,
    }
    mine = in_l2.question
    for question in other.values():
        in_l2.question = question
        assert not np.any(in_l2.check().ok)
    in_l2.question, in_box.question = mine, mine
    assert in_l2.check() and not np.any(in_box.check().ok)


def test_exact_points_are_measured_exactly():
    report = verify(np.eye(2), [[0, 1]], ball="l2", radius=True)
    half = np.array([Fraction(1), Fraction(1)], dtype=object)  # of length √2
    report.certificates[0] = Certificate("witness", witness=half)
    report.radius_hi[0], report.radius_lo[0] = 1.1, 0.5**0.5 * (1 - 1e-8)
    assert report.check()
    report.radius_lo[0] = 0.5**0.5 * (1 + 1e-8)
    assert not report.check()


# Structured heads


def test_dft_heads_have_closed_forms_and_the_solver():
    torch.manual_seed(0)
    head = sk.DFTHead(12, 40, 3, 5).double()
    sets = [[0], [3, 4], [1, 20, 33], [2, 9, 17, 30]]
    report = verify(head, sets, ball="l2", radius=True)
    assert report.check()
    W = head.weight_matrix(torch.float64).numpy()
    for i, active in enumerate(sets[:3]):
        truth = margin_by_a_general_solver(W, active)
        assert report.radius_lo[i] >= truth - 1e-7
        assert report.radius_hi[i] - report.radius_lo[i] <= 1e-6 * report.radius_hi[i]
    roots = verify(sk.DFTHead(7, 40, 3), [[1, 20, 33]], ball="l2")
    assert roots.check() and roots.verdicts[0] in YES and roots.radius_lo[0] > 0


@pytest.mark.parametrize("r", (1, 2))
def test_code_words_promise_a_margin_on_the_ball(r):
    torch.manual_seed(0)
    head = sk.DFTHead(1 + 16 + 2, 100, 0, 2, codes=16).double()
    sets = [[7], [50]] if r == 1 else [[7, 8], [3, 99]]
    quick, full = verify(head, sets, ball="l2"), verify(head, sets, ball="l2", radius=True)
    assert quick.check() and full.check()
    assert all(stage == "codes" for stage in quick.stage)
    assert np.all(quick.radius_lo > 0) and np.all(quick.radius_lo <= full.radius_hi)
    assert np.linalg.norm(quick.witness(0)) <= 1.0


# The solvers


@pytest.mark.parametrize("whole", (False, True))
@pytest.mark.parametrize("biased", (False, True))
def test_the_solver_is_the_same_in_every_namespace(biased, whole):
    rng = np.random.default_rng(1)
    n, d = 200, 6
    rows = rng.standard_normal((n, d))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    offset = 0.2 * rng.standard_normal(n) if biased else None
    ball = L2Ball(2.0)
    shift = 0.0 if offset is None else offset
    items = [Item(i, np.flatnonzero(rows @ x + shift > 0), None) for i, x in enumerate(rng.standard_normal((5, d)))]
    found = [sorted(balls(xp, rows, offset, ball, items, whole), key=lambda b: b.number) for xp in (np, strict)]
    on_the_sphere = 0
    for mine, theirs, item in zip(*found, items, strict=True):
        problem = HullProblem.of(rows, offset, item.active, ball.size)
        values = [problem.margins(b.x).min() for b in (mine, theirs)]
        truth = margin_by_a_general_solver(rows, item.active, offset, ball.size)
        np.testing.assert_allclose(values, truth, rtol=1e-6)
        exact = active_set(problem, np.array([0]), np.ones(1), 100)
        assert exact.margin >= truth - 1e-6 * abs(truth)
        if np.linalg.norm(mine.x) > ball.size * (1 - 1e-3):  # elsewhere offsets bound the region, and the ball does not
            np.testing.assert_allclose([exact.margin, problem.margins(exact.x).min()], truth, rtol=1e-6)
            on_the_sphere += 1
    assert on_the_sphere >= (2 if biased else len(items))


def test_dependent_rows_end_an_active_set_with_what_is_known():
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    exact = active_set(HullProblem.of(rows, None, np.arange(3), 1.0), np.array([0, 1, 2]), np.ones(3), 50)
    np.testing.assert_allclose(exact.margin, 0.5**0.5)
    opposite = np.array([[1.0], [-1.0]])  # no point has both margins positive
    problem = HullProblem.of(opposite, None, np.arange(2), 1.0)
    stopped = active_set(problem, np.array([0, 1]), np.ones(2), 50)
    assert problem.margins(stopped.x).min() < stopped.margin


def test_margins_of_wide_layers_are_closed_and_proved():
    rng = np.random.default_rng(7)
    W = rng.standard_normal((2000, 60)) - 0.5
    sets = [rng.choice(2000, r, replace=False).tolist() for r in (0, 1, 2, 3, 4)]
    report = verify(W, sets, ball="l2", radius=True)
    assert report.check()
    yes = np.array([v == "ARGMAXABLE" for v in report.verdicts])
    assert yes.sum() >= 2 and [s.name for s in report.stages][-1] == "radius"
    assert np.all(report.radius_hi[yes] - report.radius_lo[yes] <= 1e-6 * report.radius_hi[yes])
    assert all(len(vectors(report.certificate(i)).support) <= 60 for i in np.flatnonzero(yes))


def test_active_sets_run_on_an_executor(monkeypatch):
    from sigkernels.verify import solver_stages

    monkeypatch.setattr(solver_stages, "interior_points", lambda *args: None)
    rng = np.random.default_rng(8)
    W = rng.standard_normal((60, 5))
    sets = sets_of(rng, W, 5)
    alone = verify(W, sets, ball="l2", radius=True)
    with ProcessPoolExecutor(1) as pool:
        spread = verify(W, sets, ball="l2", radius=True, executor=pool)
    assert alone.stages[-1].name == "radius active" and alone.stages[-1].decided == len(sets)
    assert np.array_equal(spread.radius_lo, alone.radius_lo) and spread.check()


# Reports, files, the command line


def test_reports_carry_the_ball(tmp_path, closed_report):
    assert "inputs ‖x‖₂ ≤ 1" in closed_report.summary()
    assert "inputs |x_j| ≤ 10000" in verify(np.eye(2), [[0]]).summary()
    file = tmp_path / "r.npz"
    closed_report.save(file)
    loaded = Report.load(file)
    assert loaded.check() and loaded.question.ball == L2Ball(1.0)
    assert loaded.check(closed_report.question.stored) and not loaded.check(-closed_report.question.stored)
    assert np.array_equal(loaded.radius_hi, closed_report.radius_hi)
    with np.load(file) as data:
        arrays = dict(data)
    meta = json.loads(str(arrays["meta"]))
    for ball, match in (("l1", "its ball is 'l1'"), (None, "its ball is None")):
        arrays["meta"] = np.array(json.dumps(meta | {"ball": ball}))
        np.savez(tmp_path / "forged.npz", **arrays)
        with pytest.raises(ValueError, match=match):
            Report.load(tmp_path / "forged.npz")
    arrays["meta"] = np.array(json.dumps(meta | {"ball": "box"}))
    np.savez(tmp_path / "forged.npz", **arrays)
    assert not Report.load(tmp_path / "forged.npz").check()


def test_the_command_line_takes_a_ball(tmp_path, capsys):
    np.save(tmp_path / "W.npy", np.eye(3))
    (tmp_path / "labels.txt").write_text("0 1 2\n0\n")
    arguments = ["verify", str(tmp_path / "W.npy"), str(tmp_path / "labels.txt"), "--ball", "l2", "--radius", "--json"]
    assert main([*arguments, "--out", str(tmp_path / "r.npz"), "--check"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["ball"], out["box"], out["checked"]) == ("l2", 1.0, True)
    np.testing.assert_allclose(out["radius_lo"], 3**-0.5, rtol=1e-6)
    assert main(["check", str(tmp_path / "r.npz")]) == 0
    assert "inputs ‖x‖₂ ≤ 1" in capsys.readouterr().out
    assert main([*arguments, "--box", "3"]) == 0
    np.testing.assert_allclose(json.loads(capsys.readouterr().out)["radius_lo"], 3**0.5, rtol=1e-6)


def test_bad_balls():
    with pytest.raises(ValueError, match="ball='l1': use one of 'box', 'l2'"):
        verify(np.eye(2), [[0]], ball="l1")
    with pytest.raises(ValueError, match="box must be positive"):
        verify(np.eye(2), [[0]], ball="l2", box=0)
