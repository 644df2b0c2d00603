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
from .check import Proof, radius_of_margin
from .code_words import prove_code_words
from .question import Question
from .rotations import notch_inputs, prove_rotations, representative_of, representatives
from .witness import alternation_certificate, roots_certificate

FEW = 2000  # sets for which a thin closed form is not enough: they are decided one by one
MANY = 60_000  # sets with label 0 that are gone through for classes of rotations


@dataclass(frozen=True)
class Group:
    """``count`` label sets that one closed form decides: all of ``size`` labels, in ``runs`` runs (-1: in any number).

    Or, with the kind "rotations", those of them that are rotations of the set ``labels``.
    """

    size: int
    runs: int
    count: int
    kind: str  # "codes", "roots", "alternation" or "rotations"
    verdict: Verdict
    radius_lo: float
    radius_hi: float
    labels: tuple[int, ...] = ()

    def holds(self, active: ndarray, runs: int, n: int) -> bool:
        """Whether a set of labels, in this many runs, belongs to the group."""
        if len(active) != self.size or self.runs not in (-1, runs):
            return False
        return self.kind != "rotations" or representative_of(active, n) == self.labels

    def certificate(self, active: ndarray, question: Question) -> Certificate:
        """What proves one set of the group by itself."""
        if self.kind == "roots":
            return roots_certificate(active, question.n)
        if self.kind == "alternation":
            return alternation_certificate(active, question.n, question.k)
        if self.kind == "rotations":
            x = np.zeros(question.d)
            x[: question.dft_columns] = notch_inputs(question, active[None, :])[0]
            return Certificate("witness", witness=x)
        return Certificate("codes")

    def __str__(self) -> str:
        if self.kind == "rotations":
            return f"{self.count:,} rotations of {self.labels}: {self.verdict}"
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
    found: list[Group] = []
    for runs in range(min(size, n - size) + 1):
        count = sets_with_runs(n, size, runs)
        kind = "roots" if runs <= question.k else "alternation"
        group = _group(question, size, runs, count, kind) if count else None
        if group is None or (group.verdict == Verdict.THIN and count <= FEW and question.is_dense):
            continue
        if group.verdict == Verdict.THIN and math.comb(n - 1, size - 1) <= MANY:
            found += _rotation_groups(question, size, runs, group)
        else:
            found.append(group)
    return found


def _group(question: Question, size: int, runs: int, count: int, kind: str) -> Group | None:
    proof = prove_group(question, size, runs, kind)
    if proof.argmaxable is None:
        return None
    lo = _weaker(proof.lo)
    return Group(size, runs, count, kind, proof._replace(lo=lo).verdict(question.tol), lo, proof.hi)


def _rotation_groups(question: Question, size: int, runs: int, whole: Group) -> list[Group]:
    """One group for each class of rotations, with a radius of its own."""
    active, counts = representatives(question.n, size)
    mine = count_runs(active, question.n) == runs
    active, counts = active[mine], counts[mine]
    out = []
    for labels, count, radius in zip(active, counts.tolist(), prove_rotations(question, active).tolist(), strict=True):
        lo = max(whole.radius_lo, _weaker(radius))
        verdict = Verdict.ARGMAXABLE if lo >= question.tol else Verdict.THIN
        out.append(Group(size, runs, count, "rotations", verdict, lo, whole.radius_hi, tuple(labels.tolist())))
    return out


def _weaker(bound: float) -> float:
    """A lower bound that any library proves again."""
    return bound - 1e-9 * abs(bound) if math.isfinite(bound) else bound


def prove_groups(question: Question, groups: list[Group]) -> list[Proof]:
    """What closed forms prove for each of the groups, from what it says about its sets alone."""
    proofs = [prove_group(question, g.size, g.runs, "roots" if g.kind == "rotations" else g.kind) for g in groups]
    for size in {group.size for group in groups if group.kind == "rotations"}:
        which = [i for i, g in enumerate(groups) if g.kind == "rotations" and g.size == size and _is_sound(question, g)]
        if not which:
            continue
        active = np.array([groups[i].labels for i in which], dtype=np.int64)
        for i, radius in zip(which, prove_rotations(question, active).tolist(), strict=True):
            proofs[i] = proofs[i]._replace(lo=max(proofs[i].lo, radius))
    return proofs


def _is_sound(question: Question, group: Group) -> bool:
    """Whether its representative is a set of its size and runs, and these are few enough."""
    active = np.array(group.labels, dtype=np.int64)
    if question.k < 0 or active.shape != (group.size,) or not group.size or np.any(np.diff(active) <= 0):
        return False
    inside = active[0] >= 0 and active[-1] < question.n
    return bool(inside and 0 < group.runs <= question.k and count_runs(active[None, :], question.n)[0] == group.runs)


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
    return radius_of_margin(question, log_margin - 0.5 * math.log(question.n))
