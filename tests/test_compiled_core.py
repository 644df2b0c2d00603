"""The compiled core below all checks of Python: what it refuses, and calls that serve several operations."""

import os
import subprocess
import sys

import pytest
import torch

import sigkernels as sk
from sigkernels.backends import cpu
from sigkernels.backends.compiled_core import core
from sigkernels.functional import linear_loss

pytestmark = pytest.mark.skipif("cpu" not in sk.available_backends(), reason="needs the compiled core")

N, S, B = 90, 7, 5
SETS = sk.LabelSets.from_lists([[3, 17], [], [5], [0, 89], [40]], N)


def tensors():
    return [torch.randn(shape) for shape in ((B, S), (N, S), (N,))]


def freed(x):
    x.untyped_storage().resize_(0)
    return x


def shape(**sizes):
    usual = dict(dtype=0, threads=1, shares=1, tile=96, chunk=256, rows=B, labels=N, slack=S, label_start=0, k=-1)
    return core.Shape(**{**usual, "codes": 0, "code_bits": b"", **sizes})


MALFORMED = {
    "a list": lambda x, w, b: core.Call(shape(), x.tolist(), w, b),
    "None": lambda x, w, b: core.Call(shape(), None, w, b),
    "a class": lambda x, w, b: core.Call(shape(), torch.Tensor, w, b),
    "the meta device": lambda x, w, b: core.Call(shape(), x.to("meta"), w, b),
    "sparse": lambda x, w, b: core.Call(shape(), x.to_sparse(), w, b),
    "quantized": lambda x, w, b: core.Call(shape(), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), w, b),
    "freed": lambda x, w, b: core.Call(shape(), x, freed(w), b),
    "other rows": lambda x, w, b: core.Call(shape(rows=B + 1), x, w, b),
    "other columns": lambda x, w, b: core.Call(shape(slack=S + 1), x, w, b),
    "other labels": lambda x, w, b: core.Call(shape(labels=N + 1), x, w, b),
    "another dtype": lambda x, w, b: core.Call(shape(dtype=1), x, w, b),
    "two dtypes": lambda x, w, b: core.Call(shape(), x, w.half(), b),
    "a short bias": lambda x, w, b: core.Call(shape(), x, w, b[1:]),
    "a matrix of biases": lambda x, w, b: core.Call(shape(), x, w, b[:, None]),
    "bytes": lambda x, w, b: core.Call(shape(dtype=4), x.byte(), w.byte(), None),
    "no plan": lambda x, w, b: core.Call(shape(k=2, slack=S - 5), x, w[:, 5:], b),
    "a short plan": lambda x, w, b: shape(k=2).set_plan(
        **{"rank": 3, "even_rank": 2, "low_even": 0, "low_odd": 0},
        **dict.fromkeys(("u", "v_even", "v_odd", "even", "odd", "cos", "sin"), b""),
    ),
    "short codes": lambda x, w, b: shape(codes=16, tile=64, code_bits=b"\0"),
    "a short unknown": lambda x, w, b: call(x, w, b).set_sparse_targets(*SETS.unchecked(), N, torch.zeros(2, dtype=torch.bool)),
    "short offsets": lambda x, w, b: call(x, w, b).set_sparse_targets(SETS.indices, SETS.offsets[1:], N, None),
    "offsets of int32": lambda x, w, b: call(x, w, b).set_sparse_targets(SETS.indices, SETS.offsets.int(), N, None),
    "dense of other rows": lambda x, w, b: call(x, w, b).set_dense_targets(torch.zeros(B + 1, N)),
    "dense of other labels": lambda x, w, b: call(x, w, b).set_dense_targets(torch.zeros(B, N - 1)),
    "dense of int64": lambda x, w, b: call(x, w, b).set_dense_targets(torch.zeros(B, N, dtype=torch.int64)),
    "short weights": lambda x, w, b: loss(call(x, w, b), label_weight=torch.ones(N - 1)),
    "weights of float64": lambda x, w, b: loss(call(x, w, b), pos_weight=torch.ones(N).double()),
    "short scales": lambda x, w, b: loss(call(x, w, b), row_scale=torch.ones(B - 1)),
    "short thresholds": lambda x, w, b: core.predict(call(x, w, b), 0.0, torch.ones(N - 1)),
    "too many labels": lambda x, w, b: core.topk(call(x, w, b), N + 1),
    "no label at all": lambda x, w, b: core.topk(call(x, w, b), 0),
    "labels beyond counting": lambda x, w, b: shape(label_start=2**63 - 1, codes=16, tile=64, code_bits=bytes(4096)),
    "a loss without targets": lambda x, w, b: core.fused_loss(call(x, w, b), *LOSS, scale=1.0, **NO_VECTORS),
    "a step of another layer": lambda x, w, b: call(x, w, b).set_updates(step(torch.zeros(N + 1, S)), None),
    "a step of float16": lambda x, w, b: step(w.half()),
    "a step in strides": lambda x, w, b: step(torch.zeros(S, N).T),
    "a step without its state": lambda x, w, b: step(w, kind=2),
    "a step with a short state": lambda x, w, b: step(w, kind=4, first=torch.zeros(N, S), second=torch.zeros(N, S - 1)),
    "a huge tensor": lambda x, w, b: core.empty(2**62, 8, 0),
    "a negative tensor": lambda x, w, b: core.empty(-1, 8, 0),
}  # fmt: skip


