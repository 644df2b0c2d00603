"""Four ranks: data parallel × label parallel, FSDP2 × label parallel, and checkpoints that move from 4 ranks to 3 and to 1."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import join, leave, random_sets
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import sigkernels as sk

N, WIDTH, BATCH = 10, 12, 8  # Shard(0) of 10 labels on 4 ranks: 3, 3, 3, 1
HEADS = {
    "dft": lambda **mesh: sk.DFTHead(WIDTH, N, 2, 3, bias=True, **mesh),
    "linear": lambda **mesh: sk.LinearHead(WIDTH, N, **mesh),
    "bottleneck": lambda **mesh: sk.LinearHead(WIDTH, N, 4, **mesh),
    "fused": lambda **mesh: sk.LinearHead(WIDTH, N, **mesh),
}
SAVED = ("dft", "linear", "fused")
LOSSES = (sk.BCE(), sk.LMLNLL(2))


def batch() -> tuple[torch.Tensor, sk.LabelSets]:
    torch.manual_seed(7)
    return torch.randn(BATCH, WIDTH), random_sets(BATCH, N, most=3)


def model_of(name: str, **mesh) -> nn.ModuleDict:
    torch.manual_seed(3)
    return nn.ModuleDict({"encoder": nn.Linear(WIDTH, WIDTH), "head": HEADS[name](**mesh)})


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def expected(name: str, loss: sk.Loss) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Loss, gradients and their norm on one process."""
    model, (x, sets) = model_of(name), batch()
    value = model["head"].loss(model["encoder"](x), sets, loss)
    value.backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters()}
    return value.detach(), grads, sk.clip_grad_norm_(model, 1e9)


def _check_data_times_labels(mesh: DeviceMesh) -> None:
    data = mesh["data"]
    rows = slice(4 * data.get_local_rank(), 4 * data.get_local_rank() + 4)
    x, sets = batch()
    for name in ("dft", "bottleneck"):
        for loss in LOSSES if name == "dft" else LOSSES[:1]:
            want, grads, norm = expected(name, loss)
            model = model_of(name, device_mesh=mesh)
            head = model["head"]
            assert head.bias is None or head.bias.placements == (Replicate(), Shard(0))
            head.check_batches = True  # only the ranks that share labels have to agree
            encoder = nn.parallel.DistributedDataParallel(model["encoder"], process_group=data.get_group())
            value = head.loss(encoder(x[rows]), sets[rows], loss)
            value.backward()
            dist.all_reduce(value := value.detach() / 2, group=data.get_group())
            torch.testing.assert_close(value, want)
            for key, p in model.named_parameters():
                torch.testing.assert_close(full(p.grad), grads[key], msg=lambda m, k=key: f"{name} {k}: {m}")  # noqa: B023
            torch.testing.assert_close(sk.clip_grad_norm_(model, 1e9), norm)


def _check_same_start(mesh: DeviceMesh) -> None:
    """Ranks with other seeds still start with one model."""
    torch.manual_seed(dist.get_rank())
    head = HEADS["dft"](device_mesh=mesh)
    for parameter, groups in ((head.proj.weight, (None,)), (head.slack_weight.to_local(), head.shard.data_groups)):
        for group in groups:
            parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, parameter.detach(), group=group)
            assert all(torch.equal(part, parts[0]) for part in parts)


def _check_fsdp_times_labels(mesh: DeviceMesh) -> None:
    """A head that is sharded over labels, and what each rank has of it over data-parallel ranks by FSDP2."""
    data = mesh["data"]
    rows = slice(4 * data.get_local_rank(), 4 * data.get_local_rank() + 4)
    x, sets = batch()
    for name in ("dft", "linear"):
        want, grads, _ = expected(name, sk.BCE())
        model = model_of(name, device_mesh=mesh["labels"])
        for part in (model["encoder"], model["head"]):
            fully_shard(part, mesh=data)
        value = model["head"](model["encoder"](x[rows]), sets[rows])
        value.backward()
        dist.all_reduce(value := value.detach() / 2, group=data.get_group())
        torch.testing.assert_close(value, want)
        for key, p in model.named_parameters():
            torch.testing.assert_close(full(p.grad), grads[key], msg=lambda m, k=key: f"{name} {k}: {m}")  # noqa: B023
        with pytest.raises(TypeError, match=r"is a DTensor.*unshard\(\) of that module first"):
            model["head"].weight_matrix()
        frequencies = torch.linspace(0.1, 0.3, N)
        model["head"].init_prior(frequencies)
        torch.testing.assert_close(full(model["head"].bias), torch.logit(frequencies))
        before = [p.to_local().clone() for p in model["head"].parameters()]
        with pytest.raises(TypeError, match=r"cannot draw (slack_)?weight, .* call it before fully_shard"):
            model["head"].reset_parameters()
        assert all(torch.equal(p.to_local(), old) for p, old in zip(model["head"].parameters(), before, strict=True))


