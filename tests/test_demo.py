"""The demo: a tiny run from end to end, its numbers and its page."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels import cli, datasets, memory
from sigkernels.demo import models, report, run
from sigkernels.demo.train import Result, f1_at, train


@pytest.fixture(scope="module")
def tiny():
    """A stand-in for the real data: the same form, a hundredth of the size."""
    stream = datasets.synthetic(120, 6, num_examples=1200, num_features=256, mean_active=3)
    part = stream.load()
    names = np.array([f"package-{i}" for i in range(len(part))])
    return datasets.SparseDataset(part.features, part.labels, names, np.array([f"label-{i}" for i in range(120)]))


def build(kind, data, width=8, seed=0, **options):
    return models.build(kind, models.Problem.of(data, data.labels.max_active), width, seed, **options)


def test_f1_at_m_against_a_plain_count(tiny):
    model = build("plain", tiny)
    part = tiny[:50]
    logits = model.head(model.encoder(part.features))
    best = torch.topk(logits, 5).indices.tolist()
    truth = part.labels.to_lists()
    hits = [len(set(b) & set(t)) for b, t in zip(best, truth, strict=True)]
    precision = np.mean([h / 5 for h in hits])
    recall = np.mean([h / len(t) for h, t in zip(hits, truth, strict=True)])
    assert f1_at(model, part, (5,))[0] == pytest.approx(2 * precision * recall / (precision + recall))


def test_every_kind_starts_with_the_same_encoder(tiny):
    kinds = [build(kind, tiny, 4, seed=1) for kind in models.KINDS]
    for other in kinds[1:]:
        for a, b in zip(kinds[0].encoder.parameters(), other.encoder.parameters(), strict=True):
            assert torch.equal(a, b)
    k = kinds[2].head.k
    assert kinds[1].head_parameters() == 513 * 4 + 120 * 5
    assert kinds[2].head_parameters() == 513 * (2 * k + 1 + 4) + 120 * 5
    assert kinds[3].head_parameters() == 513 * (2 * k + 1 + 256 + 4) + 120 * 5


@pytest.mark.parametrize("prior", ["none", "mean", "frequencies"])
def test_every_kind_gets_the_same_prior(tiny, prior):
    """At features that are 0 all layers have the same loss, except where there is no prior."""
    batch = tiny[:64]
    losses = []
    for kind in models.KINDS:
        model = build(kind, tiny, prior=prior)
        hidden = torch.zeros(len(batch), 512)
        losses.append(float(model.head.loss(hidden, batch.labels).detach()))
    spread = max(losses) - min(losses)
    assert spread < 0.02 if prior != "none" else min(losses) > 0.5
    assert prior == "none" or max(losses) < 0.15


def test_the_heads_compute_the_same_loss_as_plain_torch(tiny):
    batch = tiny[:16]
    for kind in models.KINDS:
        model = build(kind, tiny)
        logits = model.head(model.encoder(batch.features))
        dense = batch.labels.to_dense()
        expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, dense, reduction="sum") / 16
        torch.testing.assert_close(model.loss(batch), expected, rtol=1e-4, atol=1e-4)


def test_training_learns_and_repeats(tiny):
    first, again = (Result("dft", "") for _ in range(2))
    for result in (first, again):
        train(result, build("dft", tiny), tiny, tiny[:200], epochs=3, seed=0)
    assert len(first.losses) == 3 * (1200 // 256) and len(first.f1_at_5) == 3
    assert first.losses[-1] < first.losses[0]
    assert first.losses == again.losses and first.f1_at_5 == again.f1_at_5
    assert first.step_ms > 0


def test_peak_memory_sees_what_is_allocated_and_freed():
    size = 64 * 2**20
    peak = memory.peak_bytes(lambda: np.ones(size, np.uint8).sum())
    if peak is None:
        pytest.skip("needs /proc of Linux")
    assert 0.8 * size < peak < 1.5 * size
    assert memory.peak_bytes(lambda: None) < 8 * 2**20


@pytest.fixture
def small_demo(monkeypatch, tiny):
    monkeypatch.setattr(datasets, "debian_deps", lambda: tiny)
    monkeypatch.setattr(run, "TEST_EXAMPLES", 200)


def test_the_command_from_end_to_end(small_demo, tmp_path, capsys):
    output = tmp_path / "new" / "report.html"
    options = ["--epochs", "1", "--width", "3", "--sets", "20", "--output", str(output)]
    assert cli.main(["demo", *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["epochs"] == 1 and printed["width"] == 3 and printed["verified_sets"] == 20
    plain, bottleneck, *ours = printed["results"]
    assert sum(plain["verdicts"].values()) == sum(bottleneck["verdicts"].values()) == 20
    assert len(ours) == 3
    for result in ours:  # every set of up to k labels can be predicted: that is the guarantee
        assert result["impossible_share"] == 0 and min(result["radii"]) > 0
    assert bottleneck["impossible_share"] > 0  # three columns for 120 labels
    assert "can be made possible" in bottleneck["recommendation"] and not plain["recommendation"]
    page = output.read_text()
    assert page.count("<svg") == 5 and "label-" in page
    impossible = tiny_names(bottleneck)
    assert any(f">{name}<" in page for name in impossible)
    assert "src=" not in page and "@import" not in page  # self-contained


def tiny_names(result: dict) -> list[str]:
    order = np.random.default_rng(0).permutation(1200)
    return [f"package-{order[row]}" for row in result["impossible"]]


def test_the_table(small_demo, tmp_path, capsys):
    assert cli.main(["demo", "--epochs", "1", "--sets", "0", "--output", str(tmp_path / "r.html")]) == 0
    table = capsys.readouterr().out
    assert table.split("\n")[1].split("  ")[0] == "head"
    assert [line.split()[0] for line in table.splitlines()[3:8]] == [*models.KINDS, "upgraded"]
    assert "not verified" in table


def test_undecided_sets_are_shown():
    result = Result("dft", "", f1_at_5=[0.5], f1_at_10=[0.5], verdicts={"ARGMAXABLE": 3, "UNDECIDED": 1})
    assert report.rows([result])[0][7] == "0.0 % of 4 (1 undecided)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--width", "0"], "--width must be at least 1, got 0"),
        (["--width", "513"], "--width must be at most 512, the features of the encoder, got 513"),
        (["--output", "/proc/none/r.html"], "--output: cannot create the folder /proc/none"),
        (["--output", "/proc/r.html"], "--output: /proc/r.html cannot be written"),
        (["--sets", "-1"], "--sets must be at least 0, got -1"),
        (["--sets", "999999"], "--sets must be at most the 5000 test examples"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--output", "."], "--output must be a file"),
    ],
)
def test_refused_before_any_work(arguments, message, capsys):
    assert cli.main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_verify_is_what_the_table_counts(tiny):
    model = build("bottleneck", tiny, width=2)
    result = Result("bottleneck", "")
    run.verify(result, model, tiny[:30])
    verdicts = [getattr(v, "name", str(v)) for v in sk.verify(model.head, tiny.labels[:30]).verdicts]
    assert result.impossible == [i for i, v in enumerate(verdicts) if v == "UNARGMAXABLE"]
    assert result.impossible_share == len(result.impossible) / 30
    assert "bottleneck: " in report.recommendations([result]) and "from_linear" in report.recommendations([result])
