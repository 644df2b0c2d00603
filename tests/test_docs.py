"""The code in the documents runs, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")


def blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/choosing.md"])
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
