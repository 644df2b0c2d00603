"""``sigkernels bench``: a real run of a toy suite, the report, and the comparison with an earlier run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sigkernels import bench_command, cli

BENCH = Path(__file__).resolve().parent.parent / "bench"
pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="needs the source tree")

SUITE = """
import time
import pytest

@pytest.mark.parametrize("n", [100, 1000])
@pytest.mark.parametrize(("who", "delay"), [("sigkernels", 0.001), ("peer <slow>", 0.004)])
def test_sleep(benchmark, who, delay, n):
    benchmark.group = f"sleep n={n}"
    benchmark.extra_info.update(who=who, n=n, rows=32, peak_bytes=2**20, share=0.5)
    benchmark.pedantic(time.sleep, (delay,), rounds=3)
"""


@pytest.fixture
def suites(tmp_path) -> Path:
    folder = tmp_path / "bench"
    folder.mkdir()
    shutil.copy(BENCH / "report.py", folder)
    (folder / "bench_sleep.py").write_text(SUITE)
    return folder


@pytest.fixture
def report():
    return bench_command.load_report(BENCH)


def record(report, group="g", who="sigkernels", seconds=1.0):
    return report.Record(suite="s", group=group, who=who, seconds=seconds, spread=0.0)


def test_a_run_from_end_to_end(suites, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["bench", "--suites", str(suites), "--output", str(out), "--quick", "--html", "--json"]
    assert cli.main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "report.json").read_text())
    assert [r["who"] for r in printed["records"]].count("sigkernels") == 2
    assert printed["factors"]["sleep n=100"]["sigkernels"] == 1
    assert printed["factors"]["sleep n=100"]["peer <slow>"] > 1.5
    page = (out / "report.html").read_text()
    assert "peer &lt;slow&gt;" in page and "<svg" in page and "sleep n=1000" in page
    assert "src=" not in page and "@import" not in page  # self-contained

    # The report is itself an earlier run that a later one can be compared with.
    assert cli.main([*arguments[:-2], "--compare", str(out / "report.json"), "--tolerance", "3"]) == 0
    assert "against the earlier run" in capsys.readouterr().out


def test_a_failing_suite_is_told(suites, tmp_path, capsys):
    (suites / "bench_broken.py").write_text("def test_x(benchmark):\n    benchmark(lambda: 1 / 0)\n")
    assert cli.main(["bench", "--suites", str(suites), "--output", str(tmp_path / "out"), "--quick"]) == 3
    captured = capsys.readouterr()
    assert "failed: broken" in captured.err and "sleep n=100" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing_like_it"], "no benchmark ran"),
        (["--tolerance", "0"], "--tolerance must be positive"),
        (["--compare", "missing.json"], "missing.json"),
    ],
)
def test_refused(suites, tmp_path, arguments, message, capsys):
    assert cli.main(["bench", "--suites", str(suites), "--output", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("sigkernels bench: error:") and message in error


def test_no_suites(tmp_path, capsys):
    assert cli.main(["bench", "--suites", str(tmp_path)]) == 2
    assert "no benchmark suites" in capsys.readouterr().err


def test_a_foreign_file_is_refused(report, tmp_path):
    for content in ("[]", "{}", "not json"):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match="neither a pytest-benchmark file"):
            report.read(tmp_path / "x.json")


def test_compare_goes_by_the_peer_where_there_is_one(report):
    before = [record(report, seconds=1.0), record(report, who="eager", seconds=4.0)]
    busy = [record(report, seconds=2.0), record(report, who="eager", seconds=8.0)]  # all twice as slow: the machine
    (change,) = report.compare(busy, before)
    assert change.factor == 1.0 and change.verdict == "same" and change.against == "eager"
    (change,) = report.compare([record(report, seconds=2.0), record(report, who="eager", seconds=4.0)], before)
    assert change.factor == 2.0 and change.verdict == "slower"
    (change,) = report.compare([record(report, seconds=0.5), record(report, who="eager", seconds=4.0)], before)
    assert change.verdict == "faster"


def test_compare_goes_by_the_clock_otherwise(report):
    (change,) = report.compare([record(report, seconds=1.5)], [record(report, seconds=1.0)])
    assert (change.factor, change.against, change.verdict) == (1.5, "the clock", "slower")
    assert report.compare([record(report, group="new")], [record(report)]) == []


def test_ratio_is_to_the_first_of_ours(report):
    members = [record(report, who="sigkernels, cpu", seconds=2.0), record(report, who="eager", seconds=5.0)]
    groups = report.by_group(reversed(members))
    assert [m.who for m in groups["g"]] == ["sigkernels, cpu", "eager"]
    assert report.ratio(members[1], groups["g"]) == 2.5
    assert report.ratio(members[1], [members[1]]) is None
