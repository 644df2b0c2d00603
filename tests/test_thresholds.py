"""Thresholds: one for each label in predict, and tuned ones against a search over all cuts."""

from __future__ import annotations

import pytest
import torch
from cases import problem
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import ops


@pytest.mark.parametrize("kind", ["dft", "linear"])
def test_every_label_has_its_own(device, shape, kind):
    n, k, s, batch = shape
    p = problem(n, k if kind == "dft" else -1, s, batch, device=device, dtype=torch.float64, bias=kind == "linear")
    bounds = torch.randn(n, dtype=torch.float64, device=device)
    sets = ops.predict(p.x, p.layer, bounds)
    assert sets == sk.LabelSets.of(ops.logits(p.x, p.layer) > bounds, n)
    assert ops.predict(p.x, p.layer, torch.full_like(bounds, 0.25)) == ops.predict(p.x, p.layer, 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_logit_at_its_threshold_is_not_above(device, dtype):
    head = sk.LinearHead(8, 60).to(device, dtype)
    h = torch.randn(1, 8, device=device, dtype=dtype)
    x, _, layer = head._flat(h)
    z = ops.logits(x, layer)[0]
    assert ops.predict(x, layer, z.double()).sizes.tolist() == [0]
    below = (
        torch.nextafter(z.float(), torch.tensor(-torch.inf, device=device)).double()
        if dtype == torch.float32
        else z.double() - 0.1
    )
    assert ops.predict(x, layer, below).sizes.tolist() == [60]


@pytest.mark.parametrize("make", [sk.LinearHead, lambda e, n: sk.DFTHead(e, n, k=2, slack=3, bias=True)])
def test_heads(device, make):
    torch.manual_seed(0)
    head, h = make(12, 33).to(device), torch.randn(2, 5, 12, device=device) * 3
    thresholds = torch.linspace(0, 1, 33)
    wanted = (head(h).sigmoid() > thresholds.to(device)).flatten(0, 1)
    for form in (thresholds, thresholds.numpy(), thresholds.tolist()):
        assert head.predict(h, form) == sk.LabelSets.of(wanted, 33)
    assert head.predict(h, torch.tensor(0.3)) == head.predict(h, 0.3)


@pytest.mark.parametrize("per_label", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_score_is_that_of_the_predictions(device, dtype, per_label):
    """Also where the best cut is between two neighbours of 16 bits, to one of which the middle is rounded."""
    torch.manual_seed(0)
    head = sk.LinearHead(8, 60).to(device, dtype)
    h, y = torch.randn(100, 8, device=device, dtype=dtype), torch.rand(100, 60, device=device) < 0.3
    tuned = head.tune_thresholds(h, y, per_label=per_label)
    counts = sk.metrics.F1Metrics(60)
    counts.update(head.predict(h, tuned.values), y)
    found = counts.per_label()["f1"] if per_label else torch.tensor(counts.compute()["micro_f1"], dtype=torch.float64)
    torch.testing.assert_close(found.cpu(), tuned.f_score)


@pytest.mark.parametrize("per_label", [True, False])
def test_a_forbidden_label_is_out_of_reach_of_every_threshold(per_label):
    """A logit of -inf is above none: the score is that of the predictions, and not of a cut below it."""
    z, y = torch.tensor([[-torch.inf, 1.0], [-torch.inf, -torch.inf], [-torch.inf, -1.0]]), [[0, 1], [0, 1], []]
    tuned = sk.Thresholds.tune(z, y, per_label=per_label, default=0.3)
    counts = sk.metrics.F1Metrics(2)
    counts.update(z > tuned.values.logit().float(), y)
    if per_label:
        assert tuned.f_score.tolist() == counts.per_label()["f1"].tolist() == [0.0, 2 / 3]
        assert tuned.values[0] == 0.3
    else:
        assert tuned.f_score == counts.compute()["micro_f1"] == 0.4


def test_compiled():
    head, h = sk.LinearHead(6, 20), torch.randn(3, 6)
    thresholds = torch.linspace(0.2, 0.8, 20)
    dense = torch.compile(lambda h, t: head.predict(h, t).to_dense(), fullgraph=True, backend="eager")
    assert torch.equal(dense(h, thresholds), head.predict(h, thresholds).to_dense())


@pytest.mark.parametrize(
    ("threshold", "words"),
    [
        (torch.full((4,), 0.5), "5 labels"),
        (torch.full((5,), 1.5), r"\[0, 1\]"),
        (torch.full((5,), torch.nan), r"\[0, 1\]"),
        (["a"] * 5, "threshold must be a number"),
        ("tuned", "threshold must be a number"),
        (torch.ones(5, dtype=torch.bool), "bool"),
    ],
)
def test_refused(threshold, words):
    with pytest.raises((ValueError, TypeError), match=words):
        sk.LinearHead(3, 5).predict(torch.zeros(1, 3), threshold)


# -- tuning --------------------------------------------------------------------------------------------------------


def f_score(predicted, true, known, beta):
    tp, p, predicted = (int((a & known).sum()) for a in (predicted & true, true, predicted))
    return (1 + beta**2) * tp / (beta**2 * p + predicted) if p else 0.0


def best_of_all_cuts(z, true, known, beta):
    cuts = [-torch.inf, *z[known].tolist()]
    return max(f_score(z > cut, true, known, beta) for cut in cuts) if (true & known).any() else 0.0


@given(
    st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 6), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([2, 40]),
    st.booleans(),
)  # fmt: skip
def test_no_cut_is_better(seed, rows, n, beta, levels, masked):
    g = torch.Generator().manual_seed(seed)
    z = torch.randint(-levels, levels, (rows, n), generator=g) / levels * 4
    true, known = torch.rand(rows, n, generator=g) < 0.4, torch.ones(rows, n, dtype=torch.bool)
    if masked:
        known = torch.rand(rows, n, generator=g) < 0.7
    unknown = sk.LabelSets.of(~known, n) if masked else None
    found = sk.Thresholds.tune(z, true, beta=beta, unknown=unknown, default=0.25)
    above = z > found.values.logit().float()
    for label in range(n):
        column = z[:, label], true[:, label], known[:, label]
        assert found.f_score[label] == pytest.approx(best_of_all_cuts(*column, beta))
        assert f_score(above[:, label], *column[1:], beta) == pytest.approx(float(found.f_score[label]))
        assert (column[1] & column[2]).any() or found.values[label] == 0.25
    found = sk.Thresholds.tune(z, true, beta=beta, unknown=unknown, per_label=False)
    assert float(found.f_score) == pytest.approx(best_of_all_cuts(z, true, known, beta))
    assert f_score(z > found.values.logit().float(), true, known, beta) == pytest.approx(float(found.f_score))


@pytest.mark.parametrize("make", [sk.LinearHead, lambda e, n: sk.DFTHead(e, n, k=3, slack=4, codes=16, bias=True)])
@pytest.mark.parametrize("per_label", [True, False])
def test_from_a_head_label_range_by_label_range(monkeypatch, make, per_label):
    torch.manual_seed(3)
    head, h = make(30, 50), torch.randn(40, 30)
    true = head(h) + 2 * torch.randn(40, 50) > 1.5
    whole = sk.Thresholds.tune(head(h), true, per_label=per_label)
    monkeypatch.setattr("sigkernels.thresholds._CHUNK_ELEMENTS", 40 * 7)
    parts = head.tune_thresholds(h, true, per_label=per_label)
    torch.testing.assert_close(parts.values, whole.values, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(parts.f_score, whole.f_score)
    metrics = sk.metrics.F1Metrics(50)
    metrics.update(head.predict(h, parts.values), true)
    reached = metrics.per_label()["f1"].mean() if per_label else metrics.compute()["micro_f1"]
    assert float(reached) == pytest.approx(float(parts.f_score.mean()))


def test_neighbouring_scores_are_told_apart():
    high = torch.tensor(3.0)
    low = torch.nextafter(high, torch.tensor(0.0))
    z = torch.stack([high, low])[:, None]
    found = sk.Thresholds.tune(z, torch.tensor([[True], [False]]))
    assert found.f_score.tolist() == [1.0]
    assert (z > found.values.logit().float())[:, 0].tolist() == [True, False]


def test_extreme_scores_and_no_rows():
    z = torch.tensor([[torch.inf, -torch.inf, 1e30]])
    found = sk.Thresholds.tune(z, torch.ones(1, 3, dtype=torch.bool))
    assert bool(((found.values > 0) & (found.values < 1)).all())
    empty = sk.Thresholds.tune(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), default=0.4)
    assert empty.values.tolist() == [0.4] * 3
    assert sk.Thresholds.tune(torch.zeros(0, 3), torch.zeros(0, 3).bool(), per_label=False).values == 0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sk.Thresholds.tune([[0.1]], [[0]]), "logits must be"),
        (lambda: sk.Thresholds.tune(torch.full((1, 2), torch.nan), [[0]]), "NaN"),
        (lambda: sk.Thresholds.tune(torch.zeros(1, 2), [[0], [1]]), "2 label sets for 1 rows"),
        (lambda: sk.Thresholds.tune(torch.zeros(1, 2), [[0]], beta=0), "beta"),
        (lambda: sk.Thresholds.tune(torch.zeros(1, 2), [[0]], default=1.0), "default"),
        (lambda: sk.LinearHead(3, 2).tune_thresholds(torch.zeros(1, 1, 3), [[0]]), r"shape \[N, 3\]"),
    ],
)
def test_tuning_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
