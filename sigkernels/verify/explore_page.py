"""A report as one page that answers in the browser: filter the sets, read their proofs, see the radii by size."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import htmlreport
from .certificate import Verdict
from .explain import explain

if TYPE_CHECKING:
    from .report import Report

MOST_LINES = 10_000  # that a page holds
_ORDER = (Verdict.UNARGMAXABLE, Verdict.NOT_EPS, Verdict.UNDECIDED, Verdict.THIN, Verdict.ARGMAXABLE)
_LARGEST_SIZE = 8  # larger sets share one colour


def explore_page(report: Report, title: str, names: Sequence[str] | None = None) -> str:
    """The whole document; it loads nothing from anywhere."""
    data = page_data(report, names)
    shown, total = len(data["lines"]), len(report)
    left_out = f" The page holds {shown:,} of them, those that cannot be predicted first." if shown < total else ""
    question = report.question
    lead = (
        f"{total:,} label sets, {question.labels:,} labels, {question.inputs:,} features. Predicted: "
        f"{question.rule}.{left_out}"
    )
    # "<" would end the script or start a comment in it
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    controls = resources.files(__package__).joinpath("explore.html").read_text(encoding="utf-8")
    return htmlreport.page(
        title,
        [
            f"<h1>{html.escape(title)}</h1>",
            f'<p class="lead">{html.escape(lead)}</p>',
            f'<script type="application/json" id="data">{text}</script>',
            controls,
        ],
    )


def page_data(report: Report, names: Sequence[str] | None = None) -> dict[str, Any]:
    """What the page shows, as plain data: counts of all sets, lines of at most ``MOST_LINES``, a histogram of radii."""
    order = sorted(range(len(report)), key=lambda i: (_ORDER.index(report.verdicts[i]), i))[:MOST_LINES]
    lines = []
    for i in order:
        labels = report.sets[i].tolist()
        lines.append(
            {
                "line": i,
                "verdict": str(report.verdicts[i]),
                "labels": labels if names is None else [names[label] for label in labels],
                "size": len(labels),
                "lo": _number(report.radius_lo[i]),
                "hi": _number(report.radius_hi[i]),
                "proof": report.certificate(i).kind,
                "words": explain(report, i, names),
            }
        )
    return {"counts": report.counts(), "lines": lines, "radii": radii_by_size(report)}


def radii_by_size(report: Report) -> dict[str, Any]:
    """How many sets of each size have a radius (its lower bound) in each tenth power of ten."""
    possible = np.array([v in (Verdict.ARGMAXABLE, Verdict.THIN) for v in report.verdicts], dtype=bool)
    possible &= report.radius_lo > 0
    if not possible.any():
        return {"start": 0.0, "step": 0.25, "sizes": []}
    exponents = np.log10(report.radius_lo[possible])
    step = 0.25 if np.ptp(exponents) <= 8 else float(np.ceil(np.ptp(exponents) / 8) / 4)
    start = float(np.floor(exponents.min() / step) * step)
    bins = ((exponents - start) / step).astype(np.int64)
    sizes = np.minimum(report.sets.sizes.numpy()[possible], _LARGEST_SIZE)
    groups = [
        {
            "size": f"{size}" if size < _LARGEST_SIZE else f"{_LARGEST_SIZE} or more",
            "counts": np.bincount(bins[sizes == size], minlength=int(bins.max()) + 1).tolist(),
        }
        for size in np.unique(sizes).tolist()
    ]
    return {"start": start, "step": step, "sizes": groups}


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if np.isfinite(value) else None
