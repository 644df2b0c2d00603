"""Every loss of every head, trained on two and three ranks, is that of one process.

SIGKERNELS_EVERY_STEP=1 goes 20 steps with every loss and every head, which takes some minutes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch
from cases import join, leave, random_sets
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sigkernels as sk

N, WIDTH, BATCH, STEPS = 31, 24, 6, 20


@dataclasses.dataclass(frozen=True, eq=False)
class Squared(sk.ElementwiseLoss):
    def value(self, z, y):
        return (torch.sigmoid(z) - y) ** 2


@dataclasses.dataclass(frozen=True, eq=False)
class Missed(sk.ColumnLoss):
    def column_values(self, z, y):
        return ((1 - torch.sigmoid(z)) * y).mean(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax(sk.RowLoss):
    def row_values(self, z, y):
        return -(y * torch.log_softmax(z, 1)).sum(1)


HEADS = {
    "dft": lambda n, **mesh: sk.DFTHead(WIDTH, n, 2, 3, **mesh),
    "dft codes bias": lambda n, **mesh: sk.DFTHead(WIDTH, n, 0, 3, codes=16, bias=True, **mesh),
    "linear": lambda n, **mesh: sk.LinearHead(WIDTH, n, **mesh),
    "bottleneck": lambda n, **mesh: sk.LinearHead(WIDTH, n, 4, **mesh),
}
LOSSES = {
    "BCE": lambda n: sk.BCE(weight=torch.linspace(0.5, 1.5, n)),
    "Focal": lambda n: sk.Focal(),
    "Asymmetric": lambda n: sk.Asymmetric(),
    "Poly1BCE": lambda n: sk.Poly1BCE(),
    "own elementwise": lambda n: Squared(),
    "SigmoidF1": lambda n: sk.SigmoidF1(),
    "SigmoidF1 specificity": lambda n: sk.SigmoidF1(metric="specificity", on="probability"),
    "SigmoidF1 pooled": lambda n: sk.SigmoidF1(average="pooled"),
    "UnboundedF1 pooled": lambda n: sk.UnboundedF1(metric="accuracy", average="pooled"),
    "own columns": lambda n: Missed(),
    "LMLNLL": lambda n: sk.LMLNLL(2),
    "LMLNLL of all": lambda n: sk.LMLNLL(n),
    "TruncatedTopKEntropy": lambda n: sk.TruncatedTopKEntropy(3),
    "SmoothTopKSVM": lambda n: sk.SmoothTopKSVM(3),
}
# two ranks, three ranks, and three of which the last has no labels
SIZES = {1: (N, 4), 2: (N,), 3: (N, 4)}


def batch(step: int, n: int) -> tuple[torch.Tensor, sk.LabelSets]:
    torch.manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH), random_sets(BATCH, n, most=3, seed=step)


@torch.no_grad()
def step_down(model: nn.Module) -> None:
    """Gradient descent by hand: on tensors as small as these an optimizer spends its time in DTensor's dispatch."""
    for p in model.parameters():
        if p.grad is not None:
            own, grad = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
            own.sub_(grad, alpha=0.5)


def train(head: sk.Head, loss: sk.Loss, steps: int, form=lambda sets: sets) -> list[float]:
    """The losses of some steps with an encoder in front."""
    torch.manual_seed(1)
    encoder = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleList([encoder, head])
    losses = []
    for step in range(steps):
        x, sets = batch(step, head.num_labels)
        value = head.loss(encoder(x), form(sets), loss)
        model.zero_grad()
        value.backward()
        step_down(model)
        losses.append(value.item())
    return losses


