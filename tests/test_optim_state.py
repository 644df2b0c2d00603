"""Fused optimizers as optimizers: groups, schedulers, states, checkpoints, copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_cases import HEADS, KINDS, E, N, bf16_head, close, label_parameters, refused, train
from torch import Tensor, nn

import sigkernels as sk


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


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), sk.optim.FusedSGD, "nesterov=True"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5), sk.optim.FusedSGD, "dampening=0.5"),
        (lambda p: torch.optim.SGD(p, maximize=True), sk.optim.FusedSGD, "maximize=True"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), sk.optim.FusedAdamW, "amsgrad=True"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), sk.optim.FusedAdamW, "part of the gradient"),
        (torch.optim.RAdam, sk.optim.FusedAdamW, "RAdam"),
        (torch.optim.Adagrad, sk.optim.FusedAdagrad, "a sum for every weight"),
    ],
)
def test_refuses_the_state_of_steps_that_are_not_its_own(theirs: Any, ours: Any, words: str) -> None:
    head = HEADS["linear"]()
    other = theirs(head.parameters())
    train(head, other, False)
    opt = ours(head)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=f"an optimizer with .*{words}.* which {ours.__name__} does not have"):
        opt.load_state_dict(other.state_dict())
    assert str(opt.state_dict()) == str(before)
    opt.load_state_dict(before)


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
