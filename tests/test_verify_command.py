"""``sigkernels verify``: files in, exit codes and JSON out."""

import importlib
import json
import os
import threading

import numpy as np
import pytest
import scipy.sparse
import torch
from command_cases import AFFINE, NO, SPARSE, YES, W, call, write_files

import sigkernels as sk
from sigkernels.verify import Report, Verdict
from sigkernels.verify.label_file import load_label_sets


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


@pytest.mark.parametrize("weights", ("w.npy", "w.npz", "tensor.pt", "state.pt"))
@pytest.mark.parametrize("labels", ("yes.txt", "marked.txt", "csr.npz", "dense.npz", "sets.pt"))
def test_all_argmaxable_is_exit_code_0(files, capsys, weights, labels):
    assert call(files / weights, files / labels) == 0
    assert "ARGMAXABLE" in capsys.readouterr().out


@pytest.mark.parametrize("form", ("csr", "csc", "coo", "bsr"))
def test_scipy_sparse_labels_of_every_form(files, capsys, form):
    sets = sk.LabelSets.from_lists([*YES, *NO], 12).to_scipy()
    scipy.sparse.save_npz(files / "scipy.npz", sets.asformat(form))
    assert call(files / "w.npy", files / "scipy.npz", "--json") == 1
    assert json.loads(capsys.readouterr().out)["verdicts"] == ["ARGMAXABLE"] * 4 + ["UNARGMAXABLE"]


def test_stored_zeros_are_no_labels(files, capsys):
    data, indices, offsets = np.r_[1.0, 0.0], np.array([YES[0][0], 11]), np.array([0, 2])
    matrix = scipy.sparse.csr_matrix((data, indices, offsets), (1, 12))
    scipy.sparse.save_npz(files / "zero.npz", matrix)
    assert load_label_sets(str(files / "zero.npz"), 12).to_lists() == [[YES[0][0]]]


def test_lines_that_are_comments_are_no_sets(files):
    (files / "notes.txt").write_text("# three sets\n1,2 # the first\n  # and more\n\n3 7:0.5\n")
    assert load_label_sets(str(files / "notes.txt"), 12).to_lists() == [[1, 2], [], [3]]


def test_label_sets_from_a_pipe(files, capsys):
    os.mkfifo(files / "pipe")
    writer = threading.Thread(target=(files / "pipe").write_text, args=((files / "yes.txt").read_text(),))
    writer.start()
    assert call(files / "w.npy", files / "pipe") == 0
    writer.join()
    assert call(files / "w.npy", "/dev/zero") == 2 and "/dev/zero: is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize("line", ("1_0", "1.0", "1;2", "[1]", "²", "٣"))
def test_lines_that_are_no_label_numbers(files, line):
    (files / "bad.txt").write_text(f"1 2\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad.txt, line 2: .* is not a list of label numbers"):
        load_label_sets(str(files / "bad.txt"), 12)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (scipy.sparse.csr_matrix(np.full((2, 12), 0.5)), "a set has only 0 and 1"),
        (scipy.sparse.csr_matrix(np.ones((3, 10))), "a matrix over 10 labels, and the classifier has 12"),
        (scipy.sparse.csc_matrix(np.ones((12, 3))), "a matrix over 3 labels"),
        ({"indices": np.array([0.7, 3.0]), "offsets": np.array([0, 2])}, "indices must hold whole numbers"),
        (SPARSE | {"indices": np.array([0.7]), "indptr": np.array([0, 1])}, "indices must hold whole numbers"),
        (SPARSE | {"indices": np.array([12]), "indptr": np.array([0, 1])}, "indices must be < 12"),
        (
            SPARSE | {"indices": np.array([5]), "indptr": np.repeat([0, 1], [1, 12]), "format": b"csc"},
            "indices must be < 1",
        ),
        (SPARSE, "damaged sparse matrix"),
        ({"indices": np.array([0, 3]), "offsets": np.array([0, 5])}, "offsets must go from 0"),
    ],
)
def test_label_files_that_say_something_else_are_refused(files, capsys, arrays, message):
    if isinstance(arrays, dict):
        np.savez(files / "bad.npz", **arrays)
    else:
        scipy.sparse.save_npz(files / "bad.npz", arrays)
    assert call(files / "w.npy", files / "bad.npz") == 2
    assert message in capsys.readouterr().err


