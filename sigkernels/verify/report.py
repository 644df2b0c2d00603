"""The report of a verification: one line per label set, each with its proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import ndarray

from ..labels import LabelSets
from ..validation import check_int
from .certificate import Certificate, Verdict
from .inputs import as_question, checked_question
from .label_names import in_words
from .ledger import CLOSED, Ledger
from .progress import Asked, Progress
from .question import Question, active_labels
from .recheck import Lines, rejections
from .threads import one_blas_thread
from .witness import closed_form_input

if TYPE_CHECKING:
    from .repair import Repair

SHOWN = 5  # impossible sets in a summary


class StageReport(NamedTuple):
    """What one stage of the pipeline did with the (distinct) sets that were still open.

    ``decided`` counts verdicts; for the stages of the radius, intervals that were closed.

    Example:
        >>> [stage.name for stage in sk.verify(np.eye(3), [[0]]).stages][0]
        'constant'
    """

    name: str
    taken: int
    decided: int
    seconds: float


class CheckResult:
    """The outcome of ``Report.check``: true when every line was proved again.

    Example:
        >>> bool(sk.verify(np.eye(3), [[0], [1, 2]]).check())
        True
    """

    def __init__(self, ok: ndarray, failures: list[tuple[int, str]], unchecked: int = 0):
        self.ok = ok  # [m] bool
        self.failures = failures  # (line, reason)
        self.unchecked = unchecked  # sets whose proof was not kept

    def __bool__(self) -> bool:
        return bool(self.ok.all()) and not self.unchecked

    def all(self) -> bool:
        """Whether every line holds."""
        return bool(self)

    def __len__(self) -> int:
        return len(self.ok)

    def __iter__(self) -> Iterator[bool]:
        return iter(self.ok.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> ndarray:
        return np.array(self.ok, dtype=dtype)

    def __repr__(self) -> str:
        unchecked = f"; {self.unchecked:,} sets have no proof that was kept" if self.unchecked else ""
        if not self.failures:
            return f"CheckResult(all {len(self)} lines proved{unchecked})"
        line, reason = self.failures[0]
        return f"CheckResult({len(self.failures)} of {len(self)} lines rejected; line {line}: {reason}{unchecked})"


class Report:
    """Verdicts, radii and certificates, in the order of the label sets that were given.

    Attributes:
        verdicts: ``[m]`` object array of :class:`Verdict` (each equals its name as a string).
        radius_lo, radius_hi: ``[m]`` float64, proved bounds on the radius of each set: a distance between inputs, for
            centres in the ball that ``question.ball`` names.
        stages: one ``StageReport`` per stage of the pipeline.
        certificates, proof_of: the proofs, and ``[m]`` which of them is that of each set.
        stage: ``[m]`` which stage gave the final proof.
        notes: how the classifier was read, and what could not be done.
        names: one name for each label, for output in words, or None.

    Example:
        >>> report = sk.verify(np.eye(3), [[0], [1, 2]])
        >>> report
        Report(2 label sets: 2 ARGMAXABLE)
        >>> report.counts()["ARGMAXABLE"], bool((report.radius_lo > 0).all())
        (2, True)
    """

    question: Question
    sets: LabelSets
    verdicts: ndarray
    radius_lo: ndarray
    radius_hi: ndarray
    certificates: Sequence[Certificate]
    proof_of: ndarray
    stage: ndarray
    stages: list[StageReport]
    notes: list[str]
    names: tuple[str, ...] | None = None

    def __init__(
        self,
        question: Question,
        sets: LabelSets,
        verdicts: ndarray,
        radius_lo: ndarray,
        radius_hi: ndarray,
        certificates: Sequence[Certificate],
        proof_of: ndarray,
        stage: ndarray,
        stages: list[StageReport],
        notes: list[str],
    ):
        self.question, self.sets = question, sets
        self.verdicts, self.radius_lo, self.radius_hi = verdicts, radius_lo, radius_hi
        self.certificates, self.proof_of = certificates, proof_of
        self.stage, self.stages, self.notes = stage, stages, notes

    @classmethod
    def from_ledger(
        cls,
        question: Question,
        sets: LabelSets,
        inverse: ndarray,
        ledger: Ledger,
        stages: list[StageReport],
        notes: list[str],
    ) -> Report:
        """The report on ``sets``, whose distinct members a ledger has decided."""
        m = len(ledger.sets)
        verdicts = np.empty(m, dtype=object)
        verdicts[:] = [ledger.verdict(i) for i in range(m)]
        if any(v in (Verdict.UNDECIDED, Verdict.NOT_EPS) for v in verdicts):
            notes = [*notes, _why_open(question)]
        return cls(
            question,
            sets,
            verdicts[inverse],
            ledger.lo[inverse],
            ledger.hi[inverse],
            [ledger.certificate(i) for i in range(m)],
            inverse,
            ledger.stage[inverse],
            stages,
            notes,
        )

    def __len__(self) -> int:
        return len(self.verdicts)

    def _line(self, i: int) -> int:
        """Line i, counted from the end where it is negative."""
        i = check_int("i", i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"line {i} is out of range for a report on {len(self)} label sets")
        return i % len(self)

    def certificate(self, i: int) -> Certificate:
        """What proves line i."""
        return self.certificates[int(self.proof_of[self._line(i)])]

    def witness(self, i: int) -> ndarray | None:
        """An input x ``[d]`` that predicts set i, or None when none is known.

        It holds fractions (``fractions.Fraction``) where no float64 numbers were found that do.

        With a free threshold (``rule="topk"``, ``"argmax"``) the labels of the set are those with a logit above
        :meth:`logit_threshold`.

        Where a bias leaves no such input in the ball (``radius_lo`` is below 0) it lies beyond.

        For a set proved by ``roots`` these are the coefficients of a polynomial with the right signs, rounded to
        float64: the proof is the certificate, and the rounding may have lost signs that are closer to zero than
        1e-16.
        """
        i = self._line(i)
        certificate = self.certificate(i)
        if self.verdicts[i] not in (Verdict.ARGMAXABLE, Verdict.THIN):
            return None
        bounds_alone = certificate.witness is None or not self.radius_lo[i] > 0  # it bounds the radius and no more
        columns = self.question.codes if certificate.kind == "codes" else self.question.dft_columns
        if certificate.kind in ("roots", "codes") and columns and bounds_alone:
            return closed_form_input(self.question, certificate.kind, self.sets[i].numpy())
        return None if certificate.witness is None else certificate.witness[: self.question.inputs].copy()

    def explain(self, i: int, names: Sequence[str] | None = None) -> str:
        """What proves line i, in words; ``names [n]`` (or those of the report) replace the numbers of the labels."""
        from .explain import explain

        return explain(self, self._line(i), self.names if names is None else names)

    def logit_threshold(self, i: int) -> Any:
        """What the logits at ``witness(i)`` are compared with: a number, or one for each label ``[n]``."""
        question, witness = self.question, self.certificate(i).witness
        if not question.threshold_unit or witness is None:
            return question.rule.logit()
        if isinstance(witness[-1], Fraction):
            return -witness[-1] * Fraction(question.threshold_unit) / Fraction(2) ** question.exponent
        with np.errstate(over="ignore"):
            return -np.ldexp(question.threshold_unit * witness[-1], -question.exponent)

    def check(self, head_or_matrix: Any = None, bias: Any = None, *, progress: Asked = None) -> CheckResult:
        """Prove every line again from (W, y, certificate) alone, without any solver.

        ``head_or_matrix``, ``bias``: check against this classifier instead of the one in the report; a bias alone
        replaces that of the report. The rule and its threshold are the report's. ``progress``: as for ``sk.verify``.
        """
        question = self.question_of(head_or_matrix, bias)
        columns = (self.verdicts, self.radius_lo, self.radius_hi, self.proof_of, self.stage)
        if any(len(column) != len(self.sets) for column in columns):
            raise ValueError(f"the report has {len(self)} lines for {len(self.sets)} label sets: it was changed")
        sets = question.with_domain(active_labels(self.sets))
        lines = Lines(sets, self.verdicts, self.radius_lo, self.radius_hi, self.proof_of, self.certificates)
        with one_blas_thread(), Progress(progress, len(sets), "check") as bar:
            reasons = rejections(question, lines, bar)
        failures = [(i, reason) for i, reason in enumerate(reasons) if reason]
        ok = np.array([not reason for reason in reasons], dtype=bool)
        return CheckResult(ok, failures)

    def question_of(self, head_or_matrix: Any, bias: Any) -> Question:
        """The question of the report, asked about this classifier or with this bias where they are given."""
        question = q = self.question
        if head_or_matrix is not None:
            question, _ = as_question(head_or_matrix, bias, q.tol, q.box, q.rule, q.domain, q.ball.name)
            if (question.n, question.d) != (self.question.n, self.question.d):
                raise ValueError(
                    f"head_or_matrix is {question.labels} × {question.inputs}, "
                    f"the report is about {self.question.labels} × {self.question.inputs}"
                )
        elif bias is not None:
            question = checked_question(q.stored, bias, q.k, q.tol, q.box, q.rule, q.codes, q.domain, q.ball.name)
        return question

    def repair(self, *, progress: bool | Callable[[int, int], None] | None = None) -> Repair:
        """The smallest change found that makes every ``UNARGMAXABLE`` set possible, verified again.

        Args:
            progress: as for ``sk.verify``, but it counts ways to repair the sets: the first that does ends the search.

        Returns:
            A ``Repair``: columns to append to W, with the report on ``[W | columns]``, and heads with fixed columns
            (``DFTHead.from_linear``) that do the same by a closed form. Where nothing is impossible it says so.
        """
        from .repair import repair

        return repair(self, progress)

    # What people look at

    def words(self, i: int) -> str:
        """The labels of set i, by name where ``names`` were given: ``{cat, dog}``."""
        return in_words(self.sets[self._line(i)].tolist(), self.names)

    def counts(self) -> dict[str, int]:
        """How many sets got each verdict."""
        return {v.value: int(sum(x == v for x in self.verdicts)) for v in Verdict}

    def summary(self) -> str:
        """A few lines of text: the verdicts, the radii, the stages, the notes."""
        lines = [
            f"{len(self)} label sets, {self.question.labels} labels, {self.question.inputs} features "
            f"(tol {self.question.tol:g}, {self.question.ball}); predicted: {self.question.rule}"
        ]
        lines += verdict_lines(self.counts())
        for verdict, name in ((Verdict.ARGMAXABLE, "argmaxable"), (Verdict.THIN, "thin")):
            low = self.radius_lo[np.array([v == verdict for v in self.verdicts], dtype=bool)]
            if low.size:
                lines.append(f"  radius of the {name} sets: at least {low.min():.3g} (median {np.median(low):.3g})")
        never = np.flatnonzero([v == Verdict.UNARGMAXABLE for v in self.verdicts]).tolist()
        if never:
            more = f" and {len(never) - SHOWN} more" if len(never) > SHOWN else ""
            lines.append(f"  impossible: {', '.join(self.words(i) for i in never[:SHOWN])}{more}")
        yes = np.array([v in (Verdict.ARGMAXABLE, Verdict.THIN) for v in self.verdicts], dtype=bool)
        if yes.any() and any(s.name == "radius" for s in self.stages):
            lo, hi = self.radius_lo[yes], self.radius_hi[yes]
            with np.errstate(invalid="ignore"):  # both are infinite where no row of W is a boundary
                gap = np.where(lo == hi, 0.0, (hi - lo) / np.abs(hi))
            left = int(np.sum(gap > CLOSED))
            widest = f"; {left} open, the widest by {gap.max():.2g} of its size" if left else ""
            lines.append(f"  radius closed to {CLOSED:g} of its size for {len(gap) - left} of {len(gap)} sets{widest}")
        for s in self.stages:
            if s.taken:
                did = "closed" if s.name.startswith("radius") else "decided"
                lines.append(f"  {s.name:<13} {did} {s.decided} of {s.taken} in {s.seconds:.3f} s")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def __repr__(self) -> str:
        parts = ", ".join(f"{count} {name}" for name, count in self.counts().items() if count)
        return f"Report({len(self)} label sets: {parts or 'none'})"

    def to_numpy(self) -> dict[str, ndarray]:
        """One array per column: verdict, radius_lo, radius_hi, active (labels in the set), stage, proof."""
        return {
            "verdict": np.array([str(v) for v in self.verdicts], dtype="U12"),
            "radius_lo": self.radius_lo.copy(),
            "radius_hi": self.radius_hi.copy(),
            "active": self.sets.sizes.numpy(),
            "stage": np.array([str(v) for v in self.stage], dtype="U16"),
            "proof": np.array([self.certificate(i).kind for i in range(len(self))], dtype="U12"),
        }

    def to_dataframe(self) -> Any:
        """The columns of :meth:`to_numpy` as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe needs pandas: pip install pandas, or use to_numpy()") from None
        return pandas.DataFrame(self.to_numpy())

    def plot(self, axes: Any = None) -> Any:
        """A histogram of the radii and the verdicts by number of active labels; returns the matplotlib figure.

        ``axes``: two axes to draw on; a new figure otherwise.
        """
        from .plot import plot_report

        return plot_report(self, axes)

    # Files

    def save(self, path: str | Path, matrix: bool = True) -> None:
        """Write the report to ``path`` as ``.npz``; ``matrix=False`` leaves W out (``check`` then needs it as an argument)."""
        from .report_file import save_report

        save_report(self, path, matrix)

    @classmethod
    def load(cls, path: str | Path, head_or_matrix: Any = None, bias: Any = None) -> Report:
        """Read a report that ``save`` wrote to ``path``.

        ``head_or_matrix`` is needed when it was saved without its matrix; ``bias`` alone replaces the bias in the file.

        Raises:
            ValueError: the file is damaged, no report, or about another classifier.
        """
        from .report_file import load_report

        return load_report(path, head_or_matrix, bias)


def verdict_lines(counts: dict[str, int]) -> list[str]:
    """How many sets got each verdict, one line for each that some got."""
    total = max(1, sum(counts.values()))
    return [f"  {name:<13} {count:>12,}  {100 * count / total:6.2f}%" for name, count in counts.items() if count]


def _why_open(question: Question) -> str:
    from .solvers.exact import MAX_WIDTH

    if question.k >= 0:
        return "sets left open: the entries of a DFT are irrational, so there is no exact stage for it"
    if question.d > MAX_WIDTH:
        return f"sets left open: the exact stage takes at most {MAX_WIDTH} features, and there are {question.d}"
    return "sets left open: no stage could prove an answer within its limits"
