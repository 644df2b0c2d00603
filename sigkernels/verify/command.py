"""``sigkernels verify WEIGHTS LABELS``: the verifier on the command line, as a gate before a release.

``--all-classes`` in place of LABELS asks of every class of a softmax whether it can ever win.

Exit code 0: every set is ARGMAXABLE, or has a verdict that ``--allow`` names. 1: not so. 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .certificate import Verdict
from .classifier_file import StoredClassifier, add_array_options, load_output_layer
from .files import TORCH_SUFFIXES, BadFile, existing_file, read_arrays, writable_file
from .gate import TOLERABLE, Gate
from .input_ball import BALLS
from .inputs import DOMAINS
from .label_file import load_label_sets
from .label_names import read_names
from .repair import Repair
from .report import CheckResult, Report
from .rules import FREE, RULES

JSON_SCHEMA = 1

EPILOG = """\
WEIGHTS  the output layer: .npz, .npy, .pt, .ckpt or .safetensors with a matrix [labels, features] and, beside it, its
         bias (weight and bias, W and b, coef_ and intercept_), or with the slack_weight and proj.weight of a DFTHead
LABELS   the label sets: .npz (indices and offsets, a scipy sparse matrix, or a dense 0/1 matrix), .pt (LabelSets), or
         text with one set per line (labels separated by commas or spaces; svmlight features are skipped)

