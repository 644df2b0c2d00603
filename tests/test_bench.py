"""``sigkernels bench``: a real run of a toy suite, the report, and the comparison with an earlier run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sigkernels import bench_command, cli, env, machine_load
from sigkernels.machine_load import Competitor, Load

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

    def build(suite, group, who, seconds, **more):
        known = {name: more.pop(name) for name in report.FIELDS if name in more}
        return report.Record(suite, group, who, seconds, 0.1, **known, more=more)

    records = [
        build("fused_loss", "fused loss, n=8921", who, seconds, n=8921, rows=64)
        for who, seconds in (("sigkernels", 1.0), ("eager, frozen DFT", 3.5), ("compiled, no DFT", 0.8))
    ]
    for n in (1000, 1_000_000):
        for who, seconds in (("sigkernels, DFT head", 1e-3), ("eager torch, nn.Linear", 4e-3)):
            records.append(build("scaling", f"training step, n={n:,}", who, seconds * n / 1000, n=n, rows=64))
    for who, peak in (("sigkernels", 26e6), ("eager, frozen DFT", 300e6)):
        group = "memory of a step, BCE, n=100000 k=50 s=64 B=256"
        records.append(build("memory", group, who, 1.0, peak_bytes=peak, gradient_bytes=25.8e6))
    records.append(build("roofline", "peaks of this machine", "torch sgemm", 1e-3, **{"GFLOP/s": 200.0}))
    records.append(build("roofline", "peaks of this machine", "copy", 1e-3, **{"GB/s": 20.0}))
    rates = {"flop_per_byte": 48.0, "GFLOP/s": 150.0, "of attainable": 0.75}
    records.append(build("roofline", "roofline, n=100000 k=50 s=64 B=64", "sigkernels", 1e-2, **rates))
    records.append(build("lml", "LML forward + backward, n=8,921", "sigkernels", 1.0, max_error=1e-7))
    records.append(build("lml", "LML forward + backward, n=8,921", "published bracketing", 60.0, max_error=1e-3))
    records.append(build("verify", "verify 16 label sets", "sigkernels", 1.0))
    records.append(build("verify", "verify 16 label sets", "scipy HiGHS, full program", 90.0))
    return records


def test_the_report_of_a_canned_run(report, canned):
    environment = env.collect()
    page = report.page(report.Run(canned, report.compare(canned, canned), environment, "sigkernels bench --html"))
    for caption in ("Every case and peer", "measured rates of torch", "at its peak", "as the number of labels grows"):
        assert caption in page
    assert page.count("<svg") == 4
    assert "torch sgemm 200 GFLOP/s" in page and "75 %" in page  # the roof and where the case stands below it
    assert "64,000" in page and "64,000,000" in page  # rows/s and labels/s
    assert "×60.00" in page and "×90.00" in page and "300 MiB" not in page
    assert 'class="bad"' in page  # the peer that is faster than we are
    assert environment["cpu"]["model"] in page and "sigkernels bench --html" in page
    again = report.as_json(report.Run(canned, [], environment))
    assert again["factors"]["fused loss, n=8921"]["compiled, no DFT"] == 0.8
    assert [report.Record(**r) for r in json.loads(json.dumps(again))["records"]] == canned


def test_runs_can_be_joined(report, canned, tmp_path, capsys):
    files = []
    for name, part in (("a", canned[:3]), ("b", canned[3:])):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(report.as_json(report.Run(part, [], env.collect()))))
    both = tmp_path / "both.json"
    assert report.main([*map(str, files), "--json", str(both), "--html", str(tmp_path / "both.html")]) == 0
    assert report.read(both)[0] == canned and "<svg" in (tmp_path / "both.html").read_text()
    assert "fused loss, n=8921" in capsys.readouterr().out


def test_a_run_without_a_suite_has_no_picture_of_it(report, canned):
    page = report.page(report.Run([r for r in canned if r.suite == "lml"], []))
    assert page.count("<svg") == 1 and "measured rates of torch" not in page


IDLE = Load(cores=2, load_average=0.1)
BUSY = Load(cores=2, load_average=3.5, competitors=[Competitor(7, "cc1plus", 1.0), Competitor(8, "ld", 0.5)])


def test_a_busy_machine_is_reported_everywhere(suites, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine_load, "at_start", lambda: BUSY)
    arguments = ["bench", "--suites", str(suites), "--output", str(tmp_path / "out"), "--quick", "--html"]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    expected = "other processes use 1.5 of 2 cores: cc1plus (1.0), ld (0.5)"
    for text in (captured.out, captured.err, (tmp_path / "out" / "report.html").read_text()):
        assert expected in text and "load average of the last minute is 3.5 on 2 cores" in text
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["load"]["competitors"][0]["name"] == "cc1plus" and expected in saved["warnings"][0]

    assert cli.main([*arguments, "--require-idle"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sigkernels bench: error: the machine is busy (--require-idle)") and error.count("\n") == 1


def test_an_idle_machine_is_not_reported(suites, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine_load, "at_start", lambda: IDLE)
    arguments = ["bench", "--suites", str(suites), "--output", str(tmp_path / "out"), "--quick", "--html"]
    assert cli.main([*arguments, "--require-idle"]) == 0
    assert "WARNING" not in capsys.readouterr().out
    assert "The machine was busy" not in (tmp_path / "out" / "report.html").read_text()
    assert json.loads((tmp_path / "out" / "report.json").read_text())["warnings"] == []


def test_cases_that_were_preempted_are_counted(report):
    records = [report.Record("s", f"g{i}", "sigkernels", 1.0, 0.0, preemptions=rate) for i, rate in enumerate((3, 400))]
    (warning,) = report.warnings(records, None)
    assert warning.startswith("1 of 2 cases were preempted") and "up to 400 times" in warning
    assert report.warnings(records[:1], None) == []


def test_a_process_that_uses_the_processor_is_seen():
    if not machine_load.PROC.exists():
        pytest.skip("needs /proc of Linux")
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        load = machine_load.at_start(window=0.5)
    finally:
        other.kill()
        other.wait()
    assert other.pid in [competitor.pid for competitor in load.competitors]


def test_preemptions_of_sleeping_work():
    rate = machine_load.preemptions(lambda: None)
    assert rate is None or rate >= 0


def test_the_page_names_the_range_it_measured(report, canned):
    assert "<h2>Throughput at 1,000 to 1,000,000 labels</h2>" in report.page(report.Run(canned, []))
    small = [record for record in canned if record.suite != "scaling" or record.n == 1000]
    assert "<h2>Throughput at 1,000 labels</h2>" in report.page(report.Run(small, []))


def test_a_comparison_in_brief(report, canned):
    """One line where nothing changed, a row for each case that did."""
    assert report.brief(report.Run(canned, report.compare(canned, canned))).startswith("0 slower, 0 faster")
    ours = next(record for record in canned if record.ours)
    later = [dataclasses.replace(r, seconds=3 * r.seconds) if r is ours else r for r in canned]
    lines = report.brief(report.Run(later, report.compare(later, canned))).splitlines()
    assert lines[0].startswith("1 slower, 0 faster")
    assert lines[-1].startswith(f"| ×3.00 slower | {ours.group}: {ours.who} |")


def test_how_often_sigkernels_is_slower_stands_on_top(report, canned):
    assert report.score(canned) == "sigkernels is at least as fast in 6 of 7 comparisons and slower in 1."
    assert report.text(report.Run(canned, [])).startswith("sigkernels is at least as fast in 6 of 7")
    assert report.score([]) == "Nothing is compared in this run."


def test_legends_stand_beside_the_points(report, canned):
    pytest.importorskip("matplotlib")
    for name in ("ratios", "memory", "roofline", "scaling"):
        figure = getattr(report.plots, name)(canned)
        assert figure.legends and all(axes.get_legend() is None for axes in figure.axes)
        figure.draw_without_rendering()
        covered = figure.axes[0].get_window_extent()
        assert not figure.legends[0].get_window_extent().overlaps(covered), name


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("peers")


def test_the_interval_of_a_median(peers):
    assert peers.median_interval([3.0, 1.0, 2.0]) == [1.0, 3.0]  # too few for 95 %: all of them
    low, high = peers.median_interval(range(100))
    assert (low, high) == (40, 60)
    assert peers.median_interval([5.0]) == [5.0, 5.0]


def test_every_compiled_peer_has_code_of_its_own(peers):
    """torch.compile falls back to eager after some recompilations of one code object, without an error."""

    def function():
        return torch.ones(())

    codes = [peers.compiled(function, "compiled")._torchdynamo_orig_callable.__code__ for _ in range(2)]
    assert codes[0] is not codes[1] and codes[0] == function.__code__


def test_a_race_records_its_spread(peers):
    class Benchmark:
        def __init__(self):
            self.extra_info = {}

        def pedantic(self, function, rounds):
            self.rounds = rounds

    runners = {"sigkernels": lambda: None, "peer": lambda: sum(range(20_000))}
    results = {}
    for who in runners:
        benchmark = Benchmark()
        peers.race(benchmark, "spread", who, lambda: runners, seconds=0.01, rounds=5)
        results[who] = benchmark.extra_info
    low, high = results["peer"]["interval"]
    assert 0 < low <= high and "factor_interval" not in results["sigkernels"]
    low, high = results["peer"]["factor_interval"]
    assert low <= high and high > 1
    assert results["peer"]["preemptions"] == results["sigkernels"]["preemptions"]


def test_a_failing_suite_is_reported(suites, tmp_path, capsys):
    (suites / "bench_broken.py").write_text("def test_x(benchmark):\n    benchmark(lambda: 1 / 0)\n")
    assert cli.main(["bench", "--suites", str(suites), "--output", str(tmp_path / "out"), "--quick"]) == 3
    captured = capsys.readouterr()
    assert "failed: broken" in captured.err and "sleep n=100" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing_like_it"], "no suite and no case has 'nothing_like_it' in its name; the suites are sleep"),
        (["--only", "a and"], "--only 'a and' is no expression that pytest -k takes"),
        (["--only", " "], "--only must name a suite or a case"),
        (["--tolerance", "0"], "--tolerance must be a positive number, got 0"),
        (["--tolerance", "nan"], "--tolerance must be a positive number, got nan"),
        (["--compare", "missing.json"], "--compare must be a file of an earlier run, but missing.json is none"),
        (["--compare", "."], "--compare must be a file of an earlier run, but . is none"),
        (["--output", __file__], "--output must be a folder that can be written to"),
        (["--output", "/proc"], "--output must be a folder that can be written to, got /proc"),
    ],
)
def test_refused(suites, tmp_path, arguments, message, capsys):
    assert cli.main(["bench", "--suites", str(suites), "--output", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("sigkernels bench: error:") and message in error


def test_one_case_alone(suites, tmp_path, capsys):
    (suites / "bench_broken.py").write_text("def test_x(benchmark):\n    benchmark(lambda: 1 / 0)\n")
    arguments = ["bench", "--suites", str(suites), "--output", str(tmp_path / "out"), "--quick", "--json"]
    assert cli.main([*arguments, "--only", "slow and 1000"]) == 0  # the suite without such a case is not run
    assert [r["group"] for r in json.loads(capsys.readouterr().out)["records"]] == ["sleep n=1000"]


def test_the_output_folder_keeps_what_it_holds(suites, tmp_path):
    kept = tmp_path / "out" / "suites" / "mine.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    assert cli.main(["bench", "--suites", str(suites), "--output", str(tmp_path / "out"), "--quick"]) == 0
    assert kept.read_text() == "mine"


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
