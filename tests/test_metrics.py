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


def average_precisions(y, scores):
    """scikit-learn's four averages, over the labels that have a positive where it matters."""
    known = y.any(0).numpy()
    y, scores = y.numpy(), scores.numpy()
    macro = sklearn.average_precision_score(y[:, known], scores[:, known], average="macro")
    rows = [sklearn.average_precision_score(t, s) if t.any() else 0.0 for t, s in zip(y, scores, strict=True)]
    return {
        "mAP": macro,
        "weighted_ap": sklearn.average_precision_score(y[:, known], scores[:, known], average="weighted"),
        "micro_ap": sklearn.average_precision_score(y, scores, average="micro"),
        "samples_ap": sum(rows) / len(rows),
    }


@pytest.mark.parametrize("size", [1, 7, ROWS])
def test_average_precision_is_scikit_learns(data, size):
    scores, y, values, top = data
    accumulator = in_batches(metrics.MeanAveragePrecision(N), size, values, top, y)
    assert accumulator.compute() == pytest.approx(average_precisions(y, scores), abs=1e-12)
    known = y.any(0)
    want = [sklearn.average_precision_score(y[:, i], scores[:, i]) for i in known.nonzero()[:, 0].tolist()]
    assert accumulator.per_label()[known].tolist() == pytest.approx(want, abs=1e-12)
    assert accumulator.per_label()[~known].isnan().all()
    low, high = accumulator.bounds()
    assert torch.equal(low[known], high[known])
    assert accumulator.nbytes == 9 * ROWS * N + 2 * 8 * N + 16


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000), rows=st.integers(1, 12), n=st.integers(1, 9), levels=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_average_precision_with_ties(seed, rows, n, levels, dtype):
    torch.manual_seed(seed)
    scores = torch.randint(0, levels, (rows, n)).to(dtype) / 4
    y = torch.rand(rows, n) < 0.4
    accumulator = metrics.MeanAveragePrecision(n)
    accumulator.update(*torch.sort(scores, dim=1, descending=True), y)
    if y.any():
        assert accumulator.compute() == pytest.approx(average_precisions(y, scores.double()), abs=1e-12)
    else:
        assert set(accumulator.compute().values()) == {0.0}


def test_average_precision_of_what_topk_gave(data):
    """What was not returned is tied below the rest, per label, per row and over all pairs."""
    _, y, values, top = data
    m = 6
    accumulator = in_batches(metrics.MeanAveragePrecision(N), 10, values[:, :m], top[:, :m], y)
    cut = torch.full((ROWS, N), -1e9).scatter_(1, top[:, :m], values[:, :m])
    assert accumulator.compute() == pytest.approx(average_precisions(y, cut), abs=1e-12)


def test_samples_average_precision_is_label_ranking_average_precision(data):
    scores, y, values, top = data
    some = y.any(1)  # scikit-learn gives a row without labels 1 here, and 0 in average_precision_score
    accumulator = metrics.MeanAveragePrecision(N)
    accumulator.update(values[some], top[some], y[some])
    want = sklearn.label_ranking_average_precision_score(y[some].numpy(), scores[some].numpy())
    assert accumulator.compute()["samples_ap"] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("m", [6, N])
