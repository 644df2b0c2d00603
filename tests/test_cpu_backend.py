"""The compiled CPU backend below the public edge: every operation on every instruction set and dtype."""

from __future__ import annotations

import math

import pytest
import reference
import torch

import sigkernels as sk
from sigkernels.backends import LossCall, cpu
from sigkernels.labels import LabelSets
from sigkernels.layer import Layer, LayerMeta

_C = pytest.importorskip("sigkernels._C")
ISAS = _C.build_info()["isas_usable"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# n, k, s, B: aligned, odd, prime n, n = 1, B = 1, k = 0, 2k+1 = n, no slack, plain linear, several chunks of rows,
# fewer labels than a tile, a row stride that is a power of two
SHAPES = [
    (256, 8, 16, 32),
    (101, 5, 7, 3),
    (1, 0, 2, 3),
    (300, 4, 9, 1),
    (50, 0, 4, 6),
    (11, 5, 3, 4),
    (64, 4, 0, 5),
    (997, -1, 13, 33),
    (1500, 10, 33, 270),
    (613, 12, 256, 17),
]


# AVX-512 has other kernels for batches that one vector holds.
both_widths = pytest.mark.parametrize("batch", [7, 21])


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("SIGKERNELS_ISA", request.param)
    return request.param


def make(n, k, s, batch, dtype, *, bias=True, start=0, rows=None, seed=0, scale=1.0):
    """(x, layer, sets): random, with about 5% of the labels active."""
    torch.manual_seed(seed)
    rows = n if rows is None else rows
    x = (scale * torch.randn(batch, max(2 * k + 1, 0) + s, dtype=torch.float64)).to(dtype)
    weight = torch.randn(rows, s, dtype=torch.float64).mul_(0.5).to(dtype)
    b = torch.randn(rows, dtype=torch.float64).to(dtype) if bias else None
    sets = LabelSets.from_dense(torch.rand(batch, n) < 0.05)
    return x, Layer(weight, b, LayerMeta(n, k, start)), sets


def truth(x, layer, targets, loss, scale, dtype=torch.float64):
    """Rows and gradients of the dense reference in ``dtype``."""
    leaves = [t.detach().to(dtype).clone().requires_grad_() for t in (x, layer.weight)]
    bias = None if layer.bias is None else layer.bias.to(dtype).clone().requires_grad_()
    if isinstance(targets, torch.Tensor):
        targets = targets.to(dtype)
    rows = reference.loss_rows(leaves[0], Layer(leaves[1], bias, layer.meta), targets, loss)
    (rows * scale.to(dtype)).sum().backward()
    grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
    return [rows.detach(), *grads, None if bias is None else bias.grad]


def error(got, want):
    """The largest error as a part of the largest value."""
    if not want.numel():
        return 0.0
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-300))


def check_loss(x, layer, targets, loss, *, slack=1.0):
    """No further from float64 than eager torch in the same dtype; a few roundings of the result are allowed."""
    scale = torch.rand(x.shape[0], dtype=torch.float64) + 0.5
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    needs = (True, True, layer.bias is not None)
    got = cpu.fused_loss(LossCall(x, layer, targets, loss, scale.to(real), needs))
    want = truth(x, layer, targets, loss, scale)
    eager = truth(x, layer, targets, loss, scale, x.dtype)
    floor = {torch.float64: 4e-15, torch.float32: 4.8e-7, torch.bfloat16: 5e-3, torch.float16: 4e-4}[x.dtype]
    for name, a, b, e in zip(("rows", "grad_x", "grad_weight", "grad_bias"), got[:4], want, eager, strict=True):
        if b is None:
            assert a is None
            continue
        assert a.shape == b.shape and not a.requires_grad
        assert error(a, b) <= max(error(e, b), floor) * slack, name
        if b.numel() and b.norm() > 0:
            assert float((a.double() - b).norm() / b.norm()) <= max(floor, float((e.double() - b).norm() / b.norm()))
    return got


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradients(isa, dtype, shape):
    x, layer, sets = make(*shape, dtype, bias=shape[0] % 2 == 1)
    got = check_loss(x, layer, sets, sk.BCE())
    assert got.rows.dtype == torch.float64
    expected = torch.float32 if dtype == torch.float16 else dtype
    assert got.grad_x.dtype == expected and got.grad_weight.dtype == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_number_of_slack_columns(isa, dtype):
    """The last columns may fill a vector, overlap the one before them or be done by themselves; rows may take panels."""
    for s in [*range(1, 36), 48, 50, 57, 64, 65]:
        for batch in (3, 45, 140):
            x, layer, sets = make(26, 3, s, batch, dtype, bias=False, seed=s)
            want = truth(x, layer, sets, sk.BCE(), torch.ones(len(x)))[2]
            got = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (False, True, False))).grad_weight
            limit = {torch.float64: 4e-15, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
            assert error(got, want) < limit, (s, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_an_infinite_weight_reaches_no_gradient_through_rows_that_do_not_exist(isa, dtype):
    for s in (2, 18, 31):
        for batch in (7, 37, 45):
            x, layer, sets = make(26, -1, s, batch, dtype, bias=False)
            clean = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, False))).grad_weight
            layer.weight[5, 1] = math.inf
            got = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, False))).grad_weight
            assert got.isfinite().all()
            others = [i for i in range(26) if i != 5]
            assert torch.equal(got[others], clean[others])