def trained(name: str, **mesh) -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
    model = model_of(name, **mesh)
    if name != "fused":
        return model, [torch.optim.AdamW(model.parameters(), lr=0.01)]
    fused = sk.optim.FusedAdamW(model["head"], lr=0.01)
    return model, [torch.optim.AdamW(fused.other_parameters(model), lr=0.01), fused]


def step(model: nn.ModuleDict, optimizers: list[torch.optim.Optimizer]) -> float:
    x, sets = batch()
    update = {"update": optimizers[1]} if len(optimizers) > 1 else {}
    loss = model["head"].loss(model["encoder"](x), sets, **update)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def state(model: nn.ModuleDict, optimizers: list[torch.optim.Optimizer]) -> dict:
    weights, moments = get_state_dict(model, optimizers)
    return {"model": weights, "optimizer": moments}


def flat(tree: dict, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested state dict, gathered."""
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}/")
        elif isinstance(value, torch.Tensor):
            found[prefix + key] = full(value)
    return found


def _check_checkpoints(folder, rank: int) -> None:
    """Saved by 4 ranks without a gather, loaded by 3: the same bits."""
    world = init_device_mesh("cpu", (4,))
    three = dist.new_group([0, 1, 2])
    for name in SAVED:
        model, optimizers = trained(name, device_mesh=world)
        head = model["head"]
        for _ in range(2):
            step(model, optimizers)
        saved = state(model, optimizers)
        label = "slack_weight" if name == "dft" else "weight"
        assert saved["model"][f"head.{label}"].to_local().shape[0] == (3, 3, 3, 1)[rank]
        dcp.save(saved, checkpoint_id=folder / name)
        want = flat(saved)
        torch.save(want, folder / f"{name}-{rank}.pt")
        if rank < 3:
            model, optimizers = trained(name, process_group=three)
            nn.init.zeros_(model["encoder"].weight)
            loaded = state(model, optimizers)
            dcp.load(loaded, checkpoint_id=folder / name, process_group=three)
            set_state_dict(model, optimizers, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            got = flat(state(model, optimizers))
            assert got.keys() == want.keys()
            assert all(torch.equal(got[key], want[key]) for key in want)
            assert len(model["head"]._own_rows(label)) == (4, 4, 2)[rank]
            step(model, optimizers)
    assert torch.equal(copy.deepcopy(head).weight.to_local(), head.weight.to_local())


def _worker(rank: int, folder) -> None:
    join(folder, rank, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "labels"))
    _check_data_times_labels(mesh)
    _check_same_start(mesh)
    _check_fsdp_times_labels(mesh)
    _check_checkpoints(folder, rank)
    with pytest.raises(ValueError, match=r"2 dimensions, of which none is named 'labels': make it with mesh_dim_names"):
        sk.LinearHead(WIDTH, N, device_mesh=init_device_mesh("cpu", (2, 2)))
    with pytest.raises(TypeError, match=r"device_mesh must be a .*DeviceMesh, got ProcessGroup"):
        sk.LinearHead(WIDTH, N, device_mesh=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"process_group must be a group of torch\.distributed, got \[0, 1\]"):
        sk.LinearHead(WIDTH, N, process_group=[0, 1])
    alone = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="not a member of process_group"):
            sk.LinearHead(WIDTH, N, process_group=alone)
        with pytest.raises(ValueError, match="not a member of device_mesh"):
            sk.LinearHead(WIDTH, N, device_mesh=DeviceMesh("cpu", [0]))
    else:
        DeviceMesh("cpu", [0])
    leave(folder, rank, 4)


def test_four_ranks(tmp_path):
    torch.multiprocessing.spawn(_worker, (tmp_path,), nprocs=4)
    for name in SAVED:  # the same checkpoint on one process, into a head that is not sharded
        want = torch.load(tmp_path / f"{name}-0.pt")
        model, optimizers = trained(name)
        loaded = state(model, optimizers)
        dcp.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        got = flat(loaded)
        assert all(torch.equal(got[key], want[key]) for key in want)
