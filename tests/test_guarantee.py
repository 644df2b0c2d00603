"""What heads promise in closed form, against the verifier and against the promise itself."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels import codes as code_columns


def radii(head, sets):
    report = sk.verify(head, sets, radius=True, progress=False)
    return np.asarray(report.radius_lo)


@pytest.mark.parametrize(("n", "k"), [(9, 2), (15, 3), (30, 2), (31, 1)])
def test_the_dft_promise_holds_for_every_set(n, k):
    torch.manual_seed(0)
    head = sk.DFTHead(64, n, k=k, slack=2, dtype=torch.float64)
    for r in range(k + 1):
        promise = head.guarantee(r)
        assert promise.predictable and promise.source == ("dft" if r else "constant")
        sets = list(itertools.islice(itertools.combinations(range(n), r), 0, 300))
        assert radii(head, sk.LabelSets.from_lists(sets, n)).min() >= promise.radius * (1 - 1e-9)
        assert head.guarantee(n - r) == dataclasses.replace(promise, size=n - r)  # all labels but r
        others = [sorted({*range(n)} - {*labels}) for labels in sets]
        assert radii(head, sk.LabelSets.from_lists(others, n)).min() >= promise.radius * (1 - 1e-9)
    over = head.guarantee(k + 1)
    assert not over.predictable and over.radius == 0 and "larger k or more codes" in str(over)


def test_the_promise_shrinks_with_bias_and_slack():
    torch.manual_seed(0)
    head = sk.DFTHead(64, 30, k=2, slack=2, bias=True, prior=None)
    fresh = head.guarantee(1).radius
    with torch.no_grad():
        head.bias.fill_(-0.05)
    biased = head.guarantee(1).radius
    with torch.no_grad():
        head.slack_weight.mul_(10)
    assert fresh > biased > head.guarantee(1).radius > 0
    with torch.no_grad():
        head.bias.fill_(-1e9)
    promise = head.guarantee(1)  # further out than the box
    assert promise.predictable and promise.radius == 0


@pytest.mark.parametrize("lowest", [-9.0, 1.0, -300.0])
@pytest.mark.parametrize("codes", [0, 16])
def test_the_promise_holds_beside_a_bias(codes, lowest):
    torch.manual_seed(0)
    head = sk.DFTHead(64, 40, k=2, codes=codes, slack=2, bias=True, prior=None, dtype=torch.float64)
    with torch.no_grad():
        head.bias.uniform_(lowest, lowest + 4)
    for r in (0, 1, 2, 38, 39, 40):
        promise = head.guarantee(r)
        sets = [sorted(torch.randperm(40)[:r].tolist()) for _ in range(20)]
        assert promise.radius > 0 or r not in (0, 40, *([1, 2] if codes else []))
        assert radii(head, sk.LabelSets.from_lists(sets, 40)).min() >= promise.radius * (1 - 1e-9)


def test_thin_regions_say_so():
    promise = sk.DFTHead(256, 100_000, k=80).guarantee(60)
    assert promise.predictable and not promise.reachable_in_float32
    assert "too thin for float32" in str(promise)
    wide = sk.DFTHead(512, 11_732, k=80, codes=256).guarantee(4)
    assert wide.source == "codes" and wide.reachable_in_float32 and wide.radius > 10


@pytest.mark.parametrize("c", [16, 64, 256, 1024])
def test_codes_promise_more_the_fewer_labels(c):
    n = min(c * c // 2, 20_000)
    head = sk.DFTHead(2 * c, n, k=0, codes=c)
    radius = [head.guarantee(r).radius for r in range(1, int(c**0.5) // 2 + 1)]
    assert all(a > b > 0 for a, b in itertools.pairwise(radius))
    assert not head.guarantee(len(radius) + 1).predictable
    assert len(radius) == code_columns.guaranteed_size(c, n)


def test_a_projection_that_is_too_narrow_promises_nothing():
    with pytest.warns(UserWarning, match="cannot reach"):
        head = sk.DFTHead(8, 60, k=4, slack=5)
    promise = head.guarantee(2)
    assert not promise.predictable and "wider encoder" in promise.reason


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (61, ValueError), ("2", TypeError), (1.5, TypeError)])
def test_bad_sizes(size, error):
    with pytest.raises(error, match="size"):
        sk.DFTHead(32, 60, k=4).guarantee(size)