LOSS = core and (cpu._loss_numbers((0,)), (True, True, True))
NO_VECTORS = dict.fromkeys(("row_scale", "label_weight", "pos_weight"))


def call(x, w, b):
    return core.Call(shape(), x, w, b)


def step(parameter, kind=1, **states):
    numbers = dict.fromkeys(
        ("lr", "weight_decay", "momentum", "beta1", "beta2", "correction1", "correction2", "eps"), 0.1
    )
    states = {**dict.fromkeys(("first", "second", "compensation")), **states}
    return core.Update(kind=kind, rounding=0, **numbers, key=0, parameter=parameter, **states)


def loss(loop, **vectors):
    loop.set_sparse_targets(*SETS.unchecked(), N, None)
    return core.fused_loss(loop, *LOSS, scale=1.0, **{**NO_VECTORS, **vectors})


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.filterwarnings("ignore")
def test_the_core_refuses(case):
    with pytest.raises((ValueError, TypeError, MemoryError)):
        MALFORMED[case](*tensors())


def test_the_core_takes_what_is_well_formed():
    x, w, b = tensors()
    rows, grad_x, grad_weight, grad_bias, total = loss(call(x, w, b))
    assert rows.shape == (B,) and (grad_x.shape, grad_weight.shape, grad_bias.shape) == (x.shape, w.shape, b.shape)
    assert total == pytest.approx(linear_loss(x, w, SETS, b, reduction="sum").item())


def test_a_call_may_serve_several_operations():
    """The gradients of a loss are gone by then, and nothing is written where they were."""
    x, w, b = tensors()
    loop = call(x, w, b)
    core.gradient_memory.forget()
    loss(loop)
    rows = torch.zeros(B, S), torch.zeros(N, S), torch.zeros(N)  # where small gradients were, most likely
    assert torch.equal(core.logits(loop), core.logits(call(x, w, b)))
    assert torch.equal(core.topk(loop, 3)[1], core.topk(call(x, w, b), 3)[1])
    core.fused_loss(loop, LOSS[0], (False, False, False), scale=1.0, **NO_VECTORS)
    assert not any(tensor.any() for tensor in rows)


def test_without_the_exchange_of_tensors_plain_torch_takes_over():
    """Of a torch that has no C functions for it; ``compiled_core.py`` is where that is found out."""
    script = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__
import sigkernels as sk
print(sk.backend_status()["cpu"])
weight = torch.ones(5, 3, requires_grad=True)
loss = sk.functional.linear_loss(torch.ones(2, 3), weight, sk.LabelSets.from_lists([[1], [0, 4]], 5))
loss.backward()
print(loss.item(), weight.grad.shape)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "exchanges no tensors" in done.stdout and "torch.Size([5, 3])" in done.stdout
    want = linear_loss(torch.ones(2, 3), torch.ones(5, 3), sk.LabelSets.from_lists([[1], [0, 4]], 5))
    assert float(done.stdout.splitlines()[1].split()[0]) == pytest.approx(want.item())
