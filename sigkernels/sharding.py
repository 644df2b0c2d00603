"""Heads whose labels are sharded over processes: each rank keeps a contiguous range of them.

A label needs only its own row of the classifier matrix, and a tile of the DFT only the label it starts at, so the split
is exact. The rows are those of DTensor's ``Shard(0)``: ⌈n/ranks⌉ labels on each rank, fewer or none on the last ones.
Every rank of the label dimension sees the whole batch. What crosses the network: the loss of a batch, ``grad_x [B, D]``,
a few numbers per row for losses of whole rows, and for ``topk`` and ``predict`` the few labels that each rank has found.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .labels import LabelSets
from .validation import check_memory, is_distributed

LABEL_DIMENSION = "labels"  # the name of a mesh's dimension over which labels are sharded
_DRAWN_AT_ONCE = 2**22  # numbers
_SAMPLES = 16  # entries of h that ranks compare at every call
_SAMPLED = 2**12  # entries of targets and settings


@torch.no_grad()
def write_whole(parameter: Tensor, value: Tensor | float) -> None:
    """Writes all of a parameter, of which this rank may hold a part (sharded heads, FSDP2); every rank gives the same."""
    if isinstance(value, float):
        parameter.fill_(value)
        return
    if is_distributed(parameter):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        own = value.to(parameter.device, parameter.dtype)
        value = DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.copy_(value)


class LabelShard:
    """This rank's range of labels, ``start … stop-1`` of ``num_labels``, and the collectives over its group."""

    mesh: Any  # DeviceMesh
    placements: list[Any]
    group: Any  # of the label dimension
    data_groups: list[Any]  # of the other dimensions: data parallel
    num_labels: int
    rank: int
    world: int
    starts: list[int]

    def __init__(self, num_labels: int, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, Shard  # half a second, which only sharded heads pay

        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and LABEL_DIMENSION not in names:
            raise ValueError(
                f"device_mesh has {mesh.ndim} dimensions, of which none is named '{LABEL_DIMENSION}': "
                f"make it with mesh_dim_names=('data', '{LABEL_DIMENSION}'), got {names or None}"
            )
        if mesh.get_coordinate() is None:
            raise ValueError("this process is not a member of device_mesh; make the head on its members only")
        at = names.index(LABEL_DIMENSION) if mesh.ndim > 1 else 0
        self.mesh, self.num_labels, self.group = mesh, num_labels, mesh.get_group(at)
        self.data_groups = [mesh.get_group(i) for i in range(mesh.ndim) if i != at]
        self.placements = [Shard(0) if i == at else Replicate() for i in range(mesh.ndim)]
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.starts = [min(rank * self.most_rows, num_labels) for rank in range(self.world + 1)]

    def __deepcopy__(self, memo: dict[int, Any]) -> LabelShard:
        return self  # a process group is not a thing to copy

    @property
    def start(self) -> int:
        return self.starts[self.rank]

    @property
    def stop(self) -> int:
        return self.starts[self.rank + 1]

    @property
    def rows(self) -> int:
        """How many labels this rank holds."""
        return self.stop - self.start

    @property
    def most_rows(self) -> int:
        """The most labels that any rank holds."""
        return -(-self.num_labels // self.world)

    # -- parameters ----------------------------------------------------------------------------------------------------

    def distribute(self, own: Tensor) -> Tensor:
        """The DTensor ``[n, …]`` of which this rank holds ``own [rows, …]``."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size((self.num_labels, *own.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(own, self.mesh, self.placements, run_check=False, shape=shape, stride=stride)

    def own(self, name: str, tensor: Any) -> Tensor:
        """This rank's rows of a parameter; their gradient is the mean over the data-parallel ranks."""
        if not is_distributed(tensor):
            return tensor
        if not self.holds(tensor):
            check_memory(name, tensor)  # refused
        return self.data_mean(tensor.to_local())

    def holds(self, tensor: Any) -> bool:
        """Whether this rank holds its rows of a parameter, which FSDP2 has not sharded once more."""
        if not is_distributed(tensor):
            return True
        return bool(tensor.device_mesh == self.mesh and list(tensor.placements) == self.placements)

    def draw(self, parameter: Tensor, bound: float) -> None:
        """Draws uniformly in ±bound what one process would draw for all labels, and keeps the own ones."""
        own: Tensor = parameter.to_local()  # type: ignore[attr-defined]
        columns = own.shape[1:].numel()
        step = max(_DRAWN_AT_ONCE // max(columns, 1), 1)
        for first, last in ((0, self.start), (self.start, self.stop), (self.stop, self.num_labels)):
            for at in range(first, last, step):
                size = min(step, last - at)
                mine = first == self.start and self.rows > 0
                rows = own[at - first : at - first + size] if mine else own.new_empty(size, *own.shape[1:])
                nn.init.uniform_(rows, -bound, bound)

    def broadcast(self, module: nn.Module) -> None:
        """Gives every rank the plain parameters of the first one, and every data-parallel rank the sharded ones."""
        for parameter in module.parameters():
            if parameter.is_meta:
                continue
            tensor = (parameter.to_local() if is_distributed(parameter) else parameter).detach()  # type: ignore[attr-defined]
            groups = self.data_groups if is_distributed(parameter) else [self.group, *self.data_groups]
            for group in groups:
                dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or other reduction) of x over the ranks; x itself stays."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op, group=self.group)
        return total

    def maximum(self, x: Tensor) -> Tensor:
        """The elementwise maximum of x over the ranks."""
        return self.all_reduce(x, dist.ReduceOp.MAX)

    def logsumexp(self, x: Tensor) -> Tensor:
        """``log Σ exp(x)`` over the ranks, elementwise."""
        return torch.logsumexp(torch.stack(self.gather_same(x)), 0)

    def share(self, x: Tensor) -> Tensor:
        """x itself; its gradient is the sum of all ranks' gradients."""
        return _Share.apply(x, self)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, of which each owns its own term."""
        return _Sum.apply(x, self)

    def data_mean(self, x: Tensor) -> Tensor:
        """x itself; its gradient is the mean over the data-parallel ranks, as DDP takes it."""
        return _DataMean.apply(x, self) if self.data_groups else x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's range of labels along ``dim``, joined in order."""
        return _Gather.apply(x, self, dim)

    def gather_same(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, all of the shape of x."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts

    def gather_parts(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        """Every rank's tensor, whose first dimensions are ``sizes``."""
        # Collectives want one shape: pad to the longest.
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: x.shape[0]] = x
        return [part[:size] for part, size in zip(self.gather_same(padded), sizes, strict=True)]

    def looks_alike(self, h: Any, **parts: Any) -> bool:
        """Whether the ranks were very probably given the same, by one small collective.

        Of ``h`` a few entries are compared, and loosely: an encoder rounds in another way on another processor.
        """
        own = torch.zeros(1 + _SAMPLES, dtype=torch.float64)
        seen = {name: _fingerprint(value, _SAMPLED) for name, value in parts.items()}
        if isinstance(h, Tensor):
            seen["h"] = f"{_form(h)} {h.device.type}"
            if h.is_cpu and h.layout is torch.strided and not h.is_complex():
                sample = _sampled(h.detach(), _SAMPLES).to(own).nan_to_num(0.0, 0.0, 0.0)
                own[1 : 1 + len(sample)] = sample
        own[0] = zlib.crc32(repr(seen).encode())
        most, least = self.maximum(torch.stack([own, -own]))
        apart, scale = most + least, torch.maximum(most, least)[1:].max()
        return apart[0].item() == 0 and apart[1:].max().item() <= 0.25 * scale.item()

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

    # -- what each rank found in its own labels ------------------------------------------------------------------------

    def merge_topk(self, values: Tensor, labels: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """The best m of what the ranks found, ``[B, min(m, rows)]`` each; ties go to the lower labels, which stand first."""
        widths = [min(m, b - a) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]
        all_values = torch.cat(self.gather_parts(values.T.contiguous(), widths)).T
        all_labels = torch.cat(self.gather_parts(labels.T.contiguous(), widths)).T
        best, order = torch.sort(all_values, dim=1, descending=True, stable=True)
        return best[:, :m].contiguous(), all_labels.gather(1, order[:, :m])

    def merge_sets(self, sets: LabelSets) -> LabelSets:
        """The union, row by row, of what the ranks found in their ranges."""
        sizes = torch.stack(self.gather_same(sets.sizes))  # [world, B]
        found = self.gather_parts(sets.indices, sizes.sum(1).tolist())
        rows = torch.arange(len(sets), device=sets.device)
        order = torch.argsort(torch.cat([torch.repeat_interleave(rows, size) for size in sizes]), stable=True)
        offsets = torch.cat([sizes.new_zeros(1), sizes.sum(0).cumsum(0)])
        return LabelSets.from_sorted(torch.cat(found)[order], offsets, self.num_labels)


def label_shard(num_labels: int, device_mesh: Any, process_group: Any, device: Any) -> LabelShard | None:
    """The shard of a head that was given one of these, or neither."""
    if device_mesh is None and process_group is None:
        return None
    if device_mesh is not None and process_group is not None:
        raise ValueError("device_mesh and process_group were both given; give one of them")
    if not (dist.is_available() and dist.is_initialized()):
        name = "process_group" if device_mesh is None else "device_mesh"
        raise RuntimeError(f"{name} needs torch.distributed: call torch.distributed.init_process_group first")
    from torch.distributed.device_mesh import DeviceMesh

    if device_mesh is None:
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this process is not a member of process_group; make the head on its members only")
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a group of torch.distributed, got {process_group!r}; make one with "
                "torch.distributed.new_group, or take torch.distributed.group.WORLD"
            )
        kind = torch.device(device).type if device is not None else torch.get_default_device().type
        if kind == "meta":
            kind = "cuda" if "nccl" in dist.get_backend(process_group) else "cpu"
        device_mesh = DeviceMesh.from_group(process_group, kind)
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(device_mesh).__name__}; "
            "make one with torch.distributed.init_device_mesh, or give process_group="
        )
    return LabelShard(num_labels, device_mesh)


class _OfShard(torch.autograd.Function):
    """x itself; subclasses say what becomes of its gradient, or of x."""

    @staticmethod
    def forward(x: Tensor, shard: LabelShard) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shard = inputs[1]


class _Share(_OfShard):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.shard.all_reduce(g), None


class _Sum(_OfShard):
    @staticmethod
    def forward(x: Tensor, shard: LabelShard) -> Tensor:  # type: ignore[override]
        return shard.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g, None


class _DataMean(_OfShard):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        mean = g.clone(memory_format=torch.contiguous_format)
        for group in ctx.shard.data_groups:
            mean /= dist.get_world_size(group)  # before the sum, which may be beyond the range of 16 bits
            dist.all_reduce(mean, group=group)
        return mean, None


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
        return g.narrow(ctx.dim, ctx.shard.start, ctx.shard.rows), None, None


def _form(value: Tensor | np.ndarray) -> str:
    return f"{list(value.shape)} {value.dtype}"


def _sampled(tensor: Tensor, most: int | None) -> Tensor:
    """The entries in one row, or ``most`` of them, evenly spaced."""
    flat = tensor.reshape(-1)
    return flat if most is None or flat.numel() <= most else flat[:: -(-flat.numel() // most)]


def _fingerprint(value: Any, most: int | None = None) -> str:
    """Type, size and a checksum of the bits of a batch's part: the same in every process.

    ``most``: so many entries of a large tensor stand for all.
    """
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, LabelSets):
        named = f"{len(value)} label sets"
    elif isinstance(value, (Tensor, np.ndarray)):
        named = _form(value)
    else:
        named = type(value).__name__
    crc = 0
    for part in _bits(value, most):
        crc = zlib.crc32(part, crc)
    return f"{named}, checksum {crc:08x}"


def _bits(value: Any, most: int | None) -> Iterator[bytes | memoryview]:
    """What tells a value from another. Not pickle, which writes addresses, and a repeated list as a reference."""
    if isinstance(value, Tensor) and value.layout != torch.strided:
        value = value.to_sparse_csr()
        value = (value.crow_indices(), value.col_indices(), value.values())
    elif isinstance(value, LabelSets):
        value = (value.indices, value.offsets)
    elif isinstance(value, (set, frozenset)):
        value = sorted(value)
    elif hasattr(value, "tocsr"):  # scipy
        value = value.tocsr()
        value = (value.indices, value.indptr, value.data)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.asarray(value, value.dtype.newbyteorder("=")))
    if isinstance(value, Tensor):
        yield _form(value).encode()
        yield _sampled(value.detach(), most).cpu().contiguous().view(torch.uint8).numpy().data
    elif isinstance(value, (list, tuple, np.ndarray)):
        yield b"["
        for part in value:
            yield from _bits(part, most)
        yield b"]"
    elif hasattr(value, "__dict__") and not callable(value):  # a loss and its settings
        yield type(value).__qualname__.encode()
        yield from _bits(sorted(vars(value).items()), most)
    else:
        yield getattr(value, "__qualname__", repr(value)).encode()
