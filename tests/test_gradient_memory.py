"""Gradient memory is used again, and only when nobody can see it."""

import gc
import threading

import pytest
import torch

import sigkernels as sk
from sigkernels.backends import gradient_memory

pytestmark = pytest.mark.skipif("cpu" not in sk.available_backends(), reason="needs the compiled core")


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


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(gradient_memory, "_MOST_BYTES", 5 * 2**20)
    shape = torch.Size([2**20, 2])
    tensors = [gradient_memory.empty_gradient(shape, torch.uint8) for _ in range(4)]
    assert len({t.data_ptr() for t in tensors}) == 4 and gradient_memory.waiting_bytes() == 0
    del tensors
    gc.collect()
    assert gradient_memory.waiting_bytes() == 2 * 2 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_handed_out_is_an_ordinary_tensor(weight, dtype):
    grad = gradient_memory.empty_gradient(weight.shape, dtype)
    assert grad.shape == weight.shape and grad.dtype == dtype and grad.is_contiguous()
    assert not grad._is_view() and grad.data_ptr() % 64 == 0


def test_small_gradients_are_left_to_the_allocator():
    gradient_memory.empty_gradient(torch.Size([10, 3]), torch.float32)
    assert gradient_memory.waiting_bytes() == 0


def test_waiting_memory_can_be_let_go(weight):
    gradient_memory.empty_gradient(weight.shape, torch.float32)
    assert gradient_memory.waiting_bytes() == weight.nbytes
    gradient_memory.forget()
    assert gradient_memory.waiting_bytes() == 0


def test_threads_never_share_memory():
    wrong = []

    def work(number):
        for turn in range(30):
            tensors = [gradient_memory.empty_gradient(torch.Size([2**18]), torch.float32) for _ in range(3)]
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
