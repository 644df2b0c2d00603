"""Gradient memory is used again, and only when nobody can see it."""

import gc

import pytest
import torch

import sigkernels as sk
from sigkernels.backends import buffers

pytestmark = pytest.mark.skipif("cpu" not in sk.available_backends(), reason="needs the compiled core")


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


def test_memory_goes_with_the_weight():
    weight = torch.nn.Parameter(torch.randn(20_000, 32))
    step(weight)
    key = id(weight)
    assert key in buffers._kept
    weight.grad = None
    del weight
    gc.collect()
    assert key not in buffers._kept


def test_at_most_one_gradient_is_kept(weight):
    tensors = [buffers.gradient_of(weight, torch.float32) for _ in range(3)]
    assert len({t.data_ptr() for t in tensors}) == 3
    del tensors
    assert len(buffers._kept[id(weight)]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_handed_out_is_an_ordinary_tensor(weight, dtype):
    grad = buffers.gradient_of(weight, dtype)
    assert grad.shape == weight.shape and grad.dtype == dtype and grad.is_contiguous()
    assert not grad._is_view() and grad.data_ptr() % 64 == 0


def test_small_gradients_are_left_to_the_allocator():
    small = torch.nn.Parameter(torch.randn(10, 3))
    buffers.gradient_of(small, torch.float32)
    assert id(small) not in buffers._kept


def test_kept_memory_can_be_let_go(weight):
    buffers.gradient_of(weight, torch.float32)
    assert len(buffers._kept[id(weight)]) == 1
    buffers.forget()
    assert not buffers._kept[id(weight)]
