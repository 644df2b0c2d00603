"""Fused optimizers: the same weights as a plain loss and torch's own optimizers, and every refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sigkernels as sk
from sigkernels.backends import cpu
from sigkernels.backends.torch_update import random_bits
from sigkernels.optim import FusedOptimizer, random_key

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


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", HEADS)
def test_same_weights_as_an_ordinary_optimizer(form: str, kind: str, backend: str) -> None:
    torch.manual_seed(0)
    ours = HEADS[form]()
    theirs = copy.deepcopy(ours)
    fused, plain = KINDS[kind]
    with sk.backend(backend):
        got = train(ours, fused(ours), True)
        want = train(theirs, plain(label_parameters(theirs)), False)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(a, b)
    for a, b in zip(got, want, strict=True):
        close(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_rows_than_a_chunk(kind: str, dtype: torch.dtype) -> None:
    ours = sk.DFTHead(E, N, k=3, slack=7, bias=True, dtype=dtype)
    theirs = copy.deepcopy(ours)
    fused, plain = KINDS[kind]
    train(ours, fused(ours), True, rows=301, steps=2)
    train(theirs, plain(label_parameters(theirs)), False, rows=301, steps=2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    "given",
    [
        {"loss": sk.Focal()},
        {"loss": sk.Asymmetric(), "reduction": "sum"},
        {"loss": sk.BCE(weight=torch.rand(N), pos_weight=torch.rand(N) * 5, label_smoothing=0.1)},
        {"targets": torch.rand(6, N)},
        {"unknown": [[1, 2], [], [0], [5], [], [N - 1]]},
    ],
    ids=["focal", "asymmetric sum", "weights", "dense", "unknown"],
)
def test_losses_and_targets(given: dict[str, Any], backend: str) -> None:
    lr = 0.05 if given.get("reduction") == "sum" else 20.0
    ours = sk.LinearHead(E, N)
    theirs = copy.deepcopy(ours)
    h = torch.randn(6, E)
    targets = given.pop("targets") if "targets" in given else random_targets(6)
    with sk.backend(backend):
        opt = sk.optim.FusedSGD(ours, lr)
        a = ours(h, targets, update=opt, **given)
        b = theirs.loss(h, targets, **given)
    b.backward()
    torch.optim.SGD(theirs.parameters(), lr).step()
    close(a, b)
    close(ours.weight, theirs.weight)
    assert ours.bias is not None and theirs.bias is not None
    close(ours.bias, theirs.bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step by all, of codes and of bfloat16 too: one row fits a narrow kernel, 40 the wide one."""
    monkeypatch.setenv("SIGKERNELS_ISA", isa)
    for form, dtype, rows in (("dft", torch.float32, 40), ("codes", torch.float32, 1), ("linear", torch.bfloat16, 40)):
        torch.manual_seed(0)
        ours = HEADS[form](dtype=dtype)
        theirs = copy.deepcopy(ours)
        fused, _ = KINDS[kind]
        for head, backend in ((ours, "cpu"), (theirs, "torch")):
            with sk.backend(backend):
                train(head, fused(head), True, rows=rows, steps=1)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            if dtype == torch.bfloat16:  # where it multiplies pairs of bfloat16, gradients are rounded before the step
                assert (a - b).abs().mean() < 2**-6 * b.abs().mean()
            else:
                close(a, b)