exit code: 0 every set is ARGMAXABLE or has a verdict that --allow names, 1 not so, 2 bad input
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
    parser.add_argument("labels", metavar="LABELS", nargs="?", help="file with the label sets")
    parser.add_argument(
        "--all-classes",
        action="store_true",
        help="in place of LABELS: each label by itself under --rule argmax, such as all tokens of a language model",
    )
    add_array_options(parser)
    parser.add_argument("--rule", choices=RULES, help="which labels are predicted (default threshold)")
    parser.add_argument(
        "--threshold",
        metavar="T",
        help='probability above which a label is predicted (default 0.5), "free" for one that is chosen for each input, '
        "or a file with one for each label",
    )
    parser.add_argument("--domain", choices=DOMAINS, default="all", help="nonnegative: features after a ReLU")
    parser.add_argument(
        "--names", metavar="FILE", help="the names of the labels: one in each line, a JSON list, or a JSON mapping"
    )
    parser.add_argument("--tol", type=float, default=1e-8, help="least radius that counts as argmaxable (default 1e-8)")
    parser.add_argument(
        "--ball", choices=tuple(BALLS), default="box", help="inputs that count: entries, or length, of at most --box"
    )
    parser.add_argument("--box", type=float, help="bound on the inputs (default 1e4; with --ball l2: 1)")
    parser.add_argument("--radius", action="store_true", help="close the interval of every radius")
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda"')
    parser.add_argument(
        "--allow", default="", metavar="VERDICTS", help=f"verdicts that pass beside ARGMAXABLE: {','.join(TOLERABLE)}"
    )
    parser.add_argument("--min-sets", type=int, default=1, metavar="N", help="fail with fewer label sets (default 1)")
    parser.add_argument("--check", action="store_true", help="prove every line a second time")
    parser.add_argument("--out", metavar="FILE", help="save the report (.npz) with all proofs")
    parser.add_argument(
        "--repair", metavar="FILE", help="save columns (.npz) that make the impossible sets possible, if there are any"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    try:
        return _verify(args)
    except (BadFile, ValueError, TypeError, RuntimeError, OSError) as error:
        if os.environ.get("SIGKERNELS_DEBUG"):
            raise
        print(f"sigkernels verify: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _verify(args: argparse.Namespace) -> int:
    _check_what_is_asked(args)
    gate = Gate.of(args.allow, args.min_sets)
    inputs = tuple(name for name in (args.weights, args.labels, args.names, args.threshold) if name)
    out = None if args.out is None else writable_file("--out", args.out, inputs)
    columns = None if args.repair is None else writable_file("--repair", args.repair, inputs)
    if out is not None and columns is not None and out.absolute() == columns.absolute():
        raise BadFile(f"--repair {args.repair}: is the file of --out as well; choose another name")
    classifier, layer = load_output_layer(args)
    report = _report(args, classifier, layer)
    if not args.json:  # what was proved is told before anything else can fail
        print(f"{args.weights}: {layer}")
        print(report.summary(), flush=True)
    if out is not None:
        report.save(out)
        if not args.json:
            print(f"  saved {out}")
    checked = report.check(progress=False if args.quiet or args.json else None) if args.check else None
    if checked is not None and not args.json:
        print(f"  {checked}", flush=True)
    reasons = gate.reasons(report)
    if checked is not None and not checked:
        reasons.append(f"a proof did not hold when it was checked: {checked}")
    repair = report.repair(progress=False if args.quiet or args.json else None)
    if columns is not None and repair:
        repair.save(columns)
    if args.json:
        print(json.dumps(_as_json(report, layer, gate, reasons, checked) | {"repair": _repair_as_json(repair)}))
    else:
        if repair or columns is not None:
            print(repair)
        if columns is not None and repair:
            print(f"  saved {columns}")
        print("\n".join(f"FAILED  {reason}" for reason in reasons) or f"PASSED  {len(report)} label sets")
    return 1 if reasons else 0


def _check_what_is_asked(args: argparse.Namespace) -> None:
    """Refuses a command without a question, and one with two."""
    if args.labels is None and not args.all_classes:
        raise BadFile("LABELS is missing: name a file with label sets, or say --all-classes")
    if not args.all_classes:
        return
    if args.labels is not None:
        raise BadFile(f"--all-classes asks about every class, and LABELS is {args.labels}: leave one of them out")
    if args.rule not in (None, "argmax"):
        raise BadFile(f"--all-classes asks which class has the highest logit, and --rule is {args.rule}: leave it out")
    if args.threshold not in (None, FREE):
        raise BadFile("--all-classes compares logits with each other: leave --threshold out")


def _report(args: argparse.Namespace, classifier: Any, layer: StoredClassifier) -> Report:
    """The answers to what is asked."""
    from .all_classes import verify_classes
    from .pipeline import verify

    n = layer.weight.shape[0]
    common: dict[str, Any] = {
        "bias": layer.bias,
        "tol": args.tol,
        "box": args.box,
        "radius": args.radius,
        "device": args.device,
        "progress": False if args.quiet or args.json else None,
        "domain": args.domain,
        "ball": args.ball,
        "names": None if args.names is None else read_names(existing_file(args.names), n),
    }
    if args.all_classes:
        return verify_classes(classifier, **common)
    return verify(
        classifier, load_label_sets(args.labels, n), rule=args.rule, threshold=_threshold(args.threshold), **common
    )


def _as_json(
    report: Report, layer: StoredClassifier, gate: Gate, reasons: list[str], checked: CheckResult | None
) -> dict[str, Any]:
    """What ``--json`` prints; docs/verifier.md says what each entry is."""
    question = report.question
    threshold = question.rule.threshold
    out = {
        "schema": JSON_SCHEMA,
        "passed": not reasons,
        "reasons": reasons,
        "allowed": ["argmaxable", *gate.allowed],
        "weight": layer.weight_name,
        "bias": layer.bias_name,
        "unused": layer.unused,
        "rule": question.rule.name,
        "threshold": threshold.tolist() if isinstance(threshold, np.ndarray) else threshold,
        "domain": question.domain,
        "labels": question.labels,
        "features": question.inputs,
        "sets": len(report),
        "tol": question.tol,
        "ball": question.ball.name,
        "box": question.box,
        "counts": report.counts(),
        "verdicts": [str(v) for v in report.verdicts],
        "impossible": [_impossible(report, i) for i, v in enumerate(report.verdicts) if v == Verdict.UNARGMAXABLE],
        "radius_lo": [_finite(v) for v in report.radius_lo],
        "radius_hi": [_finite(v) for v in report.radius_hi],
        "stages": [s._asdict() for s in report.stages],
        "notes": report.notes,
    }
    return out if checked is None else out | {"checked": bool(checked)}


def _impossible(report: Report, line: int) -> dict[str, Any]:
    """A set that no input predicts, and why."""
    labels = report.sets[line].tolist()
    names = None if report.names is None else [report.names[label] for label in labels]
    return {"set": line, "labels": labels, "names": names, "proof": report.explain(line)}


def _repair_as_json(repair: Repair) -> dict[str, Any] | None:
    """The recommendation; None where nothing is impossible."""
    heads = [{"k": h.k, "codes": h.codes, "columns": h.columns, "counts": h.report.counts()} for h in repair.heads]
    return (
        {
            "sets": repair.impossible.tolist(),
            "method": repair.method,
            "columns": repair.columns.shape[1],
            "counts": repair.report.counts(),
            "heads": heads,
        }
        if repair
        else None
    )


def _threshold(text: str | None) -> Any:
    """A probability, "free", or the numbers in a file."""
    if text is None or text == FREE:
        return text
    try:
        return float(text)
    except ValueError:
        pass
    if text and not Path(text).exists():
        raise BadFile(f'--threshold {text}: is neither a probability, nor "free", nor a file')
    file = existing_file(text)
    if file.suffix in (".npy", ".npz", *TORCH_SUFFIXES):
        arrays = list(read_arrays(file).values())
        if len(arrays) != 1:
            raise BadFile(f"{text}: must hold one array of thresholds, and holds {len(arrays)}")
        return np.asarray(arrays[0])
    try:
        return np.array(file.read_text(encoding="utf-8-sig").replace(",", " ").split(), dtype=np.float64)
    except ValueError:
        raise BadFile(f"{text}: is not a list of thresholds, one number for each label") from None


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if abs(value) < float("inf") else None
