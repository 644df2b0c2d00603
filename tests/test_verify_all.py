"""Every set of up to k labels: counts, proofs and closed forms against the verdicts on single sets."""

import dataclasses
import itertools
import math
import sys

import numpy as np
import pytest
import torch

import sigkernels as sk
from sigkernels.verify import Verdict, verify, verify_all
from sigkernels.verify.check import prove
from sigkernels.verify.closed_groups import count_runs, sets_with_runs
from sigkernels.verify.rotations import representative_of, representatives


def every_set(n, sizes):
    return [list(s) for r in sizes for s in itertools.combinations(range(n), r)]


def agrees_with_verify(classifier, k, n, least=0, bias=None, **options):
    report = verify_all(classifier, k, bias, **options)
    sets = every_set(n, range(k if options.pop("exactly", False) else least, k + 1))
    single = verify(classifier, sets, bias, **options)
    assert len(report) == len(sets) and report.counts() == single.counts()
    assert [report.verdict(s) for s in sets] == single.verdicts.tolist()
    assert sorted(report.impossible()) == sorted(
        tuple(s) for s, v in zip(sets, single.verdicts, strict=True) if v == "UNARGMAXABLE"
    )
    result = report.check()
    assert result and len(result) == report.proofs
    assert report.radius_lo <= single.radius_hi.min()
    return report


@pytest.mark.parametrize(
    "options", ({}, {"rule": "topk"}, {"threshold": 0.3}, {"domain": "nonnegative"}, {"ball": "l2"}), ids=str
)
def test_plain_matrices(options):
    W = np.random.default_rng(0).standard_normal((9, 3))
    W[4] = W[2]
    report = agrees_with_verify(W, 2, 9, least=int("rule" in options), **options)
    assert report.proofs == len(report) and not report.groups


def test_one_class_of_a_softmax():
    W = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [0.1, 0.1]])
    report = agrees_with_verify(W, 1, 4, least=1, rule="argmax")
    assert list(report.impossible()) == [(3,)] and "impossible: {3}" in report.summary()


@pytest.mark.parametrize("bias", (None, np.full(9, 0.7), np.linspace(-1, 1, 9)), ids=("none", "constant", "each"))
@pytest.mark.parametrize("slack", (0, 2))
@pytest.mark.parametrize("ball", ("box", "l2"))
def test_dft_heads(bias, slack, ball):
    torch.manual_seed(0)
    box = 1e4 if ball == "box" else 100.0  # the bias fits in
    agrees_with_verify(sk.DFTHead(9, 9, 2, slack), 3, 9, bias=bias, ball=ball, box=box)


@pytest.mark.parametrize("codes", (0, 16))
def test_closed_forms_on_the_l2_ball_bound_the_radii_of_their_sets(codes):
    torch.manual_seed(0)
    head = sk.DFTHead(64, 40, 3, 2, codes=codes)
    report = verify_all(head, 2, ball="l2")
    assert len(report) == 821 and len(report.groups) == report.proofs and report.check()
    for labels in ([], [0], [7, 8], [3, 30]):
        single = verify(head, [labels], ball="l2", radius=True)
        certificate = report.certificate(labels)
        proof = prove(report.question, np.array(labels, dtype=np.int64), certificate)
        assert 0 < proof.lo <= single.radius_hi[0] <= 1 and report.radius_lo <= proof.hi


def test_margins_of_all_sets_on_the_l2_ball_with_and_without_their_witnesses():
    W = np.random.default_rng(0).standard_normal((10, 4))
    options = {"ball": "l2", "domain": "nonnegative", "rule": "topk", "radius": True}
    report = agrees_with_verify(W, 2, 10, least=1, **options)
    possible = report.sets.verdicts == "ARGMAXABLE"
    lo, hi = report.sets.radius_lo[possible], report.sets.radius_hi[possible]
    assert np.all(hi - lo <= 1e-6 * hi) and np.all(hi <= 1)
    few = verify_all(W, 2, witnesses=False, **options)
    assert few.counts() == report.counts() and few.check().unchecked == possible.sum()


def test_a_dft_without_slack_needs_one_proof_for_each_number_of_runs():
    report = agrees_with_verify(sk.DFTHead(3, 12, 1), 3, 12, exactly=True)
    assert report.proofs == len(report.groups) == 3
    assert [g.verdict for g in report.groups] == ["ARGMAXABLE", "UNARGMAXABLE", "UNARGMAXABLE"]
    assert report.certificate([0, 1, 2]).kind == "roots" and report.certificate([0, 2, 5]).kind == "alternation"


def test_all_pairs_of_240_documents():
    report = verify_all(sk.DFTHead(5, 240, 2), 2, rule="topk", exactly=True)
    assert report.counts()["ARGMAXABLE"] == len(report) == 28_680 and report.proofs == 2 and report.check()
    closest = verify(sk.DFTHead(5, 240, 2), [[0, 2]], rule="topk", radius=True)
    assert report.radius_lo <= closest.radius_lo[0]


def test_codes_promise_every_set_of_a_size():
    head = sk.DFTHead(80, 128, 1, 3, codes=64, bias=True)
    report = verify_all(head, 4)
    assert len(report) == sum(math.comb(128, r) for r in range(5)) and report.proofs == 5 and report.check()
    assert {g.kind for g in report.groups} == {"codes"}
    assert report.certificate([1, 5, 9, 100]).kind == "codes"


