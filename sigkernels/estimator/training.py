"""The training loop: Adam over mini-batches, stopped with the last good weights where the loss is not finite."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..head_base import Head
from ..losses import BCE, Loss, RowLoss
from ..validation import check_int
from .examples import Examples
from .features import Batch

FUSED_ADAM = ("cpu", "cuda")  # the devices for which torch has it; elsewhere the plain one


class TrainingDiverged(FloatingPointError):
    """The loss became NaN or infinite. ``losses`` are those of the epochs that are kept."""

    def __init__(self, message: str, losses: list[float]) -> None:
        super().__init__(message)
        self.losses = losses


def generator(random_state: Any) -> np.random.Generator:
    """The generator that ``random_state`` stands for."""
    if isinstance(random_state, np.random.Generator):
        return random_state
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(2**32, size=4, dtype=np.uint32))
    return np.random.default_rng(None if random_state is None else check_int("random_state", random_state, 0))


class Encoder(nn.Module):
    """``relu(x A + b)`` for dense or sparse ``x``; starts with outputs of unit variance whatever the scale of x."""

    embedding: nn.EmbeddingBag
    bias: nn.Parameter

    def __init__(self, width: int, hidden: int, mean_square: float) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(width, hidden, mode="sum", dtype=torch.float32)  # as features come
        nn.init.normal_(self.embedding.weight, std=max(mean_square, 1e-12) ** -0.5)
        self.bias = nn.Parameter(torch.zeros(hidden, dtype=torch.float32))

    def forward(self, x: Batch) -> Tensor:
        if isinstance(x, Tensor):
            return torch.relu(torch.addmm(self.bias, x, self.embedding.weight))
        indices, offsets, values = x
        return torch.relu(self.embedding(indices, offsets, per_sample_weights=values) + self.bias)


class Trainer:
    """Trains an encoder and a head in place. Keeps the moments of Adam from one call of ``run`` to the next."""

    encoder: Encoder
    head: Head
    device: torch.device
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Adam

    def __init__(self, encoder: Encoder, head: Head) -> None:
        self.encoder, self.head, self.device = encoder, head, encoder.bias.device
        self.parameters = [*encoder.parameters(), *head.parameters()]
        self.loss: Loss = BCE()
        # The default Adam makes several passes over each parameter: more than the rest of a step at a million labels.
        self.optimizer = torch.optim.Adam(self.parameters, fused=self.device.type in FUSED_ADAM)

    def configure(self, loss: Loss, learning_rate: float, weight_decay: float) -> None:
        """What the next ``run`` minimises, and how."""
        self.loss = loss
        for group in self.optimizer.param_groups:
            group.update(lr=learning_rate, weight_decay=weight_decay)

    def run(
        self,
        examples: Examples,
        rng: np.random.Generator,
        *,
        epochs: int,
        batch_size: int,
        verbose: bool,
        stopping: EarlyStopping | None = None,
    ) -> list[float]:
        """Returns the mean loss of each epoch; raises TrainingDiverged with good weights in place."""
        losses: list[float] = []
        good = Snapshot(self.parameters)
        steps = -(-len(examples) // batch_size)
        with Progress(epochs, steps, verbose) as progress:
            for epoch in range(1, epochs + 1):
                order = torch.from_numpy(rng.permutation(len(examples)))
                total = 0.0
                for step, rows in enumerate(order.split(batch_size), 1):
                    value = self._loss(examples, rows)
                    number = float(value.detach())
                    if not math.isfinite(number):
                        self._give_up(good, losses, f"{number} in epoch {epoch}, step {step} of {steps}")
                    if step == 1:  # the weights after the epoch before gave a finite loss
                        good.take(epochs=epoch - 1)
                    self._step(value)
                    total += number * len(rows)
                    progress.step()
                losses.append(total / len(examples))
                progress.epoch(epoch, losses[-1])
                if stopping is not None and stopping.is_over(self.mean_loss(stopping.held, batch_size)):
                    break
        with torch.no_grad():
            number = float(self._loss(examples, rows))
        if not math.isfinite(number):
            self._give_up(good, losses, f"{number} after the last step of epoch {epoch}")
        if stopping is not None:
            stopping.best.restore()
        return losses

    @torch.no_grad()
    def mean_loss(self, examples: Examples, batch_size: int) -> float:
        """The mean loss of examples that nothing is learned from."""
        batches = torch.arange(len(examples)).split(batch_size)
        return sum(float(self._loss(examples, rows)) * len(rows) for rows in batches) / len(examples)

    def _loss(self, examples: Examples, rows: Tensor) -> Tensor:
        hidden = self.encoder(examples.features.batch(rows, self.device))
        targets, weights = examples.labels[rows].to(self.device), examples.weights
        if weights is None:
            return self.head.loss(hidden, targets, self.loss)
        per_row = self.head.loss(hidden, targets, self.loss, reduction="none")
        terms = 1 if isinstance(self.loss, RowLoss) else self.head.num_labels
        return (per_row * weights[rows].to(per_row)).mean() / terms

    def _step(self, value: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # Adam does not see the scale of a loss until its gradients come near its epsilon, as those of a mean over
        # B·n terms do at large n: train on n times that.
        (value * self.head.num_labels).backward()
        self.optimizer.step()

    def _give_up(self, good: Snapshot, losses: list[float], where: str) -> None:
        epochs = good.restore()
        kept = f"the weights after epoch {epochs} are kept" if epochs else "the model is as it was before this call"
        rate = self.optimizer.param_groups[0]["lr"]
        raise TrainingDiverged(
            f"training stopped: the loss is {where}; {kept}. Lower learning_rate (it is {rate}), scale X, or look for a "
            "loss that grows without bound",
            losses[:epochs],
        )


class Snapshot:
    """A copy of parameters that are known to be good, and after how many epochs they were."""

    parameters: list[nn.Parameter]
    epochs: int

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.epochs = parameters, 0
        self.copies: list[Tensor] = []

    def take(self, epochs: int) -> None:
        """Remembers the parameters as they are."""
        self.epochs = epochs
        if not self.copies:
            self.copies = [parameter.detach().clone() for parameter in self.parameters]
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            copy.copy_(parameter.detach())

    def restore(self) -> int:
        """Brings the parameters back; without a copy they were never changed."""
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self.copies, strict=bool(self.copies)):
                parameter.copy_(copy)
        return self.epochs


class EarlyStopping:
    """Watches the loss of held-out examples, and keeps the parameters of the epoch where it was lowest."""

    held: Examples
    n_iter_no_change: int
    best: Snapshot

    def __init__(self, held: Examples, n_iter_no_change: int, parameters: list[nn.Parameter]) -> None:
        self.held, self.n_iter_no_change = held, n_iter_no_change
        self.losses: list[float] = []
        self.best = Snapshot(parameters)

    def is_over(self, loss: float) -> bool:
        """Takes the loss after an epoch: has it been no better than the best for ``n_iter_no_change`` epochs?"""
        if all(loss < earlier for earlier in self.losses):
            self.best.take(epochs=len(self.losses) + 1)
        self.losses.append(loss)
        return len(self.losses) - self.best.epochs >= self.n_iter_no_change


class Progress:
    """A bar on a terminal, a line for each epoch elsewhere (a notebook, a log); nothing unless it is asked for."""

    epochs: int
    lines: bool
    bar: Any
    start: float

    def __init__(self, epochs: int, steps: int, show: bool) -> None:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.epochs, self.lines = epochs, show and not terminal
        self.bar = tqdm(total=epochs * steps, unit="step", disable=not (show and terminal))
        self.start = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.close()

    def step(self) -> None:
        """One step is done."""
        self.bar.update()

    def epoch(self, number: int, loss: float) -> None:
        """One epoch is done."""
        self.bar.set_postfix(loss=loss)
        if self.lines:
            seconds = time.perf_counter() - self.start
            print(f"epoch {number}/{self.epochs}: loss {loss:.6g}, {seconds:.1f} s", file=sys.stderr, flush=True)
