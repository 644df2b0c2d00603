"""Closed forms that decide many label sets at once: all of one size, or all of one size in a number of runs.

* **Codes** predict every set of up to a number of labels; nothing counts but its size.
* **The DFT** predicts every set with at most k runs of neighbouring labels around the circle: its 2q changes of sign are
  2q roots of a trigonometric polynomial of degree q. Roots lie midway between labels, so those around a label are at least
  ½, ½, 3/2, 3/2, … labels away: ``|p| ≥ Π_{j=1}^{q} sin²((2j-1)π/2n)`` at every label. The columns are orthonormal and
  ``|p| ≤ 1``, so its coefficients have a norm of at most √n.
* **A DFT without slack** predicts no set with more than k runs.

``n·C(r-1, q-1)·C(n-r-1, q-1)/q`` sets of r labels have q runs, for 0 < r < n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from ..codes import guaranteed_size
from .certificate import Certificate, Verdict
from .check import Proof
from .code_words import prove_code_words
from .question import Question
from .witness import alternation_certificate, roots_certificate


@dataclass(frozen=True)
class Group:
    """``count`` label sets that one closed form decides: all of ``size`` labels, in ``runs`` runs (-1: in any number)."""

    size: int
    runs: int
    count: int
    kind: str  # of the certificate of each of them: "codes", "roots" or "alternation"
    verdict: Verdict
    radius_lo: float
    radius_hi: float

    def certificate(self, active: ndarray, question: Question) -> Certificate:
        """What proves one set of the group by itself."""
        if self.kind == "roots":
            return roots_certificate(active, question.n)
        if self.kind == "alternation":
            return alternation_certificate(active, question.n, question.k)
        return Certificate("codes")

    def __str__(self) -> str:
        labels = f"{self.size} label{'' if self.size == 1 else 's'}"
        if self.runs > 0 and self.size > 1:
            labels += f" in {self.runs} run{'' if self.runs == 1 else 's'}"
        form = {"codes": "codes", "roots": "roots of the DFT", "alternation": "alternation"}[self.kind]
        return f"{self.count:,} sets of {labels}: {self.verdict} ({form})"


def sets_with_runs(n: int, size: int, runs: int) -> int:
    """How many sets of ``size`` of n labels on a circle consist of ``runs`` runs."""
    if size in (0, n):
        return int(runs == 0)
    if runs < 1:
        return 0
    return n * math.comb(size - 1, runs - 1) * math.comb(n - size - 1, runs - 1) // runs


def count_runs(active: ndarray, n: int) -> ndarray:
    """The runs around the circle of each row of sorted labels [m, r] → [m]."""
    if active.shape[1] in (0, n):
        return np.zeros(len(active), dtype=np.int64)
    following = np.roll(active, -1, axis=1)
    return np.count_nonzero((following - active) % n != 1, axis=1)


def closed_groups(question: Question, size: int) -> list[Group]:
    """The groups of sets of this size that closed forms decide; what is in none is to be decided one by one."""
    n = question.n
    if question.codes and size <= guaranteed_size(question.codes, n):
        group = _group(question, size, -1, math.comb(n, size), "codes")
        if group is not None and group.verdict == Verdict.ARGMAXABLE:
            return [group]
    if question.k < 0:
        return []
    found = []
    for runs in range(min(size, n - size) + 1):
        count = sets_with_runs(n, size, runs)
        kind = "roots" if runs <= question.k else "alternation"
        group = _group(question, size, runs, count, kind) if count else None
        if group is not None:
            found.append(group)
    return found


def _group(question: Question, size: int, runs: int, count: int, kind: str) -> Group | None:
    proof = prove_group(question, size, runs, kind)
    if proof.argmaxable is None:
        return None
    lo = proof.lo - 1e-9 * abs(proof.lo) if math.isfinite(proof.lo) else proof.lo  # so that any library proves it again
    return Group(size, runs, count, kind, proof._replace(lo=lo).verdict(question.tol), lo, proof.hi)


def prove_group(question: Question, size: int, runs: int, kind: str) -> Proof:
    """What a closed form proves for every set of ``size`` labels (in ``runs`` runs, where that is not -1)."""
    lowest, highest = (0.0 if question.bias is None else -math.inf), question.trivial_radius
    nothing = Proof(lowest, highest, None, f"{kind!r} proves nothing for {size} labels in {runs} runs")
    if kind == "codes":
        radius, reason = prove_code_words(question, np.arange(size))
        return Proof(lowest, highest, None, reason) if reason else Proof(max(lowest, radius), highest, True)
    if question.k < 0 or not 0 <= runs <= min(size, question.n - size) or (runs == 0) != (size in (0, question.n)):
        return nothing
    if kind == "roots" and runs <= question.k:
        return Proof(max(lowest, _radius_of_roots(question, runs)), highest, True)
    if kind == "alternation" and runs > question.k and question.is_pure_dft:
        return Proof(lowest, 0.0, False)
    return nothing


def _radius_of_roots(question: Question, runs: int) -> float:
    """The radius of every set in this many runs, rounded down; -∞ where a bias takes up the room there is."""
    log_margin = sum(2 * math.log(math.sin((2 * j - 1) * math.pi / (2 * question.n))) for j in range(1, runs + 1))
    log_margin += math.log(question.box) - 0.5 * math.log(question.n)
    log_margin -= 1e-9 * (1.0 + abs(log_margin))
    margin = math.exp(log_margin) if log_margin > -700 else 0.0
    largest = 0.0 if question.bias is None else float(np.max(np.abs(question.bias)))
    room = margin - largest * (1.0 + 1e-9)
    if room <= 0:
        return -math.inf if largest else 0.0
    return room / (float(question.norms[1].max()) * (1.0 + 1e-9))
