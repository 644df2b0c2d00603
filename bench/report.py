"""One report from the JSON of a pytest-benchmark run: ratios against peers, scaling, memory, regressions.

    pytest bench --benchmark-json run.json && python bench/report.py run.json --html report.html
    python bench/report.py a/report.json b/report.json --json all.json    # suites that were run one by one

``bench/README.md`` says what is read from each benchmark.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sigkernels import htmlreport, machine_load

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plots

OURS = "sigkernels"
FIELDS = ("n", "rows", "peak_bytes", "interval", "factor_interval", "preemptions")  # of a record, by their own name
OVERVIEW = {
    "ratios": (plots.ratios, "Every case and peer: time of the peer over that of sigkernels"),
    "roofline": (plots.roofline, "The fused pass beside the measured rates of torch's own product and copy (the line)"),
    "memory": (plots.memory, "Memory that one training step adds at its peak"),
    "scaling": (plots.scaling, "Throughput as the number of labels grows"),
}
DEFAULT_TOLERANCE = 0.25  # a slowdown below this is noise on a shared machine


@dataclass(frozen=True)
class Record:
    """One benchmark."""

    suite: str
    group: str
    who: str
    seconds: float  # median of a round
    spread: float  # interquartile range / median
    n: int | None = None
    rows: int | None = None
    peak_bytes: int | None = None
    interval: list[float] | None = None  # 95 % of the median, seconds
    factor_interval: list[float] | None = None  # 95 % of the median factor to ours, round by round
    preemptions: float | None = None  # involuntary context switches per second of processor time
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.who == OURS or self.who.startswith(OURS + ",")

    @property
    def key(self) -> tuple[str, str]:
        return self.group, self.who


@dataclass(frozen=True)
class Change:
    """How a sigkernels entry moved against an earlier run; above 1 is slower."""

    group: str
    who: str
    factor: float
    against: str  # the peer it is measured by, or "the clock"
    verdict: str  # slower, faster, same


def read(path: Path) -> tuple[list[Record], dict[str, Any]]:
    """The records of a pytest-benchmark file (or of a report of ours) and where they were measured."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "records" in data:
            return [Record(**record) for record in data["records"]], data["environment"]
        records = [_record(entry) for entry in data["benchmarks"]]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is neither a pytest-benchmark file nor a report of sigkernels bench") from error
    return records, {"machine": data.get("machine_info", {}), "datetime": data.get("datetime")}


def _record(entry: dict[str, Any]) -> Record:
    extra = (entry.get("params") or {}) | entry.get("extra_info", {})  # a parameter of that name will do as well
    stats = entry["stats"]
    suite = Path(entry["fullname"].partition("::")[0]).stem.removeprefix("bench_")
    median = float(stats["median"])
    return Record(
        suite=suite,
        group=entry.get("group") or entry["name"],
        who=str(extra.get("who", entry["name"])),
        seconds=median,
        spread=float(stats["iqr"]) / median if median else 0.0,
        **{name: extra[name] for name in FIELDS if extra.get(name) is not None},
        more={k: value for k, value in entry.get("extra_info", {}).items() if k not in (*FIELDS, "who")},
    )


