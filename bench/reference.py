"""The demo's encoder with seven output layers, ten epochs: F1@5 and the test label sets that each can never predict.

    python bench/reference.py                                 # all; about 20 minutes on two cores
    python bench/reference.py bottleneck:25 dft:25            # some; the others stay as they are in the file

Writes docs/results/reference.json, from which docs/pictures.py makes the table and the picture of the README. One row
is what ``sigkernels demo --epochs 10 --width 25`` trains: the same code, data, seed and order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sigkernels import datasets, env
from sigkernels.demo import models
from sigkernels.demo.run import TEST_EXAMPLES, verify
from sigkernels.demo.train import Result, train

HEADS = ("plain:0", "bottleneck:25", "dft:25", "bottleneck:50", "dft:50", "bottleneck:100", "dft:100")
OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "reference.json"


def run(head: str, epochs: int, sets: int) -> dict[str, Any]:
    """Trains and verifies one head, ``kind:width``."""
    kind, _, width = head.partition(":")
    data = datasets.debian_deps()
    train_set, test_set = data.split(TEST_EXAMPLES)
    labels = data.labels
    model = models.build(kind, data.features.num_labels, labels.num_labels, labels.max_active, int(width), seed=0)
    result = Result(kind, head)
    train(result, model, train_set, test_set, epochs, seed=0)
    verify(result, model, test_set[:sets])
    return {
        "head_parameters": result.head_parameters,
        "f1_at_5": result.f1_at_5[-1],
        "f1_at_10": result.f1_at_10[-1],
        "step_ms": result.step_ms,
        "peak_bytes": result.head_peak_bytes,
        "verdicts": result.verdicts,
        "impossible_share": result.impossible_share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", default=HEADS, help=f"of {', '.join(HEADS)}")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sets", type=int, default=500, help="test label sets to verify (default 500)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    unknown = [head for head in args.heads if head not in HEADS]
    if unknown:
        parser.error(f"heads must be of {', '.join(HEADS)}, got {', '.join(unknown)}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    saved: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"heads": {}}
    for head in args.heads:
        saved["heads"][head] = {"epochs": args.epochs, **run(head, args.epochs, args.sets)}
        saved |= {"command": "python bench/reference.py", "environment": env.summary(env.collect())}
        args.output.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
        print(f"{head:16} F1@5 {saved['heads'][head]['f1_at_5']:.3f}", flush=True)


if __name__ == "__main__":
    main()