def learned_settings(n: int, **mesh) -> list[torch.Tensor]:
    """The gradients of a loss's own parameters, and of rows that are weighted one by one."""
    torch.manual_seed(2)
    head = sk.LinearHead(WIDTH, n, **mesh)
    x, sets = batch(0, n)
    grads = []
    for average in ("label", "pooled"):
        for shape in ((), (n,)):
            beta, eta = (torch.ones(shape).requires_grad_(), torch.zeros(shape).requires_grad_())
            head.loss(x, sets, sk.SigmoidF1(beta, eta, average=average)).backward()
            grads += [beta.grad, eta.grad]
    for loss in (sk.BCE(), sk.LMLNLL(2), sk.TruncatedTopKEntropy(3), sk.SmoothTopKSVM(3)):
        h = x.clone().requires_grad_()
        rows = head.loss(h, sets.to_dense(torch.float32) * 0.9, loss, "none")
        rows.backward(torch.arange(1.0, BATCH + 1), retain_graph=True)
        rows.backward(torch.ones(BATCH))
        with torch.no_grad():
            torch.testing.assert_close(head.loss(x, sets.to_dense(torch.float32) * 0.9, loss, "none"), rows)
        grads += [rows.detach(), h.grad]
    known = head.loss(x, sets, reduction="mean", unknown=random_sets(BATCH, n, seed=5))
    return [*grads, known.detach()]


FUSED = {
    "sgd": lambda head: sk.optim.FusedSGD(head, 5.0, weight_decay=1e-3, rounding="nearest"),
    "momentum": lambda head: sk.optim.FusedSGD(head, 1.0, 0.9),
    "adagrad": lambda head: sk.optim.FusedAdagrad(head, 0.05),
    "adamw": lambda head: sk.optim.FusedAdamW(head, 0.02),
}


def updated(head: sk.Head, opt: sk.optim.FusedOptimizer, **given) -> list[torch.Tensor]:
    """Steps inside the loss: the losses, the gradients of h, all label weights and what the optimizer keeps of them."""
    found, dtype = [], head._own_rows(next(iter(head.label_parameters()))).dtype
    for step in range(3):
        x, sets = batch(step, head.num_labels)
        h = x.to(dtype).requires_grad_()
        loss = head.loss(h, sets.to_dense(torch.float32) if step == 1 else sets, update=opt, **given)
        loss.backward()
        opt.step()
        found += [loss.detach(), h.grad]
    for p in head.parameters():
        if any(p is other for group in opt.param_groups for other in group["params"]):
            parts = [p, *(value for value in opt.state[p].values() if isinstance(value, torch.Tensor))]
            found += [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for t in parts]
    return found


def all_updates(n: int, **mesh) -> dict[str, list]:
    found = {}
    for name, make in HEADS.items():
        if name == "dft" and n < 5:
            continue
        for kind, fused in FUSED.items():
            torch.manual_seed(0)
            head = make(n, **mesh)
            unknown = {"unknown": random_sets(BATCH, n, seed=5), "reduction": "sum"} if kind == "adagrad" else {}
            found[f"updates, {name}, {kind}, {n}"] = updated(head, fused(head), **unknown)
    torch.manual_seed(0)
    head = sk.LinearHead(WIDTH, n, dtype=torch.bfloat16, **mesh)  # the random bits of a label are the same on any rank
    found[f"updates, rounded, {n}"] = updated(head, sk.optim.FusedSGD(head, 0.0, weight_decay=1.0))[-2:]
    return found


def everything(n: int, **mesh) -> dict[str, list]:
    found: dict[str, list] = {}
    for name, make in HEADS.items():
        if name == "dft" and n < 5:
            continue
        for loss in LOSSES:
            torch.manual_seed(0)
            many = n == N and (name == "dft" or loss == "BCE" or "SIGKERNELS_EVERY_STEP" in os.environ)
            steps = STEPS if many else 2
            found[f"{name}, {loss}, {n}"] = train(make(n, **mesh), LOSSES[loss](n), steps)
    found[f"settings {n}"] = learned_settings(n, **mesh)
    torch.manual_seed(0)
    dense = train(sk.LinearHead(WIDTH, n, **mesh), sk.BCE(), 2, lambda sets: sets.to_dense())
    return {**found, f"dense {n}": dense, **all_updates(n, **mesh)}