def by_group(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Groups in their order; within one, sigkernels first."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    return {name: sorted(members, key=lambda r: not r.ours) for name, members in groups.items()}


def ratio(record: Record, group: list[Record]) -> float | None:
    """Time of ``record`` over that of the first sigkernels entry of its group; None where there is none."""
    ours = next((member for member in group if member.ours), None)
    return record.seconds / ours.seconds if ours is not None and ours.seconds else None


def compare(now: list[Record], before: list[Record], tolerance: float = DEFAULT_TOLERANCE) -> list[Change]:
    """Every sigkernels entry that both runs have: by its ratio to the first common peer, else by the clock."""
    earlier = {record.key: record for record in before}
    changes = []
    for members in by_group(now).values():
        peer = next((m for m in members if not m.ours and m.key in earlier), None)
        for record in members:
            if not record.ours or record.key not in earlier:
                continue
            factor = record.seconds / earlier[record.key].seconds
            if peer is not None:
                factor *= earlier[peer.key].seconds / peer.seconds
            verdict = "slower" if factor > 1 + tolerance else "faster" if factor < 1 / (1 + tolerance) else "same"
            changes.append(Change(record.group, record.who, factor, peer.who if peer else "the clock", verdict))
    return changes


def warnings(records: list[Record], load: dict[str, Any] | None) -> list[str]:
    """Why the times of this run should not be trusted, one sentence each; empty for a run on an idle machine."""
    found = list(load["warnings"]) if load else []
    measured = {r.group: r.preemptions for r in records if r.preemptions is not None}
    disturbed = [rate for rate in measured.values() if rate >= machine_load.PREEMPTED]
    if disturbed:
        found.append(
            f"{len(disturbed)} of {len(measured)} cases were preempted while they were timed, up to {max(disturbed):.0f} "
            "times per second of processor time: other work ran on the same cores"
        )
    return found


def score(records: list[Record]) -> str:
    """In how many comparisons sigkernels loses."""
    groups = by_group(records)
    factors = [ratio(r, groups[r.group]) for r in records if not r.ours]
    known = [factor for factor in factors if factor is not None]
    if not known:
        return "Nothing is compared in this run."
    slower = sum(factor < 1 for factor in known)
    return (
        f"sigkernels is at least as fast in {len(known) - slower} of {len(known)} comparisons and slower in {slower}."
    )


# --- for people ----------------------------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def rate_text(record: Record) -> str:
    if record.rows is None:
        return ""
    rows = f"{record.rows / record.seconds:.3g} rows/s"
    return f"{rows}, {record.rows * record.n / record.seconds:.2g} labels/s" if record.n else rows


def _more_text(name: str, value: Any) -> str:
    if name.endswith("_bytes") and value is not None:
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {value / 2**20:.1f} MiB"
    return f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"


def _factor_text(factor: float, interval: list[float] | None) -> str:
    return f"×{factor:.2f}" + ("" if interval is None else f" ({interval[0]:.2f} … {interval[1]:.2f})")


def _line(record: Record, group: list[Record]) -> tuple[str, ...]:
    factor = ratio(record, group)
    more = ", ".join(_more_text(name, value) for name, value in record.more.items())
    return (
        record.who,
        f"{seconds_text(record.seconds)} ±{50 * record.spread:.0f} %",
        "" if factor is None else "1" if record is group[0] else _factor_text(factor, record.factor_interval),
        rate_text(record),
        "" if record.peak_bytes is None else f"{record.peak_bytes / 2**20:.1f} MiB",
        more,
    )


@dataclass(frozen=True)
class Run:
    """What a report is made of."""

    records: list[Record]
    changes: list[Change]
    environment: dict[str, Any] = field(default_factory=dict)  # as ``sigkernels.env.collect`` has it
    command: str = ""
    load: dict[str, Any] | None = None  # of the machine while it ran


def text(run: Run) -> str:
    """The report for a terminal."""
    out = [score(run.records), *(f"WARNING: {warning}" for warning in warnings(run.records, run.load))]
    for name, members in by_group(run.records).items():
        out.append(f"\n{name}")
        lines = [_line(record, members) for record in members]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        for line in lines:
            out.append("  " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    if run.changes:
        out.append("\nagainst the earlier run (above 1 is slower)")
        for change in sorted(run.changes, key=lambda c: -c.factor):
            out.append(f"  {change.verdict:<7} ×{change.factor:.2f}  {change.group}: {change.who}, by {change.against}")
    return "\n".join(out)


def brief(run: Run) -> str:
    """What a comparison found, in the Markdown of a CI summary: one line, the warnings, and a row for each change."""
    counts = {verdict: sum(c.verdict == verdict for c in run.changes) for verdict in ("slower", "faster", "same")}
    out = [f"{counts['slower']} slower, {counts['faster']} faster, {counts['same']} the same as in the earlier run"]
    out += [f"\nWARNING: {warning}" for warning in warnings(run.records, run.load)]
    moved = sorted((c for c in run.changes if c.verdict != "same"), key=lambda c: -c.factor)
    if moved:
        out += ["\n| time | case | by |", "|---|---|---|"]
        out += [f"| ×{c.factor:.2f} {c.verdict} | {c.group}: {c.who} | {c.against} |" for c in moved]
    return "\n".join(out)


def page(run: Run) -> str:
    """The report as one self-contained HTML page."""
    records, changes = run.records, run.changes
    items = "".join(f"<li>{html.escape(warning)}</li>" for warning in warnings(records, run.load))
    parts = [
        "<h1>sigkernels benchmarks</h1>",
        "<p class='lead'>Every case beside what people would use instead, on the same data in the same run. The "
        "factor is the time over that of sigkernels: above 1 sigkernels is faster, below 1 (red) it is slower. In "
        f"brackets its 95 % interval.</p><p class='lead'>{score(records)}</p>",
        f"<section class='warning'><h2>The machine was busy</h2><ul>{items}</ul></section>" if items else "",
        f"<section>{_about(run.environment, run.command)}</section>",
    ]
    if changes:
        lines = [(c.verdict, f"×{c.factor:.2f}", c.group, c.who, c.against) for c in changes]
        marks = ["bad" if c.verdict == "slower" else "" for c in changes]
        header = ("", "time", "case", "who", "measured by")
        table = htmlreport.table(header, lines, marks, text_columns=(2, 3, 4))
        parts.append(f"<h2>Against the earlier run</h2><section>{table}</section>")
    parts.append(f"<h2>At a glance</h2><section>{_pictures(records)}</section>")
    rates = plots.throughput_rows(records)
    if rates:
        table = htmlreport.table(("labels", "who", "rows/s", "labels/s"), rates, text_columns=(1,))
        sizes = sorted({record.n for record in records if record.suite == "scaling" and record.n})
        span = f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}"
        parts.append(f"<h2>Throughput at {span} labels</h2><section>{table}</section>")
    groups = by_group(records)
    for suite in dict.fromkeys(record.suite for record in records):
        body = []
        for name, members in groups.items():
            if members[0].suite != suite:
                continue
            factors = [ratio(record, members) for record in members]
            marks = [
                "ours" if m.ours else "bad" if f is not None and f < 1 else ""
                for m, f in zip(members, factors, strict=True)
            ]
            body.append(f"<h3>{html.escape(name)}</h3>{_group_table(members, marks)}")
        parts.append(f"<h2>{html.escape(suite)}</h2><section>{''.join(body)}</section>")
    return htmlreport.page("sigkernels benchmarks", parts)


def _group_table(members: list[Record], marks: list[str]) -> str:
    """One group; columns that nobody fills are left out."""
    header = ("", "median", "factor", "throughput", "peak memory", "more")
    lines = [_line(record, members) for record in members]
    used = [i for i in range(len(header)) if any(line[i] for line in lines)]
    left = [place for place, i in enumerate(used) if header[i] in ("throughput", "more")]
    return htmlreport.table([header[i] for i in used], [[line[i] for i in used] for line in lines], marks, left)


def _about(environment: dict[str, Any], command: str) -> str:
    lines = [("command", command)]
    if "cpu" in environment:
        gpus = ", ".join(gpu["name"] for gpu in environment["gpus"]["devices"]) or "none: GPU not run"
        versions = ", ".join(f"{k} {v}" for k, v in environment["packages"].items() if v)
        lines += [
            ("machine", f"{environment['cpu']['model']}, {environment['threads']['torch']} threads"),
            ("GPU", gpus),
            ("versions", f"sigkernels {environment['sigkernels']}, {versions}"),
        ]
    return htmlreport.table(("", ""), lines, text_columns=(1,))


def _pictures(records: list[Record]) -> str:
    """The overview: what the run says at a glance."""
    if not htmlreport.has_matplotlib():
        return "<p>Plots need matplotlib: <code>pip install matplotlib</code>.</p>"
    drawn = [(name, make(records), caption) for name, (make, caption) in OVERVIEW.items()]
    shown = [htmlreport.inline_svg(figure, caption, name) for name, figure, caption in drawn if figure is not None]
    others = dict.fromkeys(r.suite for r in records if r.suite != "scaling")
    for suite in others:
        figure = plots.scaling(records, suite)
        if figure is not None:
            shown.append(htmlreport.inline_svg(figure, f"{suite}: throughput by n", f"scaling-{suite}"))
    return f"<div class='plots wide'>{''.join(shown)}</div>"


def as_json(run: Run) -> dict[str, Any]:
    """Everything, in a form that ``read`` takes back as an earlier run."""
    groups = by_group(run.records)
    return {
        "command": run.command,
        "environment": run.environment,
        "load": run.load,
        "warnings": warnings(run.records, run.load),
        "records": [asdict(record) for record in run.records],
        "factors": {g: {m.who: ratio(m, members) for m in members} for g, members in groups.items()},
        "changes": [asdict(change) for change in run.changes],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="JSON of pytest-benchmark or of sigkernels bench")
    parser.add_argument("--html", type=Path, help="write the report here")
    parser.add_argument("--json", type=Path, help="write all of it here as one run")
    parser.add_argument("--compare", type=Path, help="an earlier run")
    parser.add_argument("--tolerance", type=float, default=DEFAULT_TOLERANCE, help="default %(default)s")
    parser.add_argument("--brief", action="store_true", help="print the comparison alone, as a Markdown table")
    args = parser.parse_args(argv)
    files = [read(path) for path in args.runs]
    records, environment = [record for found, _ in files for record in found], files[0][1]
    changes = compare(records, read(args.compare)[0], args.tolerance) if args.compare else []
    command = "sigkernels bench" if "cpu" in environment else "pytest bench"
    command += " --only SUITE, one after the other" if len(files) > 1 and "cpu" in environment else ""
    run = Run(records, changes, environment, command)
    if args.html:
        args.html.write_text(page(run), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(as_json(run), indent=1), encoding="utf-8")
    print(brief(run) if args.brief else text(run))
    return 1 if any(change.verdict == "slower" for change in changes) else 0


if __name__ == "__main__":
    sys.exit(main())
