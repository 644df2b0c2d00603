"""What a report says and does: verdicts, radii, proofs that cannot be forged, files, tables, pictures, progress."""

import dataclasses
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from verify_cases import SETS, D, N, W

import sigkernels as sk
from sigkernels.verify import Certificate, Report, Verdict, verify
from sigkernels.verify.check import prove
from sigkernels.verify.question import Question


@pytest.fixture(scope="module")
def report():
    return verify(W, SETS)


def test_verdicts_radii_and_stages(report):
    counts = report.counts()
    assert counts["ARGMAXABLE"] >= 12 and counts["UNARGMAXABLE"] > 0
    assert len(report) == len(SETS) == len(report.radius_lo) == len(report.radius_hi)
    assert np.all(report.radius_lo <= report.radius_hi)
    assert sum(s.decided for s in report.stages) == len({tuple(s) for s in SETS})
    for i, verdict in enumerate(report.verdicts):
        assert isinstance(verdict, Verdict) and verdict == str(verdict)
        if verdict == "ARGMAXABLE":
            x = report.witness(i)
            assert np.flatnonzero(W @ x > 0).tolist() == SETS[i]
            assert np.abs(x).max() <= 1e4
            y = np.where(np.isin(np.arange(N), SETS[i]), 1, -1)
            assert (y * (W @ x) / np.linalg.norm(W, axis=1)).min() == pytest.approx(report.radius_lo[i], rel=1e-6)
        else:
            c = report.certificate(i)
            y = np.where(np.isin(c.support, SETS[i]), 1, -1)
            assert report.witness(i) is None
            assert np.all(c.multipliers > 0)
            assert np.abs((c.multipliers * y) @ W[c.support]).max() < 1e-12 * c.multipliers.sum()


def test_a_witness_is_the_callers_own():
    report = verify(np.eye(3), [[0]])
    report.witness(0)[:] = 0.0
    assert report.check() and np.flatnonzero(report.witness(0) > 0).tolist() == [0]


def test_radius_closes_the_interval():
    r = verify(W, SETS, radius=True)
    yes = np.array([v == "ARGMAXABLE" for v in r.verdicts])
    assert np.all(r.radius_hi[yes] - r.radius_lo[yes] <= 1e-6 * r.radius_hi[yes])
    assert r.stages[-1].name == "radius"
    assert r.check()


def test_the_chebyshev_fixture():
    rows = np.array([[-0.26, 0.97], [0.42, -0.91], [0.91, 0.42], [-0.82, -0.57]])
    r = verify(-rows, [[0, 1, 2, 3]], bias=np.array([5, 1, 8, -1.5]), radius=True)
    assert r.radius_lo[0] == pytest.approx(2.66629325, abs=1e-7) == pytest.approx(r.radius_hi[0], abs=1e-7)
    assert r.witness(0) == pytest.approx([2.87626447, 3.16518324], abs=1e-6)


def test_radius_of_an_empty_affine_region_is_negative():
    r = verify(np.array([[1.0], [-1.0]]), [[0, 1]], bias=np.array([-1.0, -1.0]), radius=True)  # x > 1 and x < -1
    assert r.verdicts[0] == "UNARGMAXABLE"
    assert r.radius_lo[0] == pytest.approx(-1, rel=1e-6) == pytest.approx(r.radius_hi[0], rel=1e-6)
    assert r.check()


def test_a_radius_without_a_bound_is_closed():
    report = verify(np.zeros((2, 3)), [[0], []], bias=[1.0, -1.0], radius=True)  # no row is a boundary anywhere
    assert report.radius_lo[0] == report.radius_hi[0] == np.inf and report.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "radius closed to 1e-06 of its size for 1 of 1 sets\n" in report.summary()


def test_covers_counts():
    import itertools

    from sigkernels.signs import count_argmaxable

    for n, d in ((8, 2), (8, 3), (10, 5)):
        matrix = np.random.default_rng(n).standard_normal((n, d))
        every = np.array(list(itertools.product((0, 1), repeat=n)))
        assert verify(matrix, every).counts()["ARGMAXABLE"] == count_argmaxable(n, d)
    shifted = verify(matrix[:8, :3], every[::4, :8], bias=np.random.default_rng(0).standard_normal(8))
    assert shifted.counts()["ARGMAXABLE"] == count_argmaxable(8, 3, bias=True)


def test_totally_positive_rows_reach_exactly_the_alternating_vectors():
    import itertools

    from sigkernels.signs import alternations

    n, d = 9, 4
    every = np.array(list(itertools.product((0, 1), repeat=n)))
    r = verify(np.vander(np.arange(1.0, n + 1), d, increasing=True), every)
    assert [v in ("ARGMAXABLE", "THIN") for v in r.verdicts] == (alternations(every) <= d - 1).tolist()


# Forged proofs


