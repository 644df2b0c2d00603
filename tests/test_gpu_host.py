"""The host side of the GPU backends where no device is needed: settings, support, tables, dense targets."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
import torch
from torch import Tensor

from sigkernels import backends
from sigkernels.backends import cuda, cuda_support, gpu_paths
from sigkernels.backends.device_tables import DeviceTables
from sigkernels.backends.gpu_paths import LossShape
from sigkernels.backends.library_walk import tf32_allowed
from sigkernels.layer import LayerMeta
from sigkernels.validation import check_targets


@pytest.fixture
def precision():
    """Torch's settings of float32 products, as they were before at the end."""
    matmul, whole = torch.backends.cuda.matmul, torch.backends
    yield SimpleNamespace(matmul=matmul, whole=whole)
    whole.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = "none"


def test_tf32_follows_every_setting_of_torch(precision):
    """Reading ``allow_tf32`` raises as soon as ``fp32_precision`` has been set to tf32."""
    assert not tf32_allowed()
    precision.matmul.fp32_precision = "tf32"
    assert tf32_allowed()
    precision.matmul.fp32_precision = "ieee"
    assert not tf32_allowed()
    precision.matmul.fp32_precision = "none"
    precision.whole.fp32_precision = "tf32"
    assert tf32_allowed()
    precision.matmul.fp32_precision = "ieee"
    assert not tf32_allowed()
    precision.whole.fp32_precision = "none"
    for name, allowed in (("high", True), ("highest", False), ("medium", True)):
        torch.set_float32_matmul_precision(name)
        assert tf32_allowed() == allowed, name


# --- whether the compiled kernels run on a device ---------------------------------------------------------------


def compiled(architectures="8.0;9.0;12.0+PTX", driver=13000, runtime=13000, capabilities=((9, 0),)):
    """What ``sigkernels._cuda`` says of itself and the machine."""
    return SimpleNamespace(
        ARCHITECTURES=architectures,
        versions=lambda: (driver, runtime),
        capability=lambda device: capabilities[device],
        device_count=lambda: len(capabilities) if driver // 1000 >= runtime // 1000 else 0,
        devices=lambda: "some",
        TILE=32,
        WIDEST=128,
        processors=lambda device: 132,
        sizes_of_block=lambda kind, batch, slack, device: (256, 0),
    )


@pytest.mark.parametrize(
    ("architectures", "capability", "jit", "runs"),
    [
        ("8.0;9.0", (8, 0), True, True),
        ("8.0;9.0", (8, 9), True, True),  # the same major version, a later minor one
        ("8.9", (8, 6), True, False),
        ("8.0;9.0", (7, 5), True, False),
        ("8.0;9.0", (12, 0), True, False),
        ("8.0 90+PTX", (12, 0), True, True),
        ("8.0;9.0+PTX", (12, 0), False, False),  # an old driver does not read new PTX
        ("9.0a", (9, 0), True, True),
        ("10.0a+PTX", (10, 3), True, False),
        ("10.0f", (10, 3), True, True),
    ],
)
def test_architectures(architectures, capability, jit, runs):
    assert cuda_support.runs_on(architectures, capability, jit) == runs


def test_driver_and_device():
    assert cuda_support.unsupported(compiled(), 0) is None
    assert cuda_support.unsupported(compiled(driver=12040, runtime=12090), 0) is None
    old = cuda_support.unsupported(compiled(driver=12040), 0)
    assert old is not None and "CUDA 13.0" in old and "12.4" in old and "update the driver" in old
    assert "missing" in str(cuda_support.unsupported(compiled(driver=0), 0))
    other = cuda_support.unsupported(compiled(capabilities=((7, 5),)), 0)
    assert other is not None and "7.5" in other and "TORCH_CUDA_ARCH_LIST" in other
    assert cuda_support.unsupported(compiled(architectures="", capabilities=((7, 5),)), 0) is None


@pytest.fixture
def machine(monkeypatch):
    """Makes a machine with GPUs, torch for them, Triton and compiled kernels out of what ``compiled`` describes."""

    def make(**described):
        monkeypatch.setattr(cuda, "_module", lambda: compiled(**described))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(gpu_paths, "choose_path", lambda shape, among: gpu_paths.Choice("cuda", "the fastest"))
        monkeypatch.setattr(backends.by_name("triton"), "unavailable", lambda: None)
        forget()

    def forget():
        cuda._unsupported.cache_clear()
        cuda._sizes.cache_clear()
        backends._unavailable.cache_clear()

    yield make
    monkeypatch.undo()
    forget()


