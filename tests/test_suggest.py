"""suggest: k and slack from label sets, with reasons that hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels import datasets


def sets(*rows, n=100):
    return sk.LabelSets.from_lists(rows, num_labels=n)


def test_k_is_the_largest_set_and_the_head_can_be_built():
    labels = datasets.synthetic(500, 12, num_examples=500, mean_active=4).load().labels
    found = sk.suggest(labels, sample=0)
    assert found.k == labels.max_active and found.coverage == 1.0 and found.num_labels == 500
    assert found.min_features == 2 * found.k + 1 + found.codes + found.slack
    head = sk.DFTHead(found.min_features, 500, k=found.k, slack=found.slack, codes=found.codes, bias=True, prior=labels)
    assert head.weight_matrix().shape == (500, found.min_features)
    assert found.radius == {} and "sample=0" in str(found)


def test_slack_grows_with_the_sets_and_with_the_labels():
    few, many = sets([1, 2], [3, 4]), sets(range(20), range(30, 50))
    assert sk.suggest(few, sample=0).slack < sk.suggest(many, sample=0).slack
    assert sk.suggest(few, sample=0).slack < sk.suggest(sets([1, 2], [3, 4], n=100_000), sample=0).slack
    assert sk.suggest(sets([1, 2], n=100_000), sample=0).slack == 48  # 2·2·ln(50 000) = 43.3, in steps of 8


@pytest.mark.parametrize(("n", "rows"), [(1, [[0]]), (2, [[0, 1]]), (3, [[0, 1, 2]]), (5, [[], []]), (9, [[0]])])
def test_small_and_odd_sets_give_a_head_that_exists(n, rows):
    found = sk.suggest(sets(*rows, n=n), sample=0)
    assert 2 * found.k + 1 + found.slack <= max(n, 1)
    sk.DFTHead(max(found.min_features, 1), n, k=found.k, slack=found.slack)


@pytest.mark.parametrize(("n", "codes"), [(60, 0), (100, 16), (129, 0), (1000, 64), (2049, 256), (600_000, 4096)])
def test_codes_are_the_fewest_with_a_guarantee_for_every_set(n, codes):
    found = sk.suggest(sets([1, 2], [3], n=n), sample=0)
    assert found.codes == codes
    assert f"codes = {codes}" in str(found)


def test_the_prior_and_what_it_is_worth():
    found = sk.suggest(sets([1, 2], [3], [3, 4, 5]), sample=0)
    assert found.active == 2.0
    first = next(reason for reason in found.reasons if reason.startswith("prior"))
    assert "2.0 labels are active on average" in first and f"{100 * np.log(2):,.0f} without a prior" in first


def test_sets_that_are_too_large_are_told():
    found = sk.suggest(sets(range(8), [1], n=9), sample=0)
    assert found.k == 4 and found.coverage == 0.5
    assert "50.00 % of the sets are larger" in str(found)


def test_radius_is_a_bound_that_the_verifier_proves():
    labels = datasets.synthetic(120, 4, num_examples=200, mean_active=2).load().labels
    found = sk.suggest(labels, sample=12)
    assert set(found.radius) == {1, 10, 50}
    assert 0 <= found.radius[1] <= found.radius[10] <= found.radius[50] and found.radius[50] > 0
    assert found == sk.suggest(labels, sample=12)
    head = sk.DFTHead(found.min_features, 120, k=found.k, slack=found.slack)
    report = sk.verify(head, labels)
    assert {str(getattr(v, "name", v)) for v in report.verdicts} <= {"ARGMAXABLE", "THIN"}


def test_a_matrix_that_is_too_large_is_not_made():
    found = sk.suggest(sets([1], range(50), n=10_000_000), sample=4)
    assert found.radius == {} and "not estimated at" in str(found)


@pytest.mark.parametrize(("n", "labels"), [(50, range(40)), (1, [0]), (2, [0, 1])])
def test_sets_that_no_k_covers(n, labels):
    found = sk.suggest(sets(labels, labels, n=n))
    assert (found.k, found.coverage, found.radius) == ((n - 1) // 2, 0.0, {})
    assert "100.00 % of the sets are larger" in str(found) and "no set has at most k" in str(found)


def test_it_leaves_the_global_generators_alone():
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 - the legacy generator is what must not move
    expected = torch.rand(2), np.random.rand(2)  # noqa: NPY002
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    sk.suggest(sets([1, 2], [5], n=40), sample=2)
    assert torch.equal(torch.rand(2), expected[0]) and np.array_equal(np.random.rand(2), expected[1])  # noqa: NPY002


def test_bad_input():
    with pytest.raises(TypeError, match=r"label_sets holds lists.*use LabelSets.from_lists"):
        sk.suggest([[1, 2]])
    with pytest.raises(TypeError, match=r"label_sets must be LabelSets, .*got int"):
        sk.suggest(3)
    with pytest.raises(ValueError, match="label_sets is empty"):
        sk.suggest(sets())
    with pytest.raises(ValueError, match="sample must be at least 0, got -1"):
        sk.suggest(sets([1]), sample=-1)


@pytest.mark.parametrize("n", [40, 2000])
def test_radius_is_below_the_true_one(n):
    """On the whole matrix, with codes at 2,000 labels, the verifier finds regions at least as large."""
    labels = sets([3], [7, 20], [1, 2], range(0, 36, 3), n=n)
    found = sk.suggest(labels, sample=4)
    assert found.codes == (0 if n == 40 else 64)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="in_features"):
        slack = sk.DFTHead(1, n, k=found.k, slack=found.slack, dtype=torch.float64).slack_weight
    fixed = sk.DFTHead(found.min_features, n, k=found.k, codes=found.codes).weight_matrix()
    radius = sk.verify(torch.cat([fixed, slack.detach()], 1), labels, radius=True).radius_hi
    bounds = [found.radius[share] for share in (1, 10, 50)]
    assert np.all(bounds <= np.percentile(radius, (1, 10, 50)) + 1e-9)
    if found.codes:
        assert "the codes promise 75 %" in str(found) and found.radius[50] > 10


def test_label_sets_in_any_form():
    given = sets([1], [2, 3])
    assert (
        sk.suggest(given.to_dense(), sample=0) == sk.suggest(given.to_scipy(), sample=0) == sk.suggest(given, sample=0)
    )
