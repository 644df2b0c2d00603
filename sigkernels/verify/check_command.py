"""``sigkernels check REPORT [WEIGHTS]``: prove every line of a saved report again, without any solver.

Exit code 0: every line is proved. 1: at least one is not. 2: bad input.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from .classifier_file import add_array_options, load_output_layer
from .files import existing_file
from .report import Report

SHOWN = 10  # lines that are not proved


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``check`` to the subcommands of a parser."""
    parser = subparsers.add_parser(
        "check",
        help="prove a saved report of verify again, without any solver",
        description="Prove every line of a saved report again from its certificates, without any solver. "
        "exit code: 0 every line is proved, 1 at least one is not, 2 bad input",
    )
    parser.add_argument("report", metavar="REPORT", help="file that sigkernels verify --out or report.save wrote")
    parser.add_argument(
        "weights", metavar="WEIGHTS", nargs="?", help="the output layer to check it against (default: that in REPORT)"
    )
    add_array_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    existing_file(args.report)
    notes = []
    if args.weights is None:
        report = Report.load(args.report)
    else:
        classifier, layer = load_output_layer(args)
        report = Report.load(args.report, classifier, layer.bias)
        notes.append(f"{args.weights}: {layer}")
    result = report.check()
    if args.json:
        failures = [{"line": line, "reason": reason} for line, reason in result.failures]
        out = {"schema": 1, "proved": bool(result), "sets": len(report), "failures": failures}
        print(json.dumps(out | {"counts": report.counts(), "rule": report.question.rule.name}))
        return 0 if result else 1
    print("\n".join([*notes, report.summary()]))
    for line, reason in result.failures[:SHOWN]:
        print(f"NOT PROVED  line {line}: {reason}")
    if len(result.failures) > SHOWN:
        print(f"NOT PROVED  and {len(result.failures) - SHOWN} more lines")
    if result:
        print(f"PROVED  all {len(report)} lines")
    return 0 if result else 1
