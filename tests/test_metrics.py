"""Metrics: equal to scikit-learn's on dense data, the same however the rows are batched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import metrics

sklearn = pytest.importorskip("sklearn.metrics")

N, ROWS = 30, 50


@pytest.fixture
def data():
    """Scores without ties, dense targets with an empty row and an unused label, and the sorted labels."""
    scores = torch.randn(ROWS, N) * 3
    y = torch.rand(ROWS, N) < 0.15
    y[0], y[:, 4] = False, False
    values, top = torch.sort(scores, dim=1, descending=True)
    return scores, y, values, top


def in_batches(accumulator, size, *arrays):
    for start in range(0, ROWS, size):
        accumulator.update(*(a[start : start + size] for a in arrays))
    return accumulator


def test_ranking(data):
    scores, y, _, top = data
    cuts = (1, 3, 10)
    got = in_batches(metrics.RankingMetrics(N, cuts), 7, top[:, :12], y).compute()
    for m in cuts:
        hits = torch.zeros(ROWS)
        for row in range(ROWS):
            hits[row] = sum(bool(y[row, label]) for label in top[row, :m])
        precision, recall = (hits / m).mean().item(), (hits / y.sum(1).clamp(min=1)).mean().item()
        assert got[f"P@{m}"] == pytest.approx(precision, rel=1e-6)
        assert got[f"R@{m}"] == pytest.approx(recall, rel=1e-6)
        assert got[f"F1@{m}"] == pytest.approx(2 * precision * recall / (precision + recall), rel=1e-6)
        assert got[f"nDCG@{m}"] == pytest.approx(sklearn.ndcg_score(y.numpy(), scores.numpy(), k=m), rel=1e-9)


def test_precision_at_m_is_sample_precision_of_sklearn(data):
    _, y, _, top = data
    predicted = torch.zeros(ROWS, N).scatter_(1, top[:, :3], 1)
    got = in_batches(metrics.RankingMetrics(N, (3,)), ROWS, top, y).compute()
    want = sklearn.precision_recall_fscore_support(y, predicted, average="samples", zero_division=0)
    assert [got["P@3"], got["R@3"]] == pytest.approx(want[:2])


def test_propensity_scored_precision(data):
    _, y, _, top = data
    counts = torch.arange(1, N + 1)
    p = metrics.propensities(counts, 1000)
    c = (math.log(1000) - 1) * 2.5**0.55
    assert p[9].item() == pytest.approx(1 / (1 + c * math.exp(-0.55 * math.log(10 + 1.5))))
    assert (p.diff() > 0).all()
    got = in_batches(metrics.RankingMetrics(N, (2, 5), propensity=p), 9, top, y).compute()
    for m in (2, 5):
        over = under = 0.0
        for row in range(ROWS):
            over += sum(1 / p[label].item() for label in top[row, :m] if y[row, label])
            under += sum(sorted((1 / p[y[row]]).tolist(), reverse=True)[:m])
        assert got[f"PSP@{m}"] == pytest.approx(over / under)
    flat = metrics.RankingMetrics(N, (2,), propensity=torch.ones(N))
    flat.update(top, y)
    assert 0 <= flat.compute()["PSP@2"] <= 1


def test_f1_at_a_threshold(data):
    scores, y, _, _ = data
    predicted = sk.LabelSets.from_dense(scores > 1.5)
    accumulator = in_batches(metrics.F1Metrics(N), 11, predicted, y)
    got = accumulator.compute()
    for average in ("micro", "macro", "weighted"):
        want = sklearn.precision_recall_fscore_support(y, scores > 1.5, average=average, zero_division=0)
        names = [f"{average}_{name}" for name in ("precision", "recall", "f1")]
        assert [got[name] for name in names] == pytest.approx(want[:3], abs=1e-12)
    each = sklearn.precision_recall_fscore_support(y, scores > 1.5, average=None, zero_division=0)
    for name, want in zip(("precision", "recall", "f1", "support"), each, strict=True):
        assert np.allclose(accumulator.per_label()[name].numpy(), want)


def test_mean_average_precision_is_that_of_the_binned_scores(data):
    _, y, values, top = data
    accumulator = in_batches(metrics.MeanAveragePrecision(N, bins=16, bound=8.0), 13, values, top, y)
    binned = torch.empty(ROWS, N, dtype=torch.int64).scatter_(1, top, accumulator.bin(values))
    known = y.any(0)
    want = [sklearn.average_precision_score(y[:, i], binned[:, i]) for i in known.nonzero()[:, 0].tolist()]
    assert accumulator.per_label()[known].tolist() == pytest.approx(want)
    assert accumulator.per_label()[~known].isnan().all()
    assert accumulator.compute()["mAP"] == pytest.approx(sum(want) / len(want))


def test_mean_average_precision_is_exact_with_fine_bins_and_all_labels(data):
    scores, y, values, top = data
    accumulator = in_batches(metrics.MeanAveragePrecision(N, bins=1 << 16, bound=16.0), ROWS, values, top, y)
    want = [sklearn.average_precision_score(y[:, i], scores[:, i]) for i in range(N) if y[:, i].any()]
    assert accumulator.compute()["mAP"] == pytest.approx(sum(want) / len(want), rel=1e-3)


def test_labels_that_were_not_returned_are_tied_below_the_rest(data):
    _, y, values, top = data
    m = 6
    accumulator = in_batches(
        metrics.MeanAveragePrecision(N, bins=1 << 12, bound=20.0), 10, values[:, :m], top[:, :m], y
    )
    binned = torch.full((ROWS, N), -1).scatter_(1, top[:, :m], accumulator.bin(values[:, :m]))
    want = [sklearn.average_precision_score(y[:, i], binned[:, i]) for i in range(N) if y[:, i].any()]
    assert accumulator.compute()["mAP"] == pytest.approx(sum(want) / len(want))


def test_threshold_averaging(data):
    scores, y, values, top = data
    got = in_batches(metrics.ThresholdAveraging(N), 8, values[:, :12], top[:, :12], y).compute()
    thresholds, best = [], []
    for row in range(ROWS):
        if not y[row].any():
            continue
        tried = []
        for cut in range(1, 12):
            threshold = (values[row, cut - 1].item() + values[row, cut].item()) / 2
            f1 = sklearn.f1_score(y[row], scores[row] > threshold, zero_division=0)
            tried.append((f1, -cut, threshold))
        f1, _, threshold = max(tried)
        thresholds.append(threshold)
        best.append(f1)
    assert got["threshold"] == pytest.approx(sum(thresholds) / len(thresholds), rel=1e-5)
    assert got["best_f1"] == pytest.approx(sum(best) / len(best))


@settings(max_examples=10)
@given(size=st.integers(5, ROWS), split=st.integers(0, ROWS))
def test_batches_and_workers_do_not_matter(size, split):
    torch.manual_seed(1)
    values, top = torch.sort(torch.randn(ROWS, N), dim=1, descending=True)
    y = torch.rand(ROWS, N) < 0.1
    predicted = sk.LabelSets.from_dense(torch.rand(ROWS, N) < 0.2)
    makes = {
        "ranking": (lambda: metrics.RankingMetrics(N, (1, 5)), (top, y)),
        "f1": (lambda: metrics.F1Metrics(N), (predicted, y)),
        "map": (lambda: metrics.MeanAveragePrecision(N), (values, top, y)),
        "threshold": (lambda: metrics.ThresholdAveraging(N), (values, top, y)),
    }
    for make, arrays in makes.values():
        whole = in_batches(make(), ROWS, *arrays).compute()
        assert in_batches(make(), size, *arrays).compute() == pytest.approx(whole)
        left, right = make(), make()
        left.update(*(a[:split] for a in arrays))
        right.update(*(a[split:] for a in arrays))
        assert left.merge(right).compute() == pytest.approx(whole)
        left.reset()
        with pytest.raises(ValueError, match="nothing to compute"):
            left.compute()


def test_straight_from_a_head():
    head = sk.DFTHead(30, 40, k=3, slack=5)
    h, sets = torch.randn(6, 30), sk.LabelSets.from_lists([[1], [2, 3], [], [0], [39], [5, 6, 7]], 40)
    ranking, f1, mean = metrics.RankingMetrics(40), metrics.F1Metrics(40), metrics.MeanAveragePrecision(40)
    with torch.no_grad():
        values, top = head.topk(h, 10)
        ranking.update(top, sets)
        f1.update(head.predict(h, threshold=0.1), sets)
        mean.update(values, top, sets)
    results = ranking.compute() | f1.compute() | mean.compute()
    assert all(0 <= value <= 1 for value in results.values())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.RankingMetrics(0), "num_labels"),
        (lambda: metrics.RankingMetrics(5, m=(6,)), "m must hold"),
        (lambda: metrics.RankingMetrics(5, m=()), "m must hold"),
        (lambda: metrics.RankingMetrics(5, m=(1,), propensity=torch.ones(4)), "propensity must have shape"),
        (lambda: metrics.RankingMetrics(5, m=(1,), propensity=torch.zeros(5)), r"\(0, 1\]"),
        (lambda: metrics.RankingMetrics(5, m=(3,)).update(torch.zeros(2, 2, dtype=torch.int64), [[], []]), "ask topk"),
        (lambda: metrics.RankingMetrics(5, m=(1,)).update(torch.full((1, 1), 5), [[]]), "labels are 0 … 4"),
        (lambda: metrics.RankingMetrics(5, m=(1,)).update(torch.zeros(1, 1), [[]]), "integer tensor"),
        (lambda: metrics.RankingMetrics(5, m=(1,)).update(torch.zeros(2, 1, dtype=torch.int64), [[]]), "1 label sets"),
        (lambda: metrics.F1Metrics(5).update([[1]], [[7]]), "label 7"),
        (lambda: metrics.F1Metrics(5).update(sk.LabelSets.from_lists([[1]], 6), [[1]]), "num_labels = 6"),
        (lambda: metrics.MeanAveragePrecision(5, bins=1), "bins"),
        (
            lambda: metrics.MeanAveragePrecision(5).update(
                torch.full((1, 1), math.nan), torch.zeros(1, 1, dtype=torch.int64), [[]]
            ),
            "NaN",
        ),
        (
            lambda: metrics.ThresholdAveraging(5).update(
                torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.int64), [[1]]
            ),
            "values must be",
        ),
        (lambda: metrics.F1Metrics(5).compute(), "nothing to compute"),
        (lambda: metrics.F1Metrics(5).merge(metrics.F1Metrics(6)), "same settings"),
        (lambda: metrics.propensities(torch.ones(3), 2), "num_points"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
