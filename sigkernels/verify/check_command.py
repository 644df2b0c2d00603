"""``sigkernels check REPORT [WEIGHTS]``: prove every line of a saved report again, without any solver.

Exit code 0: every line is proved. 1: at least one is not. 2: bad input.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from .saved_report import add_report_command, load_report

SHOWN = 10  # lines that are not proved


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``check`` to the subcommands of a parser."""
    return add_report_command(
        subparsers,
        "check",
        run,
        weights="the output layer to check it against (default: that in REPORT)",
        help="prove a saved report of verify again, without any solver",
        description="Prove every line of a saved report again from its certificates, without any solver. "
        "exit code: 0 every line is proved, 1 at least one is not, 2 bad input",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    report, layer = load_report(args)
    notes = [] if layer is None else [f"{args.weights}: {layer}"]
    result = report.check(progress=False if args.json else None)
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
