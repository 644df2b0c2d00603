"""The whole demo: data, trainings, proofs, report."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import backends, datasets, env
from . import models, report
from .train import BATCH, Result, train

TEST_EXAMPLES = 5000
RADIUS_SETS = 40  # of the verified sets: an exact radius takes longer than a verdict


class Size(NamedTuple):
    """The defaults of a run. ``train``: number of training examples, None for all."""

    epochs: int
    sets: int
    train: int | None


FULL = Size(epochs=3, sets=200, train=None)
QUICK = Size(epochs=2, sets=50, train=40 * BATCH)


@dataclass
class Outcome:
    """The results of a run of the demo, and its settings."""

    results: list[Result]
    about: dict[str, Any]


def run_demo(
    quick: bool = False,
    epochs: int | None = None,
    width: int = 25,
    sets: int | None = None,
    seed: int = 0,
    output: Path = Path("demo/report.html"),
) -> Outcome:
    """Train, verify, write the report to ``output``; see ``sigkernels demo --help`` for the arguments."""
    defaults = QUICK if quick else FULL
    epochs = defaults.epochs if epochs is None else epochs
    sets = defaults.sets if sets is None else sets
    _check(epochs, width, sets, seed)
    _check_output(output)
    backends.forced_name()  # one that is missing is refused now, not after the first training
    started = time.perf_counter()
    data = datasets.debian_deps()
    train_set, test_set = data.split(TEST_EXAMPLES)
    train_set = train_set[: defaults.train]
    verified = test_set[:sets]
    problem = models.Problem.of(train_set, data.labels.max_active)
    results = []
    for kind in models.KINDS:
        model = models.build(kind, problem, width, seed)
        results.append(_train_and_verify(kind, model, train_set, test_set, epochs, seed, verified))
        if kind == "bottleneck":
            bottleneck = model
    upgraded = models.upgrade(bottleneck, problem)
    results.append(_train_and_verify("upgraded", upgraded, train_set, test_set, 1, seed, verified))
    about = {
        "command": " ".join(["sigkernels", *sys.argv[1:]]),
        "epochs": epochs,
        "width": width,
        "k": problem.k,
        "seed": seed,
        "num_labels": data.labels.num_labels,
        "train_examples": len(train_set),
        "test_examples": len(test_set),
        "verified_sets": sets,
        "seconds": time.perf_counter() - started,
        "environment": env.collect(),
    }
    output.write_text(report.page(results, verified, about), encoding="utf-8")
    return Outcome(results, about)


def _check(epochs: int, width: int, sets: int, seed: int) -> None:
    for name, value, least in (("epochs", epochs, 1), ("width", width, 1), ("sets", sets, 0), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    if sets > TEST_EXAMPLES:
        raise ValueError(f"--sets must be at most the {TEST_EXAMPLES} test examples, got {sets}")
    if width > models.HIDDEN:
        raise ValueError(f"--width must be at most {models.HIDDEN}, the features of the encoder, got {width}")
    if seed >= 2**32:
        raise ValueError(f"--seed must be below 2**32 = {2**32}, got {seed}")


def _check_output(output: Path) -> None:
    """Makes the folder, and refuses a file that cannot be written: now, and not after all the work."""
    if output.is_dir():
        raise ValueError(f"--output must be a file, but {output} is a directory")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output: cannot create the folder {output.parent} ({error.strerror})") from error
    is_new = not output.exists()
    try:
        output.open("ab").close()
    except OSError as error:
        raise ValueError(f"--output: {output} cannot be written ({error.strerror})") from error
    if is_new:
        output.unlink()


def _train_and_verify(
    name: str,
    model: models.Model,
    train_set: datasets.SparseDataset,
    test_set: datasets.SparseDataset,
    epochs: int,
    seed: int,
    verified: datasets.SparseDataset,
) -> Result:
    description = models.describe(model.head)
    if name == "upgraded":
        description = f"the trained bottleneck as {description}, one more epoch"
    result = Result(name, description)
    train(result, model, train_set, test_set, epochs, seed)
    status = f"{name}: trained in {result.train_seconds:.0f} s, F1@5 {result.f1_at_5[-1]:.3f}"
    if len(verified):
        print(f"{status}; verifying {len(verified)} test sets", file=sys.stderr, flush=True)
        verify(result, model, verified)
        status = f"{name}: verified in {result.verify_seconds:.0f} s, {len(result.impossible)} impossible"
    print(status, file=sys.stderr, flush=True)
    return result


def verify(result: Result, model: models.Model, verified: datasets.SparseDataset) -> None:
    """Proves for each label set of ``verified`` whether any input reaches it, and how wide the regions of some are."""
    started = time.perf_counter()
    proofs = model.verify(verified.labels)
    verdicts = [verdict.name for verdict in proofs.verdicts]
    result.verdicts = dict(Counter(verdicts))
    result.impossible = [row for row, verdict in enumerate(verdicts) if verdict == "UNARGMAXABLE"]
    if result.impossible:
        result.recommendation = proofs.repair().summary()
    result.radii = model.radii(verified.labels[:RADIUS_SETS])
    result.verify_seconds = time.perf_counter() - started
