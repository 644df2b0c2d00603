"""``sigkernels verify WEIGHTS LABELS``: the verifier on the command line.

Exit code 0: every set is argmaxable. 1: at least one is not (or is not known to be, with ``--strict``). 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import Any

from .certificate import Verdict
from .files import BadFile, Classifier, load_classifier, load_label_sets

EPILOG = """\
WEIGHTS  the output layer: .npz, .npy, .pt or .safetensors with a matrix [labels, features] (and, beside it, its bias),
         or with the slack_weight and proj.weight of a DFTHead
LABELS   the label sets: .npz (indices and offsets, a scipy sparse matrix, or a dense 0/1 matrix), or text with
         one set per line (labels separated by commas or spaces; svmlight features are skipped)

exit code: 0 all sets can be predicted, 1 some cannot, 2 bad input
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``verify`` to the subcommands of a parser."""
    parser = subparsers.add_parser(
        "verify",
        help="decide which label sets a classifier can ever predict, with proofs",
        description="Decide which label sets a classifier can ever predict, with a proof for each answer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("weights", metavar="WEIGHTS", help="file with the output layer")
    parser.add_argument("labels", metavar="LABELS", help="file with the label sets")
    parser.add_argument("--weight", metavar="NAME", help="which array in WEIGHTS is the matrix")
    parser.add_argument(
        "--bias", metavar="NAME", help="which array in WEIGHTS is the bias (default: beside the matrix)"
    )
    parser.add_argument("--no-bias", action="store_true", help="ignore a bias in WEIGHTS")
    parser.add_argument(
        "--dft",
        type=int,
        metavar="K",
        help="WEIGHTS are the slack columns of a DFT head with this k (a head's state dict says so itself)",
    )
    parser.add_argument("--tol", type=float, default=1e-8, help="least radius that counts as argmaxable (default 1e-8)")
    parser.add_argument("--box", type=float, default=1e4, help="bound on the inputs (default 1e4)")
    parser.add_argument("--radius", action="store_true", help="close the interval of every radius")
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda"')
    parser.add_argument("--strict", action="store_true", help="exit with 1 also for NOT_EPS and UNDECIDED")
    parser.add_argument("--check", action="store_true", help="prove every line a second time")
    parser.add_argument("--out", metavar="FILE", help="save the report (.npz) with all proofs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    try:
        return _verify(args)
    except BrokenPipeError:  # the reader has seen enough; not an error of the input
        raise
    except (BadFile, ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"sigkernels verify: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _verify(args: argparse.Namespace) -> int:
    from .pipeline import verify

    layer = load_classifier(args.weights, args.weight, args.bias, args.dft)
    bias = None if args.no_bias else layer.bias
    classifier: Any = layer.weight
    if layer.k is not None:
        if bias is not None:
            raise BadFile("a DFT head has no bias: use --no-bias")
        classifier = _dft_head(layer, layer.k)
    labels = load_label_sets(args.labels, layer.weight.shape[0])
    progress = False if args.quiet or args.json else None
    report = verify(classifier, labels, bias, args.tol, args.box, args.radius, args.device, progress=progress)
    if args.out:
        report.save(args.out)
    checked = report.check() if args.check else None
    counts = report.counts()
    if args.json:
        out = {
            "labels": report.question.n,
            "features": report.question.d,
            "sets": len(report),
            "tol": report.question.tol,
            "box": report.question.box,
            "counts": counts,
            "verdicts": [str(v) for v in report.verdicts],
            "radius_lo": [_finite(v) for v in report.radius_lo],
            "radius_hi": [_finite(v) for v in report.radius_hi],
            "stages": [s._asdict() for s in report.stages],
            "notes": report.notes,
        }
        if checked is not None:
            out["checked"] = bool(checked)
        print(json.dumps(out))
    else:
        print(report.summary())
        bad = [i for i, v in enumerate(report.verdicts) if v == Verdict.UNARGMAXABLE]
        if bad:
            more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
            print(f"  cannot be predicted: sets {', '.join(map(str, bad[:10]))}{more}")
        if checked is not None:
            print(f"  {checked}")
        if args.out:
            print(f"  saved {args.out}")
    if checked is not None and not checked:
        return 1
    failing = counts["UNARGMAXABLE"]
    if args.strict:
        failing += counts["NOT_EPS"] + counts["UNDECIDED"]
    return 1 if failing else 0


def _dft_head(layer: Classifier, k: int) -> Any:
    """The head whose slack columns were in the file."""
    import torch

    from ..heads import DFTHead

    slack = torch.as_tensor(layer.weight)
    slack = slack if slack.is_floating_point() else slack.double()
    n, columns = slack.shape
    width = 2 * k + 1 + columns
    with warnings.catch_warnings():  # what the head says about a narrow projection, the report says too
        warnings.simplefilter("ignore")
        head = DFTHead(layer.in_features or width, n, k, columns, dtype=slack.dtype)
    with torch.no_grad():
        head.slack_weight.copy_(slack)
    return head


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if abs(value) < float("inf") else None
