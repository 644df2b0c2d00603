"""Which GPU path a shape takes: classes, tables and their files, and what ``env`` and the log say. No device needed."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sigkernels import backends, bench_command, env
from sigkernels.backends import gpu_paths
from sigkernels.backends.gpu_paths import PATHS, LossShape, ShapeClass, Times, fastest
from sigkernels.layer import LayerMeta
from sigkernels.losses import BCE, Focal

BENCH = Path(__file__).resolve().parent.parent / "bench"
GPU = torch.device("cuda", 0)
MIDDLE = ShapeClass("16-bit", 64, 256, 100_000)


def shape(rows=256, slack=64, labels=100_000, dtype=torch.bfloat16, tf32=True) -> LossShape:
    x, weight = torch.empty(rows, slack, dtype=dtype, device="meta"), torch.empty(labels, slack, device="meta")
    made = LossShape.of(x, weight, LayerMeta(labels, -1))._replace(device=GPU)
    return made._replace(product="tf32") if dtype == torch.float32 and tf32 else made


def all_times(**microseconds) -> Times:
    return Times("made up", {named: dict(microseconds) for named in gpu_paths.all_classes()})


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Makes a table the one that the environment names, and every device an A100."""

    def use(table: gpu_paths.Table) -> None:
        use_text(gpu_paths.as_json(table))

    def use_text(text: str) -> None:
        (tmp_path / "paths.json").write_text(text)
        monkeypatch.setenv(gpu_paths.VARIABLE, str(tmp_path / "paths.json"))
        forget()

    def forget() -> None:
        gpu_paths.table.cache_clear()
        gpu_paths.choose_path.cache_clear()
        gpu_paths.choose_for_class.cache_clear()
        gpu_paths.architecture.cache_clear()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    forget()
    yield SimpleNamespace(use=use, use_text=use_text, file=tmp_path / "paths.json")
    monkeypatch.undo()
    forget()


# --- classes --------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 10**5), st.integers(1, 128), st.integers(1, 10**8), st.sampled_from([torch.bfloat16, torch.float32])
)
def test_every_shape_of_a_flash_kernel_has_a_class(rows, slack, labels, dtype):
    found = LossShape(
        GPU, dtype, gpu_paths._product(torch.bfloat16), rows, slack, labels, LayerMeta(labels, -1)
    ).shape_class()
    assert found in set(gpu_paths.all_classes())
    assert found.slack >= slack > (0, *gpu_paths.SLACK)[gpu_paths.SLACK.index(found.slack)]
    for other in gpu_paths.ROWS:
        assert abs(math.log(found.rows / rows)) <= abs(math.log(other / rows))


def test_classes_of_the_bars():
    assert shape().shape_class() == MIDDLE
    assert shape(64, 50, 8921).shape_class() == ShapeClass("16-bit", 64, 64, 9_000)
    assert shape(256, 100, 20_000, torch.float16).shape_class() == ShapeClass("16-bit", 128, 256, 20_000)
    assert shape(dtype=torch.float32).shape_class() == MIDDLE._replace(product="tf32")


@pytest.mark.parametrize(
    "changed", [{"slack": 129}, {"slack": 0}, {"rows": 0}, {"labels": 0}, {"dtype": torch.float64}]
)
def test_shapes_of_the_library_alone(changed, tables):
    assert shape(**changed).shape_class() is None
    assert gpu_paths.choose_path(shape(**changed)).path == "library"


def test_float32_follows_the_setting_of_tf32():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision, product in (("ieee", None), ("tf32", "tf32")):
            matmul.fp32_precision = precision
            assert LossShape.of(torch.empty(1, 1), torch.empty(1, 1), LayerMeta(1, -1)).product == product
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_80"), ((8, 6), "sm_89"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 3), "sm_90"), ((12, 0), "sm_89"),
     ((7, 5), "other"), ((13, 0), "other")],
)  # fmt: skip
def test_architecture(capability, name, tables, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert gpu_paths.architecture(GPU) == name
    gpu_paths.architecture.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu_paths.architecture(GPU) == "other"


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "path"),
    [
        ({"library": 100.0, "flash": 99.0, "cuda": 98.0}, "flash"),  # less than a tenth faster
        ({"library": 100.0, "flash": 99.0, "cuda": 89.0}, "cuda"),
        ({"library": 100.0, "flash": 101.0}, "library"),
        ({"library": 100.0, "cuda": 89.0}, "cuda"),
        ({"flash": 5.0}, "flash"),
        ({}, "library"),
    ],
)
def test_the_fastest_path(times, path):
    assert fastest(times) == path


