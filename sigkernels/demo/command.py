"""``sigkernels demo``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..cli import add_command

DESCRIPTION = (
    "Trains the same small encoder on 53,422 Debian packages with a plain nn.Linear, a bottlenecked LinearHead, a DFTHead "
    "of the same width, and one with codes, all from the same prior; upgrades the trained bottleneck; verifies test label "
    "sets against each trained layer; prints one table and writes a self-contained HTML report."
)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    about = "train output layers on real data and prove what each can never predict"
    parser = add_command(subparsers, "demo", help=about, description=DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="fewer examples, steps and proofs")
    parser.add_argument("--epochs", type=int, help="passes over the training examples (default 3; quick: 2)")
    parser.add_argument("--width", type=int, default=25, help="bottleneck and slack columns (default 25)")
    parser.add_argument("--sets", type=int, help="test label sets to verify (default 200; quick: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data")
    parser.add_argument("--output", type=Path, default=Path("demo/report.html"), help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    from .. import htmlreport
    from . import report
    from .run import run_demo

    outcome = run_demo(
        quick=args.quick, epochs=args.epochs, width=args.width, sets=args.sets, seed=args.seed, output=args.output
    )
    if not htmlreport.has_matplotlib():
        print("The report has no plots: pip install matplotlib", file=sys.stderr)
    if args.json:
        about = outcome.about | {"results": [result.as_dict() for result in outcome.results]}
        print(json.dumps(about, indent=2))
    else:
        print(
            f"\n{report.text_table(outcome.results)}\n{report.recommendations(outcome.results)}\nReport: {args.output}"
        )
    return 0
