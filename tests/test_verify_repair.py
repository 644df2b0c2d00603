"""Repairs: columns and heads that make impossible sets possible, each proved, and compared with exact rational programs."""

import dataclasses
import importlib
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_oracle import KINDS, degenerate_matrix, is_argmaxable, is_top

import sigkernels as sk
from sigkernels.verify import Repair, verify
from sigkernels.verify import repair_columns as columns

pipeline = importlib.import_module("sigkernels.verify.pipeline")  # beside functions of the same name
repair_module = importlib.import_module("sigkernels.verify.repair")

YES = ("ARGMAXABLE", "THIN")


def repaired(W, report, **options):
    """The repair of a report, after every check that needs no oracle."""
    found = report.repair()
    impossible = [i for i, v in enumerate(report.verdicts) if v == "UNARGMAXABLE"]
    assert found.impossible.tolist() == impossible
    assert found.columns.shape == (report.question.labels, found.columns.shape[1])
    if not impossible:
        assert found.method == "none" and found.columns.shape[1] == 0 and found.report is report and not found
        return found
    assert found and found.columns.shape[1] <= len(impossible)
    assert all(found.report.verdicts[i] in YES for i in impossible)
    yes = [v in YES for v in report.verdicts]
    assert all(after in YES for before, after in zip(yes, found.report.verdicts, strict=True) if before)
    wider = np.concatenate([np.asarray(W, dtype=np.float64), found.columns], axis=1)
    assert found.report.check(wider, **options), found.report.check(wider, **options)
    for plan in found.heads:
        assert plan.report.check() and all(v in YES for v in plan.report.verdicts)
        assert len(plan.report) == len(impossible)
    return found


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    rule=st.sampled_from(("threshold", "topk", "argmax")),
    nonnegative=st.booleans(),
    biased=st.booleans(),
)
def test_what_is_repaired_is_possible_by_the_exact_oracle(seed, kind, rule, nonnegative, biased):
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    W = degenerate_matrix(rng, kind, n, d)
    bias = rng.integers(-2, 3, n).astype(float) if biased else None
    sets = [np.flatnonzero(rng.random(n) < rng.choice([0.2, 0.5, 0.8])).tolist() for _ in range(6)]
    if rule == "argmax":
        sets = [[i] for i in range(n)]
    report = verify(W, sets, bias, rule=rule, domain="nonnegative" if nonnegative else "all")
    found = repaired(W, report, bias=bias)
    wider = np.concatenate([W, found.columns], axis=1)
    if rule == "threshold":
        assert all(is_argmaxable(wider, sets[i], bias, nonnegative) for i in found.impossible)
    elif not nonnegative:
        assert all(is_top(wider, sets[i], bias) for i in found.impossible)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), threshold=st.sampled_from((0.3, "free", "each")))
def test_thresholds_are_kept(seed, threshold):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(10, 60))
    W = rng.standard_normal((n, 2))
    sets = [rng.choice(n, 3, replace=False).tolist() for _ in range(8)]
    found = repaired(W, verify(W, sets, threshold=rng.uniform(0.1, 0.9, n) if threshold == "each" else threshold))
    assert found.report.question.rule is not None and len(found.report) == 8


def test_a_class_inside_the_hull_needs_one_column():
    W = np.concatenate([np.random.default_rng(0).standard_normal((40, 3)), np.zeros((1, 3))])
    report = sk.verify_classes(W)
    assert report.counts()["UNARGMAXABLE"] > 1
    found = repaired(W, report)
    assert found.columns.shape == (41, 1) and found.report.counts()["ARGMAXABLE"] == 41
    assert found.is_least and "no fewer" in found.summary()


def test_one_column_serves_many_sets():
    """As a bias would, if it had one: the sets keep the other features to tell themselves apart."""
    rng = np.random.default_rng(1)
    W = rng.standard_normal((400, 12))
    sets = [rng.choice(400, 3, replace=False).tolist() for _ in range(30)]
    report = verify(W, sets)
    assert report.counts()["UNARGMAXABLE"] == 30
    found = repaired(W, report)
    assert found.columns.shape[1] <= 3 < len(sets)
    assert all(v == "ARGMAXABLE" for v in found.report.verdicts)


def test_all_pairs_need_no_more_than_a_trigonometric_polynomial():
    W = np.random.default_rng(2).standard_normal((12, 2))
    pairs = [list(p) for p in itertools.combinations(range(12), 2)]
    assert repaired(W, verify(W, pairs, rule="topk")).columns.shape[1] <= 4
    assert repaired(W, verify(W, pairs)).columns.shape[1] <= 5


