"""The CPU backend as a guest in a process: threads, fork, instruction sets, caches, memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import sigkernels as sk
from sigkernels.backends import LossCall, cpu, cpu_confusion
from sigkernels.labels import LabelSets
from sigkernels.layer import Layer, LayerMeta

_C = pytest.importorskip("sigkernels._C")


@pytest.fixture
def problem():
    torch.manual_seed(0)
    x = torch.randn(48, 41 + 30)
    layer = Layer(torch.randn(4000, 30) * 0.3, torch.randn(4000), LayerMeta(4000, 20))
    sets = LabelSets.from_dense(torch.rand(48, 4000) < 0.01)
    return x, layer, sets


def run(problem):
    x, layer, sets = problem
    return cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, True)))[:4]


@pytest.fixture
def threads():
    """Sets torch's number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def same(a, b):
    return all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads(problem, threads, count):
    threads(1)
    one = run(problem)
    threads(count)
    for _ in range(20):
        assert same(run(problem), one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("codes", [0, 64])
def test_every_verb_gives_the_same_bits_on_any_number_of_threads(threads, dtype, codes):
    torch.manual_seed(0)
    n, k, slack = 4000, 10, 20
    meta = LayerMeta(n, k, codes=codes)
    x = torch.randn(300, 2 * k + 1 + codes + slack, dtype=dtype)  # two chunks of rows
    layer = Layer((torch.randn(n, slack) * 0.3).to(dtype), torch.randn(n, dtype=dtype), meta)
    sets = LabelSets.from_dense(torch.rand(300, n) < 0.01)

    def everything():
        bce = cpu.fused_loss(LossCall(x, layer, sets, sk.Focal(), 1.0, (True, True, True)))[:4]
        f1 = cpu_confusion.column_loss(LossCall(x, layer, sets, sk.SigmoidF1(), 1.0, (True,) * 3 + (False,) * 2))[:4]
        found = cpu.predict(x, layer, 1.0)
        return *bce, *f1, cpu.logits(x, layer), *cpu.topk(x, layer, 7), found.indices, found.offsets

    threads(1)
    one = everything()
    for count in (2, 3, 8):
        threads(count)
        assert same(everything(), one)


def test_ties_go_to_the_lower_label_whoever_finds_it(threads):
    layer = Layer(torch.ones(20_000, 3), None, LayerMeta(20_000, -1))
    threads(3)
    for _ in range(20):
        assert torch.equal(cpu.topk(torch.ones(2, 3), layer, 5)[1], torch.arange(5).expand(2, 5))


def test_two_python_threads_at_once(problem):
    want = run(problem)
    wrong = []

    def work():
        for _ in range(10):
            if not same(run(problem), want):
                wrong.append(threading.get_ident())

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_the_gil_is_released():
    """Another Python thread makes progress while one call runs."""
    x, layer = torch.randn(256, 64), Layer(torch.randn(60_000, 64), None, LayerMeta(60_000, -1))
    sets = LabelSets.from_lists([[]] * 256, 60_000)
    seen: list[float] = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            seen.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    start = time.perf_counter()
    cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, False)))
    end = time.perf_counter()
    stop.set()
    ticker.join()
    assert sum(start < t < end for t in seen) >= 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_after_use(problem, threads):
    threads(2)

    def digest():  # numpy: torch's own parallel operations hang in a forked child
        return b"".join(t.numpy().tobytes() for t in run(problem))

    want = digest()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"same" if digest() == want and digest() == want else b"other")
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + 30
    done = 0
    while not done and time.monotonic() < deadline:
        done, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done, "a call in the forked child did not return"
    assert os.read(reader, 16) == b"same"
    os.close(reader)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_no_more_threads_than_torch_has():
    """In a fresh process: calls with one thread start none, and there is one OpenMP runtime in memory."""
    script = """
import os, torch
import sigkernels as sk
from sigkernels.backends import LossCall, cpu
from sigkernels.labels import LabelSets
from sigkernels.layer import Layer, LayerMeta
def call():
    x, layer = torch.randn(64, 40), Layer(torch.randn(5000, 40), None, LayerMeta(5000, -1))
    cpu.fused_loss(LossCall(x, layer, LabelSets.from_lists([[]] * 64, 5000), sk.BCE(), 1.0, (True, True, False)))
count = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
call()
one = count()
torch.set_num_threads(3)
call()
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}
print(one, count(), len(runtimes))
"""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    one, three, runtimes = map(int, out.split())
    assert three - one <= 2
    assert runtimes == 1