def test_something_unargmaxable_is_exit_code_1(files, capsys):
    assert call(files / "w.npy", files / "no.txt") == 1
    out = capsys.readouterr().out
    assert "FAILED  UNARGMAXABLE: sets 0" in out


def test_json_out_and_check(files, capsys):
    assert call(files / "w.npy", files / "no.txt", "--json", "--check", "--out", files / "report.npz") == 1
    out = json.loads(capsys.readouterr().out)
    assert out["counts"]["UNARGMAXABLE"] == 1 and out["checked"] is True
    assert out["verdicts"] == ["UNARGMAXABLE"] and out["sets"] == 1 and out["labels"] == 12
    report = Report.load(files / "report.npz")
    assert report.check() and report.verdicts[0] == "UNARGMAXABLE"


@pytest.mark.parametrize(
    ("weights", "labels", "options", "message"),
    [
        ("missing.npy", "yes.txt", (), "no such file"),
        ("w.npy", "missing.txt", (), "no such file"),
        ("yes.txt", "yes.txt", (), "unknown kind of file"),
        ("w.npy", "words.txt", (), "line 2"),
        ("w.npy", "far.txt", (), "out of range"),
        ("broken.npz", "yes.txt", (), "cannot be read"),
        ("two.npz", "yes.txt", (), "Say --weight NAME"),
        ("w.npz", "yes.txt", ("--weight", "nope"), "no array 'nope'"),
        ("w.npz", "yes.txt", ("--bias", "nope"), "no array 'nope'"),
        ("w.npy", "w.npz", (), "matrix over 3 labels"),
        ("nan.npy", "yes.txt", (), "nan.npy: its array holds nan at [0, 0]"),
        ("w.npy", "yes.txt", ("--tol", "-1"), "tol must be at least 0"),
        ("w.npy", "yes.txt", ("--box", "0"), "box must be positive"),
        ("w.npy", "yes.txt", ("--device", "tpu"), "device='tpu'"),
        ("w.npy", "yes.txt", ("--dft", "9"), "k"),
        ("scalar.npz", "yes.txt", ("--weight", "s"), "array 's' has shape ()"),
        ("vector.npy", "yes.txt", (), "its array has shape (3,)"),
        ("vector.npy", "yes.txt", ("--dft", "1"), "its array has shape (3,)"),
        ("text.npy", "yes.txt", (), "damaged, or not a numpy file"),
        (".", "yes.txt", (), "is a directory; name the file in it, for example"),
        ("w.npy", ".", (), "is a directory"),
        ("archive.npy", "yes.txt", (), "archive.npy: is an .npz archive by its content: rename it"),
        ("plain.npz", "yes.txt", (), "plain.npz: is an .npy array by its content: rename it"),
        ("fp8.pt", "yes.txt", (), "fp8.pt: 'weight' is torch.float8_e4m3fn"),
        ("sparse.pt", "yes.txt", (), "sparse.pt: 'weight' must be dense"),
        ("meta.pt", "yes.txt", (), "meta.pt: 'weight' is on the meta device"),
        ("nan.pt", "yes.txt", (), "nan.pt: 'weight' holds nan at [0, 0]"),
        ("module.pt", "yes.txt", (), "module.pt: holds pickled Python objects"),
        ("list.pt", "yes.txt", (), "list.pt: holds a list"),
        ("w.npy", "other.pt", (), "other.pt: holds sets over 500 labels, and the classifier has 12"),
        ("w.npy", "yes.txt", ("--allow", "maybe"), "--allow maybe: use thin, not_eps"),
        ("w.npy", "yes.txt", ("--min-sets", "-1"), "--min-sets must be at least 0"),
        ("w.npy", "yes.txt", ("--threshold", "1.5"), "strictly between 0 and 1"),
        ("w.npy", "yes.txt", ("--threshold", "high"), '--threshold high: is neither a probability, nor "free", nor a'),
        ("w.npy", "yes.txt", ("--threshold", ""), "a file must be named, got an empty name"),
        ("w.npy", "yes.txt", ("--out", ""), "--out: a file must be named, got an empty name"),
        ("w.npy", "latin.txt", (), "latin.txt: is not text in UTF-8 (invalid continuation byte at byte 5)"),
        ("w.npy", "scores.txt", (), "scores.txt: holds features alone (7:0.5), and no label in any line"),
        ("w.npy", "many-labels.npz", (), "holds sets over [12, 12] labels, and the classifier has 12"),
        ("none.npy", "yes.txt", (), "none.npy: its array has shape (0, 3); an output layer is a matrix"),
        ("text.pt", "yes.txt", (), "text.pt: cannot be read: damaged, or not a file of torch.save"),
        ("w.npy", "yes.txt", ("--rule", "topk", "--threshold", "0.5"), "leave threshold out"),
        ("w.npy", "yes.txt", ("--weight", "head"), "no array 'head' (it has: one, without a name)"),
        ("w.npy", "yes.txt", ("--rule", "argmax"), "predicts exactly one"),
        ("two-biases.npz", "yes.txt", (), "which of bias, b is the bias?"),
        ("transposed.npz", "yes.txt", (), "if the matrix is [features, labels], save its transpose"),
        ("empty.pt", "yes.txt", (), "cannot be read"),
        ("w.npy", "no-format.npz", (), "damaged sparse matrix"),
        ("w.npy", "no-blocks.npz", (), "damaged sparse matrix"),
        ("w.npy", "half-offsets.npz", (), "offsets must hold whole numbers"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(files, capsys, weights, labels, options, message):
    (files / "words.txt").write_text("1 2\nfoo\n")
    (files / "far.txt").write_text("99\n")
    (files / "broken.npz").write_bytes(b"not a zip")
    np.savez(files / "two.npz", a=W, b=W)
    np.savez(files / "scalar.npz", s=np.float64(3), weight=W)
    np.save(files / "vector.npy", np.ones(3))
    (files / "text.npy").write_text("hello")
    (files / "text.pt").write_text("hello")
    (files / "latin.txt").write_bytes("# café\n1 2\n".encode("latin-1"))
    np.save(files / "none.npy", np.ones((0, 3)))
    (files / "scores.txt").write_text("3:0.9 7:0.8\n\n5:0.4\n")
    np.savez(files / "many-labels.npz", indices=[1], offsets=[0, 1], num_labels=[12, 12])
    np.save(files / "nan.npy", np.full((12, 3), np.nan))
    (files / "empty.pt").touch()
    with open(files / "archive.npy", "wb") as file:
        np.savez(file, weight=W)
    with open(files / "plain.npz", "wb") as file:
        np.save(file, W)
    weight = torch.from_numpy(W).float()
    torch.save({"weight": weight.to(torch.float8_e4m3fn)}, files / "fp8.pt")
    torch.save({"weight": weight.to_sparse()}, files / "sparse.pt")
    torch.save({"weight": weight.to("meta")}, files / "meta.pt")
    torch.save({"weight": weight * np.nan}, files / "nan.pt")
    torch.save(torch.nn.Linear(3, 12), files / "module.pt")
    torch.save([weight], files / "list.pt")
    torch.save(sk.LabelSets.from_lists([[3]], 500), files / "other.pt")
    np.savez(files / "two-biases.npz", weight=W, bias=W[:, 0], b=W[:, 1])
    np.savez(files / "transposed.npz", weight=W.T.copy(), bias=W[:, 0])
    np.savez(files / "no-format.npz", **SPARSE | {"format": np.array(3)})
    empty = {"indices": np.zeros(0, int), "indptr": np.zeros(2, int)}
    np.savez(files / "no-blocks.npz", **SPARSE | empty | {"format": b"bsr", "data": np.ones((1, 0, 0))})
    np.savez(files / "half-offsets.npz", **SPARSE | {"format": b"dia", "offsets": [0.5]})
    assert call(files / weights, files / labels, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


# The gate


def test_no_label_sets_do_not_pass(files, capsys):
    (files / "nothing.txt").write_text("")
    assert call(files / "w.npy", files / "nothing.txt") == 1
    assert "0 label sets were given, and at least 1" in capsys.readouterr().out
    assert call(files / "w.npy", files / "nothing.txt", "--min-sets", 0) == 0
    assert call(files / "w.npy", files / "yes.txt", "--min-sets", 5) == 1


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_what_is_argmaxable_or_allowed_passes(files, capsys, monkeypatch, verdict):
    def verify(*args, **kwargs):
        report = sk.verify(*args, **kwargs)
        report.verdicts[1] = verdict
        return report

    monkeypatch.setattr(importlib.import_module("sigkernels.verify.pipeline"), "verify", verify)
    passes = verdict is Verdict.ARGMAXABLE
    assert call(files / "w.npy", files / "yes.txt") == (0 if passes else 1)
    assert ("PASSED" if passes else f"FAILED  {verdict}: sets 1") in capsys.readouterr().out
    if not passes:
        assert call(files / "w.npy", files / "yes.txt", "--allow", f"{str(verdict).lower()},undecided") == 0
        others = ",".join(v.lower() for v in Verdict if v not in (verdict, Verdict.ARGMAXABLE))
        assert call(files / "w.npy", files / "yes.txt", "--allow", others, "--json") == 1
        out = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert out["passed"] is False and out["reasons"] == [f"{verdict}: sets 1"]


def test_a_thin_set_passes_only_where_thin_is_allowed(files):
    np.save(files / "thin.npy", np.array([[1.0, 0.0], [-1.0, 1.0], [1.0 + 2.0**-45, -1.0]]))
    (files / "thin.txt").write_text("0 1 2\n")
    assert call(files / "thin.npy", files / "thin.txt", "--tol", 1e-3) == 1
    assert call(files / "thin.npy", files / "thin.txt", "--tol", 1e-3, "--allow", "thin") == 0


# Where the report goes


def test_a_report_never_overwrites_an_input(files, capsys):
    for name in ("w.npz", "csr.npz"):
        before = (files / name).read_bytes()
        assert call(files / "w.npz", files / "csr.npz", "--out", files / "." / name) == 2
        assert "is an input of this command" in capsys.readouterr().err
        assert (files / name).read_bytes() == before


@pytest.mark.parametrize("option", ("--out", "--repair"))
@pytest.mark.parametrize(("given", "text"), (("--names", "cat\n" * 12), ("--threshold", "0.3 " * 12)))
def test_nor_the_names_nor_the_thresholds(files, capsys, option, given, text):
    (files / "given.txt").write_text(text)
    assert call(files / "w.npy", files / "no.txt", given, files / "given.txt", option, files / "given.txt") == 2
    assert "is an input of this command" in capsys.readouterr().err
    assert (files / "given.txt").read_text() == text


@pytest.mark.parametrize("out", ("missing/report.npz", ".", "/proc/report.npz"))  # no file can be made in /proc
def test_a_report_that_cannot_be_written_is_refused_before_the_proving(files, capsys, monkeypatch, out):
    monkeypatch.setattr(
        importlib.import_module("sigkernels.verify.pipeline"), "verify", lambda *a, **k: pytest.fail("proved first")
    )
    assert call(files / "w.npy", files / "yes.txt", "--out", files / out) == 2
    assert "--out" in capsys.readouterr().err


def test_a_report_is_written_whole_or_not_at_all(files, monkeypatch):
    report = sk.verify(W, YES)
    report.save(files / "report.npz")
    before = (files / "report.npz").read_bytes()

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="no space"):
        report.save(files / "report.npz")
    assert (files / "report.npz").read_bytes() == before
    assert not list(files.glob("*.part")) and not list(files.glob(".*.part"))


# Rules


def test_thresholds_and_rules_on_the_command_line(files, capsys):
    np.save(files / "pair.npy", AFFINE)
    (files / "both.txt").write_text("0 1\n")
    np.save(files / "low.npy", np.array([0.3, 0.4]))
    np.save(files / "one.npy", np.array(0.3))
    (files / "low.txt").write_text("0.3\n0.4\n")
    for threshold, code in (
        ("0.5", 1),
        ("0.3", 0),
        ("free", 0),
        (files / "low.npy", 0),
        (files / "low.txt", 0),
        (files / "one.npy", 0),
    ):
        assert call(files / "pair.npy", files / "both.txt", "--threshold", threshold, "--out", files / "r.npz") == code
        assert Report.load(files / "r.npz").check()
    assert call(files / "pair.npy", files / "both.txt", "--rule", "topk", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rule"] == "topk"


def test_every_class_on_the_command_line(files, capsys):
    classes = np.r_[W, W[:1]]  # the first class and the last are the same
    bias = np.arange(13.0)
    bias[12] = bias[0]
    np.savez(files / "lm.npz", weight=classes, bias=bias)
    (files / "tokens.txt").write_text("".join(f"token{i}\n" for i in range(13)))
    options = ("--all-classes", "--names", files / "tokens.txt", "--out", files / "r.npz", "--ball", "l2", "--check")
    assert call(files / "lm.npz", *options, "--json") == 1
    out = json.loads(capsys.readouterr().out)
    expected = sk.verify_classes(classes, bias, ball="l2")
    assert out["verdicts"] == [str(v) for v in expected.verdicts] and out["sets"] == 13 and out["checked"]
    assert out["rule"] == "argmax" and out["ball"] == "l2" and out["impossible"][0]["names"] == ["token0"]
    assert Report.load(files / "r.npz", classes, bias).check()
    assert call(files / "lm.npz", "--all-classes", "--min-sets", 14) == 1
    text = capsys.readouterr().out
    assert "13 label sets were given, and at least 14" in text and "FAILED  UNARGMAXABLE: sets 0, 12" in text
    assert call(files / "lm.npz", "--all-classes", "--rule", "argmax", "--allow", "unargmaxable") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "LABELS is missing: name a file with label sets, or say --all-classes"),
        (("--rule", "argmax"), "LABELS is missing"),
        (("yes.txt", "--all-classes"), "leave one of them out"),
        (("--all-classes", "--rule", "topk"), "--rule is topk"),
        (("--all-classes", "--threshold", "0.5"), "leave --threshold out"),
        (("--all-classes", "--names", "missing.txt"), "missing.txt: no such file"),
        (("--all-classes", "--tol", "-1"), "tol must be at least 0"),
    ],
)
def test_a_command_asks_one_question(files, capsys, arguments, message):
    assert call(files / "w.npy", *(files / a if a.endswith(".txt") else a for a in arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_impossible_sets_get_a_recommendation_and_columns(files, capsys):
    assert call(files / "w.npy", files / "no.txt", "--repair", files / "columns.npz") == 1
    out = capsys.readouterr().out
    assert "can be made possible" in out and "sk.DFTHead.from_linear(head, k=" in out and "FAILED" in out
    with np.load(files / "columns.npz") as saved:
        wider = np.concatenate([W, saved["columns"]], axis=1)
        assert saved["impossible"].tolist() == [0] and str(saved["method"])
    np.save(files / "wider.npy", wider)
    assert call(files / "wider.npy", files / "no.txt", "--check") == 0
    assert "made possible" not in capsys.readouterr().out
    assert call(files / "w.npy", files / "no.txt", "--json") == 1
    assert json.loads(capsys.readouterr().out)["repair"]["columns"] == 1


def test_there_is_nothing_to_repair(files, capsys):
    assert call(files / "w.npy", files / "yes.txt", "--repair", files / "columns.npz") == 0
    assert "nothing to repair" in capsys.readouterr().out and not (files / "columns.npz").exists()
    assert call(files / "w.npy", files / "yes.txt", "--json") == 0
    assert json.loads(capsys.readouterr().out)["repair"] is None
