"""Problems for the kernel tests, their float64 truth, and the tolerance: no worse than eager torch in that dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigkernels.backends import torch_reference
from sigkernels.backends.interface import LossResult
from sigkernels.labels import LabelSets
from sigkernels.layer import Layer


class Size(NamedTuple):
    batch: int
    n: int
    k: int  # -1: no DFT part
    s: int
    bias: bool = False
    start: int = 0
    rows: int | None = None  # labels of the layer, when it is a range


SIZES = {
    "aligned": Size(128, 192, 10, 64),
    "odd": Size(5, 300, 20, 13),
    "prime, more rows than a group": Size(131, 197, 7, 9),
    "one label": Size(1, 1, 0, 1),
    "k=0": Size(3, 65, 0, 4),
    "2k+1=n": Size(4, 101, 50, 3),
    "no slack": Size(3, 130, 6, 0),
    "wide, bias, no DFT": Size(6, 70, -1, 150, bias=True),
    "label range": Size(3, 1000, 30, 20, start=130, rows=200),
}


class Problem(NamedTuple):
    x: Tensor
    layer: Layer
    targets: LabelSets | Tensor
    scale: Tensor


def problem(size: Size, dtype: torch.dtype, dense: bool = False, seed: int = 0) -> Problem:
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    rows = size.n if size.rows is None else size.rows
    columns = 2 * size.k + 1 if size.k >= 0 else 0
    x = normal(size.batch, columns + size.s)
    if columns:
        x[:, 0] -= 2 * size.n**0.5  # a prior that makes most labels unlikely, as training does
    bias = normal(rows).to(dtype) if size.bias else None
    layer = Layer((0.3 * normal(rows, size.s)).to(dtype), bias, size.n, size.k, size.start)
    targets: LabelSets | Tensor
    if dense:
        targets = torch.rand(size.batch, rows, generator=make).round(decimals=2)
    else:
        lists = [torch.randperm(size.n, generator=make)[: b % 7].tolist() for b in range(size.batch)]
        targets = LabelSets.from_lists(lists, size.n)
    return Problem(x.to(dtype), layer, targets, normal(size.batch) / max(size.batch * size.n, 1))


def truth(p: Problem, loss: Any, dtype: torch.dtype = torch.float64) -> LossResult:
    """Plain torch with autograd, in any dtype."""
    x = p.x.to(dtype).requires_grad_()
    weight = p.layer.weight.to(dtype).requires_grad_()
    bias = None if p.layer.bias is None else p.layer.bias.to(dtype).requires_grad_()
    rows = torch_reference.loss_rows(x, p.layer._replace(weight=weight, bias=bias), p.targets, loss)
    wanted = [x, weight] + ([] if bias is None else [bias])
    grads = torch.autograd.grad((rows * p.scale.to(dtype)).sum(), wanted, allow_unused=True)
    return LossResult(rows.detach(), grads[0], grads[1], grads[2] if bias is not None else None)


def error(got: Tensor | None, want: Tensor | None) -> float:
    """The largest error, of the largest value."""
    if got is None or want is None or not want.numel():
        assert (got is None) == (want is None)
        return 0.0
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-300))


def check(p: Problem, loss: Any, result: LossResult, tf32: bool = False) -> None:
    """Every part of a result against float64: within what eager torch reaches in the same dtype."""
    exact, eager = truth(p, loss), truth(p, loss, p.x.dtype)
    # On a problem of a few numbers eager torch may be right by luck: one rounding is always allowed.
    floor = {torch.float64: 1e-13, torch.float32: 4e-7}.get(p.x.dtype, torch.finfo(p.x.dtype).eps / 2)
    floor = 2**-9 if tf32 else floor
    for name, got, want, plain in zip(result._fields, result, exact, eager, strict=True):
        allowed = max(1.5 * error(plain, want), floor)
        assert error(got, want) <= allowed, f"{name}: {error(got, want):.2e}, eager {error(plain, want):.2e}"
