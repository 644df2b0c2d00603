"""What the tests of fused optimizers share: heads, optimizers beside torch's own, and a training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sigkernels as sk
from sigkernels.backends import cpu

STEPS = 4
N, E = 173, 40
ISAS = _C.build_info()["isas_usable"] if (_C := getattr(cpu, "_C", None)) else []


class RowwiseAdagrad(torch.optim.Optimizer):
    """The reference: one sum of squares per label."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad + group["weight_decay"] * p
                total = self.state[p].setdefault("sum", torch.zeros(p.shape[0], dtype=p.dtype))
                total += g.square().reshape(p.shape[0], -1).mean(1)
                root = total.sqrt() + group["eps"]
                p -= group["lr"] * g / (root[:, None] if p.ndim == 2 else root)


Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, tuple[Make, Make]] = {
    "sgd": (lambda p: sk.optim.FusedSGD(p, 50.0), lambda p: torch.optim.SGD(p, 50.0)),
    "sgd, decay": (
        lambda p: sk.optim.FusedSGD(p, 50.0, weight_decay=1e-3),
        lambda p: torch.optim.SGD(p, 50.0, weight_decay=1e-3),
    ),
    "momentum": (
        lambda p: sk.optim.FusedSGD(p, 10.0, 0.9, 1e-3),
        lambda p: torch.optim.SGD(p, 10.0, 0.9, weight_decay=1e-3),
    ),
    "adagrad": (
        lambda p: sk.optim.FusedAdagrad(p, 0.05, weight_decay=1e-4),
        lambda p: RowwiseAdagrad(p, 0.05, weight_decay=1e-4),
    ),
    "adamw": (
        lambda p: sk.optim.FusedAdamW(p, 0.02, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    ),
}
HEADS: dict[str, Callable[..., sk.Head]] = {
    "linear": lambda **given: sk.LinearHead(E, N, **given),
    "bottleneck": lambda **given: sk.LinearHead(E, N, 9, **given),
    "dft": lambda **given: sk.DFTHead(E, N, k=3, slack=7, bias=True, **given),
    "slack": lambda **given: sk.DFTHead(E, N, k=0, slack=33, **given),
    "codes": lambda **given: sk.DFTHead(E, N, k=1, slack=5, codes=16, bias=True, **given),
    "bias alone": lambda **given: sk.DFTHead(E, N, k=3, bias=True, **given),
}


def label_parameters(head: sk.Head) -> list[nn.Parameter]:
    return [p for name, p in head.named_parameters() if not name.startswith("proj.") and p.numel()]


def random_targets(rows: int, seed: int = 0, n: int = N) -> sk.LabelSets:
    generator = torch.Generator().manual_seed(seed)
    return sk.LabelSets.from_dense(torch.rand(rows, n, generator=generator) < 0.05)


def train(
    head: sk.Head, opt: torch.optim.Optimizer, fused: bool, rows: int = 6, steps: int = STEPS, **given: Any
) -> list[Tensor]:
    """The gradients of h of a few steps; the head is trained."""
    torch.manual_seed(1)
    grads = []
    for step in range(steps):
        h = torch.randn(rows, E, dtype=next(head.parameters()).dtype, requires_grad=True)
        targets = given.pop("targets", None) or random_targets(rows, step)
        loss = head.loss(h, targets, update=opt, **given) if fused else head.loss(h, targets, **given)
        loss.backward()
        assert not fused or all(p.grad is None for p in label_parameters(head))
        opt.step()
        opt.zero_grad()
        assert h.grad is not None
        grads.append(h.grad)
        for p in head.parameters():
            p.grad = None
    return grads


def close(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> None:
    if not b.numel():
        return
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max() + 1e-6))


def bf16_head(seed: int = 0, bias: bool = True, n: int = N, **given: Any) -> sk.LinearHead:
    torch.manual_seed(seed)
    return sk.LinearHead(E, n, bias=bias, dtype=torch.bfloat16, **given)


def refused(match: str, kind: type[Exception] = RuntimeError, head: Any = None, opt: Any = None, **given: Any) -> None:
    """Raises, and leaves the weights as they are."""
    head = HEADS["linear"]() if head is None else head
    opt = sk.optim.FusedSGD(head, 1.0) if opt is None else opt
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(kind, match=match):
        head.loss(torch.randn(2, E, dtype=head.weight.dtype), given.pop("targets", [[1], []]), update=opt, **given)
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())
