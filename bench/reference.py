"""The demo's encoder with output layers of several kinds and widths, ten epochs, three seeds, and with several priors.

    python bench/reference.py                                       # all; about an hour on two cores
    python bench/reference.py bottleneck:25 dft:25 --seeds 0        # some; the others stay as they are in the file

Writes docs/results/reference.json, from which docs/pictures.py makes the table of docs/choosing.md and its pictures.
A head is ``kind:width`` or ``kind:width:prior``; all kinds get the same prior. One row is what ``sigkernels demo
--epochs 10 --width 25`` trains: the same code, data, seed and order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sigkernels as sk
from sigkernels import datasets, env
from sigkernels.demo import models
from sigkernels.demo.run import TEST_EXAMPLES, verify
from sigkernels.demo.train import Result, train

WIDTHS = (25, 50, 100)
PRIORS = ("frequencies", "mean", "none")
OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "reference.json"
SIZES = (1, 2, 4, 8, 16)  # of the sets whose radius is drawn against their size
SETS_PER_SIZE = 10


class Head(NamedTuple):
    """What a row of the table is about."""

    kind: str
    width: int  # 0: a full layer
    prior: str

    @classmethod
    def parse(cls, text: str) -> Head:
        kind, width, prior = (*text.split(":"), PRIORS[0])[:3]
        return cls(kind, int(width), prior)

    def __str__(self) -> str:
        return ":".join(map(str, self))


# Every width at the prior of the frequencies, one width at every prior.
HEADS = [
    Head("full", 0, "frequencies"),
    *(Head(kind, width, "frequencies") for width in WIDTHS for kind in ("bottleneck", "dft", "codes")),
    *(Head(kind, width, prior) for prior in PRIORS[1:] for kind, width in
      (("full", 0), ("bottleneck", 25), ("dft", 25), ("codes", 25))),
]  # fmt: skip


def build(head: Head, problem: models.Problem, seed: int) -> models.Model:
    """The full layer is fused here: the same numbers as plain torch's, sooner."""
    model = models.build("plain" if head.kind == "full" else head.kind, problem, head.width, seed, prior=head.prior)
    if head.kind == "full":
        full = sk.LinearHead(models.HIDDEN, problem.labels.num_labels)
        full.load_state_dict(model.head.state_dict())
        model.head = full
    return model


def run(head: Head, epochs: int, sets: int, seed: int) -> dict[str, Any]:
    """Trains and verifies one head."""
    data = datasets.debian_deps()
    train_set, test_set = data.split(TEST_EXAMPLES)
    model = build(head, models.Problem.of(train_set, data.labels.max_active), seed)
    result = Result(str(head), models.describe(model.head))
    train(result, model, train_set, test_set, epochs, seed)
    if sets:
        verify(result, model, test_set[:sets])
    return {
        "epochs": epochs,
        "head_parameters": result.head_parameters,
        "f1_at_5": result.f1_at_5,
        "f1_at_10": result.f1_at_10,
        "map": result.mean_average_precision,
        "verdicts": result.verdicts,
        "impossible_share": result.impossible_share,
        "radii": result.radii,
        "radius_by_size": radius_by_size(model, seed) if sets else {},
    }


def radius_by_size(model: models.Model, seed: int) -> dict[str, list[float]]:
    """Proved radii of random sets by their size: how wide the regions of the trained layer are."""
    n, random = model.head.num_labels, np.random.default_rng(seed)
    found = {}
    for size in SIZES:
        sets = [random.choice(n, size, replace=False).tolist() for _ in range(SETS_PER_SIZE)]
        found[str(size)] = model.radii(sk.LabelSets.from_lists(sets, n))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", type=Head.parse, default=HEADS, help="kind:width or kind:width:prior")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sets", type=int, default=300, help="test label sets to verify, with seed 0 (default 300)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    unknown = [str(head) for head in args.heads if head not in HEADS]
    if unknown:
        parser.error(f"heads must be of {', '.join(map(str, HEADS))}, got {', '.join(unknown)}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    saved: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"heads": {}}
    for seed in args.seeds:
        for head in args.heads:
            sets = args.sets if seed == 0 and head.prior == PRIORS[0] else 0
            by_seed = saved["heads"].setdefault(str(head), {})
            by_seed[str(seed)] = run(head, args.epochs, sets, seed)
            saved |= {"command": "python bench/reference.py", "environment": env.summary(env.collect())}
            args.output.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            print(f"{head} seed {seed}: F1@5 {by_seed[str(seed)]['f1_at_5'][-1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