def test_only_what_is_there_is_taken(tables):
    tables.use({"sm_80": all_times(cuda=10.0, flash=20.0, library=30.0)})
    assert gpu_paths.choose_path(shape()).path == "cuda"
    assert gpu_paths.choose_path(shape(), ("flash", "library")).path == "flash"
    assert gpu_paths.choose_path(shape(), ("library",)).path == "library"


def test_a_device_that_nobody_timed_takes_the_library(tables, monkeypatch):
    tables.use({"sm_80": all_times(cuda=1.0, flash=2.0, library=30.0)})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    choice = gpu_paths.choose_path(shape())
    assert choice.path == "library" and "'other'" in choice.reason


def test_the_choice_is_logged_once_per_class(tables, caplog):
    tables.use({"sm_80": all_times(flash=20.0, library=30.0)})
    with caplog.at_level("DEBUG", logger="sigkernels"):
        for rows in (256, 250, 256, 64):
            gpu_paths.choose_path(shape(rows))
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert said[0] == f"GPU path flash for {MIDDLE} on sm_80: flash 20 µs, library 30 µs (made up)"


@pytest.fixture
def machine(tables, monkeypatch):
    """A machine on which every GPU backend can run."""
    for name in ("cuda", "triton"):
        monkeypatch.setattr(backends.by_name(name), "unavailable", lambda: None)
        monkeypatch.setattr(backends.by_name(name), "refuses_device", lambda device: None)
        monkeypatch.setattr(backends.by_name(name), "refuses_shape", lambda shape: None)
    backends._unavailable.cache_clear()
    yield tables
    monkeypatch.undo()
    backends._unavailable.cache_clear()


def chosen(forced="auto", operation="fused_loss", **changed):
    return backends.choose(forced, GPU, operation, None, 0, shape(**changed)).name


def test_auto_takes_the_compiled_kernel_where_the_table_says_so(machine, monkeypatch):
    table = all_times(flash=20.0, library=30.0)
    table.steps[MIDDLE]["cuda"] = 10.0
    machine.use({"sm_80": table})
    assert backends.gpu_paths_here() == PATHS
    assert [chosen(), chosen(rows=64), chosen(slack=129)] == ["cuda", "triton", "triton"]
    # the table is of BCE without weights: the kernel does the others, but no faster than Triton
    for loss, name in (
        (BCE(), "cuda"),
        (BCE(pos_weight=2.0), "triton"),
        (BCE(label_smoothing=0.1), "triton"),
        (Focal(), "triton"),
    ):
        assert backends.choose("auto", GPU, "fused_loss", loss, 0, shape()).name == name
    # never for what has no such kernel, and never by itself for what does not give its shape
    assert backends.choose("auto", GPU, "fused_loss").name == "triton"
    assert backends.choose("auto", GPU, "topk").name == "triton"
    monkeypatch.setattr(backends.by_name("cuda"), "refuses_shape", lambda shape: "too many frequencies")
    assert chosen() == "triton"
    with pytest.raises(backends.BackendError, match="'cuda' was asked for, but too many frequencies"):
        chosen("cuda")


def test_a_forced_backend_is_not_overridden(machine):
    machine.use({"sm_80": all_times(cuda=99.0, flash=20.0, library=1.0)})
    assert [chosen(name) for name in ("cuda", "triton", "torch")] == ["cuda", "triton", "torch"]


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_model_s_table():
    """It is there for every kind of device, says that it predicts, and has the library path everywhere."""
    table = gpu_paths.read(gpu_paths.MODEL)
    assert list(table) == list(gpu_paths.ARCHITECTURES)
    for times in table.values():
        assert "predicted" in times.source and "not measured" in times.source
        assert all("library" in steps for steps in times.steps.values())


