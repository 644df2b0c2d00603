"""``verify_all``: every set of up to k labels, by closed forms where there are any, one by one where there are none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from ..labels import LabelSets
from ..validation import check_bool, check_int
from .all_sets_report import AllSetsReport
from .certificate import Verdict
from .closed_groups import Group, closed_groups, count_runs, sets_with_runs
from .estimators import names_of, rule_of
from .input_ball import BallName
from .inputs import as_question
from .label_names import Names, check_names
from .pipeline import check_resources, decide
from .progress import Asked, Progress
from .question import Question
from .report_blocks import ReportBlocks
from .rules import Domain, Rule

BLOCK = 8192  # sets that are decided together
LARGEST = 4e9  # bytes of witnesses that are kept, in a temporary file


def verify_all(
    head_or_matrix: Any,
    k: int,
    bias: Any = None,
    tol: float = 1e-8,
    box: float | None = None,
    radius: bool = False,
    device: str = "cpu",
    executor: Executor | None = None,
    progress: Asked = None,
    *,
    rule: Rule | None = None,
    threshold: Any = None,
    domain: Domain = "all",
    ball: BallName = "box",
    exactly: bool = False,
    witnesses: bool = True,
    names: Names | None = None,
) -> AllSetsReport:
    """Decide for every set of at most k labels whether a classifier can ever predict it, with a proof for each.

    Heads with DFT columns or codes are decided by closed forms, one proof for all sets of a size (and a number of runs of
    neighbouring labels); what these leave open, and every set of a plain matrix, as by :func:`verify`, a few thousand at
    a time.

    Args:
        head_or_matrix, bias, tol, box, device, executor, progress, rule, threshold, domain, ball, names: as
            of :func:`verify`.
        k: the most labels of a set. The empty set is among them, except for ``rule="topk"`` and ``"argmax"``, which
            predict at least one label; ``rule="argmax"`` asks for k = 1.
        radius: also close the interval of every radius. Every set is then decided one by one.
        exactly: only the sets of exactly k labels.
        witnesses: keep an input for every set that was decided one by one and is ``ARGMAXABLE``, many of them in a
            temporary file. With False only the other sets are kept; ``check()`` then proves those alone.

    Returns:
        An ``AllSetsReport``.

    Example:
        >>> W = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> sk.verify_all(W, k=2).counts()["UNARGMAXABLE"]
        2
    """
    device = check_resources(device, executor, radius)
    exactly, witnesses = check_bool("exactly", exactly), check_bool("witnesses", witnesses)
    question, notes = as_question(
        head_or_matrix, bias, tol, box, rule_of(head_or_matrix, rule, threshold), domain, ball
    )
    sizes = _sizes(question, k, exactly)
    checked_names = check_names(names_of(head_or_matrix, names), question.labels)
    groups, left = _by_closed_forms(question, sizes, radius and question.is_dense)
    alone = sum(left.values())
    if not question.is_dense and alone:
        open_sizes = ", ".join(map(str, sorted({size for size, _ in left})))
        raise ValueError(
            f"W would have {question.n * question.d:,} entries and is not formed, and closed forms leave sets of "
            f"{open_sizes} labels open: ask for a smaller k, or sk.verify about the sets that matter"
        )
    if witnesses and alone * (8.0 * question.d + 500.0) > LARGEST:
        raise ValueError(
            f"{alone:,} sets are decided one by one, and their proofs take {alone * (8.0 * question.d + 500.0) / 1e9:.0f} "
            "GB: pass witnesses=False, which keeps only those of sets that are not ARGMAXABLE, or ask for a smaller k"
        )
    kept = ReportBlocks(question, witnesses)
    with Progress(progress, alone + sum(group.count for group in groups)) as bar:
        bar.add(sum(group.count for group in groups))
        for active in _blocks(question.labels, left):
            sets = LabelSets(
                torch.from_numpy(active.ravel()), torch.arange(len(active) + 1) * active.shape[1], question.labels
            )
            part = decide(question, sets, [], radius=radius, device=device, executor=executor, progress=bar.part())
            kept.add(part)
    if any(group.verdict == Verdict.THIN for group in groups):
        notes.append("THIN by a closed form for the worst of many sets: single ones may have more room; ask sk.verify")
    return AllSetsReport(question, sizes, groups, kept, notes, checked_names)


def _sizes(question: Question, k: Any, exactly: bool) -> range:
    """The sizes of the sets that are asked about."""
    least = 0 if question.rule.name == "threshold" else 1
    k = check_int("k", k, least)
    if k > question.labels:
        raise ValueError(f"k must be at most the {question.labels} labels, got {k}")
    if question.rule.name == "argmax" and k != 1:
        raise ValueError(f'k = {k}: rule="argmax" predicts exactly one label; use k=1, or rule="topk"')
    return range(k if exactly else least, k + 1)


def _by_closed_forms(question: Question, sizes: range, alone: bool) -> tuple[list[Group], dict[tuple[int, int], int]]:
    """The groups that closed forms decide, and how many sets are left of each (size, number of runs; -1: all of them).

    ``alone``: leave everything.
    """
    groups: list[Group] = []
    left: dict[tuple[int, int], int] = {}
    for size in sizes:
        found = [] if alone else closed_groups(question, size)
        groups += found
        if question.k < 0:
            left[size, -1] = math.comb(question.labels, size)
            continue
        decided = {group.runs for group in found}
        for runs in range(min(size, question.n - size) + 1) if -1 not in decided else ():
            count = sets_with_runs(question.n, size, runs)
            if count and runs not in decided:
                left[size, runs] = count
    return groups, left


def _blocks(n: int, left: dict[tuple[int, int], int]) -> Iterator[ndarray]:
    """The sets that are left, in blocks of sets of one size, each sorted [m, size]."""
    for size in sorted({size for size, _ in left}):
        runs = [q for r, q in left if r == size]
        every = itertools.combinations(range(n), size)
        while True:
            part = list(itertools.islice(every, BLOCK))
            if not part:
                break
            active = np.array(part, dtype=np.int64).reshape(len(part), size)
            if runs != [-1]:
                active = active[np.isin(count_runs(active, n), runs)]
            if len(active):
                yield active
