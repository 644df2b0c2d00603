"""Trains one model of the demo and records its score, time and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from ..datasets import SparseDataset
from ..memory import peak_bytes
from ..metrics import MeanAveragePrecision, RankingMetrics
from . import models

LEARNING_RATE = 1e-3
BATCH = 256
CUTOFFS = (5, 10)
DEPTH = 100  # labels of each row that the mean average precision sees


@dataclass
class Result:
    """What the demo measured about one head. ``verdicts`` counts the verified test sets by verdict."""

    name: str
    description: str
    head_parameters: int = 0
    losses: list[float] = field(default_factory=list)  # per step
    f1_at_5: list[float] = field(default_factory=list)  # per epoch
    f1_at_10: list[float] = field(default_factory=list)
    mean_average_precision: float = 0.0  # after the last epoch
    step_ms: float = 0.0
    head_peak_bytes: int | None = None
    train_seconds: float = 0.0
    verify_seconds: float = 0.0
    verdicts: dict[str, int] = field(default_factory=dict)
    impossible: list[int] = field(default_factory=list)  # rows of the verified sets, proved
    recommendation: str = ""  # what would make the impossible sets possible
    radii: list[float] = field(default_factory=list)  # proved lower bounds, of the sets whose radius was asked for

    @property
    def impossible_share(self) -> float:
        """Share of the verified test sets that no input can produce, each with its proof."""
        return len(self.impossible) / max(sum(self.verdicts.values()), 1)

    @property
    def radius_range(self) -> tuple[float, float] | None:
        """The smallest and the median radius; a set that is impossible has none and counts as 0."""
        return (min(self.radii), statistics.median(self.radii)) if self.radii else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"impossible_share": self.impossible_share}


def f1_at(model: models.Model, data: SparseDataset, cutoffs: tuple[int, ...] = CUTOFFS) -> list[float]:
    """F1@m over ``data``, for each m of ``cutoffs``."""
    ranking = RankingMetrics(data.labels.num_labels, m=cutoffs)
    with torch.no_grad():
        for batch in data.batches(1000):
            ranking.update(model.head.topk(model.encoder(batch.features), max(cutoffs))[1], batch.labels)
    scores = ranking.compute()
    return [scores[f"F1@{m}"] for m in cutoffs]


@torch.no_grad()
def mean_average_precision(model: models.Model, data: SparseDataset) -> float:
    """mAP over ``data``: labels below the ``DEPTH`` best of a row count as tied."""
    metric = MeanAveragePrecision(data.labels.num_labels)
    for batch in data.batches(1000):
        values, top = model.head.topk(model.encoder(batch.features), DEPTH)
        metric.update(values, top, batch.labels)
    return metric.compute()["mAP"]


def train(
    result: Result,
    model: models.Model,
    train_set: SparseDataset,
    test_set: SparseDataset,
    epochs: int,
    seed: int,
    progress: Callable[..., Any] = tqdm,
) -> None:
    """Adam for ``epochs`` epochs; fills the training part of ``result``."""
    result.head_parameters = model.head_parameters()
    batch = next(train_set.batches(BATCH, seed=seed))
    result.head_peak_bytes = head_peak(model, batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    steps = epochs * (len(train_set) // BATCH)
    seconds = []
    started = time.perf_counter()
    with progress(total=steps, desc=f"{result.name:<11}", unit="step", disable=None) as bar:
        for epoch in range(epochs):
            for batch in train_set.batches(BATCH, seed=seed * 1000 + epoch, drop_last=True):
                step_started = time.perf_counter()
                optimizer.zero_grad(set_to_none=True)
                loss = model.loss(batch)
                loss.backward()
                optimizer.step()
                seconds.append(time.perf_counter() - step_started)
                result.losses.append(float(loss.detach()))
                bar.update()
            scores = f1_at(model, test_set)
            result.f1_at_5.append(scores[0])
            result.f1_at_10.append(scores[1])
            bar.set_postfix({"loss": f"{result.losses[-1]:.1f}", "F1@5": f"{scores[0]:.3f}"})
    result.train_seconds = time.perf_counter() - started
    result.mean_average_precision = mean_average_precision(model, test_set)
    result.step_ms = 1000 * statistics.median(seconds)


def head_peak(model: models.Model, batch: SparseDataset) -> int | None:
    """Peak memory that the head adds in one step: loss, gradient of its input, gradients of its weights."""
    with torch.no_grad():
        hidden = model.encoder(batch.features)

    def step() -> None:
        leaf = hidden.clone().requires_grad_()
        model.head.loss(leaf, batch.labels, reduction="sum").backward()
        model.head.zero_grad(set_to_none=True)

    return peak_bytes(step)
