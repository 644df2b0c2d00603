"""Which arrays of a file ``sigkernels verify`` takes for the output layer, and what it refuses to overlook."""

import json

import numpy as np
import pytest
import torch
from command_cases import AFFINE, SHIFT, YES, W, call, write_files

import sigkernels as sk
from sigkernels.verify import Report


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


def test_safetensors(files):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"classifier.weight": torch.from_numpy(W)}, files / "w.safetensors")
    assert call(files / "w.safetensors", files / "yes.txt") == 0


def test_a_bias_beside_the_matrix_is_used(files, capsys):
    np.savez(files / "affine.npz", weight=np.array([[1.0], [-1.0]]), bias=np.array([1.0, 1.0]))
    (files / "both.txt").write_text("0 1\n")
    assert call(files / "affine.npz", files / "both.txt") == 0
    assert call(files / "affine.npz", files / "both.txt", "--no-bias") == 1
    assert call(files / "affine.npz", files / "both.txt", "--bias", "bias") == 0
    assert call(files / "affine.npz", files / "both.txt", "--bias", "bias", "--no-bias") == 2
    assert "--bias bias and --no-bias contradict each other" in capsys.readouterr().err


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
    assert f"--dft 7 contradicts {prefix}_extra_state, which says k = 3" in capsys.readouterr().err
    del state[f"{prefix}_extra_state"]
    torch.save(state, files / "dft.pt")
    assert call(files / "dft.pt", files / "sets.txt") == 0
    assert call(files / "dft.pt", files / "sets.txt", "--dft", 7) == 2
    assert f"--dft 7 contradicts {prefix}proj.weight, whose {7 + slack} rows say k = 3" in capsys.readouterr().err


def test_slack_columns_without_their_projection_need_a_k(files, capsys):
    torch.save({"slack_weight": torch.ones(12, 2), "norm.weight": torch.ones(3)}, files / "slack.pt")
    assert call(files / "slack.pt", files / "yes.txt") == 2
    assert "say its k with --dft K" in capsys.readouterr().err
    assert call(files / "slack.pt", files / "yes.txt", "--dft", 5) == 0
    torch.save({"slack_weight": torch.ones(12, 2), "proj.weight": torch.ones(6, 8)}, files / "odd.pt")
    assert call(files / "odd.pt", files / "yes.txt") == 2
    assert "6 rows, which is not 2k+1+codes+s" in capsys.readouterr().err


