"""Self-contained HTML pages with inline SVG plots, for the reports of the demo and of the benchmarks."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Usual layer, bottleneck, DFT head, with codes, upgraded.
COLOURS = ("#7a8793", "#d1495b", "#00798c", "#30638e", "#edae49")
SERIES = ("#00798c", "#d1495b", "#edae49", "#5c4d7d", "#66a182", "#7a8793", "#9c6644")
STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d2730; background: #f4f6f8; margin: 0 }
main { max-width: 64rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem }
h1 { font-size: 1.9rem; margin: 1rem 0 .25rem } h2 { font-size: 1.25rem; margin: 2.25rem 0 .5rem }
p { max-width: 46rem } .lead { font-size: 1.1rem } .note { color: #5a6772; font-size: .9rem }
section { background: #fff; border: 1px solid #dde3e8; border-radius: 10px; padding: 1rem 1.25rem; margin: 1rem 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .45rem .6rem; border-bottom: 1px solid #e6ebef; vertical-align: top; white-space: nowrap }
th:first-child, td:first-child { text-align: left } td.text, th.text { text-align: left; white-space: normal }
thead th { color: #5a6772; font-weight: 600; font-size: .88rem }
tr.ours td { background: #e8f4f5; font-weight: 600 } tr.bad td { background: #fbeaec }
.plots { display: flex; flex-wrap: wrap; gap: 1rem } .plots figure { flex: 1 1 22rem; max-width: 30rem; margin: 0; min-width: 0 }
.plots.wide figure { flex: 1 1 40rem; max-width: 100% }
figure svg { width: 100%; height: auto } figcaption { color: #5a6772; font-size: .9rem }
code, pre { font: .88em ui-monospace, monospace; background: #eef1f4; border-radius: 4px; padding: .1em .3em }
pre { padding: .8em 1em; overflow-x: auto }
.scroll { overflow-x: auto }
section.warning { background: #fbeaec; border-color: #d1495b } section.warning h2 { margin-top: 0 }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    classes: Sequence[str] = (),
    text_columns: Sequence[int] = (),
) -> str:
    """``classes[i]`` is the CSS class of row i; ``text_columns`` are set left like the first."""

    def cells(tag: str, values: Sequence[object]) -> str:
        marks = [' class="text"' if i in text_columns else "" for i in range(len(values))]
        return "".join(f"<{tag}{m}>{html.escape(str(v))}</{tag}>" for m, v in zip(marks, values, strict=True))

    body = []
    for i, row in enumerate(rows):
        mark = f' class="{classes[i]}"' if i < len(classes) and classes[i] else ""
        body.append(f"<tr{mark}>{cells('td', row)}</tr>")
    return (
        f'<div class="scroll"><table>\n<thead><tr>{cells("th", header)}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def new_figure(width: float = 5.2, height: float = 3.2) -> tuple[Any, Any]:
    """A matplotlib figure and its axes in the style of the reports (no global state, no window)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", color="#e3e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    return figure, axes


def legend(figure: Any, columns: int, title: str | None = None) -> None:
    """A legend above the axes, where it covers no point."""
    pairs = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes)
    entries = {label: handle for each in pairs for handle, label in each}
    figure.legend(
        entries.values(), entries.keys(), loc="outside upper center", ncols=columns, title=title, frameon=False, fontsize=8,
        title_fontsize=8,
    )  # fmt: skip


def inline_svg(figure: Any, caption: str, name: str) -> str:
    """A ``<figure>``. ``name`` (unique on the page) keeps the ids of one drawing apart from another's."""
    import matplotlib

    drawn = io.StringIO()
    # Text stays text, and the same figure gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def has_matplotlib() -> bool:
    """Plots need the ``plot`` extra."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True
