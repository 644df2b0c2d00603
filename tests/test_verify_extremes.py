"""Numbers at the ends of float64: nothing that overflows or underflows is ever taken for a proof."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from verify_oracle import is_argmaxable

import sigkernels as sk
from sigkernels.verify import Certificate, Report, verify
from sigkernels.verify.check import prove
from sigkernels.verify.question import Question


def fractions(*values):
    return np.array([Fraction(v) for v in values], dtype=object)


def opposite_rows(scale):
    """65 features, two rows of opposite sign: no input predicts both labels."""
    w = np.r_[np.full(32, scale), np.full(33, -scale)]
    return np.stack([w, -w * 2.0**-40])


def test_a_logit_that_overflows_is_no_margin():
    report = verify(opposite_rows(2.0**1009), [[0, 1]])
    assert report.verdicts[0] == "UNARGMAXABLE" and report.check()
    for x in (2.0**13, 2.0**900, 1.7e308):
        forged = prove(report.question, np.arange(2), Certificate("witness", witness=np.full(65, x)))
        assert forged.argmaxable is None and forged.reason


def test_inputs_beyond_the_range_are_settled_in_fractions():
    one = Question(np.array([[1.0], [-1.0]]), np.array([-1e80, 1e81]), -1, 1e-8, 1e4)  # 1e80 < x < 1e81
    for x, holds in ((5e80, True), (5e79, None), (1e200, None), (1e308, None)):
        assert prove(one, np.arange(2), Certificate("witness", witness=np.array([x]))).argmaxable is holds
    dft = Question(np.zeros((9, 0)), None, 1, 1e-8, 1e4)
    for witness in (np.full(3, 1e308), fractions(10**400, 0, 0)):
        assert prove(dft, np.array([0]), Certificate("witness", witness=witness)).argmaxable is None


def test_a_bias_does_not_vanish_beside_a_huge_witness():
    # x > 1e410 for the one label, x < 1e410 for the other (and the other way round).
    W, bias = [[1e-110], [-1e-110]], [-1e300, 1e300]
    report = verify(W, [[0, 1], [0], [1], []], bias=bias)
    assert [str(v) for v in report.verdicts] == ["UNARGMAXABLE", "THIN", "ARGMAXABLE", "UNARGMAXABLE"]
    assert report.check()
    for x in (Fraction(10) ** 400, Fraction(10) ** 410, Fraction(10) ** 420, Fraction(1, 10**400)):
        assert prove(report.question, np.arange(2), Certificate("witness", witness=fractions(x))).argmaxable is None


def test_radii_beyond_float64_are_rounded_to_safety():
    tiny = Question(np.array([[5e-324]]), np.array([1.0]), -1, 1e-8, 1e4)  # a ball of radius 2e323
    for witness in (np.zeros(1), fractions(0)):
        proof = prove(tiny, np.array([0]), Certificate("witness", witness=witness))
        assert proof.argmaxable and 1e299 < proof.lo < math.inf
    line = Question(np.array([[1.0]]), None, -1, 1e-8, 1e4)
    for x in (Fraction(3, 2**1076), Fraction(1, 10**400)):
        assert prove(line, np.array([0]), Certificate("witness", witness=fractions(x))).lo <= x
    far = Question(np.array([[2.0**-450]]), None, -1, 1e-8, 1e-100)
    for x in (1e130, 1e-100):
        assert prove(far, np.array([0]), Certificate("witness", witness=np.array([x]))).lo <= 1e-100
    # A bound of -1/3 from below is no larger than -1/3.
    third = Question(np.array([[3.0], [-3.0]]), np.array([-1.0, -1.0]), -1, 1e-8, 1e4)
    below = prove(third, np.arange(2), Certificate("witness", witness=np.zeros(1))).lo
    assert below > -0.4 and Fraction(below) <= Fraction(-1, 3)
    # Rows that cancel all but 2e-290 of 1e130: their bound is no number of float64, and not 0.
    wedge = Question(np.array([[1e130, 0.0], [-1e130, 0.0]]), None, -1, 1e-8, 1e-100)
    dual = Certificate("dual", support=np.arange(2), multipliers=np.ones(2))
    assert prove(wedge, np.arange(2), dual).hi > 0


@pytest.mark.parametrize("multipliers", ([1e308, 1e308], [5e-324, 5e-324], [1e308, 5e-324], [1.0, 1e-300]))
@pytest.mark.parametrize("kind", ("gordan", "dual"))
def test_extreme_multipliers_prove_nothing_wrong(kind, multipliers):
    for W, bias in (
        (np.array([[1.0, 1e-200], [-1.0, 1e-200]]), None),
        (np.array([[1e300, 1e-5], [-1e300, 1e-5]]), None),
        (np.array([[1e-130], [-1e-130]]), np.array([1e130, 1e-130])),
        (np.array([[1.0], [-1.0]]), np.array([5e-324, 0.0])),
    ):
        assert is_argmaxable(W, [0, 1], bias)
        question = Question(W, bias, -1, 1e-8, 1e4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for m in (np.array(multipliers), fractions(*multipliers), np.array([1.0, 1.0], dtype=np.float32)):
                proof = prove(question, np.arange(2), Certificate(kind, support=np.arange(2), multipliers=m))
                assert proof.argmaxable is None and proof.hi > 0, (W, bias, m, proof)


@pytest.mark.parametrize("scale", (5e-324, 1e-310, 1e-200, 1e-100, 1e100, 1e305, 1e306, 5e307))
def test_radii_do_not_depend_on_the_scale_of_the_matrix(scale, tmp_path):
    W = np.array([[1.0, 2.0], [2.0, -1.0]])
    plain, scaled = verify(W, [[0], [0, 1]], radius=True), verify(W * scale, [[0], [0, 1]], radius=True)
    assert scaled.verdicts.tolist() == plain.verdicts.tolist() == ["ARGMAXABLE"] * 2
    assert scaled.radius_lo == pytest.approx(plain.radius_lo, rel=1e-6)
    assert scaled.radius_hi == pytest.approx(plain.radius_hi, rel=1e-6)
    assert scaled.check() and scaled.check(W * scale)
    scaled.save(tmp_path / "r.npz")
    loaded = Report.load(tmp_path / "r.npz")
    assert loaded.check() and np.array_equal(loaded.question.stored, W * scale)


def test_rows_of_the_smallest_numbers_bound_the_ball():
    # x > 1e100 by the first label, x < 1e-40 by the second: the least bound of its norm is 0, and it counts all the same.
    W, bias = np.array([[1e-322], [-1.0]]), np.array([-1e-222, 1e-40])
    report = verify(W, [[0, 1]], bias=bias)
    assert report.verdicts[0] == "UNARGMAXABLE" and report.radius_lo[0] <= report.radius_hi[0] <= 0
    for x in (0.0, -1.0):
        assert prove(report.question, np.arange(2), Certificate("witness", witness=np.array([x]))).lo <= 0


def test_a_matrix_of_zeros_has_no_ball_to_close():
    report = verify(np.zeros((2, 3)), [[0], [0, 1]], bias=[1.0, -1.0], radius=True)
    assert [str(v) for v in report.verdicts] == ["ARGMAXABLE", "UNARGMAXABLE"] and report.check()


def test_a_bias_far_beyond_its_row():
    report = verify([[1e-10], [1.0]], [[0], [0, 1], [1], []], bias=[1e300, 1.0], radius=True)
    assert [str(v) for v in report.verdicts] == ["ARGMAXABLE", "ARGMAXABLE", "UNARGMAXABLE", "THIN"]
    assert report.check()


def test_the_largest_numbers():
    report = verify([[1.7e308, 1.7e308]], [[0], []])
    assert report.verdicts.tolist() == ["ARGMAXABLE"] * 2 and report.check()
    assert np.all(np.isfinite(report.radius_lo))


def test_fuzzed_extremes_agree_with_exact_rational_programs():
    rng = np.random.default_rng(0)
    decided = 0
    for _ in range(60):
        n, d = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        spread = int(rng.choice([0, 100, 300]))
        shift = int(rng.integers(-1000 + spread, 1000 - spread))
        W = np.ldexp(rng.integers(-3, 4, (n, d)).astype(float), shift + rng.integers(-spread, spread + 1, (n, d)))
        bias = None
        if rng.random() < 0.5:
            bias = np.ldexp(rng.integers(-3, 4, n).astype(float), shift + rng.integers(-spread, spread + 1, n))
        sets = [np.flatnonzero(rng.random(n) < 0.5).tolist() for _ in range(3)]
        try:
            report = verify(W, sets, bias=bias, radius=bool(rng.random() < 0.3))
        except ValueError as error:
            assert "range from" in str(error)
            continue
        assert report.check(), report.check()
        assert not np.any(np.isnan(report.radius_lo)) and not np.any(np.isnan(report.radius_hi))
        assert np.all(report.radius_lo <= report.radius_hi)
        for active, verdict in zip(sets, report.verdicts, strict=True):
            if verdict in ("ARGMAXABLE", "THIN", "UNARGMAXABLE"):
                assert (verdict != "UNARGMAXABLE") == is_argmaxable(W, active, bias), (W, bias, active)
                decided += 1
    assert decided > 120


def test_numbers_that_no_scale_fits_are_refused():
    with pytest.raises(ValueError, match=r"head_or_matrix.* range from 1e-200 to 1e\+300"):
        verify(np.array([[1e300], [1e-200]]), [[0]])
    head = sk.DFTHead(5, 9, 1, 2, dtype=torch.float64)
    with torch.no_grad():
        head.slack_weight[3, 1] = -1e160
    with pytest.raises(ValueError, match=r"slack_weight.*1e\+160"):
        verify(head, [[0]])
    with pytest.raises(ValueError, match=r"bias.*1e\+160"):
        verify(sk.DFTHead(3, 9, 1), [[0]], bias=np.full(9, 1e160))
    for box in (1e-101, 1e101):
        with pytest.raises(ValueError, match="box must lie between"):
            verify(np.eye(2), [[0]], box=box)


def test_a_tiny_box_does_not_underflow():
    for W in (np.array([[-1e70], [1e-277]]), np.array([[1e-300]])):
        report = verify(W, [[len(W) - 1]], box=1e-90)
        assert 0 < report.radius_lo[0] <= report.radius_hi[0] and report.radius_hi[0] == pytest.approx(1e-90)


def numbers(rng, shape, spread):
    """Small integers, some of them perturbed, times powers of two up to ``2^±spread``."""
    values = rng.integers(-2, 3, shape) * (1 + rng.random(shape) * rng.choice([0, 1e-15, 1e-8, 1]))
    return np.ldexp(values, rng.integers(-spread, spread + 1, shape))


def forgery(rng, question):
    """Any vectors at all, under any name."""
    kind = str(rng.choice(["witness", "gordan", "dual", "none", "roots", "alternation"]))
    witness = numbers(rng, question.d, int(rng.choice([0, 3, 400, 1000])))
    support = np.sort(rng.choice(question.n, int(rng.integers(1, question.n + 1)), replace=False))
    multipliers = np.abs(numbers(rng, len(support), int(rng.choice([0, 3, 300, 1000]))))
    multipliers[multipliers == 0] = 1.0
    if rng.random() < 0.4:
        witness = fractions(*witness) * Fraction(10) ** int(rng.choice([0, 100, -100, 400, -400]))
        multipliers = fractions(*multipliers)
    return Certificate(kind, witness if rng.random() < 0.7 else None, support, multipliers)


def test_no_forgery_contradicts_another_or_the_truth():
    rng = np.random.default_rng(0)
    proved = 0
    for _ in range(400):
        n, d, spread = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.choice([0, 3, 100, 225]))
        W = numbers(rng, (n, d), spread)
        bias = numbers(rng, n, spread) if rng.random() < 0.5 else None
        k = int(rng.choice([-1, -1, 0, 1])) if n > 2 else -1
        question = Question(W, bias, k, 1e-8, float(rng.choice([1e4, 1e-90, 1e90])))
        active = np.flatnonzero(rng.random(n) < 0.5)
        proofs = [prove(question, active, forgery(rng, question)) for _ in range(8)]
        answers = {proof.argmaxable for proof in proofs} - {None}
        assert max(p.lo for p in proofs) <= min(p.hi for p in proofs), (W, bias, k, active)
        assert answers <= ({is_argmaxable(W, active.tolist(), bias)} if k < 0 else {True, False}), (W, bias, active)
        assert len(answers) < 2 and not (False in answers and max(p.lo for p in proofs) > 0)
        proved += len(answers)
    assert proved > 50


def test_rows_of_all_sizes_do_not_keep_the_linear_program_busy_for_ever():
    """Beside a threshold's column of one size, unit rows hold entries from 1e-12 to 1: HiGHS cycles there."""
    draw = np.random.default_rng(150)
    W = draw.standard_normal((150, 67)) * 10.0 ** draw.integers(-12, 12, (150, 1))
    report = verify(W, [[3], [149]], rule="argmax")
    assert report.check() and [s.taken for s in report.stages if s.name == "lp"] == [1]