def test_the_published_names_of_a_dft_head(files, capsys):
    torch.save({"Ws.weight": torch.ones(12, 2), "proj.weight": torch.ones(13, 9)}, files / "published.pt")
    assert call(files / "published.pt", files / "yes.txt", "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert out["features"] == 13 and any("projection from 9 to 13" in note for note in out["notes"])


def test_two_heads_need_a_name(files, capsys):
    torch.save({"classifier.weight": torch.from_numpy(W), "b.slack_weight": torch.ones(12, 2)}, files / "both.pt")
    assert call(files / "both.pt", files / "yes.txt") == 2
    assert "Say --weight NAME" in capsys.readouterr().err


def test_a_file_without_a_matrix_says_so(files, capsys):
    assert call(files / "csr.npz", files / "yes.txt") == 2
    assert "has no matrix [labels, features], which an output layer is; it holds indices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "weight", "bias"),
    [
        ({"weight": AFFINE, "b": SHIFT}, "weight", "b"),
        ({"W": AFFINE, "b": SHIFT}, "W", "b"),
        ({"coef_": AFFINE, "intercept_": SHIFT}, "coef_", "intercept_"),
        ({"coef_": AFFINE, "intercept_": SHIFT, "classes_": np.arange(2)}, "coef_", "intercept_"),
        ({"weight": np.repeat(AFFINE, 2, 1), "bias": SHIFT[:, None]}, "weight", "bias"),
        ({"weight": np.repeat(AFFINE, 2, 1), "bias": SHIFT[None, :]}, "weight", "bias"),
        ({"fc.weight": AFFINE, "fc.bias": SHIFT, "encoder.weight": np.ones((5, 1))}, "fc.weight", "fc.bias"),
    ],
)
def test_a_bias_is_found_by_every_usual_name_and_shape(files, capsys, names, weight, bias):
    np.savez(files / "affine.npz", **names)
    (files / "both.txt").write_text("0 1\n")
    assert call(files / "affine.npz", files / "both.txt", "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["weight"], out["bias"]) == (weight, bias)
    assert call(files / "affine.npz", files / "both.txt", "--no-bias") == 1
    assert "no bias" in capsys.readouterr().out


@pytest.mark.parametrize("name", ("offset", "shift", "encoder.norm.bias"))
@pytest.mark.parametrize("shape", ((2,), (2, 1)))
def test_an_array_that_may_be_a_bias_is_never_dropped(files, capsys, name, shape):
    np.savez(files / "affine.npz", **{"weight": np.repeat(AFFINE, 2, 1), name: SHIFT.reshape(shape)})
    (files / "both.txt").write_text("0 1\n")
    assert call(files / "affine.npz", files / "both.txt") == 2
    error = capsys.readouterr().err
    assert "affine.npz: there may be a bias" in error and name in error and "--no-bias" in error
    assert call(files / "affine.npz", files / "both.txt", "--bias", name) == 0
    assert f"bias {name}" in capsys.readouterr().out
    assert call(files / "affine.npz", files / "both.txt", "--no-bias") == 1
    assert f"not used: {name}" in capsys.readouterr().out


def test_a_second_vector_over_the_labels_is_refused(files, capsys):
    np.savez(files / "affine.npz", weight=AFFINE, bias=SHIFT, pos_weight=SHIFT)
    (files / "both.txt").write_text("0 1\n")
    assert call(files / "affine.npz", files / "both.txt") == 2
    assert "the bias is 'bias', but 'pos_weight'" in capsys.readouterr().err
    assert call(files / "affine.npz", files / "both.txt", "--bias", "bias") == 0


@pytest.mark.parametrize("wrapper", ("state_dict", "model_state_dict", "model", None))
@pytest.mark.parametrize("prefix", ("", "model.", "module.", "model._orig_mod.", "net."))
def test_checkpoints_of_every_usual_form(files, capsys, wrapper, prefix):
    linear = torch.nn.Linear(3, 12)
    state = {f"{prefix}classifier.{name}": value for name, value in linear.state_dict().items()}
    state[f"{prefix}encoder.weight"] = torch.ones(3, 7)
    rest = {"epoch": 3, "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(12, 3)}}}}
    torch.save({wrapper: state, **rest} if wrapper else state, files / "model.ckpt")
    sets = sk.verify(linear, YES)
    call(files / "model.ckpt", files / "yes.txt", "--json")
    out = json.loads(capsys.readouterr().out)
    assert out["weight"] == f"{prefix}classifier.weight" and out["bias"] == f"{prefix}classifier.bias"
    assert out["verdicts"] == [str(v) for v in sets.verdicts]


def test_codes_of_a_head_are_never_taken_for_a_larger_k(files, capsys):
    head = sk.DFTHead(64, 40, k=3, slack=4, codes=16)
    state = head.state_dict()
    del state["_extra_state"]  # as before there was a mark of k and codes
    torch.save(state, files / "coded.pt")
    (files / "sets.txt").write_text("1 5\n0 1 2\n")
    assert call(files / "coded.pt", files / "sets.txt") == 2
    assert "fits k = 11 with 0 codes, k = 3 with 16 codes; say which with --dft K" in capsys.readouterr().err
    assert call(files / "coded.pt", files / "sets.txt", "--dft", 3, "--out", files / "r.npz") == 0
    assert Report.load(files / "r.npz").question.codes == 16 and Report.load(files / "r.npz").check(head)


@pytest.mark.parametrize("prefix", ("", "classifier."))
@pytest.mark.parametrize("suffix", ("pt", "npz", "safetensors"))
def test_the_mark_of_a_head_says_its_k_and_codes(files, capsys, prefix, suffix):
    head = sk.DFTHead(64, 40, k=3, slack=4, codes=16)
    state = {f"{prefix}{name}": value for name, value in head.state_dict().items()}
    file = files / f"marked.{suffix}"
    _write_state(file, state)
    (files / "sets.txt").write_text("1 5\n0 1 2\n")
    assert call(file, files / "sets.txt", "--out", files / "r.npz") == 0
    assert "not used" not in capsys.readouterr().out
    assert Report.load(files / "r.npz").question.codes == 16 and Report.load(files / "r.npz").check(head)
    assert call(file, files / "sets.txt", "--dft", 11) == 2
    assert f"--dft 11 contradicts {prefix}_extra_state, which says k = 3" in capsys.readouterr().err
    _write_state(file, state | {f"{prefix}_extra_state": torch.tensor(12)})
    assert call(file, files / "sets.txt") == 2
    assert f"{prefix}_extra_state says k = 12 with 0 codes, which contradicts the 27 rows" in capsys.readouterr().err


def _write_state(file, state):
    if file.suffix == ".npz":
        np.savez(file, **{name: value.numpy() for name, value in state.items()})
    elif file.suffix == ".pt":
        torch.save(state, file)
    else:
        pytest.importorskip("safetensors.torch").save_file(state, file)