@pytest.mark.parametrize("rule", ("threshold", "topk"))
def test_nothing_needs_a_solver_where_the_columns_come_with_inputs(rule):
    rng = np.random.default_rng(8)
    W = 100.0 ** rng.uniform(-1, 1, (30, 1)) * rng.standard_normal((30, 5))
    sets = [np.flatnonzero(W @ x > 0).tolist() for x in rng.standard_normal((6, 5))] + [[1, 2, 3], [4, 8, 20]]
    report = verify(W, sets, rule=rule)
    found = repaired(W, report)
    assert len(found.impossible) and found.report.stages[0].decided == 8


@pytest.mark.parametrize("options", ({}, {"rule": "topk"}, {"threshold": 0.3}, {"threshold": "free"}, {"ball": "l2"}))
@pytest.mark.parametrize("build", (columns._one_for_each, columns._trigonometric))
def test_proposals_come_with_inputs_that_predict_the_sets(build, options, monkeypatch):
    """So that many sets need no solver: thousands of linear programs took hours."""
    rng = np.random.default_rng(10)
    W = np.exp(rng.uniform(-3, 3, (40, 1))) * rng.standard_normal((40, 3))
    sets = [rng.choice(40, size, replace=False).tolist() for size in (1, 2, 3, 3)]
    sets.append(sets[1])
    monkeypatch.setattr(repair_module, "ways", lambda *args: [partial(build, *args)])
    monkeypatch.setattr(repair_module, "SOLVED", -1)
    # Beside a bias polynomials are too small for the ball: sets need a solver there.
    for c in (None, rng.standard_normal(40)) if build is columns._one_for_each else (None,):
        report = verify(W, sets, c, **options)
        found = report.repair()
        assert len(found.impossible) and all(verdict in YES for verdict in found.report.verdicts)
        assert found.report.check(np.concatenate([W, found.columns], axis=1), bias=c)
        assert [stage.name for stage in found.report.stages] == ["constant"]


@pytest.mark.parametrize("labels", (2, 3, 33))
@pytest.mark.parametrize("options", ({"rule": "argmax"}, {"rule": "topk"}, {"threshold": "free"}, {"ball": "l2"}))
def test_equal_classes_are_told_apart_by_binary_digits(labels, options, monkeypatch):
    W = np.repeat(np.random.default_rng(0).standard_normal((1, 3)), labels, axis=0)  # all the same
    sets = [[i] for i in range(labels)]
    proposed = []

    def rough(way):  # as float32 rounds cosines of very many labels
        found = way()
        if found is not None:
            proposed.append(found.method)
            return found._replace(values=np.round(found.values, 0) if "trigonometric" in found.method else found.values)

    monkeypatch.setattr(repair_module, "ways", lambda *args: [partial(rough, way) for way in columns.ways(*args)])
    report = verify(W, sets, **{"rule": "argmax"} | options if "threshold" not in options else options)
    assert report.counts()["UNARGMAXABLE"] == labels
    found = report.repair()
    assert found.columns.shape[1] <= max(2, (labels - 1).bit_length()) and found.report.check()
    assert all(v == "ARGMAXABLE" for v in found.report.verdicts)
    assert ("binary digits" in proposed) == (labels != 3)
    W = np.concatenate([W, found.columns], axis=1)
    assert [int(np.argmax(W @ found.report.witness(i))) for i in range(labels)] == list(range(labels))


def test_binary_digits_beside_the_constant_column_of_a_head(monkeypatch):
    torch.manual_seed(0)
    head = sk.DFTHead(2, 12, 0, slack=1)  # only the first and the last along the one learned column can win
    monkeypatch.setattr(repair_module, "ways", lambda *args: [partial(columns._binary_digits, *args)])
    monkeypatch.setattr(repair_module, "SOLVED", -1)
    found = verify(head, [[i] for i in range(12)], rule="argmax").repair()
    assert len(found.impossible) == 10
    assert found.columns.shape == (12, 4) and all(v == "ARGMAXABLE" for v in found.report.verdicts)


def test_columns_that_leave_much_to_solve_are_given_up(monkeypatch):
    rng = np.random.default_rng(11)
    W = rng.standard_normal((60, 3))
    report = verify(W, [rng.choice(60, 4, replace=False).tolist() for _ in range(6)])
    hopeless = columns.Columns("zeros", np.zeros((60, 1)))
    monkeypatch.setattr(repair_module, "ways", lambda *_: [lambda: hopeless])
    assert report.repair().method == "not found"
    monkeypatch.setattr(repair_module, "SOLVED", 60 * 4 * 5)  # of six sets
    monkeypatch.setattr(pipeline, "newton", lambda *_: pytest.fail("solved"))
    assert report.repair().method == "not found"


