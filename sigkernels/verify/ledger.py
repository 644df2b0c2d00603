"""The state of a verification: what has been proved about each set, and by which stage."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy import ndarray

from .certificate import Certificate, Verdict
from .check import prove, prove_witnesses, trivial_bounds
from .cone import Found
from .problem import Problem, Sets

OUTWARD = 1e-9  # what is reported is this much weaker than what was proved, so that any BLAS proves it again


def _down(bound: float) -> float:
    return bound - OUTWARD * abs(bound) if math.isfinite(bound) else bound


def _up(bound: float) -> float:
    return bound + OUTWARD * abs(bound) if math.isfinite(bound) else bound


class Ledger:
    """Bounds and certificates of m sets. Only what the checker proves enters."""

    def __init__(self, problem: Problem, sets: Sets, radius: bool, on_settled: Callable[[int], None]):
        self.problem, self.sets = problem, sets
        self.target = math.inf if radius else problem.tol
        self.on_settled = on_settled
        m = len(sets)
        self.lo = np.full(m, -math.inf)
        self.hi = np.full(m, math.inf)
        self.yes = np.zeros(m, dtype=bool)
        self.no = np.zeros(m, dtype=bool)
        self.lower: list[Certificate | None] = [None] * m
        self.upper: list[Certificate | None] = [None] * m
        self.stage = np.full(m, "", dtype=object)
        self.current = "constant"
        for i in range(m):
            bounds = trivial_bounds(problem, sets[i])
            self.lo[i], self.hi[i] = _down(bounds.lo), _up(bounds.hi)
            if bounds.argmaxable is False:
                row = problem.constant_answer(sets[i])[:1]
                self.offer(i, Certificate("gordan", support=row, multipliers=np.ones(1)))

    def settled(self) -> ndarray:
        """The sets about which nothing more can be asked [m]."""
        tol = self.problem.tol
        return self.no | (self.yes & ((self.lo >= tol) | (self.hi < tol)))

    def is_settled(self, i: int) -> bool:
        """Whether nothing more can be asked about set i."""
        tol = self.problem.tol
        return bool(self.no[i] or (self.yes[i] and (self.lo[i] >= tol or self.hi[i] < tol)))

    def open(self) -> ndarray:
        """The numbers of the sets that are not settled."""
        return np.flatnonzero(~self.settled())

    def begin(self, stage: str) -> None:
        self.current = stage

    def _credit(self, i: int) -> None:
        self.stage[i] = self.current
        if self.no[i] or self.lo[i] >= self.problem.tol:
            self.on_settled(1)

    def offer(self, i: int, certificate: Certificate) -> bool:
        """Prove a certificate for set i and keep what it adds; whether it decided yes or no."""
        proof = prove(self.problem, self.sets[i], certificate, self.target)
        lo, hi = _down(proof.lo), _up(proof.hi)
        if (lo > self.lo[i] and not self.yes[i]) or (proof.argmaxable and (lo > self.lo[i] or not self.yes[i])):
            self.lo[i] = max(lo, self.lo[i])
            self.lower[i] = certificate
        if proof.argmaxable is False:
            if not self.no[i]:
                self.no[i], self.upper[i], self.hi[i] = True, certificate, min(self.hi[i], hi)
                self._credit(i)
        else:
            if hi < self.hi[i] and certificate.multipliers is not None:
                bound = Certificate("dual", support=certificate.support, multipliers=certificate.multipliers)
                self.hi[i], self.upper[i] = hi, bound
            if proof.argmaxable:
                self.yes[i] = True
                self._credit(i)
        return proof.argmaxable is not None

    def offer_found(self, found: Found) -> None:
        """Prove what a solver found: witnesses in one batch, multipliers one by one."""
        if len(found.witness_of):
            lo, holds = prove_witnesses(self.problem, self.sets, found.witness_of, found.witness, self.target)
            for row in np.flatnonzero(holds):
                i = int(found.witness_of[row])
                low = _down(float(lo[row]))
                if low > self.lo[i] or not self.yes[i]:
                    self.lo[i] = max(self.lo[i], low)
                    self.lower[i] = Certificate("witness", witness=found.witness[row].copy())
                    self.yes[i] = True
                    self._credit(i)
        for i, (support, multipliers) in zip(found.multipliers_of, found.multipliers, strict=True):
            if len(support):
                self.offer(i, Certificate("gordan", support=support, multipliers=multipliers))

    def certificate(self, i: int) -> Certificate:
        """Everything that is proved about set i, in one certificate."""
        lower, upper = self.lower[i], self.upper[i]
        if self.no[i] and upper is not None:
            return Certificate(
                upper.kind,
                witness=lower.witness if lower is not None else None,
                support=upper.support,
                multipliers=upper.multipliers,
            )
        support = upper.support if upper is not None else None
        multipliers = upper.multipliers if upper is not None else None
        if lower is not None:
            kind = lower.kind if self.yes[i] else ("dual" if upper is not None else "none")
            return Certificate(kind, lower.witness, support, multipliers, lower.roots)
        return Certificate("dual" if upper is not None else "none", support=support, multipliers=multipliers)

    def verdict(self, i: int) -> Verdict:
        """The strongest verdict that is proved for set i."""
        if self.no[i]:
            return Verdict.UNARGMAXABLE
        if self.yes[i]:
            return Verdict.ARGMAXABLE if self.lo[i] >= self.problem.tol else Verdict.THIN
        return Verdict.NOT_EPS if self.hi[i] < self.problem.tol else Verdict.UNDECIDED