def verbs(head: sk.Head, x: torch.Tensor) -> list[torch.Tensor]:
    """Everything else that a head does."""
    values, labels = head.topk(x, min(5, head.num_labels))
    found, each = head.predict(x, 0.3), head.predict(x, torch.linspace(0.1, 0.6, head.num_labels))
    parts = [head(x).detach(), values.detach(), labels, found.indices, found.offsets, each.indices]
    return [*parts, head.weight_matrix(), head.to_linear()[-1].weight.detach()]


def verified(head: sk.Head) -> list[float]:
    sets = random_sets(4, head.num_labels, most=2, seed=3)
    report = sk.verify(head, sets)
    return [*map(float, report.radius_lo), *map(float, report.radius_hi)]


@torch.no_grad()
def promised(head: sk.Head) -> list[float]:
    """In closed form, by the lowest and the highest bias of all ranks."""
    if not isinstance(head, sk.DFTHead):
        return []
    if head.bias is not None:
        head._own_rows("bias").copy_(head.own_labels(torch.linspace(-4.0, 1.0, head.num_labels)))
    return [head.guarantee(size).radius for size in range(3)]


def _worker(rank: int, folder, world: int) -> None:
    join(folder, rank, world)
    mesh = init_device_mesh("cpu", (world,))
    out: dict[str, list] = {}
    for n in SIZES[world]:
        out |= everything(n, device_mesh=mesh)
        for name, make in HEADS.items():
            if name == "dft" and n < 5:
                continue
            torch.manual_seed(0)
            head = make(n, process_group=torch.distributed.group.WORLD)
            size = -(-n // world)
            assert len(head._own_rows("bias" if head.bias is not None else next(iter(head.label_parameters())))) == len(
                range(n)[rank * size : (rank + 1) * size]
            )
            out[f"verbs {name} {n}"] = verbs(head, batch(0, n)[0])
            out[f"verified {name} {n}"] = verified(head)
            out[f"promised {name} {n}"] = promised(head)
    with pytest.raises(ValueError, match=r"formula of Softmax needs all logits of a row .* on \d ranks; use LMLNLL"):
        HEADS["linear"](N, device_mesh=mesh).loss(*batch(0, N), Softmax())
    torch.save(out, folder / f"{rank}.pt")
    leave(folder, rank, world)


@pytest.fixture(scope="module")
def whole() -> Iterator[dict[str, list]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: these are small, and threads that wait for each other are not
    out: dict[str, list] = {}
    for n in SIZES[1]:
        out |= everything(n)
        for name, make in HEADS.items():
            if name == "dft" and n < 5:
                continue
            torch.manual_seed(0)
            out[f"verbs {name} {n}"] = verbs(make(n), batch(0, n)[0])
            torch.manual_seed(0)
            out[f"verified {name} {n}"] = verified(make(n))
            torch.manual_seed(0)
            out[f"promised {name} {n}"] = promised(make(n))
    yield out
    torch.set_num_threads(threads)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_process(tmp_path, whole, world):
    torch.multiprocessing.spawn(_worker, (tmp_path, world), nprocs=world)
    for rank in range(world):
        got = torch.load(tmp_path / f"{rank}.pt")
        for key, values in got.items():
            for value, want in zip(values, whole[key], strict=True):
                value, want = torch.as_tensor(value), torch.as_tensor(want)
                assert value.shape == want.shape, key
                relative, absolute = (1e-4, 1e-6) if key.startswith(("settings", "verbs", "updates")) else (1e-6, 1e-12)
                if "F1" in key:  # 1 - value, which may be all but 1
                    absolute = 1e-8
                torch.testing.assert_close(value, want, rtol=relative, atol=absolute, msg=lambda m, k=key: f"{k}: {m}")
