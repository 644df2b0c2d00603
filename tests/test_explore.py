"""Proofs in words, and the page of a report: its data, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels import cli
from sigkernels.verify import explore_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def report():
    """Four labels at the corners of a square: opposite ones exclude each other, neighbours do not."""
    W = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    return sk.verify(W, [[0, 2], [0, 1], [1, 2], [], [0, 1, 2, 3]])


def test_an_impossible_set_names_its_labels(report):
    words = report.explain(0)
    assert "can never come out like this at once: labels 0, 2 predicted" in words and "is zero" in words
    assert "at once: zero & co, two predicted" in report.explain(0, ["zero & co", "one", "two", "three"])
    assert "An input that predicts exactly this set is known." in report.explain(1)
    assert "not predicted" in report.explain(3)
    with pytest.raises(IndexError):
        report.explain(5)


def test_other_proofs_in_words():
    head = sk.DFTHead(5, 30, k=2, slack=0)
    words = sk.verify(head, [[0, 5, 10], [3, 4]]).explain(0)
    assert "These 6 labels" in words and "at most 4 times" in words
    biased = sk.verify(np.array([[1.0], [1.0]]), [[0]], bias=[-1.0, 0.0])
    assert "is never positive" in biased.explain(0)
    nonnegative = sk.verify(np.array([[-1.0], [1.0]]), [[0]], domain="nonnegative")
    assert "1 features not negative" in nonnegative.explain(0) or "label" in nonnegative.explain(0)


def test_lines_and_radii_of_the_page(report, monkeypatch):
    data = explore_page.page_data(report)
    assert [line["verdict"] for line in data["lines"]] == ["UNARGMAXABLE"] * 3 + ["ARGMAXABLE"] * 2
    assert sum(sum(group["counts"]) for group in data["radii"]["sizes"]) == 2
    assert [group["size"] for group in data["radii"]["sizes"]] == ["2"]
    monkeypatch.setattr(explore_page, "MOST_LINES", 3)
    assert {line["line"] for line in explore_page.page_data(report)["lines"]} == {0, 3, 4}
    assert "3 of them, those that cannot be predicted first" in explore_page.explore_page(report, "t")


def test_command(report, tmp_path, capsys, monkeypatch):
    file, names = tmp_path / "r.npz", tmp_path / "names.txt"
    report.save(file)
    names.write_text("a\n</script><b>\nc\nd\n")
    assert cli.main(["explore", str(file), "--names", str(names), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == str(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "</script><b>" not in page and not re.search(r"(src|href)=.http", page)
    names.write_text('["a"]')
    assert cli.main(["explore", str(file), "--names", str(names)]) == 2
    assert "holds 1 names for 4 labels" in capsys.readouterr().err
    assert cli.main(["explore", str(file), "--out", str(file)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    monkeypatch.setattr(sk.Report, "load", lambda *_: pytest.fail("found out too late"))
    assert cli.main(["explore", str(file), "--out", str(tmp_path / "missing" / "page.html")]) == 2
    assert "--out" in (error := capsys.readouterr().err) and "there is no directory" in error


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_in_a_browser(report, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(explore_page.explore_page(report, "A <title>", ["zero", "one", "two", "<i>three"]))

    def dom(fragment: str) -> str:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
        done = subprocess.run(
            [BROWSER, *flags, f"{page.as_uri()}{fragment}"], capture_output=True, text=True, timeout=120
        )
        return done.stdout.split("<section>", 1)[1].split("<script>")[0]

    first = dom("")  # the impossible ones
    assert "3 sets found" in first and first.count("<details>") == 3 and "<rect" in first
    one = dom("#labels=one,Two&most=2")
    assert "1 set found" in one and '<details open=""' in one and "An input that predicts exactly" in one
    assert "&lt;i&gt;three" in dom("#least=4")
