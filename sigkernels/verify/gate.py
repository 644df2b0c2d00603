"""The release gate: which verdicts let a classifier pass."""

from __future__ import annotations

from typing import NamedTuple

from .certificate import Verdict
from .report import Report

TOLERABLE = tuple(v.value.lower() for v in Verdict if v is not Verdict.ARGMAXABLE)


class Gate(NamedTuple):
    """Fails closed: ``ARGMAXABLE`` passes, and of the other verdicts those that are allowed by name."""

    allowed: tuple[str, ...] = ()  # of TOLERABLE
    min_sets: int = 1

    @classmethod
    def of(cls, allow: str, min_sets: int) -> Gate:
        """From the command line: verdicts separated by commas, and the least number of label sets."""
        names = [name.strip().lower() for name in allow.split(",") if name.strip()]
        unknown = [name for name in names if name not in TOLERABLE]
        if unknown:
            raise ValueError(f"--allow {unknown[0]}: use {', '.join(TOLERABLE)}, separated by commas")
        if min_sets < 0:
            raise ValueError(f"--min-sets must be at least 0, got {min_sets}")
        return cls(tuple(name for name in TOLERABLE if name in names), min_sets)

    def failing_sets(self, report: Report) -> list[int]:
        """The lines whose verdict does not pass."""
        return [
            i
            for i, verdict in enumerate(report.verdicts)
            if verdict != Verdict.ARGMAXABLE and verdict.value.lower() not in self.allowed
        ]

    def reasons(self, report: Report) -> list[str]:
        """Why the classifier does not pass, one line each; empty when it does."""
        lines = []
        if len(report) < self.min_sets:
            lines.append(
                f"{len(report)} label sets were given, and at least {self.min_sets} are asked for (--min-sets)"
            )
        failing = self.failing_sets(report)
        for verdict in Verdict:
            mine = [i for i in failing if report.verdicts[i] == verdict]
            if mine:
                more = f" and {len(mine) - 10} more" if len(mine) > 10 else ""
                named = [str(i) if report.names is None else f"{i} {report.words(i)}" for i in mine[:10]]
                lines.append(f"{verdict}: sets {', '.join(named)}{more}")
        return lines
