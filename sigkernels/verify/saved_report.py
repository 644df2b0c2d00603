"""A saved report as the argument of a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .classifier_file import StoredClassifier, add_array_options, load_output_layer
from .files import BadFile, existing_file
from .inputs import CLASSIFIER
from .report import Report


def add_report_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], weights: str, **texts: str
) -> argparse.ArgumentParser:
    """Add a command with REPORT, WEIGHTS, which ``weights`` explains, the options that name its arrays, and ``--json``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, **texts)
    parser.add_argument("report", metavar="REPORT", help="file that sigkernels verify --out or report.save wrote")
    parser.add_argument("weights", metavar="WEIGHTS", nargs="?", help=weights)
    add_array_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)
    return parser


def load_report(args: argparse.Namespace) -> tuple[Report, StoredClassifier | None]:
    """The report that these arguments name, about the layer in WEIGHTS where that is given; and that layer."""
    file = existing_file(args.report)
    if args.weights is None:
        for option in ("weight", "bias", "no_bias", "dft"):
            if getattr(args, option) not in (None, False):
                raise BadFile(f"--{option.replace('_', '-')} is about the file WEIGHTS, and none is given")
        return Report.load(file), None
    classifier, layer = load_output_layer(args)
    try:
        return Report.load(file, classifier, layer.bias), layer
    except (ValueError, TypeError) as error:
        raise BadFile(str(error).replace(CLASSIFIER, args.weights)) from None
