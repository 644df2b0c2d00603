"""``sigkernels bench``: a real run of a toy suite, the report, and the comparison with an earlier run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sigkernels import bench_command, cli, env

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
    for part in ("report.py", "plots.py"):
        shutil.copy(BENCH / part, folder)
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
    ours, peer = (r["seconds"] for r in printed["records"] if r["group"] == "sleep n=100")
    assert printed["factors"]["sleep n=100"]["peer <slow>"] == pytest.approx(peer / ours)
    page = (out / "report.html").read_text()
    assert "peer &lt;slow&gt;" in page and "<svg" in page and "sleep n=1000" in page
    assert "src=" not in page and "@import" not in page  # self-contained

    # The report is itself an earlier run that a later one can be compared with.
    assert cli.main([*arguments[:-2], "--compare", str(out / "report.json"), "--tolerance", "1e6"]) == 0
    assert "against the earlier run" in capsys.readouterr().out


@pytest.fixture
def canned(report):
    """A small run with something of every kind of suite."""

    def made(suite, group, who, seconds, **more):
        known = {name: more.pop(name) for name in ("n", "rows", "peak_bytes") if name in more}
        return report.Record(suite, group, who, seconds, 0.1, **known, more=more)

    records = [
        made("fused_loss", "fused loss, n=8921", who, seconds, n=8921, rows=64)
        for who, seconds in (("sigkernels", 1.0), ("eager, frozen DFT", 3.5), ("compiled, no DFT", 0.8))
    ]
    for n in (1000, 1_000_000):
        for who, seconds in (("sigkernels, DFT head", 1e-3), ("eager torch, nn.Linear", 4e-3)):
            records.append(made("scaling", f"training step, n={n:,}", who, seconds * n / 1000, n=n, rows=64))
    for who, peak in (("sigkernels", 26e6), ("eager, frozen DFT", 300e6)):
        group = "memory of a step, BCE, n=100000 k=50 s=64 B=256"
        records.append(made("memory", group, who, 1.0, peak_bytes=peak, gradient_bytes=25.8e6))
    records.append(made("roofline", "peaks of this machine", "torch sgemm", 1e-3, **{"GFLOP/s": 200.0}))
    records.append(made("roofline", "peaks of this machine", "copy", 1e-3, **{"GB/s": 20.0}))
    rates = {"flop_per_byte": 48.0, "GFLOP/s": 150.0, "of attainable": 0.75}
    records.append(made("roofline", "roofline, n=100000 k=50 s=64 B=64", "sigkernels", 1e-2, **rates))
    records.append(made("lml", "LML forward + backward, n=8,921", "sigkernels", 1.0, max_error=1e-7))
    records.append(made("lml", "LML forward + backward, n=8,921", "published bracketing", 60.0, max_error=1e-3))
    records.append(made("verify", "verify 16 label sets", "sigkernels", 1.0))
    records.append(made("verify", "verify 16 label sets", "scipy HiGHS, full program", 90.0))
    return records


def test_the_report_of_a_canned_run(report, canned):
    environment = env.collect()
    page = report.page(canned, report.compare(canned, canned), environment, "sigkernels bench --html")
    for caption in ("Every case and peer", "measured peaks", "at its peak", "as the number of labels grows"):
        assert caption in page
    assert page.count("<svg") == 4
    assert "torch sgemm 200 GFLOP/s" in page and "75 %" in page  # the roof and where the case stands below it
    assert "64,000" in page and "64,000,000" in page  # rows/s and labels/s
    assert "×60.00" in page and "×90.00" in page and "300 MiB" not in page
    assert 'class="bad"' in page  # the peer that is faster than we are
    assert environment["cpu"]["model"] in page and "sigkernels bench --html" in page
    again = report.as_json(canned, [], environment, "c")
    assert again["factors"]["fused loss, n=8921"]["compiled, no DFT"] == 0.8
    assert [report.Record(**r) for r in json.loads(json.dumps(again))["records"]] == canned


def test_runs_can_be_joined(report, canned, tmp_path, capsys):
    files = []
    for name, part in (("a", canned[:3]), ("b", canned[3:])):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(report.as_json(part, [], env.collect(), "c")))
    both = tmp_path / "both.json"
    assert report.main([*map(str, files), "--json", str(both), "--html", str(tmp_path / "both.html")]) == 0
    assert report.read(both)[0] == canned and "<svg" in (tmp_path / "both.html").read_text()
    assert "fused loss, n=8921" in capsys.readouterr().out


def test_a_run_without_a_suite_has_no_picture_of_it(report, canned):
    page = report.page([r for r in canned if r.suite == "lml"], [], {}, "c")
    assert page.count("<svg") == 1 and "measured peaks" not in page


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
