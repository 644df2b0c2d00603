"""The code in the documents runs, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")


def blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/choosing.md", "docs/losses.md"])
def test_the_code_runs(name, capsys):
    """Blocks of one document follow on each other; a few names stand for what the reader has."""
    rng = np.random.default_rng(0)
    x, y = rng.random((40, 12)).astype(np.float32), rng.random((40, 30)) < 0.1
    have = {"h": torch.randn(32, 768), "w": torch.ones(20_000)}
    have |= {"X": x, "Y": y, "X_new": x[:3], "X_test": x, "Y_test": y}
    for code in blocks(ROOT / name):
        exec(compile(code, name, "exec"), have)
    capsys.readouterr()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    prose = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not missing, f"{document.name} links to {missing}"


@pytest.mark.parametrize("command", ["make demo", "make test", "sigkernels env", "sigkernels verify"])
def test_the_readme_names_the_commands(command):
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_saved_runs(tmp_path, monkeypatch):
    """``docs/pictures.py`` made them: made again, every document and picture is the same."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for part in ("README.md", "docs/choosing.md", "docs/results"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    monkeypatch.setattr(pictures, "RESULTS", tmp_path / "docs" / "results")
    monkeypatch.setattr(pictures, "IMAGES", tmp_path / "docs" / "img")
    monkeypatch.setattr(sys, "argv", ["pictures.py"])
    pictures.main()
    for name in ("README.md", "docs/choosing.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"{name}: run python docs/pictures.py"
    drawn = {path.stem for path in (tmp_path / "docs" / "img").glob("*.svg")}
    assert drawn == {"ratios", "memory", "roofline", "scaling", "unargmaxable"}
    shown = (ROOT / "README.md").read_text() + (ROOT / "docs" / "choosing.md").read_text()
    assert all((ROOT / "docs" / "img" / f"{name}.svg").exists() for name in drawn) and "docs/img/ratios.svg" in shown
