"""``sigkernels check``: a saved report is proved again."""

import argparse
import json

import numpy as np
import pytest
import torch
from command_cases import NO, YES, W, call, write_files

import sigkernels as sk
from sigkernels.verify import check_command


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path)


def check_report(*arguments):
    parser = argparse.ArgumentParser(prog="sigkernels")
    check_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["check", *map(str, arguments)])
    return args.run(args)


def test_a_saved_report_is_proved_again(files, capsys):
    (files / "all.txt").write_text((files / "yes.txt").read_text() + " ".join(map(str, NO[0])) + "\n")
    call(files / "w.npy", files / "all.txt", "--out", files / "r.npz")
    assert check_report(files / "r.npz") == 0 and check_report(files / "r.npz", files / "w.npz") == 0
    assert "PROVED  all 5 lines" in capsys.readouterr().out
    np.save(files / "other.npy", -W)
    assert check_report(files / "r.npz", files / "other.npy") == 1
    assert "NOT PROVED  line 0" in capsys.readouterr().out
    assert check_report(files / "r.npz", files / "other.npy", "--json") == 1
    out = json.loads(capsys.readouterr().out)
    assert out["proved"] is False and len(out["failures"]) == 4 and out["failures"][0]["line"] == 0


def test_a_saved_report_of_a_dft_head_is_proved_again(files):
    head = sk.DFTHead(11, 12, 2, 6)
    torch.save(head.state_dict(), files / "dft.pt")
    (files / "pairs.txt").write_text("1 5\n\n0 3\n")
    call(files / "dft.pt", files / "pairs.txt", "--out", files / "r.npz", "--allow", "thin")
    assert check_report(files / "r.npz") == check_report(files / "r.npz", files / "dft.pt") == 0


@pytest.mark.parametrize("name", ("missing.npz", "w.npz", "."))
def test_what_is_no_report_is_refused(files, name):
    with pytest.raises(ValueError, match=r"no such file|not a verification report|is a directory"):
        check_report(files / name)


@pytest.mark.parametrize("option", (("--weight", "W"), ("--bias", "b"), ("--no-bias",), ("--dft", "2")))
def test_options_about_weights_that_are_not_given_are_refused(files, option):
    call(files / "w.npy", files / "yes.txt", "--out", files / "r.npz")
    with pytest.raises(ValueError, match=f"{option[0]} is about the file WEIGHTS"):
        check_report(files / "r.npz", *option)


def test_a_classifier_of_another_form_is_refused_by_the_name_of_its_file(files):
    call(files / "w.npy", files / "yes.txt", "--out", files / "r.npz")
    np.save(files / "wide.npy", np.ones((12, 5)))
    with pytest.raises(ValueError, match=r"wide.npy has 12 labels and 5 columns; .* about 12 labels and 3 columns$"):
        check_report(files / "r.npz", files / "wide.npy")
    torch.save(sk.DFTHead(5, 12, 1, 2).state_dict(), files / "dft.pt")
    with pytest.raises(ValueError, match=r"dft.pt has 12 labels and 2 columns beside a DFT with k = 1; "):
        check_report(files / "r.npz", files / "dft.pt")


def test_a_report_without_its_matrix_says_where_to_name_it(files):
    sk.verify(W, YES).save(files / "r.npz", matrix=False)
    with pytest.raises(ValueError, match="or WEIGHTS on the command line"):
        check_report(files / "r.npz")
    assert check_report(files / "r.npz", files / "w.npy") == 0


def test_columns_overwrite_no_input_and_no_report(files, capsys):
    assert call(files / "w.npz", files / "no.txt", "--repair", files / "w.npz") == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert call(files / "w.npz", files / "no.txt", "--repair", files / "r.npz", "--out", files / "r.npz") == 2
    assert "is the file of --out" in capsys.readouterr().err
