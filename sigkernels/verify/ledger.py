"""The state of a verification: what has been proved about each set, and by which stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from .certificate import Certificate, Verdict
from .check import prove, trivial_bounds
from .code_words import code_points
from .question import ActiveSets, Question
from .solvers.cone import Found
from .witness_check import prove_witnesses

CLOSED = 1e-6  # an interval this narrow, relative to its radius, is closed
OUTWARD = 1e-9  # what is reported is this much weaker than what was proved, so that any BLAS proves it again


def _down(bound: float) -> float:
    return bound - OUTWARD * abs(bound) if math.isfinite(bound) else bound


def _up(bound: float) -> float:
    return bound + OUTWARD * abs(bound) if math.isfinite(bound) else bound


class Ledger:
    """Bounds and certificates of m sets. Only what the checker proves enters."""

    question: Question
    sets: ActiveSets
    target: float
    lo: np.ndarray
    hi: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    stage: np.ndarray
    current: str

    def __init__(self, question: Question, sets: ActiveSets, on_settled: Callable[[int], None]):
        self.question, self.sets = question, sets
        self.target = question.tol  # the radius that matters: bounds are not made closer than that
        self.on_settled = on_settled
        m = len(sets)
        self.lo = np.full(m, -math.inf)
        self.hi = np.full(m, math.inf)
        self.yes = np.zeros(m, dtype=bool)
        self.no = np.zeros(m, dtype=bool)
        self.proof: list[Certificate | None] = [None] * m  # of yes or no
        self.low: list[Certificate | None] = [None] * m  # the best point so far
        self.high: list[Certificate | None] = [None] * m  # the best multipliers so far
        self.stage = np.full(m, "", dtype=object)
        self.current = "constant"
        for i in range(m):
            bounds = trivial_bounds(question, sets[i])
            self.lo[i], self.hi[i] = _down(bounds.lo), _up(bounds.hi)
            if bounds.argmaxable is False:
                row = question.constant_answer(sets[i])[:1]
                self.offer(i, Certificate("gordan", support=row, multipliers=np.ones(1)))

    def settled(self) -> ndarray:
        """The sets about which nothing more can be asked [m]."""
        tol = self.question.tol
        return self.no | (self.yes & ((self.lo >= tol) | (self.hi < tol)))

    def is_settled(self, i: int) -> bool:
        """Whether nothing more can be asked about set i."""
        tol = self.question.tol
        return bool(self.no[i] or (self.yes[i] and (self.lo[i] >= tol or self.hi[i] < tol)))

    def is_closed(self, i: int) -> bool:
        """Whether the two bounds on the radius of set i agree."""
        return bool(self.hi[i] - self.lo[i] <= CLOSED * abs(self.hi[i]))

    def is_done(self, i: int) -> bool:
        """Whether the bounds of set i are as close as is asked for now."""
        return self.is_closed(i) if self.target == math.inf else self.is_settled(i)

    def closed(self) -> ndarray:
        """The sets whose bounds agree [m]."""
        with np.errstate(invalid="ignore"):  # both are infinite where no row of W is a boundary
            return (self.hi == self.lo) | (self.hi - self.lo <= CLOSED * np.abs(self.hi))

    def open(self) -> ndarray:
        """The numbers of the sets that are not settled."""
        return np.flatnonzero(~self.settled())

    def begin(self, stage: str) -> None:
        """Name the stage that gets the credit from now on."""
        self.current = stage

    def offer(self, i: int, certificate: Certificate) -> bool:
        """Prove a certificate for set i and keep what it adds; whether it proves yes or no."""
        proof = prove(self.question, self.sets[i], certificate, self.target)
        self._keep(i, certificate, _down(proof.lo), _up(proof.hi), proof.argmaxable)
        return proof.argmaxable is not None

    def offer_found(self, found: Found, exact: bool = True) -> None:
        """Prove what a solver found: witnesses in one batch, without ``exact`` sums only clear ones; multipliers one by one."""
        if len(found.witness_of):
            lo, holds = prove_witnesses(self.question, self.sets, found.witness_of, found.witness, self.target, exact)
            for row in np.flatnonzero(holds):
                certificate = Certificate("witness", witness=found.witness[row].copy())
                self._keep(int(found.witness_of[row]), certificate, _down(float(lo[row])), math.inf, True)
        for i, (support, multipliers) in zip(found.multipliers_of, found.multipliers, strict=True):
            if len(support) and not self.yes[i]:
                self.offer(i, Certificate("gordan", support=support, multipliers=multipliers))

    def _keep(self, i: int, certificate: Certificate, lo: float, hi: float, argmaxable: bool | None) -> None:
        better_yes = bool(argmaxable) and self.yes[i] and lo > self.lo[i]
        if argmaxable is not None and (self.proof[i] is None or better_yes):
            self.proof[i] = certificate
        if lo > self.lo[i]:
            self.lo[i], self.low[i] = lo, certificate
        if hi < self.hi[i] and (certificate.multipliers is not None or argmaxable is False):
            self.hi[i], self.high[i] = hi, certificate
        if argmaxable is not None and self.proof[i] is certificate:
            self.yes[i], self.no[i] = argmaxable, not argmaxable
            self.stage[i] = self.current
            if self.no[i] or self.lo[i] >= self.question.tol:
                self.on_settled(1)

    def point(self, i: int) -> ndarray | None:
        """The best input known for set i [d] in float64, predicting it or not."""
        return self.points(np.array([i]))[0]

    def points(self, which: ndarray) -> list[ndarray | None]:
        """The same for many sets."""
        coded = [i for i in which.tolist() if (low := self.low[i]) is not None and low.kind == "codes"]
        found = (
            dict(zip(coded, code_points(self.question, [self.sets[i] for i in coded]), strict=True)) if coded else {}
        )
        return [found[i] if i in found else self._witness(i) for i in which.tolist()]

    def _witness(self, i: int) -> ndarray | None:
        low = self.low[i]
        if low is None or low.witness is None:
            return None
        try:
            return low.witness.astype(np.float64)
        except OverflowError:  # exact numbers, beyond float64
            return None

    def certificate(self, i: int) -> Certificate:
        """Everything that is proved about set i, in one certificate."""
        main, low, high = self.proof[i], self.low[i], self.high[i]
        if main is None:
            main = Certificate("none" if high is None else "dual")
        fields: dict[str, Any] = {"kind": main.kind, "roots": main.roots}
        fields |= {"witness": main.witness, "support": main.support, "multipliers": main.multipliers}
        extra: dict[str, Any] = {}
        if low is not None and low is not main:
            (fields if main.witness is None else extra)["witness"] = low.witness
        if high is not None and high is not main:
            place = fields if main.support is None else extra
            place |= {"support": high.support, "multipliers": high.multipliers}
        return Certificate(**fields, bounds=Certificate("none", **extra) if extra else None)

    def verdict(self, i: int) -> Verdict:
        """The strongest verdict that is proved for set i."""
        if self.no[i]:
            return Verdict.UNARGMAXABLE
        if self.yes[i]:
            return Verdict.ARGMAXABLE if self.lo[i] >= self.question.tol else Verdict.THIN
        return Verdict.NOT_EPS if self.hi[i] < self.question.tol else Verdict.UNDECIDED
