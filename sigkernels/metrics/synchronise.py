"""What the ranks of a process group have seen, brought together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_alone(group: Any) -> bool:
    """Whether there is nobody to ask: no process group, or one of this process only."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise RuntimeError("group was given, but torch.distributed.init_process_group was not called")
        return True
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of group; call sync on its members only")
    return dist.get_world_size(group) == 1


def gather_objects(value: Any, group: Any) -> list[Any]:
    """Every rank's value, by rank."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def add_up(value: Tensor, group: Any) -> Tensor:
    """The sum over the ranks, the same bits on each: numbers that are not whole are added in order of rank."""
    mine = value.to(_device(group))
    if value.is_floating_point():
        total = torch.stack(_gather(mine, group)).sum(0)
    else:
        total = mine.clone()
        dist.all_reduce(total, group=group)
    return total.to(value.device)


def join(value: Tensor, sizes: list[int], group: Any) -> Tensor:
    """The ranks' vectors of these lengths one after another."""
    if sum(sizes) == 0:
        return value
    # Collectives want one shape, and no bools: pad to the longest.
    padded = torch.zeros(max(sizes), dtype=torch.uint8 if value.dtype == torch.bool else value.dtype)
    padded[: len(value)] = value
    parts = _gather(padded.to(_device(group)), group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(value.device, value.dtype)


def _gather(value: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return parts


def _device(group: Any) -> torch.device:
    """Where a group's collectives want their tensors."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
