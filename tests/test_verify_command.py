"""``sigkernels verify``: files in, exit codes and JSON out."""

import argparse
import json

import numpy as np
import pytest
import scipy.sparse
import torch

import sigkernels as sk
from sigkernels.verify import Report
from sigkernels.verify.command import add_parser, run
from sigkernels.verify.files import load_label_sets

W = np.random.default_rng(0).standard_normal((12, 3))
YES = [np.flatnonzero(W @ x > 0).tolist() for x in np.random.default_rng(1).standard_normal((4, 3))]
NO = [[i for i in range(12) if i not in YES[0]][:2] + YES[0][:2]]
SPARSE = {"format": b"csr", "shape": np.array([1, 12]), "data": np.ones(1)}  # the beginnings of a scipy file


def call(*arguments):
    parser = argparse.ArgumentParser(prog="sigkernels")
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["verify", *map(str, arguments)])
    assert args.run is run
    return args.run(args)


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "w.npy", W)
    np.savez(tmp_path / "w.npz", weight=W, other=np.ones(3))
    torch.save(torch.from_numpy(W), tmp_path / "tensor.pt")
    state = {"body.weight": torch.ones(3, 3), "classifier.weight": torch.from_numpy(W)}
    torch.save(state, tmp_path / "state.pt")
    (tmp_path / "yes.txt").write_text("".join(",".join(map(str, s)) + "\n" for s in YES))
    (tmp_path / "no.txt").write_text("".join(" ".join(map(str, s)) + " 3:0.5 9:1 # note\n" for s in NO))
    sets = sk.LabelSets.from_lists(YES, 12)
    np.savez(tmp_path / "csr.npz", indices=sets.indices.numpy(), offsets=sets.offsets.numpy())
    np.savez(tmp_path / "dense.npz", y=sets.to_dense().numpy())
    torch.save(sets, tmp_path / "sets.pt")
    (tmp_path / "marked.txt").write_text((tmp_path / "yes.txt").read_text(), encoding="utf-8-sig")
    return tmp_path


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


def test_safetensors(files):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"classifier.weight": torch.from_numpy(W)}, files / "w.safetensors")
    assert call(files / "w.safetensors", files / "yes.txt") == 0


def test_something_unargmaxable_is_exit_code_1(files, capsys):
    assert call(files / "w.npy", files / "no.txt") == 1
    out = capsys.readouterr().out
    assert "UNARGMAXABLE" in out and "cannot be predicted: sets 0" in out


def test_json_out_and_check(files, capsys):
    assert call(files / "w.npy", files / "no.txt", "--json", "--check", "--out", files / "report.npz") == 1
    out = json.loads(capsys.readouterr().out)
    assert out["counts"]["UNARGMAXABLE"] == 1 and out["checked"] is True
    assert out["verdicts"] == ["UNARGMAXABLE"] and out["sets"] == 1 and out["labels"] == 12
    report = Report.load(files / "report.npz")
    assert report.check() and report.verdicts[0] == "UNARGMAXABLE"


def test_a_bias_beside_the_matrix_is_used(files, capsys):
    np.savez(files / "affine.npz", weight=np.array([[1.0], [-1.0]]), bias=np.array([1.0, 1.0]))
    (files / "both.txt").write_text("0 1\n")
    assert call(files / "affine.npz", files / "both.txt") == 0
    assert call(files / "affine.npz", files / "both.txt", "--no-bias") == 1
    assert call(files / "affine.npz", files / "both.txt", "--bias", "bias") == 0


def test_dft_heads_by_their_slack(files):
    np.save(files / "slack.npy", np.random.default_rng(0).standard_normal((12, 2)))
    (files / "sets.txt").write_text("1 5\n\n0 1 2\n")
    assert call(files / "slack.npy", files / "sets.txt", "--dft", 2, "--radius") == 0


