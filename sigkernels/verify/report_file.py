"""Reports as ``.npz`` files: plain arrays, so that reading one runs no code; everything is checked on the way in."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from ..labels import LabelSets
from .certificate import Verdict
from .certificate_store import numbers_below, pack_certificates, unpack_certificates
from .files import write_arrays
from .input_ball import BALLS
from .inputs import DOMAINS, as_numpy, as_question, checked_question
from .label_names import check_names
from .question import Question
from .report import Report, StageReport
from .rules import DecisionRule

FORMAT = 4
LINES = ("verdicts", "radius_lo", "radius_hi", "proof_of", "stage")  # one entry per label set


def save_report(report: Report, path: str | Path, matrix: bool) -> None:
    """Write a report; ``matrix``: with W and the bias."""
    arrays: dict[str, ndarray] = {
        "indices": report.sets.indices.numpy(),
        "offsets": report.sets.offsets.numpy(),
        "verdicts": np.array([str(v) for v in report.verdicts], dtype="U12"),
        "radius_lo": report.radius_lo,
        "radius_hi": report.radius_hi,
        "proof_of": report.proof_of,
        "stage": np.array([str(v) for v in report.stage], dtype="U16"),
        **pack_certificates(report.certificates),
    }
    p = report.question
    if matrix:
        arrays["weight"] = p.stored
        if p.stored_bias is not None:
            arrays["bias"] = p.stored_bias
    meta = {
        "format": FORMAT,
        "n": p.labels,
        "slack": p.stored.shape[1],
        "k": p.k,
        "codes": p.codes,
        "tol": p.tol,
        "box": p.box,
    }
    meta |= {"bias": p.stored_bias is not None, "stages": [list(s) for s in report.stages], "notes": report.notes}
    meta |= {"rule": p.rule.name, "threshold": p.rule.threshold, "domain": p.domain}
    meta["ball"] = p.ball.name
    if isinstance(p.rule.threshold, ndarray):
        arrays["threshold"], meta["threshold"] = p.rule.threshold, None
    if report.names is not None:
        arrays["names"] = np.frombuffer(json.dumps(report.names).encode(), dtype=np.uint8)
    arrays["meta"] = np.array(json.dumps(meta))
    write_arrays(path, arrays)


def load_report(path: str | Path, head_or_matrix: Any, bias: Any) -> Report:
    """Read a report; ``head_or_matrix`` where it was saved without its matrix."""
    data = _arrays(path)
    try:
        about = _About.of(data)
    except (ValueError, TypeError, KeyError) as error:
        raise _unusable(path, error) from None
    if head_or_matrix is not None:
        question = about.question_of(head_or_matrix, bias)
        if about.has_bias and question.stored_bias is None:
            raise ValueError(f"{path} is about a classifier with a bias: pass bias= beside head_or_matrix=")
    elif "weight" not in data:
        raise ValueError(
            f"{path} was saved without its matrix: pass head_or_matrix= to load it, or WEIGHTS on the command line"
        )
    elif bias is not None:
        data["bias"] = as_numpy("bias", bias)
        if data["bias"].shape != (about.labels,):
            raise ValueError(
                f"bias must have shape ({about.labels},) like the labels of the report, got {data['bias'].shape}"
            )
    try:
        if head_or_matrix is None:
            question = about.question_of_stored(data["weight"], data.get("bias"))
        return _report(question, data, about)
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError) as error:
        raise _unusable(path, error) from None


class _About(NamedTuple):
    """What a file says about the question, beside the matrix."""

    labels: int
    columns: int  # that are stored
    k: int
    codes: int
    tol: float
    box: float
    rule: DecisionRule
    domain: Any
    ball: Any
    has_bias: bool
    stages: list[Any]
    notes: list[Any]

    @classmethod
    def of(cls, data: dict[str, ndarray]) -> _About:
        """From the arrays of a file."""
        meta = json.loads(str(data["meta"]))
        if meta["format"] != FORMAT:
            raise ValueError(f"its format is {meta['format']}, and this version reads format {FORMAT}")
        rule = DecisionRule.of(meta["rule"], data["threshold"] if meta["threshold"] is None else meta["threshold"])
        if meta["domain"] not in DOMAINS:
            raise ValueError(f"its domain is {meta['domain']!r}")
        if meta["ball"] not in BALLS:
            raise ValueError(f"its ball is {meta['ball']!r}")
        return cls(
            labels=meta["n"],
            columns=meta["slack"],
            k=meta["k"],
            codes=meta["codes"],
            tol=meta["tol"],
            box=meta["box"],
            rule=rule,
            domain=meta["domain"],
            ball=meta["ball"],
            has_bias=bool(meta.get("bias")),
            stages=meta["stages"],
            notes=meta["notes"],
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As of ``_shape``."""
        return self.labels, self.columns, self.k, self.codes

    def question_of(self, head_or_matrix: Any, bias: Any) -> Question:
        """The question about a classifier that was given."""
        question, _ = as_question(head_or_matrix, bias, self.tol, self.box, self.rule, self.domain, self.ball)
        if _shape(question) != self.shape:
            raise ValueError(f"head_or_matrix has {_form(*_shape(question))}; the report is about {_form(*self.shape)}")
        return question

    def question_of_stored(self, weight: ndarray, bias: ndarray | None) -> Question:
        """The question about the matrix in the file."""
        question = checked_question(
            weight, bias, self.k, self.tol, self.box, self.rule, self.codes, self.domain, self.ball
        )
        if _shape(question) != self.shape:
            raise ValueError(f"its matrix has shape {weight.shape}, and {self.shape[:2]} was expected")
        return question


