"""The report of ``verify_all``: counts over all sets, the impossible ones, and their proofs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy import ndarray

from .certificate import Certificate, Verdict
from .check import Proof
from .closed_groups import Group, count_runs, prove_groups
from .label_names import in_words
from .progress import Asked
from .question import Question
from .report import CheckResult, Report, verdict_lines
from .report_blocks import ReportBlocks

SHOWN = 5  # impossible sets in a summary


class AllSetsReport:
    """What is proved about every set of up to k labels.

    Attributes:
        sizes: the numbers of labels of the sets that were asked about.
        groups: the sets that closed forms decide, each with one proof.
        sets: a ``Report`` on the sets that were decided one by one (with ``witnesses=False`` on those of them that
            are not ``ARGMAXABLE``).
        notes: how the classifier was read, and what could not be done.
        names: one name for each label, or None.

    Example:
        >>> sk.verify_all(sk.DFTHead(64, 100, k=3, slack=2), k=2)
        AllSetsReport(5051 label sets, 4 proofs: 5051 ARGMAXABLE)
    """

    question: Question
    sizes: range
    groups: list[Group]
    sets: Report
    notes: list[str]
    names: tuple[str, ...] | None

    def __init__(
        self,
        question: Question,
        sizes: range,
        groups: list[Group],
        kept: ReportBlocks,
        notes: list[str],
        names: tuple[str, ...] | None = None,
    ):
        self.question, self.sizes, self.groups = question, sizes, groups
        self.names = names
        self.sets = kept.report()
        self.sets.names = names
        self._dropped, self._dropped_radius = kept.dropped, kept.dropped_radius
        self.notes = [*notes, *[note for note in self.sets.notes if note not in notes]]

    def __len__(self) -> int:
        return sum(group.count for group in self.groups) + len(self.sets) + self._dropped

    @property
    def proofs(self) -> int:
        """How many proofs decide all sets: one for each group, one for each set that was decided by itself."""
        return len(self.groups) + len(self.sets) + self._dropped

    def counts(self) -> dict[str, int]:
        """How many sets got each verdict."""
        out = self.sets.counts()
        out[Verdict.ARGMAXABLE.value] += self._dropped
        for group in self.groups:
            out[group.verdict.value] += group.count
        return out

    @property
    def radius_lo(self) -> float:
        """A lower bound on the radii of all sets: 0 or less where one of them is not predictable, or thin."""
        each = [group.radius_lo for group in self.groups] + [self._dropped_radius]
        return float(np.min(self.sets.radius_lo, initial=min(each)))

    def impossible(self, limit: int | None = None) -> Iterator[tuple[int, ...]]:
        """The sets that no input predicts, as tuples of labels; at most ``limit`` of them."""
        return itertools.islice(self._impossible(), limit)

    def _impossible(self) -> Iterator[tuple[int, ...]]:
        never = np.flatnonzero([v == Verdict.UNARGMAXABLE for v in self.sets.verdicts])
        for i in never.tolist():
            yield tuple(self.sets.sets[i].tolist())
        n = self.question.n
        for group in self.groups:
            if group.verdict == Verdict.UNARGMAXABLE:
                for labels in itertools.combinations(range(n), group.size):
                    if count_runs(np.array([labels]), n)[0] == group.runs:
                        yield labels

    def _find(self, labels: Iterable[int]) -> Group | int | None:
        """The group of a set, its line in ``sets``, or None where its proof was not kept."""
        active = self._active(labels)
        runs = int(count_runs(active[None, :], self.question.n)[0])
        for group in self.groups:
            if group.holds(active, runs, self.question.n):
                return group
        offsets, indices = self.sets.sets.offsets.numpy(), self.sets.sets.indices.numpy()
        at = np.flatnonzero(np.diff(offsets) == len(active))
        rows = indices[offsets[at][:, None] + np.arange(len(active))]
        hit = np.flatnonzero(np.all(rows == active, axis=1))
        return int(at[hit[0]]) if hit.size else None

    def _active(self, labels: Iterable[int]) -> ndarray:
        active = np.unique(np.array(list(labels), dtype=np.int64))
        outside = active[(active < 0) | (active >= self.question.labels)]
        if outside.size:
            raise ValueError(f"labels holds {outside[0]}, and there are the labels 0 to {self.question.labels - 1}")
        if len(active) not in self.sizes:
            raise ValueError(
                f"labels has {len(active)} labels; the report is about sets of {self.sizes[0]} to {self.sizes[-1]}"
            )
        return active

    def verdict(self, labels: Iterable[int]) -> Verdict:
        """The verdict on one set."""
        place = self._find(labels)
        if isinstance(place, Group):
            return place.verdict
        return Verdict.ARGMAXABLE if place is None else self.sets.verdicts[place]

    def certificate(self, labels: Iterable[int]) -> Certificate:
        """What proves the verdict on one set."""
        labels = list(labels)
        place = self._find(labels)
        if place is None:
            raise ValueError(f"the proof for {labels} was not kept: use witnesses=True, or sk.verify for this set")
        return (
            place.certificate(self._active(labels), self.question)
            if isinstance(place, Group)
            else self.sets.certificate(place)
        )

    def check(self, head_or_matrix: Any = None, bias: Any = None, *, progress: Asked = None) -> CheckResult:
        """Prove everything again from W and the certificates alone, without any solver.

        One entry for each group and then for each line of ``sets``; ``head_or_matrix``, ``bias`` and
        ``progress`` as of :meth:`Report.check`. With ``witnesses=False`` it is not true as a whole: what was not kept cannot be proved again.
        """
        again = self.sets.check(head_or_matrix, bias, progress=progress)
        question = self.sets.question_of(head_or_matrix, bias)
        proofs = prove_groups(question, self.groups)
        reasons = [_rejection(question, group, proof) for group, proof in zip(self.groups, proofs, strict=True)]
        failures = [(i, reason) for i, reason in enumerate(reasons) if reason]
        failures += [(len(reasons) + i, reason) for i, reason in again.failures]
        ok = np.concatenate([np.array([not r for r in reasons], dtype=bool), again.ok])
        return CheckResult(ok, failures, self._dropped)

    def summary(self) -> str:
        """A few lines of text: the verdicts, the proofs, the impossible sets, the notes."""
        q = self.question
        first, last = self.sizes[0], self.sizes[-1]
        size = f"{last}" if first == last else f"{first} to {last}"
        lines = [
            f"all {len(self):,} sets of {size} of {q.labels} labels, {q.inputs} features (tol {q.tol:g}, {q.ball}); "
            f"predicted: {q.rule}"
        ]
        lines += verdict_lines(self.counts())
        lines.append(f"  proofs        {self.proofs:>12,}")
        lines += [f"  {group}, radius at least {group.radius_lo:.3g}" for group in self.groups[:SHOWN]]
        if len(self.groups) > SHOWN:
            least = min(group.radius_lo for group in self.groups)
            lines.append(f"  and {len(self.groups) - SHOWN:,} more groups, radius at least {least:.3g}")
        never = list(self.impossible(SHOWN))
        if never:
            more = self.counts()[Verdict.UNARGMAXABLE.value] - len(never)
            lines.append(
                f"  impossible: {', '.join(in_words(s, self.names) for s in never)}"
                + (f" and {more:,} more" if more else "")
            )
        for s in self.sets.stages:
            if s.taken:
                lines.append(f"  {s.name:<13} decided {s.decided:,} of {s.taken:,} in {s.seconds:.3f} s")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def __repr__(self) -> str:
        parts = ", ".join(f"{count} {name}" for name, count in self.counts().items() if count)
        return f"AllSetsReport({len(self)} label sets, {self.proofs} proofs: {parts or 'none'})"


def _rejection(question: Question, group: Group, proof: Proof) -> str:
    """Why a group is not proved; empty when it is."""
    if not (proof.lo >= group.radius_lo and proof.hi <= group.radius_hi):
        return f"its radius {group.radius_lo} … {group.radius_hi} is not proved (only {proof.lo} … {proof.hi})"
    proved = proof.verdict(question.tol)
    if proved != group.verdict and (group.verdict, proved) != (Verdict.THIN, Verdict.ARGMAXABLE):
        return f"{group.verdict} is not proved: {proof.reason or f'the closed form proves {proved}'}"
    return ""
