"""The table and the HTML page of the demo."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import htmlreport
from ..datasets import SparseDataset
from .train import Result

HEADER = (
    "head", "parameters", "F1@5", "F1@10", "mAP", "step", "peak memory", "never predictable", "radius: least", "median"
)  # fmt: skip
EXAMPLES = 6  # packages shown by name
SHOWN_LABELS = 14


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One line per head, in the order of ``HEADER``."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        peak = result.head_peak_bytes
        verified = sum(result.verdicts.values())
        never = f"{100 * result.impossible_share:.1f} % of {verified}" if verified else "not verified"
        undecided = result.verdicts.get("UNDECIDED", 0)
        lines.append(
            (
                result.name,
                f"{result.head_parameters / 1e6:.2f} M",
                f"{result.f1_at_5[-1]:.3f}",
                f"{result.f1_at_10[-1]:.3f}",
                f"{result.mean_average_precision:.3f}",
                f"{result.step_ms:.0f} ms",
                f"{peak / 2**20:.0f} MiB" if peak is not None else "not measured",
                never + (f" ({undecided} undecided)" if undecided else ""),
                *_radii(result),
            )
        )
    return lines


def _radii(result: Result) -> tuple[str, str]:
    """The smallest and the median radius."""
    if result.radius_range is None:
        return "–", "–"
    smallest, median = (f"{radius:.2g}" for radius in result.radius_range)
    return smallest, median


def text_table(results: Sequence[Result]) -> str:
    """The table for a terminal."""
    lines = [HEADER, *rows(results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]

    def show(line: tuple[str, ...]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join([first, *rest])

    return "\n".join([show(HEADER), "  ".join("-" * w for w in widths), *map(show, lines[1:])])


def recommendations(results: Sequence[Result]) -> str:
    """For each head with impossible sets, what would make them possible."""
    return "".join(f"\n{result.name}: {result.recommendation}\n" for result in results if result.recommendation)


def page(results: Sequence[Result], verified: SparseDataset, about: dict[str, Any]) -> str:
    """The whole report. ``verified`` are the test examples whose label sets were verified."""
    bottleneck = results[1]
    parts = [
        "<h1>What can your output layer never predict?</h1>",
        f'<p class="lead">The same encoder, trained {about["epochs"]} epochs on {about["train_examples"]:,} Debian '
        f"packages to predict which of {about['num_labels']:,} packages each one depends on — with different output "
        "layers, all of which start at the frequencies of the labels. A layer that is narrower than its label set makes "
        "some sets impossible for <em>any</em> input. "
        "sigkernels counts them, with a proof for each, and offers a layer of the same width that rules none of "
        f"them out.</p><section>{_table(results)}<p class='note'>{html.escape(_reading(about))}</p></section>",
        f"<h2>Measured</h2><section>{_plots(results)}</section>",
        f"<h2>Sets that the bottleneck can never predict</h2><section>{_impossible(bottleneck, verified)}</section>",
        f"<h2>How it was run</h2><section>{_how(about)}</section>",
    ]
    return htmlreport.page("sigkernels demo", parts)


def _table(results: Sequence[Result]) -> str:
    lines = [(*line, result.description) for line, result in zip(rows(results), results, strict=True)]
    return htmlreport.table((*HEADER, ""), lines, classes=("", "", "ours", "ours", "ours"), text_columns=(len(HEADER),))


def _reading(about: dict[str, Any]) -> str:
    return (
        "Every layer starts at the frequencies of the labels, by a bias for each label. Parameters: those of the head. "
        "F1@m: harmonic mean of the mean precision and recall of the m highest labels; mAP: mean average precision of "
        f"the labels; both on {about['test_examples']:,} test packages. A full layer has the best scores: what the DFT "
        "and the codes add is that nothing is impossible. Step: median of a whole training step, encoder and optimizer "
        "included. Peak memory: what the head's loss and gradients add at the peak of one step. Never predictable: test "
        "label sets that were proved impossible at threshold 0.5, of those verified. Radius: of the largest ball of "
        "features, within ±10,000, that predict the set; a proved lower bound, for the first 40 sets; 0 for impossible "
        "ones. upgraded: the trained bottleneck with DFT and code columns beside its own, after one more epoch."
    )


def _plots(results: Sequence[Result]) -> str:
    if not htmlreport.has_matplotlib():
        return "<p>Plots need matplotlib: <code>pip install matplotlib</code>, then run the demo again.</p>"
    names = [result.name for result in results]
    colours = htmlreport.COLOURS[: len(results)]
    figures = []

    figure, axes = htmlreport.new_figure()
    for result, colour in zip(results, colours, strict=True):
        window = max(len(result.losses) // 60, 1)
        smooth = np.convolve(result.losses, np.ones(window) / window, "valid")
        axes.plot(np.arange(len(smooth)) + window, smooth, color=colour, label=result.name)
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    htmlreport.legend(figure, columns=3)
    figures.append(htmlreport.inline_svg(figure, "Training loss, averaged over neighbouring steps", "loss"))

    figure, axes = htmlreport.new_figure()
    for result, colour in zip(results, colours, strict=True):
        axes.plot(range(1, len(result.f1_at_5) + 1), result.f1_at_5, "o-", color=colour, label=result.name)
    axes.set(xlabel="epoch", ylabel="F1@5 on the test packages")
    axes.xaxis.get_major_locator().set_params(integer=True)
    htmlreport.legend(figure, columns=3)
    figures.append(htmlreport.inline_svg(figure, "F1@5 after each epoch", "f1"))

    bars: list[tuple[str, list[float], str, str]] = [
        ("ms per training step", [r.step_ms for r in results], "{:.0f}", "Time of one training step"),
        (
            "share of test sets, %",
            [100 * r.impossible_share for r in results],
            "{:.1f}",
            "Test label sets that were proved impossible",
        ),
    ]
    if all(r.head_peak_bytes is not None for r in results):
        peaks = [(r.head_peak_bytes or 0) / 2**20 for r in results]
        bars.insert(1, ("MiB", peaks, "{:.0f}", "Memory that the head adds at the peak of one step"))
    for i, (label, values, form, caption) in enumerate(bars):
        figure, axes = htmlreport.new_figure(height=2.6)
        drawn = axes.bar(names, values, color=colours, width=0.6)
        axes.bar_label(drawn, [form.format(v) for v in values], fontsize=9, padding=2)
        axes.set(ylabel=label, ylim=(0, 1.18 * max(*values, 1e-9)))
        figures.append(htmlreport.inline_svg(figure, caption, f"bar{i}"))
    return f'<div class="plots">{"".join(figures)}</div>'


def _impossible(result: Result, verified: SparseDataset) -> str:
    """A few real packages by name: the ones with the fewest dependencies are the most telling."""
    if not sum(result.verdicts.values()):
        return "<p>Nothing was verified in this run.</p>"
    if not result.impossible:
        return "<p>None: every verified test set can be predicted by this bottleneck. A smaller --width has some.</p>"
    assert verified.names is not None and verified.label_names is not None
    different = {tuple(verified.labels[row].tolist()): row for row in reversed(result.impossible)}
    smallest = sorted(different.values(), key=lambda row: (len(verified.labels[row]), row))[:EXAMPLES]
    lines = []
    for row in smallest:
        labels = list(verified.label_names[verified.labels[row].numpy()])
        more = f" … and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
        lines.append((verified.names[row], len(labels), ", ".join(labels[:SHOWN_LABELS]) + more))
    shown = htmlreport.table(("package", "dependencies", "their names"), lines, text_columns=(2,))
    return (
        "<p>No encoder makes this trained layer output exactly these sets at threshold 0.5: the proof is about the "
        "layer alone. (Another threshold moves every boundary: it makes other sets possible, and others impossible.) "
        f"{len(result.impossible)} of "
        f"{sum(result.verdicts.values())} verified test sets are like this.</p>{shown}"
        f"<h3>What to do about it</h3><pre>{html.escape(result.recommendation)}</pre>"
    )


def _how(about: dict[str, Any]) -> str:
    env = about["environment"]
    available = ", ".join(name for name, why_not in env["backends"].items() if why_not is None)
    lines = [
        ("command", about["command"]),
        ("machine", f"{env['cpu']['model']}, {env['threads']['torch']} threads"),
        ("versions", f"sigkernels {env['sigkernels']}, torch {env['packages']['torch']}, Python {env['python']}"),
        ("backends", f"{available} (GPU: {'yes' if env['gpus']['devices'] else 'not run'})"),
        ("time", f"{about['seconds']:.0f} s in all"),
    ]
    return htmlreport.table(("", ""), lines, text_columns=(1,))
