"""Which GPU path a shape takes: classes, tables and their files, and what ``env`` and the log say. No device needed."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from gpu_path_cases import GPU, MIDDLE, all_times, named_tables, shape
from hypothesis import given
from hypothesis import strategies as st

from sigkernels import backends, env
from sigkernels.backends import gpu_paths
from sigkernels.backends.gpu_paths import PATHS, LossShape, ShapeClass, fastest
from sigkernels.layer import LayerMeta
from sigkernels.losses import BCE, Focal


@pytest.fixture
def tables(tmp_path):
    with named_tables(tmp_path) as named:
        yield named


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
    assert shape(256, 100, 20_000, torch.float16).shape_class() == ShapeClass("16-bit", 116, 256, 20_000)
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
