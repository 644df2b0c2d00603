"""``sigkernels explore REPORT``: a saved report as one page for the browser."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .explore_page import explore_page
from .files import existing_file, whole_file, writable_file
from .label_names import read_names
from .saved_report import add_report_command, load_report


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``explore`` to the subcommands of a parser."""
    parser = add_report_command(
        subparsers,
        "explore",
        run,
        weights="the output layer, for a report that was saved without it",
        help="write a saved report of verify as one page for the browser",
        description="Write a saved report as one page that loads nothing from anywhere: filter the label sets, read in "
        "words why one can never be predicted, see the radii by set size.",
    )
    parser.add_argument("--out", metavar="PAGE", help="where the page goes (default: REPORT with .html)")
    parser.add_argument(
        "--names", metavar="FILE", help="the names of the labels: one in each line, a JSON list, or a JSON mapping"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    file = existing_file(args.report)
    out = str(file.with_suffix(".html")) if args.out is None else args.out
    page = writable_file("--out", out, tuple(name for name in (args.report, args.weights, args.names) if name))
    report, _ = load_report(args)
    names = report.names if args.names is None else read_names(existing_file(args.names), report.question.labels)
    html = explore_page(report, f"Report of {file.name}", names)
    with whole_file(page) as written:
        written.write(html.encode())
    result = {"page": str(page), "sets": len(report), "counts": report.counts()}
    print(
        json.dumps({"schema": 1} | result) if args.json else f"{page}: {len(report)} label sets; open it in a browser"
    )
    return 0
