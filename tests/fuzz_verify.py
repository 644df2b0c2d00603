"""Every decision rule, domain and ball against exact rational arithmetic, on matrices that break floating-point reasoning.

    python tests/fuzz_verify.py --cases 10000

For each question (rule, threshold, domain, ball): fuzzed matrices and label sets, each verdict compared with an exact rational
oracle, each report proved again; then forged: verdicts reversed, certificates of other sets, changed vectors, radii
beyond what is possible. A forgery counts as accepted when the checker confirms a claim that is false.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from tqdm import tqdm
from verify_oracle import EXTREMES, KINDS, degenerate_matrix, is_argmaxable, is_top

from sigkernels.verify import Certificate, Report, Verdict, verify
from sigkernels.verify.check import prove

YES = (Verdict.ARGMAXABLE, Verdict.THIN)
SETS = 6  # per matrix


class Asked(NamedTuple):
    """One kind of question."""

    rule: str
    threshold: str  # "half", "number", "per label", "free" or "none"
    domain: str
    ball: str = "box"

    def __str__(self) -> str:
        return ", ".join(part for part in self if part != "none")


QUESTIONS = tuple(
    Asked(rule, threshold, domain, ball)
    for ball in ("box", "l2")
    for domain in ("all", "nonnegative")
    for rule, threshold in (
        ("threshold", "half"),
        ("threshold", "number"),
        ("threshold", "per label"),
        ("threshold", "free"),
        ("topk", "none"),
        ("argmax", "none"),
    )
)


class Case(NamedTuple):
    """A matrix, its label sets, and how they are asked about."""

    weight: np.ndarray  # [n, d]
    bias: np.ndarray | None  # [n]
    sets: list[list[int]]
    threshold: float | np.ndarray | str | None
    asked: Asked

    def truths(self) -> list[bool]:
        """What exact arithmetic says of each set."""
        nonnegative = self.asked.domain == "nonnegative"
        if self.threshold is None or isinstance(self.threshold, str):
            return [is_top(self.weight, s, self.bias, nonnegative) for s in self.sets]
        logit = np.log(self.threshold) - np.log1p(-np.asarray(self.threshold))
        shifted = (np.zeros(len(self.weight)) if self.bias is None else self.bias) - logit
        bias = shifted if np.any(shifted) else None
        return [is_argmaxable(self.weight, s, bias, nonnegative) for s in self.sets]

    def report(self, radius: bool) -> Report:
        """What the verifier says of them."""
        options = {"rule": self.asked.rule, "threshold": self.threshold}
        options |= {"domain": self.asked.domain, "ball": self.asked.ball}
        return verify(self.weight, self.sets, bias=self.bias, radius=radius, progress=False, **options)


def draw(rng: np.random.Generator, asked: Asked) -> Case:
    """A fuzzed case."""
    n, d = int(rng.integers(1, 8)), int(rng.integers(1, 4))
    kind = str(rng.choice([*KINDS, *EXTREMES]))
    W = degenerate_matrix(rng, kind, n, d)
    scale = float(np.max(np.abs(W), initial=0.0)) or 1.0
    bias = None
    if rng.random() < 0.4:
        bias = rng.integers(-2, 3, n).astype(float) if rng.random() < 0.5 else rng.standard_normal(n)
        bias = bias * scale if kind in EXTREMES else bias
    threshold: float | np.ndarray | str | None = None
    if asked.rule == "threshold":
        number = float(rng.choice([0.3, 0.9, rng.uniform(0.01, 0.99)]))
        per_label = rng.choice([0.5, 0.3, rng.uniform(0.05, 0.95)], n)
        threshold = {"half": 0.5, "number": number, "per label": per_label, "free": "free"}[asked.threshold]
    if asked.rule == "argmax":
        sets = [[int(i)] for i in rng.permutation(n)[:SETS]]
    else:
        sets = [np.flatnonzero(rng.random(n) < rng.choice([0.2, 0.5, 0.8])).tolist() for _ in range(SETS)]
    return Case(W, bias, sets, threshold, asked)


def contradictions(case: Case, report: Report, truths: list[bool]) -> list[str]:
    """Where an honest report is wrong, or does not hold when it is proved again."""
    out = []
    for i, (verdict, truth) in enumerate(zip(report.verdicts, truths, strict=True)):
        if (verdict in YES and not truth) or (verdict == Verdict.UNARGMAXABLE and truth):
            out.append(f"set {case.sets[i]} is {verdict}, and the truth is {truth}")
        if not report.radius_lo[i] <= report.radius_hi[i]:
            out.append(f"set {case.sets[i]} has radius {report.radius_lo[i]} … {report.radius_hi[i]}")
    checked = report.check()
    return out if checked else [*out, f"{checked}"]


def forged_reports(rng: np.random.Generator, report: Report) -> list[Report]:
    """The report with verdicts reversed, with the certificates of other lines, and with radii that are too large."""
    reverse, swapped, wider = copy.copy(report), copy.copy(report), copy.copy(report)
    verdicts = [Verdict.UNARGMAXABLE if v in YES else Verdict.ARGMAXABLE for v in report.verdicts]
    reverse.verdicts = np.array([*verdicts, None], dtype=object)[:-1]
    swapped.verdicts = reverse.verdicts
    swapped.proof_of = np.roll(report.proof_of, int(rng.integers(0, len(report))))
    swapped.radius_lo = np.where([v in YES for v in verdicts], report.question.tol, -np.inf)
    swapped.radius_hi = np.full(len(report), np.inf)
    finite = np.where(np.isfinite(report.radius_hi), np.abs(report.radius_hi), 1e300)
    wider.radius_lo = np.minimum(finite * 1.01 + report.question.tol, 1e308)
    wider.radius_hi = np.full(len(report), np.inf)
    wider.verdicts = np.array([*[Verdict.ARGMAXABLE] * len(report), None], dtype=object)[:-1]
    return [reverse, swapped, wider]


def accepted_forgeries(forged: Report, truths: list[bool], honest: Report) -> list[str]:
    """The lines of a forged report that the checker confirms although they are false."""
    out = []
    for i, ok in enumerate(forged.check()):
        verdict = forged.verdicts[i]
        false_verdict = (verdict in YES and not truths[i]) or (verdict == Verdict.UNARGMAXABLE and truths[i])
        if ok and (false_verdict or forged.radius_lo[i] > honest.radius_hi[i]):
            out.append(f"line {i} is confirmed as {verdict} with radius {forged.radius_lo[i]}")
    return out


def forged_certificate(rng: np.random.Generator, report: Report, line: int) -> Certificate:
    """The certificate of some line with other numbers in it, under any name."""
    kind = str(rng.choice(["witness", "gordan", "dual", "none", "roots", "alternation", "codes", "unknown"]))
    source = report.certificate(int(rng.integers(0, len(report))))
    d, n = report.question.d, report.question.n
    spread = int(rng.choice([0, 3, 300, 1000]))
    witness = np.ldexp(rng.integers(-2, 3, d) * (1 + rng.random(d) * rng.choice([0, 1e-15, 1])), spread)
    if source.witness is not None and rng.random() < 0.5:
        witness = source.witness.copy()
        witness[int(rng.integers(0, d))] *= int(rng.choice([-1, 0, 2]))
    support = np.sort(rng.choice(n, int(rng.integers(1, n + 1)), replace=False))
    multipliers = np.ldexp(rng.random(len(support)) + rng.choice([0.0, 1.0]), -spread)
    multipliers[multipliers == 0] = 1.0
    if source.multipliers is not None and source.support is not None and rng.random() < 0.5:
        support, multipliers = source.support, source.multipliers.copy()
        multipliers[int(rng.integers(0, len(support)))] *= int(rng.choice([1, 2, 3]))
    elif rng.random() < 0.2:
        multipliers = np.array([Fraction(float(m)) for m in multipliers], dtype=object)
    return Certificate(kind, witness if rng.random() < 0.7 else None, support, multipliers)


def campaign(asked: Asked, cases: int, seed: int, bar: tqdm | None = None) -> Counter:
    """Counts of one kind of question; ``failures`` lists what went wrong."""
    rng = np.random.default_rng([seed, QUESTIONS.index(asked)])
    counts: Counter = Counter()
    while counts["cases"] < cases:
        case = draw(rng, asked)
        try:
            report = case.report(radius=bool(rng.random() < 0.2))
        except ValueError as error:
            if "too far for float64" not in str(error):
                raise
            counts["refused"] += 1
            continue
        truths = case.truths()
        wrong = contradictions(case, report, truths)
        counts["cases"] += len(case.sets)
        counts["possible"] += sum(truths)
        counts["open"] += sum(v in (Verdict.UNDECIDED, Verdict.NOT_EPS) for v in report.verdicts)
        counts["contradictions"] += len(wrong)
        accepted = []
        for forged in forged_reports(rng, report):
            accepted += accepted_forgeries(forged, truths, report)
            counts["forgeries"] += len(report)
        sets = report.question.with_domain([np.array(s, dtype=np.int64) for s in case.sets])
        for i, active in enumerate(sets):
            proof = prove(report.question, active, forged_certificate(rng, report, i))
            counts["forgeries"] += 1
            if proof.argmaxable not in (None, truths[i]) or not proof.lo <= report.radius_hi[i]:
                accepted.append(f"a certificate proves {proof} for {case.sets[i]}")
            if not proof.hi >= report.radius_lo[i]:
                accepted.append(f"a certificate proves {proof} for {case.sets[i]}, of radius {report.radius_lo[i]}")
        counts["forgeries accepted"] += len(accepted)
        for line in wrong + accepted:
            message = f"{asked}: {line}; W = {case.weight.tolist()}, bias = {case.bias}, threshold = {case.threshold}"
            print(message, flush=True)
        if bar is not None:
            bar.update(len(case.sets))
    return counts


def main() -> None:
    """The whole campaign; exit code 1 when anything is contradicted or forged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="label sets for each kind of question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ball", nargs="+", choices=("box", "l2"), default=["box", "l2"], help="only these balls")
    parser.add_argument("--json", metavar="FILE", help="write the counts to this file")
    args = parser.parse_args()
    rows = {}
    questions = [asked for asked in QUESTIONS if asked.ball in args.ball]
    with tqdm(total=args.cases * len(questions), unit="case") as bar:
        for asked in questions:
            counts = rows[str(asked)] = campaign(asked, args.cases, args.seed, bar)
            print(f"{asked}: {dict(counts)}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    if any(row["contradictions"] or row["forgeries accepted"] for row in rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
