"""Sizes for the kernel tests, the float64 truth of a problem, and what a kernel's arithmetic may cost."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cases
import reference
import torch
from cases import Problem
from torch import Tensor

from sigkernels.backends import ColumnResult, LossCall, LossResult
from sigkernels.labels import LabelSets
from sigkernels.losses import ConfusionLoss, SigmoidF1, UnboundedF1
from sigkernels.losses.confusion import METRICS

FLOAT64 = 2e-14  # what a float64 kernel may be off by, as a part of the largest number (see compare)


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


def confusion_losses(n: int) -> list[ConfusionLoss]:
    """Every metric, every form of S, numbers and tensors of both shapes for β and η."""
    beta, eta = torch.rand(n, dtype=torch.float64) + 0.5, torch.randn(n, dtype=torch.float64)
    scalars = torch.tensor(1.3, dtype=torch.float64), torch.tensor(-0.4, dtype=torch.float64)
    made: list[ConfusionLoss] = [SigmoidF1(beta, eta, metric) for metric in METRICS]
    made += [SigmoidF1(2.0, 0.3, "f1", on="probability"), SigmoidF1(*scalars, "npv", on="probability")]
    return [*made, UnboundedF1(), UnboundedF1("specificity")]


def problem(size: Size, dtype: torch.dtype, dense: bool = False, seed: int = 0) -> Problem:
    """A problem of this size for a backend that is called directly."""
    return cases.problem(
        size.n, size.k, size.s, size.batch, dtype=dtype, bias=size.bias, weight_scale=0.3, start=size.start,
        rows=size.rows, dense=dense, prior=2 * size.n**0.5 if size.k >= 0 else 0.0, seed=seed,
    ).detach()  # fmt: skip


def truth(p: Problem, loss: Any, dtype: torch.dtype = torch.float64) -> LossResult:
    """Plain torch with autograd, in any dtype."""
    x = p.x.to(dtype).requires_grad_()
    weight = p.layer.weight.to(dtype).requires_grad_()
    bias = None if p.layer.bias is None else p.layer.bias.to(dtype).requires_grad_()
    rows = reference.loss_rows(x, p.layer._replace(weight=weight, bias=bias), p.targets, loss)
    wanted = [x, weight] + ([] if bias is None else [bias])
    grads = torch.autograd.grad((rows * p.scale.to(dtype)).sum(), wanted, allow_unused=True)
    return LossResult(rows.detach(), grads[0], grads[1], grads[2] if bias is not None else None)


def confusion_truth(
    p: Problem, loss: ConfusionLoss, reduction: str, dtype: torch.dtype = torch.float64, blur: float = 0.0
) -> ColumnResult:
    """The formulas of ``losses/confusion.py`` on dense logits with autograd, in any dtype.

    ``blur``: what the logits are off by, up or down, as a part of the largest.
    """
    x = p.x.to(dtype).requires_grad_()
    weight = p.layer.weight.to(dtype).requires_grad_()
    bias = None if p.layer.bias is None else p.layer.bias.to(dtype).requires_grad_()
    settings = {name: getattr(loss, name, None) for name in ("beta", "eta")}
    leaves = {n: v.detach().to(dtype).requires_grad_() for n, v in settings.items() if isinstance(v, Tensor)}
    loss = dataclasses.replace(loss, **leaves)
    layer = p.layer._replace(weight=weight, bias=bias)
    z = reference.logits(x, layer)
    if blur:
        sides = torch.randint(0, 2, z.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
        z = z + blur * z.detach().abs().max() * sides
    inside = slice(layer.label_start, layer.label_start + layer.num_rows)
    y = p.targets.to_dense()[:, inside] if isinstance(p.targets, LabelSets) else p.targets
    if leaves:
        whole = {n: v[inside] if v.ndim else v for n, v in leaves.items()}
        loss = dataclasses.replace(loss, **whole)
    value = loss.value(z, y.to(dtype)) * layer.num_rows  # the sum over the labels here
    value = value / layer.num_labels if reduction == "mean" else value
    wanted = [x, weight, *([] if bias is None else [bias]), *leaves.values()]
    grads = list(torch.autograd.grad(value, wanted, allow_unused=True))
    first = [value.detach(), grads.pop(0), grads.pop(0), None if bias is None else grads.pop(0)]
    return ColumnResult(*first, *(grads.pop(0) if name in leaves else None for name in ("beta", "eta")))


def check_confusion(backend: Any, p: Problem, loss: ConfusionLoss, reduction: str, tf32: bool = False) -> None:
    """A confusion-matrix loss of a backend against float64, within what eager torch reaches in the same dtype."""
    settings = [isinstance(getattr(loss, name, None), Tensor) for name in ("beta", "eta")]
    needs = (True, True, p.layer.bias is not None, *settings)
    scale = 1 / p.layer.num_labels if reduction == "mean" else 1.0
    call = LossCall(p.x, p.layer, p.targets, loss, scale, needs)
    result = backend.column_loss(call)
    inside = slice(p.layer.label_start, p.layer.label_start + p.layer.num_rows)
    # In float64 eager is the truth itself. A quotient whose denominator nearly vanishes blows up what the logits are off
    # by, so there the truth of slightly different logits shows how much may be lost.
    blur = FLOAT64 if p.x.dtype == torch.float64 else 0.0
    exact, eager = confusion_truth(p, loss, reduction), confusion_truth(p, loss, reduction, p.x.dtype, blur)
    # The truth has the gradient of a setting for every label, the backend for the labels of the layer.
    exact, eager = (
        outcome._replace(
            **{n: g[inside] for n in ("grad_beta", "grad_eta") if (g := getattr(outcome, n)) is not None and g.ndim}
        )
        for outcome in (exact, eager)
    )
    compare(p, result, exact, eager, tf32)
    nothing = backend.column_loss(call._replace(needs=(False,) * 5))
    assert torch.equal(nothing.value, result.value) and all(grad is None for grad in nothing[1:])


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
    compare(p, result, truth(p, loss), truth(p, loss, p.x.dtype), tf32)


def compare(p: Problem, result: Any, exact: Any, eager: Any, tf32: bool) -> None:
    """Every part of a result by the rule of ``cases.assert_no_worse``. What the arithmetic of the kernels allows itself,
    with u = eps/2 of the dtype:

    float64: the factors of a tile are cut off at 1e-14 of the largest singular value, and exp and log take as much
    again (seen: 1.5e-14).
    float32: the DFT part is a product of five rounded factors (V, its rotation, M, c, U) and two sums where eager has one
    of each: 7u. Worst seen: 3.6e-7 where eager has 2.2e-7.
    16-bit, the loss: factors in two halves are right to u², twice; everything else is float32.
    16-bit, gradients: one rounding, of ∂loss/∂z before its products, or of the result: u.
    tf32: 11 bits, and three products in a row (c, z, the gradient) cut their operands off or round them: 4u.
    """
    u = torch.finfo(p.x.dtype).eps / 2
    exact_part = {torch.float64: FLOAT64, torch.float32: 7 * u}.get(p.x.dtype, 2 * u * u + 3e-7)
    for name, got, want, plain in zip(result._fields, result, exact, eager, strict=True):
        assert (got is None) == (want is None), name
        if got is not None:
            own = exact_part if name in ("rows", "value") or p.x.dtype.itemsize > 2 else u
            floor = 4 * 2**-11 if tf32 else own
            cases.assert_no_worse(got, plain, want, p.x.dtype, name, floor)
