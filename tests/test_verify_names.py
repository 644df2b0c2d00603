"""Label names in reports, files and on the command line; every entry of the JSON output is documented."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import sigkernels as sk
from sigkernels.cli import main
from sigkernels.verify import Report, verify, verify_all, verify_classes
from sigkernels.verify.label_names import read_names

W = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [0.1, 0.1]])
NAMES = ["cat", "dog", "bird", "fish"]
DOCS = (Path(__file__).parents[1] / "docs" / "verifier.md").read_text(encoding="utf-8")


def test_impossible_sets_and_proofs_read_in_words(tmp_path):
    report = verify(W, [[0], [3], [0, 1, 2]], rule="topk", names=NAMES)
    assert report.words(-1) == "{cat, dog, bird}" and "impossible: {fish}" in report.summary()
    assert "fish predicted; " in report.explain(1) and re.search(
        r"(cat|dog|bird)[^;]* not predicted", report.explain(1)
    )
    report.save(tmp_path / "r.npz")
    assert Report.load(tmp_path / "r.npz").names == tuple(NAMES)
    assert verify(W, [[3]], rule="topk").words(0) == "{3}"
    assert verify_classes(W, names=NAMES).words(3) == "{fish}"
    assert "impossible: {fish}" in verify_all(W, 1, rule="argmax", names=NAMES).summary()


def test_long_sets_are_cut():
    head = sk.DFTHead(5, 40, 2)
    report = verify(head, [list(range(0, 40, 2))])
    assert report.words(0) == "{0, 2, 4, 6, 8, 10, 12, 14, … 12 more}"


def test_bad_names(tmp_path, capsys):
    with pytest.raises(ValueError, match="one name for each of the 4 labels, got 2"):
        verify(W, [[0]], names=["a", "b"])
    with pytest.raises(TypeError, match="use a list of names"):
        verify(W, [[0]], names="abcd")
    with pytest.raises(TypeError, match="names must hold one name for each label in order, got 5; use a list"):
        verify(W, [[0]], names=5)
    with pytest.raises(TypeError, match=r"in order, got {.*}; use a list"):
        verify(W, [[0]], names=set(NAMES))
    np.save(tmp_path / "w.npy", W)
    (tmp_path / "sets.txt").write_text("0\n")
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    files = [str(tmp_path / f) for f in ("w.npy", "sets.txt")]
    assert main(["verify", *files, "--names", str(tmp_path / "names.txt")]) == 2
    assert "holds 2 names for 4 labels" in capsys.readouterr().err
    (tmp_path / "names.json").write_text('["cat", "dog", 3, "bird"]')
    assert main(["verify", *files, "--names", str(tmp_path / "names.json")]) == 2
    assert "holds 3 among the names of the labels" in capsys.readouterr().err
    for text, message in (
        ('{"cat": [0]}', "names maps 'cat' to [0]; use a list of names, or a mapping"),
        ('{"cat": 4}', "names maps 4 to 'cat'"),
        ('{"cat": 1, "dog": 1}', "one number to two names"),
        ('"cat"', "is JSON, but neither a list of names nor a mapping"),
        ("[cat", "names.json: is not JSON"),
    ):
        (tmp_path / "names.json").write_text(text)
        assert main(["verify", *files, "--names", str(tmp_path / "names.json")]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "names.txt").write_bytes("caté\n".encode("latin-1"))
    assert main(["verify", *files, "--names", str(tmp_path / "names.txt")]) == 2
    assert "names.txt: is not text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mapping",
    [
        {"dog": 1, "fish": 3, "cat": 0},  # a tokenizer's vocabulary, in any order
        {3: "fish", 0: "cat", 1: "dog"},  # id2label
        {"3": "fish", "0": "cat", "1": "dog"},  # … as JSON has it
    ],
)
def test_names_by_number(tmp_path, mapping):
    expected = ("cat", "dog", "2", "fish")
    assert verify(W, [[0]], names=mapping).names == expected
    (tmp_path / "names.json").write_text(json.dumps(mapping))
    assert tuple(read_names(tmp_path / "names.json", 4)) == expected


@pytest.mark.parametrize("mapping", ({True: "cat"}, {0: 1.5}, {-1: "cat"}, {"a": "b"}, {0: "cat", "dog": 1}))
def test_mappings_that_name_no_labels(mapping):
    with pytest.raises(ValueError, match=r"names maps .* use a list of names, or a mapping"):
        verify(W, [[0]], names=mapping)


def test_names_that_look_like_something_else(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[unused0]\nline\u2028break\n##ing\n", encoding="utf-8-sig")
    assert read_names(tmp_path / "vocab.txt", 4) == ["[PAD]", "[unused0]", "line\u2028break", "##ing"]


def documented_entries():
    """The names in the first column of the table of ``--json``."""
    table = DOCS[DOCS.index("**`--json`**") :]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.parametrize("sets", ("0\n3\n", "0\n"), ids=("impossible", "possible"))
def test_every_entry_of_the_json_is_documented(tmp_path, capsys, sets):
    np.save(tmp_path / "w.npy", W)
    (tmp_path / "sets.txt").write_text(sets)
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    files = [str(tmp_path / f) for f in ("w.npy", "sets.txt")]
    options = ["--rule", "argmax", "--check", "--json", "--names", str(tmp_path / "names.txt")]
    failed = main(["verify", *files, *options, "--out", str(tmp_path / "r.npz")])
    out = json.loads(capsys.readouterr().out)
    assert failed == int("3" in sets) and out["schema"] == 1
    assert set(out) == documented_entries()
    inner = [*out["stages"], *out["impossible"], *([out["repair"], *out["repair"]["heads"]] if out["repair"] else [])]
    for name in {name for entry in inner for name in entry}:
        assert f"`{name}`" in DOCS
    if failed:
        assert out["impossible"][0]["names"] == ["fish"] and out["impossible"][0]["labels"] == [3]
        assert "UNARGMAXABLE: sets 1 {fish}" in out["reasons"]
    assert main(["check", str(tmp_path / "r.npz"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert all(f"`{name}`" in DOCS[DOCS.index("`sigkernels check --json`") :] for name in again)