@pytest.mark.parametrize("prefix", ("", "classifier."))
@pytest.mark.parametrize("slack", (0, 4))
def test_the_state_dict_of_a_dft_head_says_its_k(files, capsys, prefix, slack):
    torch.manual_seed(0)
    head = sk.DFTHead(64, 40, k=3, slack=slack)
    sets = [[1, 5, 9], [], [0, 1, 2], [3, 4, 30]]
    state = {f"{prefix}{name}": value for name, value in head.state_dict().items()}
    torch.save({"encoder.weight": torch.ones(64, 7), **state} if prefix else state, files / "dft.pt")
    (files / "sets.txt").write_text("".join(" ".join(map(str, s)) + "\n" for s in sets))
    for options in ((), ("--dft", 3), ("--weight", f"{prefix}slack_weight")):
        assert call(files / "dft.pt", files / "sets.txt", "--json", *options) == 0
        out = json.loads(capsys.readouterr().out)
        assert out["features"] == 7 + slack
        assert out["verdicts"] == [str(v) for v in sk.verify(head, sets).verdicts]
    assert call(files / "dft.pt", files / "sets.txt", "--dft", 7) == 2
    assert f"--dft 7 contradicts {prefix}proj.weight" in capsys.readouterr().err


def test_slack_columns_without_their_projection_need_a_k(files, capsys):
    torch.save({"slack_weight": torch.ones(12, 2), "norm.weight": torch.ones(3)}, files / "slack.pt")
    assert call(files / "slack.pt", files / "yes.txt") == 2
    assert "say its k with --dft K" in capsys.readouterr().err
    assert call(files / "slack.pt", files / "yes.txt", "--dft", 5) == 0
    torch.save({"slack_weight": torch.ones(12, 2), "proj.weight": torch.ones(6, 8)}, files / "odd.pt")
    assert call(files / "odd.pt", files / "yes.txt") == 2
    assert "6 rows, which is not 2k+1+s" in capsys.readouterr().err


def test_the_published_names_of_a_dft_head(files, capsys):
    torch.save({"Ws.weight": torch.ones(12, 2), "proj.weight": torch.ones(13, 9)}, files / "published.pt")
    assert call(files / "published.pt", files / "yes.txt", "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert out["features"] == 13 and any("projection from 9 to 13" in note for note in out["notes"])


def test_two_heads_need_a_name(files, capsys):
    torch.save({"classifier.weight": torch.from_numpy(W), "b.slack_weight": torch.ones(12, 2)}, files / "both.pt")
    assert call(files / "both.pt", files / "yes.txt") == 2
    assert "Say --weight NAME" in capsys.readouterr().err


def test_strict_counts_what_is_not_known_to_be_argmaxable(files):
    tall = np.array([[1.0, 0.0], [-1.0, 1.0], [1.0, -1.0]])
    np.save(files / "tall.npy", tall)
    (files / "set.txt").write_text("0 1 2\n")
    assert call(files / "tall.npy", files / "set.txt", "--strict") == 1


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
        ("nan.npy", "yes.txt", (), "every entry must be finite"),
        ("w.npy", "yes.txt", ("--tol", "-1"), "tol must be at least 0"),
        ("w.npy", "yes.txt", ("--box", "0"), "box must be positive"),
        ("w.npy", "yes.txt", ("--device", "tpu"), "device='tpu'"),
        ("w.npy", "yes.txt", ("--dft", "9"), "k"),
        ("scalar.npz", "yes.txt", ("--weight", "s"), "array 's' has shape ()"),
        ("vector.npy", "yes.txt", (), "its array has shape (3,)"),
        ("vector.npy", "yes.txt", ("--dft", "1"), "its array has shape (3,)"),
        ("text.npy", "yes.txt", (), "damaged, or not a numpy file"),
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
    np.save(files / "nan.npy", np.full((12, 3), np.nan))
    (files / "empty.pt").touch()
    np.savez(files / "no-format.npz", **SPARSE | {"format": np.array(3)})
    empty = {"indices": np.zeros(0, int), "indptr": np.zeros(2, int)}
    np.savez(files / "no-blocks.npz", **SPARSE | empty | {"format": b"bsr", "data": np.ones((1, 0, 0))})
    np.savez(files / "half-offsets.npz", **SPARSE | {"format": b"dia", "offsets": [0.5]})
    assert call(files / weights, files / labels, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
