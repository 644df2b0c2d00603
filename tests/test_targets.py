"""Arrays are dense targets wherever targets are taken, as tensors are."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from cases import random_sets

import sigkernels as sk

N, B = 7, 3
SETS = random_sets(B, N, most=3, seed=5)
DENSE = SETS.to_dense().numpy()
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_dense_targets(dtype, order):
    array = np.array(DENSE, dtype, order=order)
    array.flags.writeable = False
    head, h, z = sk.LinearHead(4, N), torch.randn(B, 4), torch.randn(B, N)
    for loss in (sk.BCE(), sk.SigmoidF1(), sk.LMLNLL(2)):
        torch.testing.assert_close(head.loss(h, array, loss), head.loss(h, SETS, loss))
    torch.testing.assert_close(sk.functional.lml_nll(z, array, 2), sk.functional.lml_nll(z, SETS, 2))
    f1, ranking = sk.metrics.F1Metrics(N), sk.metrics.RankingMetrics(N, m=(1,))
    f1.update(array, array)
    ranking.update(torch.from_numpy(DENSE).argmax(1, keepdim=True), array)
    assert f1.compute()["micro_f1"] == 1.0
    assert f1.per_label()["support"].tolist() == DENSE.sum(0).tolist()
    assert ranking.compute()["P@1"] == np.mean(DENSE.any(1))


def test_soft_arrays_and_leading_dimensions():
    head, h = sk.LinearHead(4, N), torch.randn(2, B, 4)
    soft = np.random.default_rng(0).random((2, B, N))
    torch.testing.assert_close(head.loss(h, soft), head.loss(h, torch.from_numpy(soft)))
    torch.testing.assert_close(head.loss(h[0, 0], soft[0, 0]), head.loss(h[0, 0], torch.from_numpy(soft[0, 0])))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("stored", FLOATS, ids=str)
def test_soft_targets_of_every_dtype_beside_every_layer(device, dtype, stored):
    torch.manual_seed(0)
    soft = torch.arange(B * N, device=device).reshape(B, N) / 32  # exact in all of them
    x, weight = (torch.randn(rows, 4, device=device, dtype=dtype) for rows in (B, N))
    for loss in (sk.BCE(), sk.Focal(), sk.SigmoidF1(), sk.Poly1BCE(), sk.LMLNLL(2)):
        with sk.backend("auto") if isinstance(loss, sk.Poly1BCE) else contextlib.nullcontext():
            got = sk.functional.linear_loss(x, weight, soft.to(stored), loss=loss)
            assert torch.equal(got, sk.functional.linear_loss(x, weight, soft.to(dtype), loss=loss))
            if not isinstance(loss, (sk.SigmoidF1, sk.LMLNLL)):
                options = {"loss": loss, "unknown": [[1], [], [2, 6]]}
                got = sk.functional.linear_loss(x, weight, soft.to(stored), **options)
                assert torch.equal(got, sk.functional.linear_loss(x, weight, soft.to(dtype), **options))


def test_an_array_of_lists_holds_lists():
    lists = np.empty(B, dtype=object)
    lists[:] = SETS.to_lists()
    head, h = sk.LinearHead(4, N), torch.randn(B, 4)
    assert torch.equal(head.loss(h, lists), head.loss(h, SETS))


@pytest.mark.parametrize(
    ("targets", "error", "match"),
    [
        (np.array([[1, 2], [2, 3], [0, 6]]), ValueError, r"shape \[3, 7\], got \[3, 2\].*from_lists"),
        (DENSE * 2, ValueError, r"lie in \[0, 1\]"),
        ((DENSE * 2).astype(int), ValueError, "targets holds 2"),
        (DENSE.astype(complex), TypeError, "targets must be an array of booleans.*complex128"),
        (DENSE.astype(str), TypeError, "targets must be an array of booleans.*U32"),
        (DENSE.astype(int).tolist(), ValueError, "row 0 .* dense target.*from_dense"),
        (DENSE.astype(bool).tolist(), TypeError, "row 0 .*from_dense"),
    ],
)
def test_refusals(targets, error, match):
    with pytest.raises(error, match=match):
        sk.LinearHead(4, N).loss(torch.randn(B, 4), targets)
