"""Code columns in the compiled CPU backend, against the same matrix as columns of the weight."""

from __future__ import annotations

import math

import pytest
import reference
import torch

import sigkernels as sk
from sigkernels.backends import LossCall, cpu, cpu_confusion
from sigkernels.codes import CODES, code_matrix
from sigkernels.labels import LabelSets
from sigkernels.layer import Layer, LayerMeta

_C = pytest.importorskip("sigkernels._C")
ISAS = _C.build_info()["isas_usable"]
# n, first label, labels, k, s, rows: whole blocks, part of one, many, ranges that begin and end inside a tile
SHAPES = [
    (256, 0, 256, 3, 4, 5),
    (100, 0, 100, -1, 0, 3),
    (1000, 137, 700, 5, 9, 37),
    (5000, 4100, 333, 0, 20, 1),
    (70, 65, 5, -1, 3, 270),
]


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("SIGKERNELS_ISA", request.param)
    return request.param


def make(shape, codes, dtype):
    """(x, the layer with codes, the same layer with all of its columns in the weight, sets)."""
    n, start, m, k, s, batch = shape
    torch.manual_seed(codes + n)
    x = torch.randn(batch, max(2 * k + 1, 0) + codes + s, dtype=torch.float64).to(dtype)
    weight = (torch.randn(m, s, dtype=torch.float64) / 2).to(dtype)
    bias = torch.randn(m, dtype=torch.float64).to(dtype)
    layer = Layer(weight, bias, LayerMeta(n, k, start, codes))
    columns = torch.cat([code_matrix(n, codes, dtype)[start : start + m], weight], 1)
    plain = Layer(columns, bias, LayerMeta(n, k, start))
    assert layer.in_columns == plain.in_columns == x.shape[1]
    return x, layer, plain, LabelSets.from_dense(torch.rand(batch, n) < 0.05)


def truth(x, plain, targets, loss):
    """Rows and gradients of x, weight and bias in float64."""
    leaves = [t.detach().double().clone().requires_grad_() for t in (x, plain.weight, plain.bias)]
    rows = reference.loss_rows(leaves[0], Layer(leaves[1], leaves[2], plain.meta), targets, loss)
    rows.sum().backward()
    return rows.detach(), *(leaf.grad for leaf in leaves)


def close(got, want, dtype, name):
    limit = {torch.float64: 1e-13, torch.float32: 4e-6}.get(dtype, 3e-2)
    if want.numel():
        assert (got.double() - want).abs().max() <= limit * want.abs().max(), name


@pytest.mark.parametrize("codes", CODES[1:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_logits(isa, shape, codes):
    for dtype in (torch.float32, torch.float64) if codes < 4096 else (torch.float32,):
        x, layer, plain, sets = make(shape, codes, dtype)
        dense = sets.to_dense()[:, layer.labels].double() * 0.7 + 0.1
        for targets in (sets, dense.to(dtype)):
            got = cpu.fused_loss(LossCall(x, layer, targets, sk.BCE(), 1.0, (True, True, True)))
            wide = targets if isinstance(targets, LabelSets) else targets.double()
            rows, grad_x, grad_weight, grad_bias = truth(x, plain, wide, sk.BCE())
            close(got.rows, rows, dtype, "rows")
            close(got.grad_x, grad_x, dtype, "grad_x")
            close(got.grad_weight, grad_weight[:, codes:], dtype, "grad_weight")
            close(got.grad_bias, grad_bias, dtype, "grad_bias")
        close(cpu.logits(x, layer), reference.logits(x.double(), plain_in(plain, torch.float64)), dtype, "logits")


def plain_in(plain, dtype):
    return Layer(plain.weight.to(dtype), plain.bias.to(dtype), plain.meta)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", [16, 256])
def test_16_bit_inputs(isa, codes, dtype):
    x, layer, plain, sets = make((700, 30, 600, 4, 25, 40), codes, dtype)
    got = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, True)))
    rows, grad_x, grad_weight, _ = truth(x, plain, sets, sk.BCE())
    close(got.rows, rows, dtype, "rows")
    close(got.grad_x, grad_x, dtype, "grad_x")
    close(got.grad_weight, grad_weight[:, codes:], dtype, "grad_weight")


@pytest.mark.parametrize("codes", [16, 64, 1024])
def test_column_loss(isa, codes):
    x, layer, plain, sets = make((700, 30, 600, 4, 5, 40), codes, torch.float64)
    calls = (LossCall(x, one, sets, sk.SigmoidF1(), 1.0, (True, True, True, False, False)) for one in (layer, plain))
    got, want = (cpu_confusion.column_loss(call) for call in calls)
    close(got.value, want.value, torch.float64, "value")
    close(got.grad_x, want.grad_x, torch.float64, "grad_x")
    close(got.grad_weight, want.grad_weight[:, codes:], torch.float64, "grad_weight")


@pytest.mark.parametrize("codes", [16, 256, 4096])
def test_topk_and_predict(isa, codes):
    x, layer, plain, _ = make((700, 30, 600, 4, 5, 40), codes, torch.float64)
    values, labels = cpu.topk(x, layer, 9)
    expected = cpu.topk(x, plain, 9)
    close(values, expected[0], torch.float64, "values")
    assert torch.equal(labels, expected[1])
    found, wanted = cpu.predict(x, layer, 0.3), cpu.predict(x, plain, 0.3)
    assert found.indices.numel() and torch.equal(found.indices, wanted.indices)
    assert torch.equal(found.offsets, wanted.offsets)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_and_ranges(threads):
    """A range of the labels gives that part of the logits, whatever the number of threads; the same bits every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, layer, plain, _ = make((3000, 0, 3000, 3, 12, 20), 256, torch.float32)
        whole = cpu.logits(x, layer)
        assert torch.equal(whole, cpu.logits(x, layer))
        close(whole, reference.logits(x.double(), plain_in(plain, torch.float64)), torch.float32, "logits")
        for start, stop in [(0, 1), (255, 257), (300, 2999), (1024, 2048)]:
            close(cpu.logits(x, layer.part(start, stop)), whole[:, start:stop].double(), torch.float32, "range")
    finally:
        torch.set_num_threads(before)


def test_beyond_the_kerdock_labels():
    """c²/2 = 128 labels for c = 16: blocks after them have random signs."""
    x, layer, plain, _ = make((500, 100, 300, -1, 2, 6), 16, torch.float64)
    close(cpu.logits(x, layer), x @ plain.weight.T + plain.bias, torch.float64, "logits")
    assert math.isclose(plain.weight[:, :16].square().sum(1).max(), 1)
