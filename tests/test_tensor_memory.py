"""The compiled core reads the memory that a tensor has at the call, as long as the call takes, and not a byte beyond it."""

import os
import subprocess
import sys

import pytest
import torch

import sigkernels as sk
from sigkernels.functional import linear_loss, linear_topk

pytestmark = pytest.mark.skipif("cpu" not in sk.available_backends(), reason="needs the compiled core")

ROWS, LABELS, SLACK = 8, 400_000, 4  # the weight reaches beyond whatever else lies around its storage

BEGIN = f"""
import threading, time
import torch
import sigkernels as sk
from sigkernels.functional import linear_loss, linear_topk
x, w, b = torch.randn({ROWS} + 1, {SLACK})[1:], torch.randn({LABELS} + 1, {SLACK})[1:], torch.randn({LABELS} + 1)[1:]
indices = torch.arange({ROWS} + 1)[1:]
sets = sk.LabelSets.from_sorted(indices, torch.arange({ROWS} + 1), {LABELS})
"""


def run(script):
    """In a process of its own, which may crash."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", BEGIN + script], env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("size", [0, 64], ids=["emptied", "cut short"])
def test_storage_that_does_not_hold_the_tensor_is_refused(size):
    """Views of it keep their sizes, and an address that is not null where they begin behind its start."""
    done = run(f"""
calls = {{
    "x": lambda: linear_loss(x, w, sets, b), "w": lambda: linear_loss(x, w, sets, b),
    "b": lambda: linear_loss(x, w, sets, b), "indices": lambda: linear_loss(x, w, sets, b),
    "none": lambda: linear_loss(x, w, sets, b, reduction="none"), "topk": lambda: linear_topk(x, w, 2, b),
}}
for name, call in calls.items():
    storage = globals().get(name, w).untyped_storage()
    bytes, kept = storage.nbytes(), storage.clone()
    storage.resize_({size})
    try:
        call()
        print(name, "was taken")
    except ValueError as error:
        assert "storage holds all their elements" in str(error), error
    storage.resize_(bytes)
    storage.copy_(kept)
    call()
""")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


@pytest.mark.parametrize("call", ["linear_loss(x, w, sets, b)", "linear_topk(x, w, 2, b)"])
def test_a_tensor_may_get_other_memory_while_a_kernel_reads(call):
    done = run(f"""
w = torch.nn.Parameter(w)
stop = time.monotonic() + 2

def read():
    while time.monotonic() < stop:
        {call}

def swap():
    while time.monotonic() < stop:
        w.data = torch.zeros_like(w)

threads = [threading.Thread(target=work) for work in (read, read, swap)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""")
    assert done.returncode == 0, done.stderr[-2000:]


def test_views_within_their_storage_are_read():
    torch.manual_seed(0)
    sets = sk.LabelSets.from_lists([[0], [2, 4], []], 5)
    views = [
        (torch.randn(6, 9)[3:, 2:6], torch.randn(4, 5).T, torch.randn(1).expand(5)),
        (torch.randn(1, 1).expand(3, 4), torch.randn(8).as_strided((5, 4), (1, 1)), torch.randn(9)[::2]),
        (torch.randn(3, 0), torch.randn(5, 0), torch.randn(6)[1:]),
    ]
    for x, w, b in views:
        want = linear_loss(x.contiguous(), w.contiguous(), sets, b.contiguous())
        assert torch.equal(linear_loss(x, w, sets, b), want)
        values, labels = linear_topk(x, w, 2, b)
        again = linear_topk(x.contiguous(), w.contiguous(), 2, b.contiguous())
        assert torch.equal(values, again[0]) and torch.equal(labels, again[1])
