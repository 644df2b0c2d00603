"""The code in the documents runs, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from sigkernels import env

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md"]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
SITE = {"index.md", "results.md", "changelog.md", "contributing.md"}  # pages of the site that include other documents
RUN = ["README.md", "docs/quickstart.md", "docs/choosing.md", "docs/losses.md", "docs/faq.md", "docs/verifier.md"]
RUN += ["docs/optimizers.md"]
RUN += [f"docs/verify-{audience}.md" for audience in ("multilabel", "retrieval", "language-models")]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source tree")


def blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(document: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of every link to a file of the tree; the anchor is empty where there is none."""
    found = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", prose(document))
    return [
        (document if not path else (document.parent / path).resolve(), anchor)
        for path, anchor in found
        if "://" not in path
    ]


def anchors(document: Path) -> set[str]:
    """The anchors that a Markdown page gets from its headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", RUN)
def test_the_code_runs(name, capsys, tmp_path, monkeypatch):
    """Blocks of one document follow on each other, and define every name they use."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for code in blocks(ROOT / name):
        exec(compile(code, name, "exec"), namespace)
    capsys.readouterr()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_links_lead_somewhere(document):
    missing = [str(path) for path, _ in links(document) if not path.exists()]
    assert not missing, f"{document.name} links to {missing}"
    unknown = [
        f"{path.name}#{anchor}"
        for path, anchor in links(document)
        if anchor and path.suffix == ".md" and anchor not in anchors(path)
    ]
    assert not unknown, f"{document.name} links to {unknown}"


def test_the_readme_leads_to_every_document():
    """In at most two steps."""
    reached = {path for path, _ in links(ROOT / "README.md")}
    reached |= {path for document in reached if document.suffix == ".md" for path, _ in links(document)}
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if path not in reached and path.name not in SITE]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_claims_that_are_false_stay_out(document):
    """F1 of heads with different priors, "not with another threshold", a package index that does not have us."""
    text = document.read_text(encoding="utf-8")
    for claim in ("0.355", "not with another threshold", "pip install sigkernels", "pip install 'sigkernels"):
        assert claim not in text


@pytest.mark.parametrize("command", ["make demo", "make test", "sigkernels env", "sigkernels verify"])
def test_the_readme_names_the_commands(command):
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """``docs/pictures.py``, on a copy of the documents and of the saved runs."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for part in ("README.md", "docs/choosing.md", "docs/losses.md", "docs/results"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "docs" / "results")
    monkeypatch.setattr(module, "IMAGES", tmp_path / "docs" / "img")
    monkeypatch.setattr(sys, "argv", ["pictures.py"])
    return module


def test_the_tables_are_those_of_the_saved_runs(pictures, tmp_path):
    """Generated again, every document is the same."""
    pictures.main()
    for name in ("README.md", "docs/choosing.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"{name}: run python docs/pictures.py"
    drawn = {path.stem for path in (tmp_path / "docs" / "img").glob("*.svg")}
    assert drawn >= {"ratios", "memory", "roofline", "scaling"}
    shown = (ROOT / "README.md").read_text() + (ROOT / "docs" / "choosing.md").read_text()
    assert all((ROOT / "docs" / "img" / f"{name}.svg").exists() for name in drawn) and "docs/img/ratios.svg" in shown


def _scores(value):
    averages = [f"{average}_f1 at {cut}" for average in ("micro", "macro", "weighted") for cut in ("0.5", "best")]
    return {"epochs": 5} | dict.fromkeys(("P@5", "mAP", *averages), value)


def test_new_runs_fill_their_tables(pictures, tmp_path, monkeypatch):
    environment = env.collect()
    head = {"head_parameters": 310_000, "verdicts": {"UNARGMAXABLE": 3, "ARGMAXABLE": 7}, "impossible_share": 0.3}
    head |= {"radii": [0.5, 2.0, 3.0], "f1_at_5": [0.1, 0.25], "f1_at_10": [0.2]}
    demo = head | {"description": "some head", "mean_average_precision": 0.3, "step_ms": 9.0}
    run = {"command": "sigkernels demo --json", "environment": environment, "epochs": 2, "seconds": 5.0}
    run |= {
        "train_examples": 400,
        "test_examples": 100,
        "results": [demo | {"head_peak_bytes": 2**20, "losses": [1.0]}],
    }
    (tmp_path / "demo.json").write_text(json.dumps(run))
    trained = head | {"epochs": 10, "map": 0.3, "radius_by_size": {"1": [3.0], "4": [0.5]}}
    kinds = ["full:0", *(f"{kind}:{width}" for kind in ("bottleneck", "dft", "codes") for width in (25, 100))]
    seeds = {"0": trained, "1": trained | {"f1_at_5": [0.35]}}
    heads = {f"{kind}:frequencies": seeds for kind in kinds} | {"dft:25:none": seeds}
    losses = {"BCE": {"0": _scores(0.4), "1": _scores(0.5)}}
    results = tmp_path / "docs" / "results"
    for name, content in (("reference.json", {"heads": heads}), ("reference_losses.json", {"losses": losses})):
        saved = {"command": f"python bench/{name}", "environment": environment, **content}
        (results / name).write_text(json.dumps(saved))
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--demo", str(tmp_path / "demo.json")])
    pictures.main()
    row = "| some head | 0.31 M | 0.250 | 0.200 | 0.300 | 9 ms | 1 MiB | 3 of 10 | 0.5 / 2 |"
    assert row in (tmp_path / "README.md").read_text()
    choosing = (tmp_path / "docs" / "choosing.md").read_text()
    assert (
        "| DFT, slack 25 | 0.31 M | 2 | 0.300 ± 0.071 | 0.200 ± 0.000 | 0.300 ± 0.000 | 3 of 10 | 0.5 / 2 |" in choosing
    )
    assert "| DFT, slack 25 | 0.300 ± 0.071 | 0.300 ± 0.071 |" in choosing  # by prior: none, frequencies
    assert "| full `nn.Linear` | – | 0.300 ± 0.071 |" in choosing
    assert "| BCE | 2 | 0.450 ± 0.071 |" in (tmp_path / "docs" / "losses.md").read_text()
    assert all((tmp_path / "docs" / "img" / f"{name}.svg").exists() for name in ("unargmaxable", "radius"))
    saved = json.loads((tmp_path / "docs" / "results" / "demo.json").read_text())
    assert set(saved["environment"]) == {"sigkernels", "packages", "cpu", "threads"}
    assert "losses" not in saved["results"][0]
