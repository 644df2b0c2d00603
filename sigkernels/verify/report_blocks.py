"""One report from the reports on blocks of sets: the proofs go to a store, so that memory holds those of one block."""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray

from ..labels import LabelSets
from .certificate import Verdict
from .certificate_store import CertificateStore
from .question import Question
from .report import Report, StageReport


class ReportBlocks:
    """What was decided block by block: lines for a report, and counts of those whose proof was not kept.

    ``witnesses=False``: keep only the lines of sets that are not ``ARGMAXABLE``.
    """

    question: Question
    witnesses: bool
    dropped: int  # sets that are ARGMAXABLE, with a witness that was proved and not kept
    dropped_radius: float  # the least bound on their radii

    def __init__(self, question: Question, witnesses: bool = True):
        self.question, self.witnesses = question, witnesses
        self.dropped, self.dropped_radius = 0, math.inf
        self._certificates = CertificateStore()
        self._sets: list[LabelSets] = []
        self._columns: list[tuple[ndarray, ...]] = []  # verdicts, radius_lo, radius_hi, proof_of, stage
        self._stages: dict[str, StageReport] = {}
        self._notes: list[str] = []

    def add(self, report: Report) -> None:
        """Take in the report on a block of sets."""
        for s in report.stages:
            old = self._stages.get(s.name, StageReport(s.name, 0, 0, 0.0))
            self._stages[s.name] = StageReport(
                s.name, old.taken + s.taken, old.decided + s.decided, old.seconds + s.seconds
            )
        self._notes += [note for note in report.notes if note not in self._notes]
        if not self.witnesses:
            possible = np.array([v == Verdict.ARGMAXABLE for v in report.verdicts], dtype=bool)
            self.dropped += int(possible.sum())
            self.dropped_radius = min(self.dropped_radius, float(np.min(report.radius_lo[possible], initial=math.inf)))
            report = _lines(report, np.flatnonzero(~possible))
        if not len(report):
            return
        proof_of = report.proof_of + len(self._certificates)
        self._certificates.add(report.certificates)
        self._sets.append(report.sets)
        self._columns.append((report.verdicts, report.radius_lo, report.radius_hi, proof_of, report.stage))

    def report(self) -> Report:
        """One report on all sets that were kept, in the order in which they came."""
        none = (np.empty(0, dtype=object), np.empty(0), np.empty(0), np.empty(0, np.int64), np.empty(0, dtype=object))
        columns = zip(none, *self._columns, strict=True)
        verdicts, lo, hi, proof_of, stage = (np.concatenate(column) for column in columns)
        sets = LabelSets.cat(self._sets) if self._sets else LabelSets.from_lists([], self.question.labels)
        stages = list(self._stages.values())
        return Report(
            self.question, sets, verdicts, lo, hi, self._certificates, proof_of, stage, stages, list(self._notes)
        )


def _lines(report: Report, which: ndarray) -> Report:
    """The report on some of its sets, with their certificates alone."""
    return Report(
        report.question,
        LabelSets.from_lists([report.sets[int(i)].tolist() for i in which], report.question.labels),
        report.verdicts[which],
        report.radius_lo[which],
        report.radius_hi[which],
        [report.certificate(int(i)) for i in which],
        np.arange(len(which)),
        report.stage[which],
        report.stages,
        report.notes,
    )
