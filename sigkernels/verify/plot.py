"""Pictures of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .certificate import Verdict

if TYPE_CHECKING:
    from .report import Report

COLOURS = {
    Verdict.ARGMAXABLE: "#2a78b5",
    Verdict.THIN: "#8fbcdb",
    Verdict.NOT_EPS: "#f0b27a",
    Verdict.UNARGMAXABLE: "#c0392b",
    Verdict.UNDECIDED: "#b0b0b0",
}

BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}  # covers no bar


def plot_report(report: Report, axes: Any = None) -> Any:
    """Two pictures: the radii of the argmaxable sets, and the share of each verdict by the number of active labels."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from None
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    if np.size(axes) != 2:
        raise ValueError(f"axes must be two matplotlib axes, got {np.size(axes)}")
    left, right = np.ravel(axes)

    low = report.radius_lo
    positive = low > 0
    if positive.any():
        exponent = np.log10(low[positive])
        bins = np.linspace(exponent.min() - 0.5, exponent.max() + 0.5, 40)
        left.hist(exponent, bins=bins, color=COLOURS[Verdict.ARGMAXABLE])
        if report.question.tol > 0:
            left.axvline(np.log10(report.question.tol), color="black", linewidth=1, linestyle=":", label="tol")
            left.legend(**BESIDE)
    span = f": {low[positive].min():.2g} to {low[positive].max():.2g}" if positive.any() else ""
    left.set(
        xlabel="log10 of the proved radius",
        ylabel="label sets",
        title=f"Radius of {positive.sum()} argmaxable sets{span}",
    )

    active = report.sets.sizes.numpy()
    groups, start = np.unique(active, return_inverse=True)
    total = np.maximum(1, np.bincount(start, minlength=len(groups)))
    base = np.zeros(len(groups))
    for verdict, colour in COLOURS.items():
        mine = np.array([v == verdict for v in report.verdicts], dtype=bool)
        if mine.any():
            share = np.bincount(start[mine], minlength=len(groups)) / total
            right.bar(groups, share, bottom=base, width=0.9, color=colour, label=verdict.value)
            base += share
    if len(groups):
        right.legend(**BESIDE)
    right.set(xlabel="active labels", ylabel="share of the sets", ylim=(0, 1), title="Verdicts")
    return left.figure
