"""Certificates in words: why a label set can, or can never, be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray

from .certificate import Verdict
from .label_names import check_names

if TYPE_CHECKING:
    from .question import Question
    from .report import Report

_SHOWN = 12  # labels of a list


def explain(report: Report, i: int, names: Sequence[str] | None = None) -> str:
    """What proves line i, in a few sentences; ``names [n]`` replace the numbers of the labels."""
    certificate, verdict, question = report.certificate(i), report.verdicts[i], report.question
    names = check_names(names, question.labels)
    active = report.sets[i].numpy()
    lo, hi = float(report.radius_lo[i]), float(report.radius_hi[i])
    if certificate.kind == "gordan" and certificate.support is not None:
        return _impossible(question, active, certificate.support, names)
    if certificate.kind == "alternation" and certificate.support is not None:
        return (
            f"These {len(certificate.support)} labels lie around the circle of the DFT and would have to be on and off "
            f"alternately: {_listed(certificate.support, question, names)}. With k = {question.k} the logits change sign at most "
            f"{2 * question.k} times around the circle, so no input predicts this set, nor any other that has these labels "
            "so."
        )
    if verdict in (Verdict.ARGMAXABLE, Verdict.THIN):
        return f"{_possible(report, i)} {_width(lo, hi, question.tol)}"
    if verdict == Verdict.NOT_EPS:
        return f"Its region, if there is one, has a radius of at most {hi:.3g}, which is below tol = {question.tol:g}."
    return f"Nothing is proved about this set; its radius lies between {max(lo, 0.0):.3g} and {hi:.3g}."


def _impossible(question: Question, active: ndarray, support: ndarray, names: Sequence[str] | None) -> str:
    on, off = support[np.isin(support, active)], support[~np.isin(support, active)]
    inputs = on[on >= question.labels]  # in these the rows are those of the domain: x_j > 0
    on = on[on < question.labels]
    parts = [f"{_listed(on, question, names)} predicted"] if on.size else []
    parts += [f"{_listed(off, question, names)} not predicted"] if off.size else []
    parts += [f"{len(inputs)} features not negative"] if inputs.size else []
    labels = "This label" if len(on) + len(off) == 1 else f"These {len(on) + len(off)} labels"
    zero = "is never positive" if question.bias is not None else "is zero"
    return (
        f"{labels} can never come out like this at once: {'; '.join(parts)}. For every input a weighted sum of their "
        f"margins, with positive weights only, {zero}, so that they cannot all be positive. (The margin is logit minus "
        "threshold where a label is predicted, threshold minus logit where it is not.) Every other set that agrees with "
        "this one on them is ruled out, too."
    )


def _possible(report: Report, i: int) -> str:
    kind, question = report.certificate(i).kind, report.question
    if kind == "roots":
        roots = report.certificate(i).roots
        count = 0 if roots is None else len(roots)
        return (
            f"The DFT part alone predicts this set: around the circle of labels its signs change {count} times, and k = "
            f"{question.k} allows {2 * question.k}."
        )
    if kind == "codes":
        return "The codes alone predict this set: it is small enough for their closed form."
    return "An input that predicts exactly this set is known."


def _width(lo: float, hi: float, tol: float) -> str:
    if not lo > 0:
        return f"Its radius is at most {hi:.3g}."
    bounds = f"at least {lo:.3g}" if not np.isfinite(hi) else f"between {lo:.3g} and {hi:.3g}"
    thin = f", below tol = {tol:g}: rounding may lose it" if hi < tol else ""
    return f"The largest ball of inputs that predict it has a radius {bounds}{thin}."


def _listed(labels: ndarray, question: Question, names: Sequence[str] | None) -> str:
    shown = [
        str(label) if names is None else names[label] for label in labels[:_SHOWN].tolist() if label < question.labels
    ]
    more = len(labels) - len(shown)
    unit = "" if names is not None else "labels " if len(labels) > 1 else "label "
    return unit + ", ".join(shown) + (f" and {more} more" if more > 0 else "")
