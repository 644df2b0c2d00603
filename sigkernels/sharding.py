"""Heads that are sharded over processes: each rank keeps a contiguous range of them.

A label needs only its own row of the classifier matrix, and a tile of the DFT only the label it starts at, so the split
is exact. Every rank sees the whole batch. What crosses the network: the loss of a batch, ``grad_x [B, D]``, and for
``topk`` and ``predict`` the few labels that each rank has found.
"""

from __future__ import annotations

import math
import pickle
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .labels import LabelSets


class LabelShard:
    """This rank's range of labels, ``start … stop-1`` of ``num_labels``, and the collectives over its group."""

    group: Any
    num_labels: int
    rank: int
    world: int
    starts: list[int]

    def __init__(self, num_labels: int, group: Any) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("process_group needs torch.distributed: call torch.distributed.init_process_group first")
        self.group, self.num_labels = group, num_labels
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of process_group; make the head on its members only")
        if num_labels < self.world:
            raise ValueError(f"num_labels = {num_labels} is less than the {self.world} ranks of process_group")
        self.starts = [num_labels * rank // self.world for rank in range(self.world + 1)]

    def __deepcopy__(self, memo: dict[int, Any]) -> LabelShard:
        return self  # a process group is not a thing to copy

    @property
    def start(self) -> int:
        return self.starts[self.rank]

    @property
    def stop(self) -> int:
        return self.starts[self.rank + 1]

    def broadcast(self, tensor: Tensor) -> None:
        """Gives every rank the tensor of the first one."""
        dist.broadcast(tensor, dist.get_global_rank(self.group, 0), group=self.group)

    def share(self, x: Tensor) -> Tensor:
        """x itself; its gradient is the sum of all ranks' gradients."""
        return _Share.apply(x, self)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, of which each owns its own term."""
        return _Sum.apply(x, self)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's range of labels along ``dim``, joined in order."""
        return _Gather.apply(x, self, dim)

    def gather_parts(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        """Every rank's tensor, whose first dimensions are ``sizes``."""
        # Collectives want one shape: pad to the longest.
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def norm(self, own: Tensor, order: float) -> Tensor:
        """The norm of a vector of which each rank has its own part, from the parts' norms."""
        if math.isinf(order):
            total = own.clone()
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self.group)
            return total
        total = own**order
        dist.all_reduce(total, group=self.group)
        return total ** (1 / order)

    def check_same_batch(self, **parts: Any) -> None:
        """Raises on every rank unless all were given the same, bit for bit."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, {name: _fingerprint(value) for name, value in parts.items()}, group=self.group)
        for name in parts:
            if len({other[name] for other in every}) > 1:
                listed = "; ".join(f"rank {rank}: {other[name]}" for rank, other in enumerate(every))
                raise ValueError(
                    f"the ranks of a sharded head were given different {name}: {listed}; "
                    "every rank has to call the same verb with the same batch"
                )

    def merge_topk(self, values: Tensor, labels: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """The best m of what the ranks found, ``[B, m_rank]`` each; lower labels stand first, so ties go to them."""
        widths = [min(m, b - a) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]
        all_values = torch.cat(self.gather_parts(values.T.contiguous(), widths)).T
        all_labels = torch.cat(self.gather_parts(labels.T.contiguous(), widths)).T
        best, order = torch.sort(all_values, dim=1, descending=True, stable=True)
        return best[:, :m].contiguous(), all_labels.gather(1, order[:, :m])

    def merge_sets(self, sets: LabelSets) -> LabelSets:
        """The union, row by row, of what the ranks found in their ranges."""
        sizes = torch.stack(self.gather_parts(sets.sizes, [len(sets)] * self.world))  # [world, B]
        found = self.gather_parts(sets.indices, sizes.sum(1).tolist())
        rows = torch.arange(len(sets), device=sets.device)
        order = torch.argsort(torch.cat([torch.repeat_interleave(rows, size) for size in sizes]), stable=True)
        offsets = torch.cat([sizes.new_zeros(1), sizes.sum(0).cumsum(0)])
        return LabelSets.from_sorted(torch.cat(found)[order], offsets, self.num_labels)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, shard: LabelShard) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shard = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.shard.group)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, shard: LabelShard) -> Tensor:  # type: ignore[override]
        total = x.clone()
        dist.all_reduce(total, group=shard.group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, shard: LabelShard, dim: int) -> Tensor:  # type: ignore[override]
        sizes = [b - a for a, b in zip(shard.starts[:-1], shard.starts[1:], strict=True)]
        parts = shard.gather_parts(x.movedim(dim, 0).contiguous(), sizes)
        return torch.cat(parts).movedim(0, dim).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.shard, ctx.dim = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return g.narrow(ctx.dim, ctx.shard.start, ctx.shard.stop - ctx.shard.start), None, None


def _fingerprint(value: Any) -> str:
    """Type, size and a checksum of the bits of a batch's part."""
    if isinstance(value, LabelSets):
        return f"{len(value)} label sets, checksum {_checksum(value.indices, value.offsets)}"
    if isinstance(value, Tensor):
        sparse = value.layout == torch.sparse_csr
        parts = (value.crow_indices(), value.col_indices(), value.values()) if sparse else (value,)
        return f"{list(value.shape)} {value.dtype}, checksum {_checksum(*parts)}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"{type(value).__name__}, checksum {zlib.crc32(pickle.dumps(value)):08x}"


def _checksum(*tensors: Tensor) -> str:
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
