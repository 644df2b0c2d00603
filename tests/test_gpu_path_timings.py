"""The table of GPU paths from timings, what ``sigkernels bench`` writes of it, and the page of predictions."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_path_cases import MIDDLE, all_times, named_tables, shape

from sigkernels import backends, bench_command
from sigkernels.backends import gpu_paths
from sigkernels.backends.gpu_paths import PATHS, ShapeClass

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def tables(tmp_path):
    with named_tables(tmp_path) as named:
        yield named


@pytest.fixture
def measuring(monkeypatch):
    if not BENCH.exists():
        pytest.skip("needs the source tree")
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setitem(sys.modules, "gpu_paths", None)
    del sys.modules["gpu_paths"]
    return importlib.import_module("gpu_paths")


def test_paths_are_timed_alternately(measuring):
    """On a clock that the steps themselves advance; the first calls, which compile, do not count."""
    order, cost = [], {"flash": 2.0, "library": 3.0}

    def step(path):
        return lambda: order.append(path)

    def clock(run):
        run()
        return cost[order[-1]]

    taken = measuring.samples({path: step(path) for path in cost}, clock, rounds=3)
    assert taken == {"flash": [2.0] * 3, "library": [3.0] * 3}
    assert order[4:] == ["flash", "library"] * 3


def test_a_problem_of_a_class_runs(measuring):
    """The calls that are timed are such that every path takes them; here by torch, on the CPU."""
    call = measuring.problem(ShapeClass("16-bit", 32, 16, 9_000), torch.device("cpu"))
    assert call.x.dtype == torch.bfloat16 and call.layer.k == 50
    result = backends.by_name("torch").fused_loss(call)
    assert all(grad is not None and grad.isfinite().all() for grad in result.gradients)


def test_the_steps_that_are_timed(measuring, monkeypatch):
    """Every path that can run here and takes the call."""
    flash = pytest.importorskip("sigkernels.backends.triton.flash")
    call = measuring.problem(ShapeClass("16-bit", 32, 16, 9_000), torch.device("cpu"))
    monkeypatch.setattr(measuring, "gpu_paths_here", lambda: ("library",))
    steps = measuring.steps_of(call)
    assert list(steps) == ["library"] and steps["library"]().grad_x is not None
    monkeypatch.setattr(measuring, "gpu_paths_here", lambda: PATHS)
    monkeypatch.setattr(backends.by_name("cuda"), "refuses_device", lambda device: None)
    monkeypatch.setattr(backends.by_name("cuda"), "refuses_shape", lambda shape: None)
    monkeypatch.setattr(flash, "kernels_for", lambda call, shape: object())
    assert set(measuring.steps_of(call)) == set(PATHS)
    monkeypatch.setattr(flash, "kernels_for", lambda call, shape: "too wide")
    assert set(measuring.steps_of(call)) == {"cuda", "library"}


@pytest.mark.parametrize(("path", "refusal"), [("flash", None), ("flash", "too wide"), ("library", None)])
def test_the_triton_backend_goes_by_the_table(path, refusal, measuring, monkeypatch):
    flash = pytest.importorskip("sigkernels.backends.triton.flash")
    call = measuring.problem(ShapeClass("16-bit", 32, 16, 9_000), torch.device("cpu"))
    from sigkernels.backends import flash_pass, library_pass, triton

    monkeypatch.setattr(triton, "choose_path", lambda shape, among: gpu_paths.Choice(path, "made up"))
    monkeypatch.setattr(flash, "kernels_for", lambda call, shape: refusal or object())
    monkeypatch.setattr(flash_pass, "fused_loss", lambda call, kernels: "flash")
    monkeypatch.setattr(library_pass, "fused_loss", lambda call, pointwise: "library")
    taken = "flash" if path == "flash" and refusal is None else "library"
    assert backends.by_name("triton").fused_loss(call) == taken


def record(shape, path, microseconds):
    return SimpleNamespace(
        suite="gpu_paths", group=f"GPU path, {shape}", who=f"sigkernels, {path}", seconds=microseconds * 1e-6
    )


def test_a_table_of_timings(measuring, tables, tmp_path):
    """From the records of the suite to what ``auto`` takes; a path or a class that did not run is not taken."""
    tables.use({"sm_80": all_times(cuda=1.0, flash=2.0, library=3.0)})
    skipped = next(gpu_paths.all_classes())
    records = [
        record(shape, path, time)
        for shape in gpu_paths.all_classes()
        for path, time in (("flash", 50.0), ("library", 40.0 if shape == MIDDLE else 60.0))
        if shape != skipped
    ]
    other = SimpleNamespace(suite="topk", group="top 10", who="sigkernels", seconds=1.0)
    assert measuring.write([*records, other], tmp_path, "sm_80", "Pretend 100") == ["gpu_paths.json", "gpu_paths.md"]
    tables.use_text((tmp_path / "gpu_paths.json").read_text())
    assert gpu_paths.choose_path(shape()).path == "library"
    assert gpu_paths.choose_path(shape(rows=64)) == ("flash", "flash 50 µs, library 60 µs (measured on Pretend 100)")
    assert gpu_paths.choose_for_class("sm_80", skipped).path == "library"
    text = (tmp_path / "gpu_paths.md").read_text()
    assert "Pretend 100" in text and f"Not timed, so that the library path does them: {skipped}." in text
    assert measuring.write([other], tmp_path, "sm_80", "Pretend 100") == []


def test_where_the_model_was_wrong(measuring):
    predicted = {"cuda": 10.0, "flash": 20.0, "library": 30.0}
    right, wrong_path, wrong_time, untold = list(gpu_paths.all_classes())[:4]
    measured = {
        right: {"cuda": 11.0, "flash": 22.0, "library": 33.0},
        wrong_path: {"flash": 24.0, "library": 12.0},  # no cuda here: the model would take flash
        wrong_time: {"cuda": 10.0, "flash": 20.0, "library": 90.0},
        untold: {},
    }
    found = measuring.differences(dict.fromkeys(measured, predicted), measured)
    assert [(d.shape, d.lost) for d in found] == [(wrong_path, 2.0), (wrong_time, 1.0)]


def test_bench_writes_the_table(tmp_path, monkeypatch, capsys):
    if not BENCH.exists():
        pytest.skip("needs the source tree")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretend 100")
    monkeypatch.setattr(gpu_paths, "architecture", lambda device: "sm_89")
    assert bench_command.write_gpu_paths(BENCH, [], tmp_path) == []
    files = bench_command.write_gpu_paths(BENCH, [record(MIDDLE, "library", 3.0)], tmp_path)
    assert files == ["gpu_paths.json", "gpu_paths.md"]
    assert f"SIGKERNELS_GPU_PATHS={tmp_path / 'gpu_paths.json'}" in capsys.readouterr().err
    assert gpu_paths.read(tmp_path / "gpu_paths.json")["sm_89"].steps[MIDDLE] == {"library": 3.0}


# --- predictions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def predictions(measuring):
    return importlib.import_module("predict_gpu")


def entry(path="flash", ratio=0.5, dft=1.1, launches=7, **changed):
    known = dict(n=8921, k=80, s=50, B=64, dtype="bf16", machine="A100", path=path, launches=launches, bar=1.0)
    times = dict(microseconds={"flash": 12.3, "library": 45678.0}, eager=40.0, compiled=24.6, chunked=20.0)
    return known | times | dict(ratio=ratio, met=ratio <= 1 and launches <= 8, dft=dft) | changed


def test_predictions_as_a_table(predictions):
    """A missed bar stands out, and is counted; so is a DFT part that costs too much."""
    text = predictions.page([entry(), entry(machine="H100", path="library", ratio=1.5, dft=1.4)])
    assert "| n=8,921 k=80 s=50 B=64 | bf16 | 1.0 | flash 12 / 40 / 25 / 20 (0.50) |" in text
    assert "library 45.7k / 40 / 25 / 20 (**1.50**)" in text
    assert "**1 of 2 bars are missed**" in text and "never measured" in text
    assert "**above 1.25 in 1 of 2**: n=8,921 k=80 s=50 B=64 1.10–1.40." in text
    assert "No case takes CUDA C++." in text
    taken = entry("cuda", microseconds={"cuda": 9.0, "flash": 12.3, "library": 30.0})
    text = predictions.page([taken, entry(launches=9, **{"met": False})])
    assert "the `triton` backend's time over `torch.compile`'s: n=8,921 k=80 s=50 B=64 0.50–0.50." in text
    assert "**1 of 2 bars are missed** (bold), 1 of them by more than 8 launches alone." in text
    assert "All 1 bars are met." in predictions.page([entry()])


def test_the_page_has_the_saved_predictions(predictions):
    saved = json.loads(predictions.RESULT.read_text(encoding="utf-8"))
    assert len(saved["entries"]) == 3 * 2 * len(predictions.BARS)
    assert predictions.page(saved["entries"]) in predictions.PAGE.read_text(encoding="utf-8")
