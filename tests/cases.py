"""Problems and the tolerance rule that the operation tests share."""

from __future__ import annotations

import datetime
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import reference
import torch
from torch import Tensor

import sigkernels as sk
from sigkernels.layer import Layer, LayerMeta

LOW = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-14}


class Problem(NamedTuple):
    """One layer and its inputs; ``layer`` holds the same tensors that take gradients."""

    x: Tensor
    layer: Layer
    sets: sk.LabelSets

    def to(self, dtype: torch.dtype) -> Problem:
        """A copy in another dtype whose values are exactly these, with fresh leaves."""
        x, weight, bias = (
            None if t is None else t.detach().to(dtype).requires_grad_()
            for t in (self.x, self.layer.weight, self.layer.bias)
        )
        return Problem(x, self.layer._replace(weight=weight, bias=bias), self.sets)

    @property
    def leaves(self) -> list[Tensor]:
        tensors = (self.x, self.layer.weight, self.layer.bias)
        return [t for t in tensors if t is not None]

    def grads(self) -> list[Tensor]:
        """The gradients of all leaves, which are cleared."""
        grads = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        assert all(grad is not None for grad in grads)
        return grads


def random_sets(batch: int, n: int, most: int = 6, seed: int = 0) -> sk.LabelSets:
    draw = random.Random(seed)
    lists = [draw.sample(range(n), draw.randint(0, min(n, most))) for _ in range(batch)]
    return sk.LabelSets.from_lists(lists, n)


def problem(n, k, s, batch, *, device="cpu", dtype=torch.float32, bias=False, scale=1.0, codes=0) -> Problem:
    """A seeded problem; ``k = -1`` for a plain linear layer."""
    meta = LayerMeta(n, k, codes=codes)
    columns = meta.fixed_columns + s
    x = (torch.randn(batch, columns) * scale).to(device, dtype).requires_grad_()
    weight = torch.randn(n, s).to(device, dtype).requires_grad_()
    c = torch.randn(n).to(device, dtype).requires_grad_() if bias else None
    return Problem(x, Layer(weight, c, meta), random_sets(batch, n).to(device))


def public_loss(p: Problem, targets, loss, reduction: str) -> Tensor:
    """The loss through the public function of this kind of layer."""
    if p.layer.k >= 0:
        args = (p.x, p.layer.weight, targets, p.layer.num_labels, p.layer.k)
        options = {"bias": p.layer.bias, "codes": p.layer.codes}
        return sk.functional.dft_loss(*args, loss=loss, reduction=reduction, **options)
    return sk.functional.linear_loss(p.x, p.layer.weight, targets, p.layer.bias, loss=loss, reduction=reduction)


def dense_loss(p: Problem, targets, loss, reduction: str) -> Tensor:
    """The same by dense, differentiable torch."""
    rows = reference.loss_rows(p.x, p.layer, targets, loss)
    if reduction == "none":
        return rows
    return rows.sum() / (rows.shape[0] * p.layer.num_labels) if reduction == "mean" else rows.sum()


def assert_no_worse(ours: Tensor, eager: Tensor, truth: Tensor, dtype: torch.dtype, what: str) -> None:
    """The error against float64 is no larger than eager torch's own, up to the rounding of one result."""
    truth = truth.double()
    size = truth.abs().max().item() if truth.numel() else 0.0
    if truth.numel() == 0:
        assert ours.shape == truth.shape, what
        return
    assert ours.shape == truth.shape, (what, ours.shape, truth.shape)
    error, own = ((t.double() - truth).abs().max().item() for t in (ours, eager))
    # In float64 the truth is eager torch itself: leave room for another order of summation.
    floor = (64 if dtype == torch.float64 else 4) * torch.finfo(dtype).eps * size
    assert error <= 1.5 * own + floor, f"{what}: error {error:.3g}, eager torch {own:.3g}, size {size:.3g}"
    norm = truth.norm().item()
    if norm > 0:
        relative = (ours.double() - truth).norm().item() / norm
        cosine = torch.nn.functional.cosine_similarity(ours.double().flatten(), truth.flatten(), dim=0).item()
        assert relative <= 20 * LOW[dtype], f"{what}: relative L2 error {relative:.3g}"
        assert cosine >= 1 - 20 * LOW[dtype], f"{what}: cosine {cosine}"


def join(folder: Path, rank: int, world: int = 2, seconds: float = 120) -> None:
    """Makes this process one of some ranks, which meet in a file of ``folder``: no port that another could hold."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )


def leave(folder: Path, rank: int, world: int = 2) -> None:
    """Ends this rank once all have done their last collective; what they found is written.

    At once, because gloo's threads can abort an interpreter that is shutting down.
    """
    (folder / f"done-{rank}").touch()
    while not all((folder / f"done-{other}").exists() for other in range(world)):
        time.sleep(0.01)
    os._exit(0)