def test_forged_certificates_are_rejected(report):
    question = Question(W, None, -1, 1e-8, 1e4)
    yes = next(i for i, v in enumerate(report.verdicts) if v == "ARGMAXABLE")
    no = next(i for i, v in enumerate(report.verdicts) if v == "UNARGMAXABLE")
    good, bad = report.certificate(yes), report.certificate(no)
    active, empty = np.array(SETS[yes]), np.array(SETS[no])
    assert prove(question, active, good).argmaxable is True
    assert prove(question, empty, bad).argmaxable is False
    forged = [
        (empty, good),  # a witness of another set
        (empty, dataclasses.replace(good, witness=np.zeros(D))),
        (empty, Certificate("witness")),
        (empty, Certificate("witness", witness=np.full(D, np.nan))),
        (empty, Certificate("witness", witness=np.ones(D + 1))),
        (empty, Certificate("witness", witness=np.array([1.0] * D, dtype=object))),
        (empty, Certificate("made up")),
        (active, bad),  # multipliers of another set
        (active, dataclasses.replace(bad, multipliers=bad.multipliers * 0)),
        (active, dataclasses.replace(bad, multipliers=-bad.multipliers)),
        (active, dataclasses.replace(bad, support=bad.support[:-1])),
        (active, dataclasses.replace(bad, support=bad.support + N)),
        (active, dataclasses.replace(bad, support=np.zeros_like(bad.support))),
        (active, Certificate("gordan", support=active[:1], multipliers=np.array([Fraction(1)], dtype=object))),
        (active, Certificate("gordan", support=active[:1], multipliers=np.array([1.0]))),
        (active, Certificate("gordan", support=np.zeros(0, dtype=int), multipliers=np.zeros(0))),
        (active, Certificate("gordan")),
        (empty, dataclasses.replace(bad, multipliers=bad.multipliers * (1 + 1e-6 * np.arange(len(bad.multipliers))))),
    ]
    for labels, certificate in forged:
        proof = prove(question, labels, certificate)
        assert proof.argmaxable is None, certificate
        assert proof.reason


@pytest.mark.parametrize("field", ("verdicts", "radius_lo", "radius_hi", "witness", "multipliers", "sets"))
def test_a_tampered_report_does_not_check(field):
    r = verify(W, SETS)
    yes = next(i for i, v in enumerate(r.verdicts) if v == "ARGMAXABLE")
    no = next(i for i, v in enumerate(r.verdicts) if v == "UNARGMAXABLE")
    assert r.check()
    if field == "verdicts":
        r.verdicts[no], r.verdicts[yes] = Verdict.ARGMAXABLE, Verdict.UNARGMAXABLE
    elif field == "radius_lo":
        r.radius_lo[yes] *= 1.001
    elif field == "radius_hi":
        r.radius_hi[yes] = r.radius_lo[yes]
    elif field == "witness":
        r.certificate(yes).witness[:] *= -1
    elif field == "multipliers":
        r.certificate(no).multipliers[0] *= 2
    else:
        other = next(v for v in range(N) if v not in SETS[no])
        r.sets = sk.LabelSets.from_lists([*SETS[:no], [other, *SETS[no][1:]], *SETS[no + 1 :]], N)
    result = r.check()
    assert not result and not result.all() and result.failures
    assert len(result) == len(r) and list(result) == result.ok.tolist()
    assert "rejected" in repr(result)


def test_check_against_another_matrix(report):
    assert report.check(W)
    assert not report.check(-W)
    with pytest.raises(ValueError, match="the report is about"):
        report.check(W[:, :2])


# Files, tables, pictures


@pytest.mark.parametrize("matrix", (True, False))
def test_save_and_load(report, tmp_path, matrix):
    report.save(tmp_path / "r.npz", matrix=matrix)
    if not matrix:
        with pytest.raises(ValueError, match="without its matrix"):
            Report.load(tmp_path / "r.npz")
        with pytest.raises(ValueError, match="the report is about"):
            Report.load(tmp_path / "r.npz", W[:, :2])
    loaded = Report.load(tmp_path / "r.npz", None if matrix else W)
    assert loaded.verdicts.tolist() == report.verdicts.tolist()
    assert np.array_equal(loaded.radius_lo, report.radius_lo)
    assert loaded.stages == report.stages and loaded.notes == report.notes
    assert loaded.summary() == report.summary()
    assert loaded.check()


def test_save_and_load_exact_proofs(tmp_path):
    slope = np.nextafter(1.0, 2.0)
    matrix = np.array([[1.0, 0.0], [-1.0, 1.0], [slope, -1.0], [3.0, -3.0]], dtype=np.float64)
    r = verify(matrix, [[0, 1, 2], [0, 1, 2, 3], [0], []])
    r.save(tmp_path / "exact.npz")
    loaded = Report.load(tmp_path / "exact.npz")
    assert loaded.verdicts.tolist() == r.verdicts.tolist()
    assert loaded.check()


def test_save_and_load_dft(tmp_path):
    torch.manual_seed(0)
    r = verify(sk.DFTHead(64, 50, 3, 2), [[1, 2], [3, 9, 11], list(range(0, 50, 2))])
    r.save(tmp_path / "dft.npz")
    loaded = Report.load(tmp_path / "dft.npz")
    assert loaded.verdicts.tolist() == r.verdicts.tolist()
    assert loaded.check()


def test_tables(report):
    table = report.to_numpy()
    assert table["verdict"].tolist() == [str(v) for v in report.verdicts]
    assert table["active"].tolist() == [len(s) for s in SETS]
    assert set(table["proof"]) <= {"witness", "gordan"}
    frame = pytest.importorskip("pandas") and report.to_dataframe()
    assert list(frame.columns) == list(table) and len(frame) == len(report)
    assert "UNARGMAXABLE" in report.summary() and "newton" in report.summary()
    assert "label sets" in repr(report)


def test_plot(report):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = report.plot()
    left, right = figure.axes
    assert sum(p.get_height() for p in left.patches) == (report.radius_lo > 0).sum()
    assert max(p.get_y() + p.get_height() for p in right.patches) == pytest.approx(1)
    with pytest.raises(ValueError, match="two matplotlib axes"):
        report.plot(left)


def test_progress():
    seen = []
    verify(W, SETS, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len({tuple(s) for s in SETS})
    assert [a for a, _ in seen] == sorted(a for a, _ in seen)
    verify(W, SETS[:2], progress=True)


def test_progress_of_a_check(report):
    seen = []
    report.check(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(report), len(report))
    assert [a for a, _ in seen] == sorted({a for a, _ in seen})
    with pytest.raises(TypeError, match="progress must be"):
        report.check(progress="yes")