def test_own_loss_goes_through_torch() -> None:
    class Squared(sk.ElementwiseLoss):
        def value(self, z: Tensor, y: Tensor) -> Tensor:
            return (z - y) ** 2

        def value_and_grad(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return (z - y) ** 2, 2 * (z - y)

    ours = sk.LinearHead(E, N)
    theirs = copy.deepcopy(ours)
    train(ours, sk.optim.FusedSGD(ours, 5.0), True, loss=Squared())
    train(theirs, torch.optim.SGD(theirs.parameters(), 5.0), False, loss=Squared())
    close(ours.weight, theirs.weight)


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(1, 300), s=st.integers(1, 70), rows=st.integers(1, 40), kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 99)
)  # fmt: skip
def test_any_shape(n: int, s: int, rows: int, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    ours = sk.LinearHead(s, n, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    h, y = torch.randn(rows, s, dtype=torch.float64), random_targets(rows, seed, n)
    fused, plain = KINDS[kind]
    a, b = fused(ours), plain(theirs.parameters())
    for _ in range(2):
        ours.loss(h, y, update=a).backward()
        a.step()
        theirs.loss(h, y).backward()
        b.step()
        b.zero_grad()
    close(ours.weight, theirs.weight, torch.float64)


# -- bfloat16 ------------------------------------------------------------------------------------------------------


def bf16_head(seed: int = 0, bias: bool = True, n: int = N, **given: Any) -> sk.LinearHead:
    torch.manual_seed(seed)
    return sk.LinearHead(E, n, bias=bias, dtype=torch.bfloat16, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest", "kahan"])
def test_backends_round_alike(kind: str, rounding: str) -> None:
    """The same random bits: all but a few entries, whose exact values differ by rounding of float32, are equal."""
    heads = []
    for backend in ("cpu", "torch"):
        head = bf16_head()
        opt = KINDS[kind][0](head)
        for group in opt.param_groups:
            group["rounding"] = rounding
        with sk.backend(backend):
            train(head, opt, True, steps=1)
        heads.append(head)
    same = (heads[0].weight == heads[1].weight).float().mean()
    assert same > 0.98
    torch.testing.assert_close(heads[0].weight, heads[1].weight, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_stochastic_rounding_is_unbiased(backend: str) -> None:
    """A weight decay far below half a unit in the last place: nearest rounding keeps every weight as it is."""
    decay, moved = 1e-4, {}
    for rounding in ("stochastic", "nearest"):
        head = sk.LinearHead(64, 2000, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            head.weight.fill_(1.171875)
        opt = sk.optim.FusedSGD(head, 1.0, weight_decay=decay, rounding=rounding, seed=3)
        with sk.backend(backend):  # x is 0: no gradient but the decay's
            head.loss(torch.zeros(1, 64, dtype=torch.bfloat16), [[]], update=opt)
        moved[rounding] = float((1.171875 - head.weight.detach().double()).mean())
        values = set(head.weight.unique().tolist())
        assert values == ({1.171875} if rounding == "nearest" else {1.171875, 1.171875 - 2**-7})
    step = 1.171875 * decay
    p = step / 2**-7  # the share of weights that go down
    error = 2**-7 * (p * (1 - p) / 128_000) ** 0.5
    assert abs(moved["stochastic"] - step) < 5 * error
    assert moved["nearest"] == 0


@pytest.mark.parametrize("fused", [sk.optim.FusedSGD, sk.optim.FusedAdamW])
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_weight_decay_does_not_vanish_in_bfloat16(fused: Any, rounding: str) -> None:
    head = sk.LinearHead(64, 300, bias=False, dtype=torch.bfloat16)
    before = head.weight.detach().double().norm()
    opt = fused(head, 1e-2, weight_decay=0.05, rounding=rounding)
    for _ in range(100):
        head.loss(torch.zeros(1, 64, dtype=torch.bfloat16), [[]], update=opt)
        opt.step()
    assert float(head.weight.detach().double().norm() / before) == pytest.approx((1 - 5e-4) ** 100, rel=2e-3)


def test_kahan_follows_float32() -> None:
    wide = sk.LinearHead(E, N).to(torch.bfloat16).float()
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    a, b = sk.optim.FusedSGD(wide, 1e-3), sk.optim.FusedSGD(narrow, 1e-3, rounding="kahan")
    h, y = torch.randn(6, E).to(torch.bfloat16), random_targets(6)
    for _ in range(50):
        wide.loss(h.float(), y, update=a, reduction="sum")
        narrow.loss(h, y, update=b, reduction="sum")
        a.step()
        b.step()
    exact = narrow.weight.float() + b.state[narrow.weight]["compensation"]
    error = (exact - wide.weight).norm() / wide.weight.norm()
    assert error < 2e-3
    assert (narrow.weight.float() - wide.weight).norm() / wide.weight.norm() < 4e-3


def test_same_bits_on_any_number_of_threads_and_again() -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            head = bf16_head(n=3001)
            opt = sk.optim.FusedAdamW(head, 0.01, seed=5)
            for step in range(2):
                h = torch.randn(16, E, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
                head.loss(h, random_targets(16, step, 3001), update=opt)
                opt.step()
            results.append(head.weight.detach().clone())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


def test_seed_and_step_change_the_bits() -> None:
    like = torch.zeros(50, 64)
    keys = {random_key(seed, step, index) for seed in range(4) for step in range(4) for index in range(2)}
    assert len(keys) == 32
    bits = torch.stack([random_bits(key, 0, like) & 0xFFFF for key in sorted(keys)]).double()
    spread = bits.std() / 65536
    assert abs(bits.mean() / 65536 - 0.5) < 0.01 and abs(spread - 12**-0.5) < 0.01
    flat = bits.flatten(1)
    correlation = torch.corrcoef(flat) - torch.eye(32)
    assert correlation.abs().max() < 0.1
    rows = torch.corrcoef((random_bits(7, 0, torch.zeros(200, 500)) & 0xFFFF).double())
    assert (rows - torch.eye(200)).abs().max() < 0.3


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**33))
def test_random_bits_fit_in_32(key: int, label: int) -> None:
    bits = random_bits(key, label, torch.zeros(3, 5))
    assert bits.min() >= 0 and bits.max() < 2**32
    assert torch.equal(random_bits(key, label + 1, torch.zeros(2, 5)), bits[1:])


# -- as an optimizer -----------------------------------------------------------------------------------------------


def test_groups_schedulers_and_other_parameters() -> None:
    head = HEADS["dft"]()
    opt = sk.optim.FusedSGD([{"params": [head.slack_weight]}], lr=1.0)
    opt.add_param_group({"params": [head.bias], "lr": 0.0})
    assert {p.shape for p in opt.other_parameters(head)} == {p.shape for p in head.proj.parameters()}
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    before = head.bias.detach().clone()
    weight = head.slack_weight.detach().clone()
    train(head, opt, True, steps=1)
    schedule.step()
    assert opt.param_groups[0]["lr"] == 0.5
    assert torch.equal(head.bias, before) and not torch.equal(head.slack_weight, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_continues_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    head = HEADS["dft"](dtype=dtype)
    opt = KINDS[kind][0](head)
    train(head, opt, True, steps=2)
    other = copy.deepcopy(head)
    again = KINDS[kind][0](other)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for p in label_parameters(other):
        assert all(v.dtype == torch.float32 for v in again.state[p].values() if isinstance(v, Tensor))
    train(head, opt, True, steps=2)
    train(other, again, True, steps=2)
    for a, b in zip(head.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_copies_go_on_alike(tmp_path: Any) -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedAdamW(head, 0.1)
    opt.grad_scale = 0.5
    (0.5 * head.loss(torch.randn(2, E), [[1], []], update=opt)).backward()
    other, again = copy.deepcopy((head, opt))
    refused("stepped by an earlier loss", head=other, opt=again)
    for o in (opt, again):
        o.step()
    torch.save((head, opt), tmp_path / "whole")
    third, loaded = torch.load(tmp_path / "whole", weights_only=False)
    h = torch.randn(2, E)
    for part, o in ((head, opt), (other, again), (third, loaded)):
        assert o.grad_scale == 0.5
        part.loss(h, [[1], []], update=o)
    assert torch.equal(head.weight, other.weight) and torch.equal(head.weight, third.weight)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_goes_on_from_the_state_of_torchs_own(kind: str) -> None:
    ours, theirs = HEADS["linear"](), HEADS["linear"]()
    fused, plain = KINDS[kind]
    other = plain(theirs.parameters())
    train(theirs, other, False)
    ours.load_state_dict(theirs.state_dict())
    opt = fused(ours)
    opt.load_state_dict(copy.deepcopy(other.state_dict()))
    train(ours, opt, True)
    train(theirs, other, False)
    close(ours.weight, theirs.weight)


def test_distributed_checkpoints(tmp_path: Any) -> None:
    """Of a fused optimizer beside an ordinary one; the optimizer that reads has not made a step yet."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
        model = nn.ModuleDict({"encoder": nn.Linear(E, E), "head": bf16_head().float()})
        opt = sk.optim.FusedAdagrad(model["head"], 0.1, initial_accumulator_value=0.5)
        return model, [opt, torch.optim.AdamW(opt.other_parameters(model))]

    def step(model: nn.ModuleDict, optimizers: list[torch.optim.Optimizer]) -> None:
        x = torch.linspace(-1, 1, 3 * E).reshape(3, E)
        model["head"].loss(model["encoder"](x), [[1], [], [2]], update=optimizers[0]).backward()
        for o in optimizers:
            o.step()
            o.zero_grad()

    model, optimizers = make()
    step(model, optimizers)
    dcp.save(dict(zip("ab", get_state_dict(model, optimizers), strict=True)), checkpoint_id=tmp_path, no_dist=True)
    other, fresh = make()
    state = dict(zip("ab", get_state_dict(other, fresh), strict=True))
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, fresh, model_state_dict=state["a"], optim_state_dict=state["b"])
    for pair in ((model, optimizers), (other, fresh)):
        step(*pair)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_sgd_has_no_tensors_in_its_state() -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head)
    train(head, opt, True)
    assert all(not isinstance(v, Tensor) for state in opt.state.values() for v in state.values())
    opt = sk.optim.FusedAdagrad(head)
    train(head, opt, True)
    assert opt.state[head.weight]["sum"].shape == (N,)


def test_frozen_parameters_stay() -> None:
    head = HEADS["linear"]()
    head.bias.requires_grad_(False)
    bias, weight = head.bias.detach().clone(), head.weight.detach().clone()
    opt = sk.optim.FusedSGD(head, 1.0)
    train(head, opt, True)
    assert torch.equal(head.bias, bias) and not torch.equal(head.weight, weight)
    head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        head.loss(torch.randn(1, E), [[1]], update=opt)


def test_closure_and_two_heads() -> None:
    one, two = HEADS["linear"](), HEADS["slack"]()
    opt = sk.optim.FusedSGD([*label_parameters(one), *label_parameters(two)], 1.0)
    h = torch.randn(2, E)

    def closure() -> Tensor:
        loss = one.loss(h, [[1], []], update=opt) + two.loss(h, [[1], []], update=opt)
        loss.backward()
        return loss

    assert opt.step(closure).item() > 0
    opt.step(closure)


def test_encoder_trains_in_bfloat16_under_autocast() -> None:
    encoder, head = nn.Linear(8, E), bf16_head()
    opt = sk.optim.FusedSGD(head, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head.loss(encoder(torch.randn(3, 8)), [[1], [], [2]], update=opt)
    loss.backward()
    assert encoder.weight.grad is not None


def test_grad_scale() -> None:
    ours, theirs = HEADS["linear"](), HEADS["linear"]()
    theirs.load_state_dict(ours.state_dict())
    h, other = torch.randn(2, E, requires_grad=True), torch.randn(2, E, requires_grad=True)
    opt = sk.optim.FusedSGD(ours, 10.0)
    opt.grad_scale = 0.25
    (0.25 * ours.loss(h, [[1], []], update=opt)).backward()
    with torch.no_grad():
        other.copy_(h)
    (0.25 * theirs.loss(other, [[1], []])).backward()
    torch.optim.SGD(theirs.parameters(), 10.0).step()
    close(ours.weight, theirs.weight)
    close(h.grad, other.grad)  # type: ignore[arg-type]


def test_retained_graph_gives_the_gradient_before_the_step_again() -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head, 10.0)
    h = torch.randn(2, E, requires_grad=True)
    loss = head.loss(h, [[1], []], update=opt)
    (first,) = torch.autograd.grad(loss, h, retain_graph=True)
    (second,) = torch.autograd.grad(loss, h, retain_graph=True)
    assert torch.equal(first, second)
    (third,) = torch.autograd.grad(loss, h, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        third.sum().backward()


def test_compiled_encoder() -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head, 1.0)
    encoder = nn.Linear(8, E)

    def loss(x: Tensor) -> Tensor:
        return head.loss(encoder(x), [[1], []], update=opt)

    before = head.weight.detach().clone()
    torch.compile(loss, backend="eager")(torch.randn(2, 8)).backward()
    assert encoder.weight.grad is not None and not torch.equal(before, head.weight)


# -- refusals ------------------------------------------------------------------------------------------------------


def refused(match: str, kind: type[Exception] = RuntimeError, head: Any = None, opt: Any = None, **given: Any) -> None:
    """Raises, and leaves the weights as they are."""
    head = HEADS["linear"]() if head is None else head
    opt = sk.optim.FusedSGD(head, 1.0) if opt is None else opt
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(kind, match=match):
        head.loss(torch.randn(2, E, dtype=head.weight.dtype), given.pop("targets", [[1], []]), update=opt, **given)
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())


def test_refuses_losses_that_are_not_of_single_labels() -> None:
    refused("whole columns", ValueError, loss=sk.SigmoidF1())
    refused("whole rows", ValueError, loss=sk.LMLNLL(3))
    refused("reduction='mean' or 'sum'", ValueError, reduction="none")


def test_refuses_what_is_no_fused_optimizer() -> None:
    head = HEADS["linear"]()
    refused("FusedSGD, FusedAdagrad or FusedAdamW", TypeError, head, torch.optim.SGD(head.parameters()))
    refused("has not the head's weight", ValueError, head, sk.optim.FusedSGD(HEADS["linear"](), 1.0))
    with pytest.raises(ValueError, match="without targets"):
        head(torch.randn(2, E), update=sk.optim.FusedSGD(head))


def test_refuses_without_gradients() -> None:
    with torch.no_grad():
        refused("leave update out to evaluate")
    with torch.inference_mode():
        head = HEADS["linear"]()
        refused("leave update out to evaluate", head=head)


def test_refuses_a_second_loss_before_the_step() -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head, 1.0)
    head.loss(torch.randn(2, E), [[1], []], update=opt)
    refused("not accumulated", head=head, opt=opt)
    opt.step()
    head.loss(torch.randn(2, E), [[1], []], update=opt)


@pytest.mark.parametrize("reentrant", [False, True])
def test_refuses_activation_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head, 1.0)
    h = torch.randn(2, E, requires_grad=True)
    with pytest.raises(RuntimeError, match="checkpoint"):
        checkpoint(lambda h: head.loss(h, [[1], []], update=opt), h, use_reentrant=reentrant).backward()


def test_refuses_gradients_that_nobody_would_use() -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head, 1.0)
    head.loss(torch.randn(2, E), [[1], []]).backward()
    with pytest.raises(RuntimeError, match="pass update=opt"):
        opt.step()
    refused("has a .grad", head=head, opt=opt)
    opt.zero_grad()
    opt.step()


def test_refuses_another_upstream_gradient() -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head, 1.0)
    h = torch.randn(2, E, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"opt\.grad_scale"):
        (head.loss(h, [[1], []], update=opt) / 2).backward()


def test_refuses_hooks_transforms_and_computed_weights() -> None:
    head = HEADS["linear"]()
    head.weight.register_hook(lambda grad: grad * 2)
    refused("hooks", head=head)
    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head, 1.0)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda h: head.loss(h, [[1], []], update=opt))(torch.randn(2, E))
    nn.utils.parametrizations.weight_norm(head, "weight")
    with pytest.raises(ValueError, match="parametrized"):
        head.loss(torch.randn(2, E), [[1], []], update=opt)
    with torch.autocast("cpu", torch.bfloat16):
        refused("autocast", ValueError)


def test_refuses_empty_batches_and_bad_targets_before_the_step() -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedSGD(head, 1.0)
    with pytest.raises(ValueError, match="at least one row"):
        head.loss(torch.randn(0, E), [], update=opt)
    broken = sk.LabelSets.from_lists([[1], []], N)
    broken.indices[0] = N + 5
    refused("label", ValueError, head, opt, targets=broken)
    assert not opt.state[head.weight].get("step")
    head.loss(torch.randn(2, E), [[1], []], update=opt)


def test_refuses_settings_by_name() -> None:
    head = HEADS["linear"]()
    for kind, wrong, match in (
        (sk.optim.FusedSGD, {"lr": -1.0}, "lr must be"),
        (sk.optim.FusedSGD, {"lr": "fast"}, "lr must be a number"),
        (sk.optim.FusedSGD, {"lr": float("nan")}, "lr must be finite"),
        (sk.optim.FusedSGD, {"rounding": "up"}, "rounding must be"),
        (sk.optim.FusedSGD, {"seed": 1.5}, "seed must be"),
        (sk.optim.FusedSGD, {"weight_decay": -1.0}, "weight_decay"),
        (sk.optim.FusedAdamW, {"betas": (1.0, 0.9)}, "betas must lie"),
        (sk.optim.FusedAdamW, {"betas": 0.9}, "betas must be two"),
        (sk.optim.FusedAdamW, {"betas": ("a", 0.9)}, "betas must be a number"),
        (sk.optim.FusedAdagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
        (sk.optim.FusedAdagrad, {"eps": None}, "eps must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            kind(head, **wrong)
    opt = sk.optim.FusedSGD(head, lr=torch.tensor(0.5))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        opt.other_parameters([head])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_decay"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "weight_decay": -1.0})
    assert len(opt.param_groups) == 1
    opt.param_groups[0]["rounding"] = "up"
    refused("rounding must be", ValueError, head, opt)
    with pytest.raises(TypeError, match="float16"):
        sk.optim.FusedSGD(sk.LinearHead(E, N, dtype=torch.float16))
    for none in (nn.Linear(2, 2), None, "weight", 5):
        with pytest.raises(TypeError, match="params must be a head"):
            sk.optim.FusedSGD(none)
    with pytest.raises(ValueError, match="neither slack nor bias"):
        sk.optim.FusedSGD(sk.DFTHead(E, N, k=3))
    with pytest.raises(NotImplementedError):
        FusedOptimizer(head, {"lr": 1.0, "weight_decay": 0.0, "rounding": "nearest", "seed": 0})


def test_refuses_states_and_heads_that_do_not_fit() -> None:
    """The kernels write where the state is: it has to be as large as the head."""
    small, head = sk.LinearHead(E, 5), HEADS["linear"]()
    opts = [sk.optim.FusedAdamW(part) for part in (small, head)]
    opts[1].load_state_dict(opts[0].state_dict())
    refused(r"exp_avg is torch.float32 \[5, 40\] .* needs torch.float32 \[173, 40\]", ValueError, head, opts[1])
    head = HEADS["linear"]()
    opt = sk.optim.FusedAdamW(head)
    for kind in (sk.optim.FusedSGD, sk.optim.FusedAdagrad):
        with pytest.raises(ValueError, match=r"another kind of optimizer: its groups have betas, eps where Fused"):
            kind(head).load_state_dict(opt.state_dict())
    with pytest.raises(TypeError, match="state_dict must be"):
        opt.load_state_dict({})
    refused("converted since", ValueError, head.double(), opt)
    refused(r"float32, float64 and bfloat16, got torch\.float16", TypeError, head.half(), opt)
    opt.load_state_dict(opt.state_dict())
    head.float().loss(torch.randn(2, E), [[1], []], update=opt)


def test_refuses_parameters_that_no_loss_steps() -> None:
    """A projection in the wrong optimizer would never be trained."""
    head = HEADS["dft"]()
    opt = sk.optim.FusedSGD(head.parameters(), 0.1)
    head.loss(torch.randn(2, E), [[1], []], update=opt).backward()
    with pytest.raises(RuntimeError, match="no label weight or bias"):
        opt.step()


@pytest.mark.parametrize("name", ["cuda"])
def test_gpu_kernels_refuse_by_name(name: str) -> None:
    from sigkernels import backends

    assert "update=" in str(backends.by_name(name).refuses_update())
    with pytest.raises(backends.BackendError, match="update="):
        backends.by_name(name).fused_update(None, None)  # type: ignore[arg-type]


def test_refuses_ddp(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        head = HEADS["linear"]()
        opt = sk.optim.FusedSGD(head, 1.0)
        model = nn.parallel.DistributedDataParallel(head)
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            model(torch.randn(2, E), [[1], []], update=opt)
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "labels"))
        averaged = sk.DFTHead(E, N, k=3, slack=7, device_mesh=mesh)
        with pytest.raises(ValueError, match=r"data-parallel dimensions averages .* device_mesh=mesh\['labels'\]"):
            sk.optim.FusedSGD(averaged, 1.0)
        with pytest.raises(ValueError, match="data-parallel"):
            averaged.loss(torch.randn(2, E), [[1], []], update=opt)
        sharded = sk.DFTHead(E, N, k=3, slack=7, device_mesh=mesh["labels"])
        with pytest.raises(ValueError, match="has not the head's weight"):
            sharded.loss(torch.randn(2, E), [[1], []], update=opt)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="cast by autocast"):
            sharded.loss(torch.randn(2, E), [[1], []], update=sk.optim.FusedSGD(sharded))
    finally:
        dist.destroy_process_group()


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend,fused,dtype,share",
    [
        ("cpu", sk.optim.FusedSGD, torch.float32, 0.25),
        ("cpu", sk.optim.FusedAdagrad, torch.bfloat16, 0.25),
        ("torch", sk.optim.FusedSGD, torch.float32, 0.75),  # a few chunks of labels, whatever n is
    ],
)
def test_no_array_of_the_size_of_the_gradient(backend: str, fused: Any, dtype: torch.dtype, share: float) -> None:
    from sigkernels.memory import peak_bytes

    if backend not in sk.available_backends():
        pytest.skip("the compiled core is not built")
    n = 60_000
    head = sk.LinearHead(256, n, dtype=dtype)
    opt = fused(head, 1e-3)
    h, y = torch.randn(8, 256, dtype=dtype, requires_grad=True), random_targets(8, 0, n)

    def step() -> None:
        head.loss(h, y, update=opt).backward()
        opt.step()
        h.grad = None

    with sk.backend(backend):
        added = peak_bytes(step, repeats=1)
    if added is None:
        pytest.skip("peak memory is read from /proc of Linux, which is not here")
    assert added < share * n * 256 * dtype.itemsize
