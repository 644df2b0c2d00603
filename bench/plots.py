"""The pictures of a benchmark run, for the report and for the README, drawn from its records.

Every function gives a matplotlib figure, or None where the run has nothing to show in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from sigkernels import htmlreport

OURS = "sigkernels"
TEAL, RED, GREY, BLUE = "#00798c", "#d1495b", "#7a8793", "#30638e"
# name in the legend: (colour, how the names of such peers begin)
PEERS = {
    "eager torch": ("#d1495b", ("eager", "chunks")),
    "torch.compile, zentorch": ("#edae49", ("compiled", "max-autotune", "zentorch")),
    "published method, HiGHS": ("#5c4d7d", ("",)),
}
SPEED = ("fused_loss", "losses", "lml", "topk", "predict", "logits", "verify")


def _groups(records: Sequence[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    return groups


def _colour(who: str) -> str:
    return next(colour for colour, begins in PEERS.values() if who.startswith(begins))


def ratios(records: Sequence[Any]) -> Any:
    """One line per case: the time of each peer over ours."""
    lines = []
    for group, members in _groups([r for r in records if r.suite in SPEED]).items():
        ours = next((r for r in members if r.ours), None)
        peers = [r for r in members if not r.ours]
        if ours is not None and peers:
            lines.append((group, [(r.who, r.seconds / ours.seconds) for r in peers]))
    if not lines:
        return None
    figure, axes = htmlreport.new_figure(8.4, 0.9 + 0.235 * len(lines))
    axes.axvline(1, color="#1d2730", linewidth=1)
    for place, (group, peers) in enumerate(lines):
        best = max(factor for _, factor in peers)
        axes.plot([1, best], [place, place], color="#cfd8de", linewidth=1.2, zorder=1)
        for who, factor in peers:
            hollow = "no DFT" in who and "k=-1" not in group
            colour = _colour(who)
            axes.plot(factor, place, "o", color=colour, markersize=6, markerfacecolor="white" if hollow else colour)
    for name, (colour, _) in PEERS.items():
        axes.plot([], [], "o", color=colour, label=name)
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", label="hollow: does less (no DFT part)")
    axes.set_yticks(range(len(lines)), [group for group, _ in lines], fontsize=7.5)
    axes.set(xscale="log", xlabel="time of the other / time of sigkernels (right of the line: sigkernels is faster)")
    low, high = axes.get_xlim()
    axes.set_xticks([t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= t <= high])
    axes.minorticks_off()
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.grid(True, axis="x", color="#e3e8ec", linewidth=0.8)
    axes.grid(False, axis="y")
    htmlreport.legend(figure, columns=4)
    return figure


def memory(records: Sequence[Any]) -> Any:
    """What a step adds at its peak: gradients, and everything beside them."""
    chosen = [r for r in records if r.suite == "memory" and r.peak_bytes is not None]
    if not chosen:
        return None
    chosen = [r for members in _groups(chosen).values() for r in members]
    figure, axes = htmlreport.new_figure(8.4, 0.9 + 0.27 * len(chosen))
    for place, record in enumerate(chosen):
        gradients = record.more.get("gradient_bytes", 0) / 2**20
        beyond = max(record.peak_bytes / 2**20 - gradients, 0)
        axes.barh(place, gradients, color=GREY, height=0.7)
        axes.barh(place, beyond, left=gradients, color=TEAL if record.ours else RED, height=0.7)
        axes.text(gradients + beyond, place, f"  {gradients + beyond:,.0f} MiB", va="center", fontsize=8)
    names = [re.sub(r"memory of a step, (.*), n=.*", r"\1", r.group) + ": " + r.who.split(",")[0] for r in chosen]
    axes.barh([0], [0], color=GREY, label="gradients of input and weight")
    axes.barh([0], [0], color=TEAL, label="besides, sigkernels")
    axes.barh([0], [0], color=RED, label="besides, eager torch")
    axes.set_yticks(range(len(chosen)), names, fontsize=8)
    axes.set(xlabel=f"MiB added at the peak of a training step, {chosen[0].group.rpartition(', ')[2]}")
    axes.set_ylim(len(chosen) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.grid(True, axis="x", color="#e3e8ec", linewidth=0.8)
    axes.grid(False, axis="y")
    htmlreport.legend(figure, columns=3)
    return figure


def roofline(records: Sequence[Any]) -> Any:
    """Rates of torch's own product and copy (the line), and that of the fused pass, which may lie above it."""
    mine = [r for r in records if r.suite == "roofline"]
    flops = next((r.more["GFLOP/s"] for r in mine if r.who == "torch sgemm"), None)
    bandwidth = next((r.more["GB/s"] for r in mine if r.who == "copy"), None)
    cases = [r for r in mine if r.ours and "flop_per_byte" in r.more]
    if flops is None or bandwidth is None or not cases:
        return None
    figure, axes = htmlreport.new_figure(8.4, 4.2)
    low = min(1.0, *(r.more["flop_per_byte"] / 2 for r in cases))
    high = max(256.0, *(r.more["flop_per_byte"] * 2 for r in cases))
    grid = [low * (high / low) ** (i / 80) for i in range(81)]
    axes.plot(grid, [min(flops, g * bandwidth) for g in grid], color="#1d2730")
    axes.text(high, flops * 1.06, f"torch sgemm {flops:.0f} GFLOP/s", ha="right", fontsize=8)
    axes.text(low * 2.1, low * 1.8 * bandwidth, f"copy {bandwidth:.0f} GB/s", fontsize=8, va="top")
    for i, record in enumerate(cases):
        colour = htmlreport.SERIES[i % len(htmlreport.SERIES)]
        share = record.more["of attainable"]
        label = f"{record.group.removeprefix('roofline, ')}: {100 * share:.0f} %"
        axes.plot(record.more["flop_per_byte"], record.more["GFLOP/s"], "o", color=colour, label=label)
    axes.set(xlabel="floating point operations per byte that must move", ylabel="GFLOP/s", xscale="log", yscale="log")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    htmlreport.legend(figure, columns=2, title="case: rate / the line")
    return figure


def scaling(records: Sequence[Any], suite: str = "scaling") -> Any:
    """Throughput against n for everyone that was measured at two or more n."""
    curves: dict[str, dict[int, float]] = {}
    for record in records:
        if record.suite == suite and record.n and record.rows:
            best = curves.setdefault(record.who, {})
            best[record.n] = max(record.rows * record.n / record.seconds, best.get(record.n, 0.0))
    curves = {who: points for who, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    figure, axes = htmlreport.new_figure(8.4, 3.6)
    for i, (who, points) in enumerate(sorted(curves.items(), key=lambda item: not item[0].startswith(OURS))):
        colour = htmlreport.SERIES[i % len(htmlreport.SERIES)]
        axes.plot(*zip(*sorted(points.items()), strict=True), "o-", color=colour, label=who)
    axes.set(xlabel="labels n", ylabel="rows × labels per second", xscale="log", yscale="log")
    htmlreport.legend(figure, columns=2)
    return figure


def throughput_rows(records: Sequence[Any]) -> list[tuple[str, ...]]:
    """(labels, who, rows/s, labels/s) of the scaling suite."""
    chosen = [r for r in records if r.suite == "scaling" and r.n and r.rows]
    return [
        (f"{r.n:,}", r.who, f"{r.rows / r.seconds:,.0f}", f"{_two_digits(r.rows * r.n / r.seconds):,}") for r in chosen
    ]


def _two_digits(value: float) -> int:
    scale = 10 ** max(math.floor(math.log10(value)) - 1, 0)
    return round(value / scale) * scale