def chosen(device: int) -> str:
    """For a loss of a shape that ``machine`` gives to the compiled kernels."""
    gpu = torch.device("cuda", device)
    shape = LossShape(gpu, torch.bfloat16, "16-bit", 256, 64, 100_000, LayerMeta(100_000, 50))
    return backends.choose(backends.forced_name(), gpu, "fused_loss", shape=shape).name


def test_auto_falls_to_triton_where_the_kernels_do_not_run(machine):
    machine()
    assert chosen(0) == "cuda"
    machine(driver=12040)
    assert chosen(0) == "triton" and "update the driver" in str(backends.backend_status()["cuda"])
    machine(capabilities=((7, 5), (7, 0)))
    assert chosen(0) == "triton" and "7.5" in str(backends.backend_status()["cuda"])
    machine(capabilities=((7, 5), (9, 0)))
    assert backends.backend_status()["cuda"] is None
    assert [chosen(0), chosen(1)] == ["triton", "cuda"]
    with backends.backend("cuda"), pytest.raises(backends.BackendError, match=r"cuda:0 has compute capability 7\.5"):
        chosen(0)


def test_a_missing_backend_is_asked_for_once(machine, monkeypatch):
    """A failed search for a module or a driver costs more than a small layer."""
    machine()
    asked = []
    monkeypatch.setattr(backends.by_name("cuda"), "unavailable", lambda: asked.append(1) or "there is none")
    assert [chosen(0) for _ in range(3)] == ["triton"] * 3 and len(asked) == 1


# --- tables on the device ---------------------------------------------------------------------------------------


class OnDevice:
    """A tensor on a device, as far as the tables use it."""

    nbytes = 400

    def __init__(self) -> None:
        self.streams: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.streams.append(stream)


class Table(NamedTuple):
    values: OnDevice

    def tensors(self) -> tuple[Tensor, ...]:
        return (cast(Tensor, self.values),)


def table() -> Table:
    return Table(OnDevice())


CUDA = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch):
    """What torch says of the device: the streams of the calls to come, and whether a graph records them."""
    told = SimpleNamespace(streams=[], capturing=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: told.streams.pop(0) if told.streams else "default")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: told.capturing)
    return told


def test_tables_of_a_captured_graph_are_never_let_go(streams):
    tables: DeviceTables[Table] = DeviceTables(1000)
    kept, dropped = (weakref.ref(tables.get(key, CUDA, table).values) for key in ("kept", "dropped"))
    streams.capturing = True
    tables.get("kept", CUDA, table)
    streams.capturing = False
    for key in range(5):
        tables.get(key, CUDA, table)
    gc.collect()
    assert dropped() is None
    assert kept() is not None and tables.get("kept", CUDA, table).values is kept()


def test_tables_are_not_made_during_a_capture(streams):
    streams.capturing = True
    tables: DeviceTables[Table] = DeviceTables(1000)
    with pytest.raises(RuntimeError, match="run the same call once before the capture"):
        tables.get("new", CUDA, table)


def test_tables_on_a_device(streams):
    """Made by a thread of their own, away from the pool of a graph; every stream that uses them is noted."""
    import threading

    streams.streams = ["first", "second"]
    made_by = []

    def make():
        made_by.append(threading.current_thread())
        return table()

    tables: DeviceTables[Table] = DeviceTables(1000)
    for _ in range(2):
        found = tables.get("key", CUDA, make)
    assert found.values.streams == ["first", "second"]
    assert len(made_by) == 1 and made_by[0] is not threading.current_thread()

    def fail():
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        tables.get("other", CUDA, fail)


# --- dense targets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32], ids=str)
def test_dense_targets_stay_as_they_are_on_an_accelerator(dtype):
    """Nothing looks at their values, which would wait for the device, and no float copy of ``[B, n]`` is made."""
    given = torch.empty(3, 50, dtype=dtype, device="meta")
    assert check_targets(given, torch.Size([3]), 50, given.device).dtype == dtype