def test_rows_of_every_length_beside_a_constant_column():
    rng = np.random.default_rng(9)
    W = 10.0 ** rng.uniform(-2, 2, (20, 1)) * rng.standard_normal((20, 3))
    pairs = [list(p) for p in itertools.combinations(range(20), 2)]
    assert repaired(W, verify(W, pairs, rule="topk")).columns.shape[1] <= 4


def test_nothing_impossible_is_said():
    found = verify(np.eye(3), [[0], [1, 2]]).repair()
    assert found.method == "none" and found.columns.shape == (3, 0) and "nothing to repair" in found.summary()
    assert not found.heads and str(found) == found.summary()
    assert verify(np.eye(3), []).repair().method == "none"


def test_columns_come_in_the_dtype_of_the_matrix_and_are_verified_so():
    rng = np.random.default_rng(3)
    W = torch.from_numpy(rng.standard_normal((60, 3))).float()
    report = verify(W, [rng.choice(60, 4, replace=False).tolist() for _ in range(5)])
    found = repaired(W, report)
    assert found.columns.dtype == np.float32
    assert found.report.question.stored.dtype == np.float32


def test_heads_are_proposed_with_what_they_cost():
    rng = np.random.default_rng(4)
    layer = sk.LinearHead(32, 300, bottleneck=4)
    report = verify(layer, [rng.choice(300, size, replace=False).tolist() for size in (1, 2, 4, 4)])
    found = repaired(layer.weight.detach(), report)
    dft, codes = found.heads
    assert (dft.k, dft.codes, dft.columns) == (4, 0, 9) and (codes.k, codes.codes, codes.columns) == (0, 64, 65)
    assert dft.parameters(32) == 33 * 9 and codes.parameters(32) == 33 * 65
    assert all(v == "ARGMAXABLE" for v in codes.report.verdicts)
    text = found.summary()
    assert "sk.DFTHead.from_linear(head, k=4)" in text and "sk.DFTHead.from_linear(head, k=0, codes=64)" in text
    upgraded = sk.DFTHead.from_linear(layer, k=dft.k, codes=dft.codes)
    assert dft.report.check(upgraded)


def test_a_dft_head_gets_a_larger_k():
    head = sk.DFTHead(40, 50, k=2)
    report = verify(head, [[0, 10, 20, 30], [5], [1, 3, 5, 7, 9]])
    found = report.repair()
    assert found.impossible.tolist() == [0, 2] and found.heads[0].k == 5
    assert all(v in YES for v in found.report.verdicts) and found.report.check()
    assert found.report.question.k == 2 and found.report.question.stored.shape == found.columns.shape


def test_sets_of_most_labels_count_by_what_they_leave_out():
    W = np.random.default_rng(5).standard_normal((21, 2))
    found = repaired(W, verify(W, [sorted(set(range(21)) - {3, 9, 15}), list(range(0, 21, 2))]))
    assert found.heads[0].k == 10
    W = np.ones((4, 1))
    found = repaired(W, verify(W, [[0, 2]]))  # more runs than a DFT of four labels can follow
    assert found.heads == () and found.columns.shape == (4, 1)


def test_progress_counts_the_ways_that_are_tried():
    rng = np.random.default_rng(11)
    report = verify(rng.standard_normal((60, 3)), [rng.choice(60, 4, replace=False).tolist() for _ in range(6)])
    seen = []
    quiet, shown = report.repair(progress=False), report.repair(progress=lambda done, total: seen.append((done, total)))
    assert np.array_equal(quiet.columns, shown.columns)
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] and len({total for _, total in seen}) == 1
    assert seen[0][0] == len(shown.heads) and seen[-1][1] > len(shown.heads)
    for answer in (report, verify(np.eye(3), [[0]])):  # nothing is impossible in the second
        with pytest.raises(TypeError, match="progress must be"):
            answer.repair(progress="yes")


def test_the_result_is_frozen():
    found = verify(np.ones((4, 1)), [[0, 2]]).repair()
    assert isinstance(found, Repair)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.method = "other"


def test_huge_and_tiny_numbers():
    W = np.random.default_rng(6).standard_normal((30, 2))
    sets = [[1, 2, 3], [4, 8, 20]]
    for scale in (1e-200, 1e200):
        repaired(W * scale, verify(W * scale, sets))


def test_a_loaded_report_is_repaired(tmp_path):
    W = np.random.default_rng(7).standard_normal((30, 2))
    report = verify(W, [[1, 2, 3], [4, 8, 20]])
    report.save(tmp_path / "r.npz")
    assert np.array_equal(sk.Report.load(tmp_path / "r.npz").repair().columns, report.repair().columns)
