"""Calls in which a step of a fused optimizer cannot be right are refused before anything has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optim_cases import HEADS, E, N, bf16_head, refused
from torch import nn

import sigkernels as sk
from sigkernels.optim import FusedOptimizer


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


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["linear", "bf16"])
def test_refuses_features_that_would_spoil_every_weight(wrong: float, kind: str) -> None:
    head = HEADS["linear"]() if kind == "linear" else bf16_head()
    opt = sk.optim.FusedAdamW(head, 0.1)
    h = torch.randn(3, E, dtype=head.weight.dtype)
    h[1, 0] = wrong
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(ValueError, match=r"1 of 3 rows, the first is row 1.*nothing was changed"):
        head.loss(h, [[1], [], [2]], update=opt)
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())
    h[1, 0] = torch.finfo(h.dtype).max / 2
    h[2, 0] = torch.finfo(h.dtype).max / 1.5
    with torch.no_grad():
        head.weight[:, 0] = 0  # large numbers are none of these, though their sum is infinite
    head.loss(h, [[1], [], [2]], update=opt)  # nor does the optimizer count it as a step
    assert all(state["step"] == 1 for state in opt.state.values())


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


def test_refuses_weights_whose_rows_share_memory() -> None:
    head = HEADS["linear"]()
    head.weight = nn.Parameter(torch.randn(1, head.weight.shape[1]).expand_as(head.weight))
    refused("contiguous rows of its own", ValueError, head)
    head.weight = nn.Parameter(torch.randn(head.weight.shape[::-1]).T)
    refused("contiguous rows of its own", ValueError, head)


@pytest.mark.parametrize("step", [-5, "q", None, 1.5, float("nan")])
def test_refuses_a_damaged_state(step: Any) -> None:
    head = HEADS["linear"]()
    opt = sk.optim.FusedAdamW(head)
    opt.state[head.weight]["step"] = step
    refused("step must count the steps made", ValueError, head, opt)
    opt.state[head.weight]["step"] = torch.tensor(3.0)  # as torch's AdamW keeps it
    opt.state[head.weight]["exp_avg"] = None
    refused("exp_avg must be a tensor, got None", TypeError, head, opt)


def test_refuses_one_tensor_for_parameters() -> None:
    with pytest.raises(TypeError, match=r"got one tensor: write \[parameter\]"):
        sk.optim.FusedSGD(HEADS["linear"]().weight)


def test_runs_outside_of_compiled_graphs() -> None:
    head, h = HEADS["linear"](), torch.randn(2, E)
    opt = sk.optim.FusedSGD(head, 0.1)

    def step(h: torch.Tensor) -> torch.Tensor:
        return head.loss(h * 1, [[1], []], update=opt)

    want = head.loss(h, [[1], []]).detach()
    assert torch.equal(torch.compile(step)(h), want)
    opt.step()
    assert head.loss(h, [[1], []]) < want
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="update= run eagerly: leave fullgraph=True out"):
        torch.compile(step, fullgraph=True)(h)
