"""The second look: every line of a report proved again from (W, y, certificate) alone, without any solver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from .certificate import Certificate, Verdict
from .check import prove, trivial_bounds
from .progress import Progress
from .question import ActiveSets, Question
from .witness_check import prove_witnesses

BLOCK = 4_000_000  # entries of the witnesses that are put together at a time


class Lines(NamedTuple):
    """What a report claims about m label sets, and the certificates that are to prove it."""

    sets: ActiveSets  # with the rows of the domain
    verdicts: ndarray  # [m]
    radius_lo: ndarray  # [m]
    radius_hi: ndarray  # [m]
    proof_of: ndarray  # [m] numbers of certificates
    certificates: Sequence[Certificate]

    def certificate(self, i: int) -> Certificate:
        """The certificate of line i; one that proves nothing where it names none."""
        at = int(self.proof_of[i])
        return self.certificates[at] if 0 <= at < len(self.certificates) else Certificate()


def rejections(question: Question, lines: Lines, bar: Progress) -> list[str]:
    """Why each line is not proved; empty where it is."""
    proved = _plain_witnesses(question, lines, bar)
    seen: dict[tuple, str] = {}
    out = []
    for i, active in enumerate(lines.sets):
        if proved[i]:
            out.append("")
            continue
        verdict, lo, hi = str(lines.verdicts[i]), float(lines.radius_lo[i]), float(lines.radius_hi[i])
        key = (int(lines.proof_of[i]), verdict, lo, hi, active.tobytes())
        if key not in seen:
            seen[key] = _rejection(question, active, lines.certificate(i), verdict, lo, hi)
        out.append(seen[key])
        bar.add(1)
    return out


def _plain_witnesses(question: Question, lines: Lines, bar: Progress) -> ndarray:
    """The lines [m] that claim ``ARGMAXABLE`` by an input alone and are right, many with one matrix product."""
    proved = np.zeros(len(lines.sets), dtype=bool)
    claimed = [
        i
        for i, active in enumerate(lines.sets)
        if lines.verdicts[i] == Verdict.ARGMAXABLE
        and _is_plain_witness(lines.certificate(i), question.d)
        and not _disordered(question, active)
        and trivial_bounds(question, active).argmaxable is None
        and question.trivial_radius <= lines.radius_hi[i]
    ]
    step = max(1, BLOCK // question.d)
    for start in range(0, len(claimed), step):
        part = np.array(claimed[start : start + step])
        x = np.array([lines.certificate(i).witness for i in part.tolist()], dtype=np.float64)
        target = np.maximum(lines.radius_lo[part], question.tol)
        lo, holds = prove_witnesses(question, lines.sets, part, x, target)
        proved[part] = holds & (lo >= target)
        bar.add(int(proved[part].sum()))
    return proved


def _is_plain_witness(certificate: Certificate, d: int) -> bool:
    x = certificate.witness if isinstance(certificate, Certificate) and certificate.kind == "witness" else None
    if not isinstance(x, np.ndarray) or x.shape != (d,) or x.dtype not in (np.float32, np.float64):
        return False
    return certificate.multipliers is None and certificate.bounds is None and bool(np.all(np.isfinite(x)))


def _disordered(question: Question, active: ndarray) -> bool:
    return bool(np.any(np.diff(active) <= 0) or np.any((active < 0) | (active >= question.n)))


def _rejection(
    question: Question, active: ndarray, certificate: Certificate, verdict: str, lo: float, hi: float
) -> str:
    """Why this line is not proved; empty when it is."""
    if _disordered(question, active):
        return f"its labels are not distinct numbers from 0 to {question.n - 1}, in order"
    proof = prove(question, active, certificate, target=max(lo, question.tol) if verdict == "ARGMAXABLE" else lo)
    if not proof.lo >= lo:
        return f"radius_lo = {lo} is not proved (only {proof.lo}). {proof.reason}"
    if not proof.hi <= hi:
        return f"radius_hi = {hi} is not proved (only {proof.hi}). {proof.reason}"
    proved = proof.verdict(question.tol)
    weaker = {"THIN": ("ARGMAXABLE",), "NOT_EPS": ("UNARGMAXABLE",), "UNDECIDED": tuple(Verdict)}
    if str(proved) != verdict and proved not in weaker.get(verdict, ()):
        return f"{verdict} is not proved: {proof.reason or f'the certificate proves {proved}'}"
    return ""