def losses(n):
    torch.manual_seed(5)
    weights = {"weight": torch.rand(n) + 0.5, "pos_weight": torch.rand(n) * 3}
    return {
        "weighted": sk.BCE(**weights),
        "smoothed": sk.BCE(label_smoothing=0.2, **weights),
        "pos_weight": sk.BCE(pos_weight=weights["pos_weight"]),
        "focal": sk.Focal(),
        "focal-weighted": sk.Focal(gamma=1.5, alpha=None, **weights),
        "focal-0": sk.Focal(gamma=0.0),
        "asl": sk.Asymmetric(),
        "asl-plain": sk.Asymmetric(gamma_neg=2.5, gamma_pos=0.0, clip=0.0, **weights),
        "asl-detached": sk.Asymmetric(detach_focus=True),
    }


@pytest.mark.parametrize("name", list(losses(1)))
@pytest.mark.parametrize("dense", [False, True], ids=["sets", "dense"])
@both_widths
def test_losses(isa, batch, name, dense):
    x, layer, sets = make(203, 4, 6, batch, torch.float64, scale=3.0)
    targets = torch.rand(batch, 203, dtype=torch.float64) if dense else sets
    check_loss(x, layer, targets, losses(203)[name], slack=20.0)
    x, layer, sets = make(203, 4, 6, batch, torch.float32)
    check_loss(x, layer, targets.float() if dense else sets, losses(203)[name], slack=2.0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float64, torch.int64], ids=str)
def test_dense_targets_of_any_dtype_and_stride(isa, dtype):
    x, layer, _ = make(90, 3, 5, 12, torch.float32)
    y = torch.rand(90, 12) < 0.3
    want = cpu.fused_loss(LossCall(x, layer, y.T.float().contiguous(), sk.BCE(), 1.0, (True, True, True)))
    got = cpu.fused_loss(LossCall(x, layer, y.to(dtype).T, sk.BCE(), 1.0, (True, True, True)))
    for a, b in zip(got[:4], want[:4], strict=True):
        assert torch.equal(a, b)


def test_sets_and_dense_zeros_and_ones_agree(isa):
    x, layer, sets = make(400, 6, 11, 20, torch.float32)
    a = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, True)))
    b = cpu.fused_loss(LossCall(x, layer, sets.to_dense(), sk.BCE(), 1.0, (True, True, True)))
    for left, right in zip(a[:4], b[:4], strict=True):
        assert error(left, right) < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits(isa, dtype, shape):
    x, layer, _ = make(*shape, dtype)
    wide = Layer(layer.weight.double(), layer.bias.double(), layer.meta)
    want, got = reference.logits(x.double(), wide), cpu.logits(x, layer)
    floor = {torch.float64: 4e-15, torch.float32: 4.8e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert got.dtype == dtype
    assert error(got, want) <= max(floor, error(reference.logits(x, layer), want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 7, 50])
@both_widths
def test_topk_is_a_stable_sort_of_the_logits(isa, batch, dtype, m):
    x, layer, _ = make(700, 5, 8, batch, dtype)
    z = cpu.logits(x, layer)
    values, order = torch.sort(z, dim=1, descending=True, stable=True)
    got_values, got_labels = cpu.topk(x, layer, m)
    assert torch.equal(got_values, values[:, :m]) and torch.equal(got_labels, order[:, :m])


def test_topk_ties_go_to_the_lower_label_and_nan_is_largest(isa):
    weight = torch.zeros(500, 1)
    weight[[3, 77, 78, 401]] = 1.0
    weight[[450, 20]] = math.nan
    values, labels = cpu.topk(torch.ones(2, 1), Layer(weight, None, LayerMeta(500, -1)), 8)
    assert labels.tolist() == [[20, 450, 3, 77, 78, 401, 0, 1]] * 2
    assert values[0].isnan().tolist() == [True] * 2 + [False] * 6
    every, all_labels = cpu.topk(torch.ones(2, 1), Layer(weight, None, LayerMeta(500, -1)), 500)
    assert every.shape == (2, 500) and all_labels.sort(1).values.tolist() == [list(range(500))] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 1.5, -math.inf, math.inf])
