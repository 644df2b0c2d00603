"""Labels spread over two processes: the same numbers as on one, and a state dict that loads on either."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from cases import leave, random_sets

import sigkernels as sk

N, K, S, WIDTH = 101, 4, 5, 20


def head_and_batch(group=None):
    torch.manual_seed(3)
    head = sk.DFTHead(WIDTH, N, K, S, process_group=group, dtype=torch.float64)
    torch.manual_seed(4)
    return head, torch.randn(6, WIDTH, dtype=torch.float64), random_sets(6, N)


def results(head, h, sets):
    """Everything a head gives, and all its gradients."""
    h = h.clone().requires_grad_()
    loss = sk.BCE(weight=torch.linspace(0.5, 1.5, N, dtype=torch.float64))
    total = (
        head.loss(h, sets, loss)
        + head.loss(h, sets.to_dense(torch.float64), reduction="none") @ torch.arange(6.0, dtype=torch.float64)
        + head(h).square().mean()
    )
    total.backward()
    values, labels = head.topk(h, 60)
    found = head.predict(h, 0.04)
    return {
        "total": total.detach(),
        "grad_h": h.grad,
        "grad_proj": head.proj.weight.grad,
        "logits": head(h).detach(),
        "values": values.detach(),
        "labels": labels,
        "found": found.indices,
        "found_at": found.offsets,
        "weight": head.weight_matrix(),
        **{f"state {key}": value for key, value in head.state_dict().items()},
    }


def _check_distributed_tensors(h, sets):
    """Weights that torch has spread are refused with the remedy, and the remedy works."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for make in (lambda: sk.LinearHead(WIDTH, N), lambda: sk.DFTHead(WIDTH, N, K, S)):
        torch.manual_seed(5)
        head = make()
        want = head.loss(h, sets)
        fully_shard(head, mesh=mesh)
        for verb in (lambda head=head: head.loss(h, sets), lambda head=head: head.topk(h, 3)):
            with pytest.raises(TypeError, match=r"weight is a DTensor.*register_fsdp_forward_method\(head"):
                verb()
        register_fsdp_forward_method(head, "loss")
        value = head.loss(h, sets)
        value.backward()
        torch.testing.assert_close(value, want)
        assert all(parameter.grad is not None for parameter in head.parameters())
    spread = distribute_tensor(torch.randn(N, WIDTH), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"^weight is a DTensor.*full_tensor"):
        sk.functional.linear_loss(h, spread, sets)
    with pytest.raises(TypeError, match=r"^z is a DTensor"):
        sk.functional.lml(spread, 2)


def _worker(rank: int, port: int, folder) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    head, h, sets = head_and_batch(group)
    out = results(head, h, sets)
    with pytest.raises(ValueError, match="SigmoidF1 needs all labels"):
        head.loss(h, sets, sk.SigmoidF1())
    own = slice(head.shard.start, head.shard.stop)
    fresh = sk.DFTHead(WIDTH, N, K, S, process_group=group, dtype=torch.float64)
    fresh.load_state_dict(head.state_dict())
    assert torch.equal(fresh.slack_weight, head.slack_weight)
    for rows in (N - 1, N + 1, len(head.slack_weight)):
        with pytest.raises(RuntimeError, match=f"slack_weight has {rows} rows for num_labels = {N}"):
            fresh.load_state_dict(head.state_dict() | {"slack_weight": torch.zeros(rows, S)})
    assert torch.equal(fresh.slack_weight, head.slack_weight)
    _check_distributed_tensors(h.float(), sets)
    torch.save((own, head.slack_weight.grad, out), folder / f"{rank}.pt")
    leave(folder, rank)


def test_two_ranks_equal_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_worker, (port, tmp_path), nprocs=2)
    head, h, sets = head_and_batch()
    want = results(head, h, sets)
    for rank in range(2):
        own, grad, got = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        torch.testing.assert_close(grad, head.slack_weight.grad[own])
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, msg=lambda m, k=key: f"{k}: {m}")
    head.load_state_dict({key[6:]: value for key, value in want.items() if key.startswith("state ")})


def test_needs_torch_distributed():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        sk.DFTHead(WIDTH, N, K, S, process_group=object())
