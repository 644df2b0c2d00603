"""Draws ``docs/img/why.svg``, the first picture of the README: what a bottleneck of width 2 can say about 5 labels.

python docs/why.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

LABELS = "ABCDE"
INK, GREY, RED, TEAL = "#1d2730", "#7a8793", "#d1495b", "#00798c"


def regions(weights: np.ndarray) -> dict[str, float]:
    """Label set → the direction (angle) in the middle of its region."""
    angles = np.linspace(0, 2 * np.pi, 100_000, endpoint=False)
    signs = np.stack([np.cos(angles), np.sin(angles)], 1) @ weights.T > 0
    found: dict[str, list[float]] = {}
    for angle, row in zip(angles, signs, strict=True):
        found.setdefault("".join(np.array(list(LABELS))[row]), []).append(float(angle))
    middle = {}
    for name, where in found.items():
        middle[name] = float(np.angle(np.exp(1j * np.array(where)).mean()))
    return middle


def main() -> None:
    angle = np.deg2rad([12, 50, 90, 128, 166])
    weights = np.stack([np.cos(angle), np.sin(angle)], 1)
    reachable = regions(weights)
    everything = ["".join(c for i, c in enumerate(LABELS) if m >> i & 1) for m in range(2 ** len(LABELS))]
    everything.sort(key=lambda name: (len(name), name))

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "why", "font.family": "sans-serif"})
    figure = Figure(figsize=(9.2, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    for i, name in enumerate(LABELS):
        along = np.array([-weights[i, 1], weights[i, 0]])
        left.plot(*np.stack([-1.0 * along, 1.0 * along], 1), color=GREY, linewidth=1.2)
        left.annotate(
            name, xytext=0.42 * weights[i], xy=(0, 0), color=INK, ha="center", va="center", fontsize=10,
            arrowprops={"arrowstyle": "<-", "color": INK, "linewidth": 0.8},
        )  # fmt: skip
    for name, where in reachable.items():
        left.text(
            1.15 * np.cos(where), 1.15 * np.sin(where), "{" + ", ".join(name) + "}" if name else "∅",
            ha="center", va="center", fontsize=8.5, color=TEAL, fontweight="bold",
        )  # fmt: skip
    left.set(xlim=(-1.35, 1.35), ylim=(-1.3, 1.3), aspect="equal")
    left.set_title(
        "Two features, five labels: each line is one label's\nyes/no boundary; each wedge is one set", fontsize=10
    )
    for i, name in enumerate(everything):
        row, column = divmod(i, 4)
        can = name in reachable
        shown = "{" + ", ".join(name) + "}" if name else "∅"
        right.text(column, -row, shown, fontsize=9, ha="center", color=TEAL if can else RED, alpha=1 if can else 0.75)
        if not can:
            half = 0.06 + 0.055 * len(name)
            right.plot([column - half, column + half], [0.12 - row, 0.12 - row], color=RED, linewidth=0.8, alpha=0.75)
    right.set(xlim=(-0.6, 3.6), ylim=(-7.6, 0.7))
    right.set_title(
        f"{len(reachable)} of {len(everything)} label sets have a wedge. The other {len(everything) - len(reachable)} are\n"
        "impossible for any input, however good the encoder",
        fontsize=10,
    )
    for axes in (left, right):
        axes.axis("off")
    out = Path(__file__).parent / "img" / "why.svg"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
