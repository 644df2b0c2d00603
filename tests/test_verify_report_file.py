"""Reports from files and by hand: what is damaged is refused, what is malformed is no proof."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels.verify import Certificate, Report, verify
from sigkernels.verify.witness import roots_certificate

W = np.random.default_rng(0).standard_normal((10, 3))
SETS = [np.flatnonzero(W @ x > 0).tolist() for x in np.random.default_rng(1).standard_normal((3, 3))]
SETS += [[0, 1, 2, 3, 4, 5, 6, 7, 8]]  # not argmaxable


@pytest.fixture
def report():
    return verify(W, SETS)


@pytest.fixture
def arrays(report, tmp_path):
    report.save(tmp_path / "r.npz")
    with np.load(tmp_path / "r.npz") as file:
        return dict(file)


def load(arrays, path):
    np.savez(path, **arrays)
    return Report.load(path)


def test_what_is_saved_is_loaded(arrays, report, tmp_path):
    loaded = load(arrays, tmp_path / "same.npz")
    assert loaded.check() and loaded.verdicts.tolist() == report.verdicts.tolist()


@pytest.mark.parametrize("content", ("garbage", "empty", "npy", "truncated", "flipped", "state dict", "other arrays"))
def test_other_files_are_refused(report, tmp_path, content):
    path = tmp_path / "r.npz"
    report.save(path)
    whole = path.read_bytes()
    if content in ("garbage", "empty"):
        path.write_bytes(b"not a report" if content == "garbage" else b"")
    elif content == "npy":
        with path.open("wb") as file:
            np.save(file, W)
    elif content == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif content == "flipped":
        path.write_bytes(whole[:300] + bytes(255 - b for b in whole[300:320]) + whole[320:])
    elif content == "state dict":
        torch.save({"weight": torch.ones(3)}, path)
    else:
        np.savez(path, a=np.ones(3))
    with pytest.raises(ValueError, match="is not a verification report") as refused:
        Report.load(path)
    assert "pickle" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_that_does_not_exist_is_named(report, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; make it first"):
        report.save(tmp_path / "nowhere" / "r.npz")


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        Report.load(tmp_path / "missing.npz")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("verdicts", lambda a: a[:0], "verdicts has shape"),
        ("verdicts", lambda a: np.full(a.shape, "MAYBE"), "MAYBE"),
        ("radius_lo", lambda a: a[:-1], "radius_lo has shape"),
        ("radius_hi", lambda a: a.astype(str), "radius_hi|cast"),
        ("proof_of", lambda a: a + 100, "proof_of must hold numbers"),
        ("proof_of", lambda a: a - 1, "proof_of must hold numbers"),
        ("proof_of", lambda a: a.astype(float), "proof_of must hold numbers"),
        ("bounds_of", lambda a: np.array([99]), "bounds_of must hold numbers"),
        ("stage", lambda a: a[:1], "stage has shape"),
        ("indices", lambda a: a - 1, "label -1"),
        ("indices", lambda a: a + 10, "out of range"),
        ("offsets", lambda a: a[::-1].copy(), "offsets"),
        ("offsets", lambda a: a[:-1], "offsets"),
        ("kinds", lambda a: a[:-1], "one vector for each"),
        ("witness_lengths", lambda a: a + 1, "lengths they should"),
        ("weight", lambda a: a * np.nan, "finite"),
        ("weight", lambda a: a[:, :2], "was expected"),
        ("weight", lambda a: a.astype(str), "real numbers"),
        ("meta", lambda a: np.array("{"), "not a verification report"),
        ("meta", lambda a: np.array("[1]"), "not a verification report"),
        ("meta", lambda a: np.array(json.dumps(json.loads(str(a)) | {"format": 99})), "its format is 99"),
        ("meta", lambda a: np.array(json.dumps(json.loads(str(a)) | {"box": -1.0})), "box must be positive"),
        ("meta", lambda a: np.array(json.dumps(json.loads(str(a)) | {"tol": "x"})), "tol must be a number"),
        ("meta", lambda a: np.array(json.dumps(json.loads(str(a)) | {"k": 9})), "k = 9"),
        ("meta", lambda a: np.array(json.dumps(json.loads(str(a)) | {"stages": [1]})), "not a verification report"),
    ],
)
def test_damaged_contents_are_refused(arrays, tmp_path, name, change, message):
    arrays[name] = change(arrays[name])
    with pytest.raises(ValueError, match=message):
        load(arrays, tmp_path / "bad.npz")


@pytest.mark.parametrize("name", ("meta", "kinds", "indices", "verdicts", "support_values", "proof_of"))
def test_missing_arrays_are_named(arrays, tmp_path, name):
    del arrays[name]
    with pytest.raises(ValueError, match=f"there is no '{name}'"):
        load(arrays, tmp_path / "bad.npz")


def test_sets_over_other_labels_do_not_check():
    report = verify(sk.DFTHead(7, 20, 3), [[19], [4, 5]])
    report.sets = sk.LabelSets.from_lists([[25], [4, 5]], 30)
    result = report.check()
    assert list(result) == [False, True] and "its labels are not distinct" in result.failures[0][1]


def test_fractions_of_many_digits_survive_a_file(report, tmp_path):
    many = np.array([Fraction(v) * Fraction(7**6000 + 1, 7**6000) for v in report.witness(0)], dtype=object)
    report.certificates[report.proof_of[0]] = Certificate("witness", witness=many)
    report.radius_lo[0] = 0.0
    report.save(tmp_path / "r.npz")
    loaded = Report.load(tmp_path / "r.npz")
    assert loaded.check() and loaded.certificate(0).witness.tolist() == many.tolist()


def test_malformed_certificates_are_rejected(report):
    yes, no = report.certificate(0), report.certificate(3)
    assert report.verdicts[0] == "ARGMAXABLE" and report.verdicts[3] == "UNARGMAXABLE"
    for line, forged in (
        (0, "a proof"),
        (0, None),
        (0, replace(yes, witness=yes.witness.astype(str))),
        (0, replace(yes, witness=yes.witness.tolist())),
        (0, replace(yes, witness=yes.witness[None, :])),
        (0, replace(yes, witness=np.array(3.0))),
        (0, replace(yes, witness=yes.witness.astype(complex))),
        (0, replace(yes, witness=np.array([None] * 3))),
        (0, replace(yes, bounds="x")),
        (0, Certificate("roots", roots=np.array(["a"]))),
        (0, Certificate("roots", roots=[1, 2])),
        (0, Certificate(["witness"])),
        (3, replace(no, multipliers=no.multipliers.tolist())),
        (3, replace(no, multipliers=no.multipliers.astype(str))),
        (3, replace(no, multipliers=np.array(["1"] * len(no.support), dtype=object))),
        (3, replace(no, multipliers=no.multipliers.astype(np.longdouble) * 0 + 1)),
        (3, replace(no, support=no.support.astype(float))),
        (3, replace(no, support=no.support.tolist())),
        (3, replace(no, support=None)),
        (3, Certificate("alternation", support=["a"])),
        (3, Certificate("alternation", support=np.array(3))),
    ):
        report.certificates[report.proof_of[line]] = forged
        result = report.check()
        assert not result.ok[line], forged
    report.proof_of[0] = 99
    assert not report.check().ok[0]


def test_lines_that_were_taken_away_do_not_check(report):
    report.verdicts = report.verdicts[:0]
    with pytest.raises(ValueError, match="0 lines for 4 label sets"):
        report.check()


def test_lines_are_counted_from_the_end_too():
    report = verify(sk.DFTHead(11, 60, 5), [[3, 30, 50], [10], [7, 8]])
    for i in range(3):
        assert report.certificate(i - 3) is report.certificate(i)
        assert np.array_equal(report.witness(i - 3), report.witness(i))
        assert np.array_equal(report.sets[i - 3], report.sets[i])
    for i in (3, -4):
        for read in (report.witness, report.certificate, report.sets.__getitem__):
            with pytest.raises(IndexError, match=f"{i} is out of range"):
                read(i)
    with pytest.raises(TypeError):
        report.witness(0.5)


@pytest.mark.parametrize("kind", ("roots", "codes"))
def test_a_closed_form_without_its_columns_has_no_witness(report, kind):
    report.certificates[report.proof_of[0]] = Certificate(kind, roots=np.array([1, 2]))
    assert report.witness(0) is None and not report.check().ok[0]


def test_a_witness_made_from_roots_is_that_of_its_own_set():
    report = verify(sk.DFTHead(21, 400, 10), [[3, 200], [10, 90, 91], [7, 8, 350]])
    report.certificates = [roots_certificate(report.sets[i], 400) for i in range(3)]
    for i in (-1, -2, -3):
        logits = report.question.logits(report.witness(i)[None, :])[0]
        assert np.flatnonzero(logits > 0).tolist() == report.sets[i].tolist()
