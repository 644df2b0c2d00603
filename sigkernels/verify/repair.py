"""What to do about impossible sets: the smallest change found that makes all of them possible, verified again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy import ndarray

from ..codes import CODES, guaranteed_size
from .certificate import Certificate, Verdict
from .files import write_arrays
from .inputs import checked_question
from .progress import Asked, Progress
from .question import Question, active_labels, distinct_sets
from .repair_columns import ways

if TYPE_CHECKING:
    from .report import Report

SOLVED = 10**7  # entries of W of all sets that are solved to verify columns: some ten seconds of linear programs
POSSIBLE = (Verdict.ARGMAXABLE, Verdict.THIN)
CLOSED_FORMS = "only closed forms were tried, so THIN sets may have a larger radius"


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """A ``DFTHead`` with W for its slack columns, in which the impossible sets are possible by a closed form.

    Example:
        >>> W = np.random.default_rng(0).standard_normal((40, 2))
        >>> plan = sk.verify(W, [[0, 7, 21]]).repair().heads[0]
        >>> plan.k, plan.columns
        (3, 7)
    """

    k: int
    codes: int
    report: Report  # of the impossible sets, by closed forms alone

    @property
    def columns(self) -> int:
        """How many fixed columns stand beside W; they have no parameters."""
        return 2 * self.k + 1 + self.codes

    def parameters(self, in_features: int) -> int:
        """How many parameters the projection from ``in_features`` gets for the features of these columns."""
        return self.columns * (in_features + 1)

    @property
    def call(self) -> str:
        """The call that makes this head of a trained bottleneck."""
        codes = f", codes={self.codes}" if self.codes else ""
        return f"sk.DFTHead.from_linear(head, k={self.k}{codes})"

    def __str__(self) -> str:
        thin = self.report.counts()["THIN"]
        width = (
            f"; {thin} of these {len(self.report)} in regions too thin for a float32 encoder to find" if thin else ""
        )
        return f"{self.call}: {self.columns} fixed columns, {self.columns}·(in_features + 1) parameters{width}"


@dataclass(frozen=True, eq=False)
class Repair:
    """The smallest change found that makes every impossible set of a report possible.

    It is true when there is something to repair. ``print`` it to read it in words.

    Example:
        >>> W = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> repair = sk.verify(W, [[0, 2], [0, 1]]).repair()
        >>> repair.impossible, repair.columns.shape
        (array([1]), (3, 1))
    """

    impossible: ndarray  # [p] int64, lines of the report that no input predicts
    columns: ndarray  # [n, c] to append to W, in its dtype; the new features come after those of W
    method: str  # how they were found; "none": nothing is impossible, "not found": none could be proved to do
    report: Report  # of all sets of the report on [W | columns]
    heads: tuple[HeadPlan, ...] = ()  # heads with fixed columns that do the same

    def __bool__(self) -> bool:
        return bool(len(self.impossible))

    @property
    def is_least(self) -> bool:
        """Whether it is known that fewer columns do not do."""
        return self.columns.shape[1] <= 1

    def save(self, path: str | Path) -> None:
        """Write ``columns``, ``impossible`` and ``method`` as ``.npz``."""
        write_arrays(path, {"columns": self.columns, "impossible": self.impossible, "method": np.array(self.method)})

    def summary(self) -> str:
        """A few lines of text: what to change, what it costs, what was proved."""
        if not self:
            return "nothing to repair: no set is impossible"
        if self.method == "not found" and not self.heads:
            return f"{_count(len(self.impossible), 'impossible set')}; nothing was found that is proved to repair them"
        n, count = self.columns.shape
        verdicts = self.report.verdicts[self.impossible]
        thin = sum(v == Verdict.THIN for v in verdicts)
        few = "no fewer can do" if self.is_least else "the fewest found"
        lines = [f"{_count(len(verdicts), 'impossible set')} can be made possible, each way verified again:"]
        if count:
            lines.append(
                f"  these sets alone: append {_count(count, 'column')} to W (.columns: {self.method}, {few}), "
                f"{n * count:,} parameters" + (f"; {thin} sets are THIN then" if thin else "")
            )
        if self.heads:
            largest = int(self.heads[0].report.sets.sizes.max())
            lines.append(
                f"  every set of up to {_count(largest, 'label')}, with W for a trained bottleneck's last layer:"
            )
            lines += [f"    {plan}" for plan in self.heads]
        if self.heads and self.report.question.domain != "all":
            lines.append("    (their features may be negative: they come from a projection, not from a ReLU)")
        return "\n".join(
            [*lines, "  What is added has no effect yet: go on training, so that the new features are used."]
        )

    __str__ = summary


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def repair(report: Report, progress: Asked = None) -> Repair:
    """See :meth:`Report.repair`."""
    impossible = np.flatnonzero([v == Verdict.UNARGMAXABLE for v in report.verdicts])
    question = report.question
    none = np.zeros((question.labels, 0), question.stored.dtype)
    every = active_labels(report.sets)
    sets, place = distinct_sets([every[i] for i in impossible])
    kinds, tries = (_heads(question, sets), ways(question, sets)) if len(impossible) else ([], [])
    with Progress(progress, len(kinds) + len(tries), "repair", "way") as bar:
        plans = [_head_plan(report, impossible, k, codes) for k, codes in kinds]
        bar.add(len(kinds))
        heads = tuple(plan for plan in plans if plan is not None)
        found = Repair(impossible, none, "not found" if len(impossible) else "none", report, heads)
        for way in tries:
            columns = way()
            bar.add(1)
            if columns is None:
                continue
            stored = _in_stored_units(question, columns.values)
            inputs = (
                {} if columns.inputs is None else dict(zip(impossible.tolist(), columns.inputs[place], strict=True))
            )
            again = _verified_again(report, stored, inputs)
            verdicts = again.verdicts[impossible]
            if all(v == Verdict.ARGMAXABLE for v in verdicts):
                return Repair(impossible, stored, columns.method, again, heads)
            if found.report is report and all(v in POSSIBLE for v in verdicts):
                found = Repair(impossible, stored, columns.method, again, heads)
    return found


def _heads(question: Question, sets: list[ndarray]) -> list[tuple[int, int]]:
    """k and codes of the smallest heads in which every set of as many labels as these is possible."""
    n = question.labels
    largest = max(len(active) for active in sets)
    k = max(min(len(active), n - len(active)) for active in sets)
    enough = (c for c in CODES if c > question.codes and c + 1 < n and guaranteed_size(c, n) >= largest)
    found = [(k, question.codes)] if question.k < k and 2 * k + 1 <= n else []
    return found + [(max(question.k, 0), codes) for codes in enough][:1]


def _head_plan(report: Report, impossible: ndarray, k: int, codes: int) -> HeadPlan | None:
    """The head with these fixed columns, if it is proved to predict the impossible sets."""
    from .pipeline import decide

    q = report.question
    try:
        question = checked_question(q.stored, q.stored_bias, k, q.tol, q.box, q.rule, codes, ball=q.ball.name)
    except ValueError:  # numbers so large that they cannot stand beside a DFT
        return None
    again = decide(question, report.sets[torch.from_numpy(impossible)], [CLOSED_FORMS], closed_forms=True)
    return HeadPlan(k, codes, again) if all(v in POSSIBLE for v in again.verdicts) else None


def _verified_again(report: Report, columns: ndarray, inputs: dict[int, ndarray]) -> Report:
    """The report on ``[W | columns]``, with what should predict some of its lines.

    What was possible still is where the new features are 0, and needs no solver. Columns that leave many large
    questions open are given up: a repair is a recommendation, and all sets must be possible for it to be one.
    """
    from .pipeline import decide

    q = report.question
    question = checked_question(
        np.concatenate([q.stored, columns], axis=1),
        q.stored_bias,
        q.k,
        q.tol,
        q.box,
        q.rule,
        q.codes,
        q.domain,
        q.ball.name,
    )
    known = [
        _in_units_of(question, q, inputs[i]) if i in inputs else _on_more_columns(report.certificate(i), q, question)
        for i in range(len(report))
    ]
    notes = [f"{columns.shape[1]} columns were appended to W"]
    return decide(question, report.sets, notes, known=known, solve_at_most=SOLVED // (question.n * question.d))


def _in_units_of(after: Question, before: Question, witness: ndarray) -> Certificate:
    if before.threshold_unit:  # a power of two that may differ
        witness = np.append(witness[:-1], witness[-1] * (before.threshold_unit / after.threshold_unit))
    return Certificate("witness", witness=witness)


def _on_more_columns(certificate: Certificate, before: Question, after: Question) -> Certificate:
    """The certificate with a witness that leaves the new features at 0."""
    witness = certificate.witness
    if witness is not None:
        witness = np.insert(witness, np.full(after.inputs - before.inputs, before.inputs), 0)
        if before.threshold_unit:  # the unit is a power of two that may differ
            witness[-1] *= type(witness[-1])(before.threshold_unit / after.threshold_unit)
    return Certificate(certificate.kind, witness=witness, roots=certificate.roots)


def _in_stored_units(question: Question, values: ndarray) -> ndarray:
    """Columns [n, c] beside the stored weights, where the question has those times a power of two."""
    stored = question.stored
    largest = float(np.max(np.abs(stored), initial=0.0))
    if largest and question.k < 0:
        scaled = question.weight[: question.labels, : stored.shape[1]]
        values = values * (largest / float(np.max(np.abs(scaled))))
    with np.errstate(over="ignore"):
        rounded = values.astype(stored.dtype)
    return rounded if np.all(np.isfinite(rounded)) else values
