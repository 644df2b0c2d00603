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
    targets: sk.LabelSets | Tensor
    scale: Tensor  # [B] float64: an upstream gradient for the rows, not uniform and of both signs

    def to(self, dtype: torch.dtype) -> Problem:
        """A copy in another dtype whose values are exactly these, with fresh leaves."""
        x, weight, bias = (
            None if t is None else t.detach().to(dtype).requires_grad_()
            for t in (self.x, self.layer.weight, self.layer.bias)
        )
        return self._replace(x=x, layer=self.layer._replace(weight=weight, bias=bias))

    def detach(self) -> Problem:
        """The same tensors without leaves, for a backend that is called directly."""
        x, weight, bias = (None if t is None else t.detach() for t in (self.x, self.layer.weight, self.layer.bias))
        return self._replace(x=x, layer=self.layer._replace(weight=weight, bias=bias))

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


def problem(
    n, k, s, batch, *, device="cpu", dtype=torch.float32, bias=False, scale=1.0, codes=0,
    weight_scale=1.0, start=0, rows=None, dense=False, prior=0.0, seed=None,
) -> Problem:  # fmt: skip
    """A random problem; ``k = -1`` for a plain linear layer. Without a seed, torch's generator draws one.

    ``start``, ``rows``: a layer of this range of the labels. ``dense``: targets between 0 and 1. ``prior``: what is
    taken from the first feature, the constant of the DFT, as training does to make most labels unlikely.
    """
    seed = int(torch.randint(2**31, ())) if seed is None else seed
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:  # in float64, so that a float64 kernel may drop no digit of its inputs
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    meta = LayerMeta(n, k, start, codes=codes)
    rows = n if rows is None else rows
    x = scale * normal(batch, meta.fixed_columns + s)
    if prior:
        x[:, 0] -= prior
    x = x.to(device, dtype).requires_grad_()
    weight = (weight_scale * normal(rows, s)).to(device, dtype).requires_grad_()
    c = normal(rows).to(device, dtype).requires_grad_() if bias else None
    upstream = (normal(batch) / max(batch * n, 1)).to(device)
    targets = torch.rand(batch, rows, generator=draw).round(decimals=2) if dense else random_sets(batch, n, seed=seed)
    return Problem(x, Layer(weight, c, meta), targets.to(device), upstream)


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


def assert_no_worse(
    ours: Tensor, eager: Tensor, truth: Tensor, dtype: torch.dtype, what: str, floor: float | None = None
) -> None:
    """The error against float64 is no larger than 1.5 times eager torch's own in ``dtype``, up to ``floor``.

    ``floor``: what rounding alone may cost, as a part of the largest number. On few numbers eager torch is right by
    luck, and in float64 it is the truth itself, summed in another order.
    """
    truth = truth.double()
    assert ours.shape == truth.shape, (what, ours.shape, truth.shape)
    if not truth.numel():
        return
    if floor is None:
        floor = (64 if dtype == torch.float64 else 4) * torch.finfo(dtype).eps
    size, norm = truth.abs().max().item(), truth.norm().item()
    differences = [t.double() - truth for t in (ours, eager)]
    error, own = (t.abs().max().item() for t in differences)
    assert error <= 1.5 * own + floor * size, f"{what}: error {error:.3g}, eager torch {own:.3g}, size {size:.3g}"
    # Many small errors that lie the same way; an L2 error of r also bounds the cosine, by 1 - r².
    error, own = (t.norm().item() for t in differences)
    assert error <= max(1.5 * own, floor * norm, 20 * LOW[dtype] * norm), f"{what}: L2 error {error:.3g} of {norm:.3g}"


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