@both_widths
def test_predict(isa, batch, dtype, threshold):
    x, layer, _ = make(700, 5, 8, batch, dtype)
    z = cpu.logits(x, layer)
    assert cpu.predict(x, layer, threshold).to_lists() == [row.nonzero()[:, 0].tolist() for row in z > threshold]


def test_predict_does_not_count_nan(isa):
    weight = torch.ones(100, 1)
    weight[10] = math.nan
    assert cpu.predict(torch.ones(1, 1), Layer(weight, None, LayerMeta(100, -1)), 0.0).to_lists() == [
        [i for i in range(100) if i != 10]
    ]


@pytest.mark.parametrize("k", [-1, 7])
def test_label_ranges_add_up_to_the_whole(isa, k):
    x, layer, sets = make(1000, k, 9, 21, torch.float64)
    whole = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 0.5, (True, True, True)))
    rows, grad_x, parts = 0, 0, []
    for a, b in [(0, 137), (137, 138), (138, 900), (900, 1000)]:
        part = layer.part(a, b)
        parts.append(cpu.fused_loss(LossCall(x, part, sets, sk.BCE(), 0.5, (True, True, True))))
        rows, grad_x = rows + parts[-1].rows, grad_x + parts[-1].grad_x
        assert error(cpu.logits(x, part), cpu.logits(x, layer)[:, a:b]) < 1e-12
        labels = cpu.topk(x, part, 1)[1]
        assert int(labels.min()) >= a and int(labels.max()) < b
    assert error(rows, whole.rows) < 1e-14 and error(grad_x, whole.grad_x) < 1e-13
    assert error(torch.cat([p.grad_weight for p in parts]), whole.grad_weight) < 1e-13
    assert error(torch.cat([p.grad_bias for p in parts]), whole.grad_bias) < 1e-13


