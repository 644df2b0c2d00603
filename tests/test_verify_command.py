"""``sigkernels verify``: files in, exit codes and JSON out."""

import argparse
import json

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels.verify import Report
from sigkernels.verify.command import add_parser, run

W = np.random.default_rng(0).standard_normal((12, 3))
YES = [np.flatnonzero(W @ x > 0).tolist() for x in np.random.default_rng(1).standard_normal((4, 3))]
NO = [[i for i in range(12) if i not in YES[0]][:2] + YES[0][:2]]


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
    return tmp_path


@pytest.mark.parametrize("weights", ("w.npy", "w.npz", "tensor.pt", "state.pt"))
@pytest.mark.parametrize("labels", ("yes.txt", "csr.npz", "dense.npz"))
def test_all_argmaxable_is_exit_code_0(files, capsys, weights, labels):
    assert call(files / weights, files / labels) == 0
    assert "ARGMAXABLE" in capsys.readouterr().out


def test_scipy_sparse_labels(files):
    from scipy.sparse import save_npz

    save_npz(files / "scipy.npz", sk.LabelSets.from_lists(YES, 12).to_scipy())
    assert call(files / "w.npy", files / "scipy.npz") == 0


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
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(files, capsys, weights, labels, options, message):
    (files / "words.txt").write_text("1 2\nfoo\n")
    (files / "far.txt").write_text("99\n")
    (files / "broken.npz").write_bytes(b"not a zip")
    np.savez(files / "two.npz", a=W, b=W)
    np.save(files / "nan.npy", np.full((12, 3), np.nan))
    assert call(files / weights, files / labels, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