def test_binned_average_precision_is_that_of_the_binned_scores(data, m):
    _, y, values, top = data
    values, top = values[:, :m], top[:, :m]
    accumulator = in_batches(metrics.MeanAveragePrecision(N, bins=16, bound=8.0), 13, values, top, y)
    binned = torch.full((ROWS, N), -1).scatter_(1, top, accumulator.bin(values))
    got, want = accumulator.compute(), average_precisions(y, binned)
    cut = torch.full((ROWS, N), -1e9).scatter_(1, top, values)
    want["samples_ap"] = average_precisions(y, cut)["samples_ap"]  # needs no state: never binned
    assert got == pytest.approx(want, abs=1e-12)
    assert accumulator.nbytes == 2 * 8 * N * 16 + 2 * 8 * N + 16


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), bins=st.integers(2, 40), levels=st.sampled_from([0, 3, 9]))
def test_the_exact_value_lies_within_the_bounds_of_the_binned_one(seed, bins, levels):
    torch.manual_seed(seed)
    scores = torch.randn(40, 5) * 2
    if levels:  # many equal scores
        scores = (scores * levels).round() / levels
    y = torch.rand(40, 5) < 0.3
    exact, binned = metrics.MeanAveragePrecision(5), metrics.MeanAveragePrecision(5, bins=bins, bound=5.0)
    for accumulator in (exact, binned):
        accumulator.update(*torch.sort(scores, dim=1, descending=True), y)
    known = y.any(0)
    low, high = (b[known] for b in binned.bounds())
    for value in (exact.per_label()[known], binned.per_label()[known]):
        assert (low - 1e-12 <= value).all() and (value <= high + 1e-12).all()


def test_the_bounds_close_as_bins_grow(data):
    _, y, values, top = data
    known, widths = y.any(0), []
    for bins in (8, 128, 1 << 16):
        low, high = in_batches(metrics.MeanAveragePrecision(N, bins=bins), ROWS, values, top, y).bounds()
        widths.append((high - low)[known].max().item())
    assert widths[0] > widths[1] > widths[2] and widths[2] < 0.02


def test_threshold_averaging(data):
    rows = 15
    scores, y, values, top = (a[:rows] for a in data)
    accumulator = metrics.ThresholdAveraging(N)
    for part in (slice(0, 4), slice(4, rows)):
        accumulator.update(values[part, :12], top[part, :12], y[part])
    got = accumulator.compute()
    thresholds, best = [], []
    for row in range(rows):
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
        "binned map": (lambda: metrics.MeanAveragePrecision(N, bins=64), (values, top, y)),
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
            lambda: metrics.ThresholdAveraging(5).update(torch.zeros(1, 3), torch.tensor([[0, 1]]), [[1]]),
            "values must be",
        ),
        (lambda: metrics.MeanAveragePrecision(5).bin(torch.zeros(1)), "has no bins"),
        (lambda: metrics.MeanAveragePrecision(5).merge(metrics.MeanAveragePrecision(5, bins=8)), "same settings"),
        (lambda: metrics.F1Metrics(5).compute(), "nothing to compute"),
        (lambda: metrics.F1Metrics(5).merge(metrics.F1Metrics(6)), "same settings"),
        (lambda: metrics.propensities(torch.ones(3), 2), "num_points"),
        (lambda: metrics.propensities(torch.tensor([1, -2]), 9), "counts must lie in 0 … .*got -2 for label 1"),
        (lambda: metrics.propensities(torch.tensor([1, math.nan]), 9), "got nan for label 1"),
        (lambda: metrics.propensities(torch.ones(3, 1), 9), r"shape \[n\], got torch.float32 of shape \(3, 1\)"),
        (lambda: metrics.propensities(torch.ones(3), 9, b=-1), "a and b must be positive"),
        (
            lambda: metrics.RankingMetrics(9, m=(3,)).update(torch.tensor([[2, 4, 2]]), [[2]]),
            "top holds label 2 more than once in row 0",
        ),
        (lambda: metrics.RankingMetrics(9, m=(1,)).update([[1]], [[2]]), "top must be an integer tensor.*got list"),
        (lambda: metrics.F1Metrics(9).update([[9]], [[2]]), "label 9 in row 0 is out of range"),
        (lambda: metrics.F1Metrics(9).update([[1]], [[2], [3]]), "targets hold 2 label sets for 1 rows"),
        (lambda: metrics.F1Metrics(9).update(torch.full((1, 9), 0.5), [[2]]), "predicted holds 0.5.*predicted > 0.5"),
        (
            lambda: metrics.ThresholdAveraging(9).update(torch.tensor([[0.1, 0.7]]), torch.tensor([[1, 2]]), [[2]]),
            "values of row 0 are not in descending order",
        ),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