@pytest.mark.parametrize("z", [1e4, -1e4, 88.0, -88.0, 104.0, -104.0, 710.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_huge_logits(isa, z, dtype):
    layer = Layer(torch.full((40, 1), z, dtype=dtype), None, LayerMeta(40, -1))
    sets = LabelSets.from_lists([[0, 39], []], 40)
    got = cpu.fused_loss(LossCall(torch.ones(2, 1, dtype=dtype), layer, sets, sk.BCE(), 1.0, (True, True, False)))
    want = truth(torch.ones(2, 1), layer, sets, sk.BCE(), torch.ones(2))
    tiny = 1e-37 if dtype == torch.float32 else 1e-305
    assert all(t.isfinite().all() for t in got[:3])
    for a, b in zip(got[:3], want[:3], strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-6, atol=40 * abs(z) * tiny + tiny)


def test_small_losses_keep_their_digits(isa):
    """Around z = -15 eager float32 has lost most of softplus(z); one log of a product has not."""
    z = torch.linspace(-16, -14, 5000)
    layer = Layer(z[:, None], None, LayerMeta(5000, -1))
    got = cpu.fused_loss(
        LossCall(torch.ones(1, 1), layer, LabelSets.from_lists([[]], 5000), sk.BCE(), 1.0, (False,) * 3)
    )
    assert abs(float(got.rows) / float(z.double().exp().log1p().sum()) - 1) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_as_precise_as_eager_ones_down_to_the_least_normal_number(isa, dtype):
    least = math.log(torch.finfo(dtype).tiny) + 1e-4
    z = torch.linspace(least, 0, 20001, dtype=torch.float64).to(dtype)
    layer, sets = Layer(torch.ones(1, 1, dtype=dtype), None, LayerMeta(1, -1)), LabelSets.from_lists([[]] * len(z), 1)
    got = cpu.fused_loss(LossCall(z[:, None], layer, sets, sk.BCE(), 1.0, (True, False, False))).grad_x[:, 0]
    want = 1 / (1 + (-z.double()).exp())
    worst, eager = (((g.double() - want) / want).abs().max().item() for g in (got, torch.sigmoid(z)))
    assert worst <= 2 * eager + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", [sk.BCE(), sk.BCE(label_smoothing=0.1), sk.Focal(), sk.Asymmetric()], ids=str)
@both_widths
def test_nan_and_infinity_propagate_in_their_row_only(isa, batch, bad, loss):
    x, layer, sets = make(150, -1, 6, batch, torch.float32)
    clean = cpu.fused_loss(LossCall(x, layer, sets, loss, 1.0, (True, True, True)))
    x[3, 2] = bad
    got = cpu.fused_loss(LossCall(x, layer, sets, loss, 1.0, (True, True, True)))
    # The logarithms of the asymmetric loss are cut off: there an infinite logit has a finite loss.
    assert not got.rows[3].isfinite() or (isinstance(loss, sk.Asymmetric) and math.isinf(bad))
    others = [i for i in range(batch) if i != 3]
    assert torch.equal(got.rows[others], clean.rows[others])
    assert torch.equal(got.grad_x[others], clean.grad_x[others])
    if math.isnan(bad):
        assert got.grad_weight.isnan().all() and got.grad_x[3].isnan().all()


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_only_what_is_needed_is_made(isa, needs):
    x, layer, sets = make(333, 3, 5, 40, torch.float32)
    full = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, True)))
    got = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, tuple(map(bool, needs))))
    assert torch.equal(got.rows, full.rows)
    for need, a, b in zip(needs, got.gradients, full.gradients, strict=True):
        assert (a is None) if not need else torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [2, 3])  # bfloat16 is read in pairs, which a row may begin in the middle of
@pytest.mark.parametrize("s", [3, 16])
@both_widths
def test_views_are_read_in_place(isa, batch, s, first, dtype):
    x, layer, sets = make(140, 3, s, batch, dtype)
    want = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, True)))
    wide = torch.zeros(batch, 50, dtype=dtype)
    wide[:, 4 : 4 + x.shape[1]] = x
    for spare in (5, 6):
        weight = torch.zeros(280, s + spare, dtype=dtype)
        weight[::2, first : first + s] = layer.weight
        bias = torch.zeros(280, dtype=dtype)
        bias[::2] = layer.bias
        view = Layer(weight[::2, first : first + s], bias[::2], LayerMeta(140, 3))
        for xs, ws in [
            (wide[:, 4 : 4 + x.shape[1]], view),
            (x.T.contiguous().T, Layer(layer.weight.T.contiguous().T, layer.bias, LayerMeta(140, 3))),
        ]:
            got = cpu.fused_loss(LossCall(xs, ws, sets, sk.BCE(), 1.0, (True, True, True)))
            assert all(torch.equal(a, b) for a, b in zip(got[:4], want[:4], strict=True))


def test_large_gradients_are_written_completely(isa):
    """Larger than every cache."""
    x, layer, sets = make(80_001, -1, 43, 3, torch.float32)
    check_loss(x, layer, sets, sk.BCE())


def test_empty_batch_and_empty_range(isa):
    x, layer, sets = make(30, 2, 3, 0, torch.float32)
    got = cpu.fused_loss(LossCall(x, layer, sets, sk.BCE(), 1.0, (True, True, True)))
    assert got.rows.shape == (0,) and got.grad_x.shape == (0, 8)
    assert not got.grad_weight.any() and not got.grad_bias.any()
    assert cpu.logits(x, layer).shape == (0, 30) and cpu.topk(x, layer, 3)[0].shape == (0, 3)
    assert len(cpu.predict(x, layer, 0.0)) == 0
    nothing = Layer(torch.empty(0, 3), None, LayerMeta(30, 2, 30))
    x = torch.randn(4, 8)
    got = cpu.fused_loss(LossCall(x, nothing, LabelSets.from_lists([[]] * 4, 30), sk.BCE(), 1.0, (True, True, False)))
    assert not got.rows.any() and not got.grad_x.any() and got.grad_weight.shape == (0, 3)