def _report(question: Question, data: dict[str, ndarray], about: _About) -> Report:
    sets = LabelSets(torch.from_numpy(data["indices"]), torch.from_numpy(data["offsets"]), question.labels)
    for name in LINES:
        if data[name].shape != (len(sets),):
            raise ValueError(f"{name} has shape {data[name].shape} for {len(sets)} label sets")
    verdicts = np.empty(len(sets), dtype=object)
    verdicts[:] = [Verdict(str(v)) for v in data["verdicts"]]
    certificates = unpack_certificates(data)
    report = Report(
        question,
        sets,
        verdicts,
        data["radius_lo"].astype(np.float64, casting="safe"),
        data["radius_hi"].astype(np.float64, casting="safe"),
        certificates,
        numbers_below(len(certificates), "proof_of", data["proof_of"]),
        data["stage"].astype(object),
        [StageReport(str(name), int(taken), int(decided), float(s)) for name, taken, decided, s in about.stages],
        [str(note) for note in about.notes],
    )
    if "names" in data:
        report.names = check_names(json.loads(bytes(data["names"])), question.labels)
    return report


def _shape(question: Question) -> tuple[int, int, int, int]:
    """(labels, columns that are stored, k, codes)."""
    return question.labels, question.stored.shape[1], question.k, question.codes


def _form(labels: int, columns: int, k: int, codes: int) -> str:
    fixed = f" beside a DFT with k = {k}" + (f" and {codes} codes" if codes else "") if k >= 0 else ""
    return f"{labels} labels and {columns} columns{fixed}"


def _unusable(path: str | Path, error: Exception) -> ValueError:
    why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{path} is not a verification report that can be used: {why}")


def _arrays(path: str | Path) -> dict[str, ndarray]:
    """The arrays of an ``.npz`` file."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be that of a saved report, got {path!r}")
    try:
        zipfile.ZipFile(path).close()  # numpy takes other files for pickles
        with np.load(path, allow_pickle=False) as file:
            return {name: a for name, a in file.items() if isinstance(a, ndarray)}
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError):
        raise ValueError(f"{path} is not a verification report: it is damaged, or another kind of file") from None