def test_thin_groups_are_split_into_rotations_of_single_sets():
    head, tol = sk.DFTHead(6, 120, 2, 1), 3e-3
    report = verify_all(head, 2, exactly=True, tol=tol)
    assert len(report) == math.comb(120, 2) and len(report.groups) == 60 and report.check()
    assert report.counts()["ARGMAXABLE"] > 0 and report.counts()["THIN"] > 0
    sets = [[7, 7 + distance] for distance in range(2, 61)] + [[0, 119], [1, 117]]
    single = verify(head, sets, tol=tol, radius=True)
    for i, labels in enumerate(sets):
        group = next(g for g in report.groups if g.holds(np.array(labels), 1 + (i != 59), 120))
        assert group.radius_lo <= single.radius_hi[i]
        if group.verdict == "ARGMAXABLE":
            assert single.verdicts[i] == "ARGMAXABLE"
            assert prove(report.question, np.array(labels), report.certificate(labels)).lo >= tol
    for change in ({"labels": (0, 1)}, {"labels": (0, 500)}, {"labels": ()}, {"radius_lo": 1.0}):
        at = next(i for i, g in enumerate(report.groups) if g.kind == "rotations")
        forged = verify_all(head, 2, exactly=True, tol=tol)
        forged.groups[at] = dataclasses.replace(report.groups[at], **change)
        assert not forged.check()


def test_sets_too_many_for_a_closer_look_stay_thin():
    report = verify_all(sk.DFTHead(7, 10_000, 3), 3, exactly=True)  # 1.7e11 triples
    assert report.proofs == 3 and report.counts()["THIN"] > 1.6e11 and report.check()
    assert "single ones may have more room" in report.summary()


def test_classes_of_rotations_cover_all_sets():
    for n, size in ((6, 1), (6, 2), (6, 3), (7, 3), (8, 4)):
        active, counts = representatives(n, size)
        assert counts.sum() == math.comb(n, size)
        rotated = {tuple(sorted((labels + s) % n)) for labels in active for s in range(n)}
        assert len(rotated) == math.comb(n, size)
        assert {representative_of(np.array(labels), n) for labels in rotated} == set(map(tuple, active.tolist()))


def test_runs_are_counted_as_they_are():
    for n in (1, 2, 5, 9):
        for size in range(n + 1):
            sets = list(itertools.combinations(range(n), size))
            runs = count_runs(np.array(sets, dtype=np.int64).reshape(len(sets), size), n)
            for q in range(n + 1):
                assert sets_with_runs(n, size, q) == np.count_nonzero(runs == q)


def test_forged_groups_are_rejected():
    report = verify_all(sk.DFTHead(5, 20, 2), 3)
    for i, group in enumerate(report.groups):
        opposite = Verdict.ARGMAXABLE if group.verdict == "UNARGMAXABLE" else Verdict.UNARGMAXABLE
        for change in (
            {"verdict": opposite},
            {"radius_lo": group.radius_lo * 1.01 + 1e-3},
            {"radius_hi": -1.0},
            {"runs": 0 if group.runs else 1},
            {"kind": "codes"},
        ):
            forged = verify_all(sk.DFTHead(5, 20, 2), 3)
            forged.groups[i] = dataclasses.replace(group, **change)
            result = forged.check()
            assert not result and result.failures[0][0] == i, (group, change)
    assert not report.check(bias=np.linspace(-1e3, 1e3, 20))


def test_radii_are_closed_one_by_one():
    report = verify_all(sk.DFTHead(5, 12, 2), 2, radius=True)
    assert not report.groups and report.proofs == len(report) == 79
    assert np.all(report.sets.radius_hi - report.sets.radius_lo <= 1e-6 * report.sets.radius_hi)


def test_only_what_is_not_possible_may_be_kept():
    W = np.random.default_rng(0).standard_normal((12, 3))
    every, few = (verify_all(W, 2, rule="topk", witnesses=w) for w in (True, False))
    assert few.counts() == every.counts() and len(few) == len(every) == few.proofs
    assert list(few.impossible()) == list(every.impossible()) and few.radius_lo == every.radius_lo
    never = few.counts()["UNARGMAXABLE"]
    result = few.check()
    assert not result and not result.failures and len(result) == never and result.unchecked == len(few) - never
    assert "no proof that was kept" in repr(result)
    possible = next(s for s in every_set(12, (1, 2)) if every.verdict(s) == "ARGMAXABLE")
    assert few.verdict(possible) == "ARGMAXABLE"
    with pytest.raises(ValueError, match="was not kept: use witnesses=True"):
        few.certificate(possible)


def test_progress_counts_every_set():
    seen = []
    verify_all(np.eye(6), 2, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (22, 22)
    seen.clear()
    verify_all(sk.DFTHead(5, 30, 2), 2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(466, 466)]


def test_bad_arguments(monkeypatch):
    W = np.eye(5)
    for k, error, message in (
        (-1, ValueError, "k must be at least 0"),
        (6, ValueError, "at most the 5 labels"),
        (1.5, TypeError, "k must be a whole number"),
    ):
        with pytest.raises(error, match=message):
            verify_all(W, k)
    with pytest.raises(ValueError, match="predicts exactly one label"):
        verify_all(W, 2, rule="argmax")
    with pytest.raises(ValueError, match="GB: pass witnesses=False"):
        verify_all(np.ones((5000, 50)), 2)
    monkeypatch.setattr(sys.modules["sigkernels.verify.question"], "DENSE", 100)
    with pytest.raises(ValueError, match="not formed, and closed forms leave sets of 2 labels open"):
        verify_all(sk.DFTHead(6, 40, 1, 2), 2, exactly=True)
    report = verify_all(W, 2)
    for labels, message in (([7], "there are the labels 0 to 4"), ([0, 1, 2], "sets of 0 to 2")):
        with pytest.raises(ValueError, match=message):
            report.verdict(labels)
