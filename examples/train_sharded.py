"""Labels sharded over processes, with checkpoints that move to another number of them.

    torchrun --nproc-per-node 2 examples/train_sharded.py --checkpoints runs/ckpt
    torchrun --nproc-per-node 3 examples/train_sharded.py --checkpoints runs/ckpt    # goes on where the first one ended

A checkpoint is written under a temporary name, and renamed once all ranks are done with it: one that is there is whole.
Every step's batch follows from the step's number, so that a run which was interrupted sees the same batches again.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import sigkernels as sk


def batch_of(step: int, args: argparse.Namespace) -> tuple[torch.Tensor, sk.LabelSets]:
    """The same on every rank: all of them need the whole batch."""
    draw = torch.Generator().manual_seed(step)
    labels = torch.randint(args.labels, (args.batch_size, 3), generator=draw)
    x = torch.zeros(args.batch_size, args.width).scatter_(1, labels % args.width, 1.0)  # features that say something
    return x, sk.LabelSets.from_lists([sorted(set(row)) for row in labels.tolist()], args.labels)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Weights and moments; those of the head's labels are DTensors, of which each rank writes and reads its own rows."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    unfinished = folder / f"unfinished-{step}"
    if dist.get_rank() == 0 and unfinished.exists():  # of a run that was killed while it wrote
        shutil.rmtree(unfinished)
    dist.barrier()
    dcp.save(state_of(model, optimizer), checkpoint_id=unfinished)  # returns when all ranks have written
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()


def load_newest(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of steps that are done: those of the newest checkpoint, or 0."""
    done = max((int(path.name.split("-")[1]) for path in folder.glob("step-*")), default=0)
    if done:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder / f"step-{done}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return done


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all ranks can write to")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a rank waits for the others")
    parser.add_argument(
        "--die-at", type=int, default=-1, help="the step at which the last rank kills itself, to try it"
    )
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = datetime.timedelta(seconds=args.timeout)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("labels",))
    args.checkpoints.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)  # the same encoder on every rank
    encoder = nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU()).to(device)
    head = sk.DFTHead(args.width, args.labels, k=10, slack=32, prior=3, device_mesh=mesh)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(load_newest(args.checkpoints, model, optimizer), args.steps):
        x, labels = batch_of(step, args)
        loss = head(encoder(x.to(device)), labels.to(device), reduction="sum") / len(x)
        optimizer.zero_grad()
        loss.backward()
        sk.clip_grad_norm_(model, 10.0)
        optimizer.step()
        if step == args.die_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), 9)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)
        if (step + 1) % args.save_every == 0:
            save(args.checkpoints, step + 1, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