MALFORMED = {
    "an offset beyond the labels": ([1, 5], [0, 10**6, 2], r"offsets\[1\] = 1000000 after 0"),
    "a negative offset": ([1, 5], [0, -3, 2], r"offsets\[1\] = -3"),
    "falling offsets": ([1, 5], [0, 2, 1], r"offsets\[2\] = 1 after 2"),
    "a first offset that is not 0": ([1, 5], [1, 1, 2], r"offsets\[0\] = 1"),
    "a last offset that is too small": ([1, 5, 7], [0, 1, 2], "the last offset is 2, but there are 3 indices"),
    "too few offsets": ([1, 5], [0, 2], "2 offsets for 2 rows"),
    "unsorted labels": ([5, 1], [0, 2, 2], r"indices\[1\] = 1 in row 0"),
    "a label twice": ([3, 3], [0, 0, 2], r"indices\[1\] = 3 in row 1"),
    "a negative label": ([-1, 5], [0, 2, 2], r"indices\[0\] = -1 in row 0"),
    "a label beyond the last": ([1, 300], [0, 1, 2], r"indices\[1\] = 300 in row 1.*num_labels = 300"),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("loss", [sk.BCE(), sk.BCE(label_smoothing=0.1), sk.SigmoidF1()], ids=repr)
def test_malformed_label_sets_are_refused(case, loss):
    """Sets that nobody has checked cannot lead the kernel outside its memory."""
    indices, offsets, message = MALFORMED[case]
    layer = Layer(torch.randn(300, 4), None, LayerMeta(300, -1))
    sets = LabelSets.from_sorted(torch.tensor(indices), torch.tensor(offsets), 300)
    with pytest.raises(ValueError, match=f"targets are not valid label sets: .*{message}.*; build them with LabelSets"):
        if isinstance(loss, sk.SigmoidF1):
            needs = (True, True, False, False, False)
            cpu_confusion.column_loss(LossCall(torch.randn(2, 4), layer, sets, loss, 1.0, needs))
        else:
            cpu.fused_loss(LossCall(torch.randn(2, 4), layer, sets, loss, 1.0, (True, True, False)))


def test_labels_of_other_shards_are_no_error():
    layer = Layer(torch.randn(100, 4), None, LayerMeta(300, -1, 100))
    sets = LabelSets.from_lists([[0, 150, 299], [99, 100, 199, 200]], 300)
    cpu.fused_loss(LossCall(torch.randn(2, 4), layer, sets, sk.BCE(), 1.0, (True, True, False)))


def test_every_instruction_set_gives_the_same_answer(problem, monkeypatch):
    want = run(problem)
    for name in _C.build_info()["isas_usable"]:
        monkeypatch.setenv("SIGKERNELS_ISA", name)
        assert cpu.isa() == name
        for a, b in zip(run(problem), want, strict=True):
            assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def test_an_instruction_set_that_is_not_there_raises(problem, monkeypatch):
    monkeypatch.setenv("SIGKERNELS_ISA", "mmx")
    with pytest.raises(ValueError, match=r"SIGKERNELS_ISA=mmx is not an instruction set of this build.*portable"):
        run(problem)
    info = _C.build_info()
    for name in set(info["isas_compiled"]) - set(info["isas_usable"]):
        monkeypatch.setenv("SIGKERNELS_ISA", name)
        with pytest.raises(ValueError, match=f"this CPU has no {name} instructions; unset SIGKERNELS_ISA"):
            run(problem)


def test_build_info_says_what_was_built():
    info = _C.build_info()
    assert {"compiler", "flags", "isas_compiled", "isas_usable", "has_openmp", "has_cuda"} <= set(info)
    assert "portable" in info["isas_usable"]


def test_plans_are_cached_and_bounded(monkeypatch):
    caches = (cpu._plans, cpu._shapes)
    for cache in caches:
        cache.clear()
        monkeypatch.setattr(cache, "most_bytes", 200_000)
    x = torch.randn(2, 41)
    for n in range(3000, 3030):
        cpu.logits(x, Layer(torch.empty(n, 0), None, LayerMeta(n, 20)))
        assert all(len(cache) == 1 or cache.nbytes <= 200_000 for cache in caches)
    size = len(cpu._plans)
    for _ in range(3):
        cpu.logits(x, Layer(torch.empty(3029, 0), None, LayerMeta(3029, 20)))
    assert 1 <= len(cpu._plans) == size


def test_kept_shapes_are_bounded(monkeypatch):
    cpu._shapes.clear()
    monkeypatch.setattr(cpu._shapes, "most_bytes", 4096)
    layer = Layer(torch.randn(300, 3), None, LayerMeta(300, -1))
    for batch in range(1, 20):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(cpu.logits(x, layer), x @ layer.weight.T)
        assert len(cpu._shapes) <= 4


def test_a_plan_for_a_million_labels_is_small():
    prepared = cpu._plan(LayerMeta(1_000_000, 80), 192, 8, tuple(range(0, 1_000_000, 8 * 192)), torch.float32)
    assert prepared.nbytes < 2**20
    assert prepared.sizes["rank"] < 20