def test_a_file_replaces_its_devices_alone(tables):
    tables.use({"sm_90": all_times(library=7.0)})
    known = gpu_paths.table()
    assert known["sm_90"].source == "made up" and "predicted" in known["sm_80"].source


def test_a_file_says_the_same_again(tables):
    table = {"sm_80": all_times(cuda=1.5, library=7.0), "other": all_times(flash=2.0)}
    tables.use(table)
    assert gpu_paths.read(tables.file) == table


def row_of(index: int, **changed):
    def change(table):
        rows = table["devices"]["sm_80"]["microseconds"]
        for position, value in changed.items():
            rows[index][int(position[1:])] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("format"), 'an object with "format": 1'),
        (lambda t: t.update(columns=["product"]), '"columns" must be'),
        (lambda t: t.update(devices={}), '"devices" must be'),
        (lambda t: t["devices"].update(sm_70=t["devices"]["sm_80"]), "'sm_70' is no class of devices"),
        (lambda t: t["devices"]["sm_80"].pop("source"), 'must have a "source"'),
        (lambda t: t["devices"]["sm_80"]["microseconds"].pop(), "no times of tf32, slack 128, 1024 rows, 1,000,000"),
        (lambda t: t["devices"]["sm_80"]["microseconds"].append(t["devices"]["sm_80"]["microseconds"][0]), "twice"),
        (lambda t: t["devices"]["sm_80"]["microseconds"][3].pop(), "a row must be a list of 7"),
        (row_of(5, _1=65), "is no class of shapes"),
        (row_of(5, _4=-1.0), "positive numbers or null, got -1.0"),
        (row_of(5, _4="fast"), "positive numbers or null, got 'fast'"),
        (row_of(5, _4=True), "positive numbers or null, got True"),
        (row_of(5, _6=math.inf), "positive numbers or null, got inf"),
    ],
)
def test_a_malformed_file_is_refused(change, message, tables):
    given = json.loads(gpu_paths.as_json({"sm_80": all_times(flash=2.0, library=3.0)}))
    change(given)
    tables.use_text(json.dumps(given))
    with pytest.raises(backends.BackendError, match="cannot be used") as refused:
        gpu_paths.choose_path(shape())
    assert message in str(refused.value) and str(tables.file) in str(refused.value)
    assert "unset SIGKERNELS_GPU_PATHS" in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}'])
def test_what_is_no_table_is_refused(text, tables):
    tables.use_text(text)
    with pytest.raises(backends.BackendError, match="cannot be used"):
        gpu_paths.table()


def test_a_missing_file_is_refused(tables, monkeypatch):
    monkeypatch.setenv(gpu_paths.VARIABLE, "/nowhere/paths.json")
    with pytest.raises(backends.BackendError, match=r"/nowhere/paths\.json cannot be used: No such file"):
        gpu_paths.table()


# --- env --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_gpu(machine, monkeypatch):
    properties = SimpleNamespace(name="Pretend 100", major=8, minor=0, total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return machine


def test_env_says_what_a_gpu_takes(one_gpu):
    one_gpu.use({"sm_80": all_times(cuda=10.0, flash=20.0, library=30.0)})
    info = {"gpus": env._gpus()}
    text = env.render(env.collect() | info)
    assert "gpu          Pretend 100, compute 8.0, 64.0 GiB\n      losses go by the times of 'sm_80' devices\n" in text
    assert "16-bit, slack 64, 256 rows, 100,000 labels: cuda; cuda 10 µs, flash 20 µs, library 30 µs (made up)" in text
    assert json.loads(json.dumps(info)) == info


def test_env_says_when_the_table_is_malformed(one_gpu):
    one_gpu.use_text("{}")
    text = env.render(env.collect() | {"gpus": env._gpus()})
    assert "'sm_80' devices; every loss will fail: the table of GPU paths" in text


# --- the table from timings -------------------------------------------------------------------------------------------


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
