"""Metrics with labels that are not annotated: the same as on the known entries alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import metrics

sklearn = pytest.importorskip("sklearn.metrics")

N, ROWS = 12, 25


@pytest.fixture
def data():
    scores = torch.randn(ROWS, N) * 3
    y, unknown = torch.rand(ROWS, N) < 0.3, torch.rand(ROWS, N) < 0.25
    values, top = scores.sort(1, descending=True)
    return scores, y, unknown, values, top


def test_f1_of_known_entries(data):
    scores, y, unknown, *_ = data
    metric = metrics.F1Metrics(N)
    metric.update(scores > 0, y, unknown)
    got = metric.per_label()
    for label in range(N):
        known = ~unknown[:, label]
        want = sklearn.f1_score(y[known, label], scores[known, label] > 0, zero_division=0)
        assert float(got["f1"][label]) == pytest.approx(want)
    assert metric.compute()["micro_f1"] == pytest.approx(sklearn.f1_score(y[~unknown], scores[~unknown] > 0))


@pytest.mark.parametrize("bins", [None, 4096])
def test_average_precision_of_known_entries(data, bins):
    scores, y, unknown, values, top = data
    metric = metrics.MeanAveragePrecision(N, bins=bins, bound=20.0)
    for rows in (slice(0, 7), slice(7, ROWS)):
        metric.update(values[rows], top[rows], y[rows], unknown[rows])
    got, tolerance = metric.per_label(), 1e-9 if bins is None else 0.02
    for label in range(N):
        known = ~unknown[:, label]
        want = sklearn.average_precision_score(y[known, label], scores[known, label])
        assert float(got[label]) == pytest.approx(want, abs=tolerance)
    low, high = metric.bounds()
    assert bool((low <= got + 1e-12).all() and (got <= high + 1e-12).all())
    whole = metric.compute()
    assert whole["micro_ap"] == pytest.approx(
        sklearn.average_precision_score(y[~unknown], scores[~unknown]), abs=tolerance
    )
    rows = [
        sklearn.average_precision_score(y[r][~unknown[r]], scores[r][~unknown[r]]) if (y & ~unknown)[r].any() else 0.0
        for r in range(ROWS)
    ]
    assert whole["samples_ap"] == pytest.approx(sum(rows) / ROWS)


def test_ranking_and_threshold_of_known_labels(data):
    """Row by row the same as with the unknown labels removed from the data."""
    scores, y, unknown, values, top = data
    for row in range(ROWS):
        keep = (~unknown[row]).nonzero()[:, 0]
        fewer, ordered = len(keep), scores[row, keep].sort(descending=True)
        sets = y[row, keep][None]
        pairs = (
            (metrics.RankingMetrics(N, (1, 3)), metrics.RankingMetrics(fewer, (1, 3)), 1),
            (metrics.ThresholdAveraging(N), metrics.ThresholdAveraging(fewer), 0),
        )
        for masked, removed, first in pairs:
            masked.update(*(values[[row]], top[[row]])[first:], y[[row]], unknown[[row]])
            removed.update(*(ordered.values[None], ordered.indices[None])[first:], sets)
            if sets.any() or first:
                assert masked.compute() == pytest.approx(removed.compute())


@given(st.integers(0, 10_000))
def test_targets_of_unknown_labels_may_be_anything(seed):
    g = torch.Generator().manual_seed(seed)
    values, top = torch.randn(6, N, generator=g).sort(1, descending=True)
    y, unknown = torch.rand(6, N, generator=g) < 0.3, torch.rand(6, N, generator=g) < 0.3
    nan = y.float().masked_fill(unknown, torch.nan)
    results = []
    for targets, extra in (
        (y, unknown),
        (nan, unknown),
        (nan.numpy(), unknown),
        (y, sk.LabelSets.of(unknown)),
    ):
        metric = metrics.MeanAveragePrecision(N)
        metric.update(values, top, targets, extra)
        results.append(metric.compute())
    assert all(result == results[0] for result in results)


def test_refused():
    top = torch.tensor([[0, 1, 2]])
    with pytest.raises(ValueError, match="2 labels of row 0 that are known, but 3 are needed"):
        metrics.RankingMetrics(5, (3,)).update(top, [[0]], unknown=[[1]])
    metrics.RankingMetrics(3, (3,)).update(top, [[0]], unknown=[[1]])  # there are no more labels
    with pytest.raises(ValueError, match="unknown hold 2 label sets for 1 rows"):
        metrics.F1Metrics(3).update([[0]], [[0]], unknown=[[1], [2]])
