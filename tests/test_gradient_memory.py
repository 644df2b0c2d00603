"""Gradient memory is used again, and only when nobody can see it."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch

import sigkernels as sk
from sigkernels.backends.compiled_core import core

pytestmark = pytest.mark.skipif("cpu" not in sk.available_backends(), reason="needs the compiled core")

gradient_memory = core and core.gradient_memory
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)  # in the order of the core


def empty(rows, columns, dtype):
    """Uninitialised, on memory that an earlier tensor has left behind."""
    return core.empty(rows, columns, DTYPES.index(dtype))


@pytest.fixture(autouse=True)
def nothing_waits():
    gradient_memory.forget()
    yield
    gradient_memory.forget()


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.randn(20_000, 32))  # 2.4 MiB: above what the allocator itself keeps


def step(weight, upstream=1.0):
    x = torch.ones(4, 32)
    sets = sk.LabelSets.from_lists([[0], [1], [2], [19_999]], 20_000)
    (upstream * sk.functional.linear_loss(x, weight, sets)).backward()
    return weight.grad


def test_the_next_step_takes_the_memory_of_the_last(weight):
    where = step(weight).data_ptr()
    weight.grad = None
    assert step(weight).data_ptr() == where


def test_a_gradient_that_somebody_holds_is_left_alone(weight):
    held = step(weight)
    copy = held.clone()
    weight.grad = None
    other = step(weight, upstream=3.0)
    assert other.data_ptr() != held.data_ptr()
    assert torch.equal(held, copy) and torch.allclose(other, 3 * copy)


def test_a_view_keeps_the_memory_too(weight):
    view = step(weight)[10:20]
    copy = view.clone()
    weight.grad = None
    step(weight, upstream=5.0)
    assert torch.equal(view, copy)


def test_a_second_gradient_of_the_step_is_added(weight):
    once = step(weight).clone()
    assert torch.allclose(step(weight), 2 * once)


@pytest.fixture
def most_bytes():
    """Sets how much memory may wait, and puts it back."""
    before = gradient_memory.most_bytes
    yield lambda count: setattr(core.gradient_memory, "most_bytes", count)
    gradient_memory.most_bytes = before


def test_what_waits_is_bounded_and_the_oldest_goes_first(most_bytes):
    most_bytes(5 * 2**20)
    tensors = [empty(2**20, 2, torch.uint8) for _ in range(4)]
    places = [t.data_ptr() for t in tensors]
    assert len(set(places)) == 4 and gradient_memory.waiting_bytes == 0
    while tensors:
        del tensors[0]
    gc.collect()
    assert 2 * 2 * 2**20 <= gradient_memory.waiting_bytes <= 5 * 2**20
    again = [empty(2**20, 2, torch.uint8).data_ptr() for _ in range(2)]
    assert set(again) <= set(places[2:])


def test_a_tensor_larger_than_all_that_may_wait_is_let_go(most_bytes):
    most_bytes(2**20)
    empty(2**20, 2, torch.uint8)
    assert gradient_memory.waiting_bytes == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [20_000, 200_000], ids=["small pages", "huge pages"])
def test_what_is_handed_out_is_an_ordinary_tensor(dtype, rows):
    grad = empty(rows, 32, dtype)
    assert grad.shape == (rows, 32) and grad.dtype == dtype and grad.is_contiguous() and grad.is_cpu
    assert not grad._is_view() and not grad.requires_grad and grad.data_ptr() % 64 == 0
    grad.fill_(3)
    assert grad.sum(dtype=torch.float64).item() == 3 * rows * 32


@pytest.mark.parametrize("rows, columns", [(0, 5), (5, 0), (1, 1)])
def test_shapes_of_little_or_nothing(rows, columns):
    assert empty(rows, columns, torch.float32).shape == (rows, columns)


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "save": saved,
    "detach": torch.Tensor.detach,
    "share_memory": lambda tensor: tensor.share_memory_(),
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
}


@pytest.mark.parametrize("way", COPIES)
def test_what_people_do_with_a_gradient(weight, way):
    want = step(weight).clone()
    got = COPIES[way](weight.grad)
    weight.grad = None
    other = step(weight, upstream=7.0)  # on the memory of the last one, if nobody holds that
    assert torch.equal(got, want) and not torch.equal(other, want)


def test_a_gradient_may_be_made_smaller(weight):
    grad = step(weight)
    grad.resize_(10, 32)
    assert grad.shape == (10, 32)
    weight.grad = None
    del grad
    assert gradient_memory.waiting_bytes >= weight.nbytes


def test_small_gradients_are_left_to_the_allocator():
    empty(10, 3, torch.float32)
    assert gradient_memory.waiting_bytes == 0


def test_waiting_memory_can_be_let_go(weight):
    empty(*weight.shape, torch.float32)
    assert weight.nbytes <= gradient_memory.waiting_bytes < weight.nbytes + 4096
    gradient_memory.forget()
    assert gradient_memory.waiting_bytes == 0


def test_threads_never_share_memory():
    wrong = []

    def work(number):
        for turn in range(30):
            tensors = [empty(2**18, 1, torch.float32) for _ in range(3)]
            for i, tensor in enumerate(tensors):
                tensor.fill_(number * 1000 + turn * 10 + i)
            if any((t != number * 1000 + turn * 10 + i).any() for i, t in enumerate(tensors)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_tensor_may_be_dropped_by_another_thread(weight):
    """Such as one of autograd's, without the interpreter's lock."""
    held = [step(weight)]
    weight.grad = None
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert gradient_memory.waiting_bytes >= weight.nbytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_may_be_forked_at_any_time():
    stop = threading.Event()

    def take_and_give_back():
        while not stop.is_set():
            empty(2**18, 1, torch.float32)

    threads = [threading.Thread(target=take_and_give_back) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                fine = empty(2**18, 1, torch.float32).numpy().size == 2**18
                os._exit(0 if fine else 1)
            deadline, done, status = time.monotonic() + 30, 0, 1
            while not done and time.monotonic() < deadline:
                done, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.001)
            if not done:
                os.kill(child, 9)
                os.waitpid(child, 0)
            assert done and status == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_tensors_may_outlive_everything_at_exit():
    script = """
import torch, sigkernels as sk
from sigkernels.backends.compiled_core import core
held = [core.empty(2**20, 2, 0) for _ in range(3)]
torch.held = held[1:]  # goes with the modules
del held[0]
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
