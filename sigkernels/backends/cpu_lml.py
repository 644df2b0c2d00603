"""The LML projection by the compiled core; ``ops/lml.py`` has the mathematics, ``csrc/cpu/lml_kernel.h`` the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sharding import LabelShard
from . import torch_lml
from .compiled_core import core as _C
from .interface import LMLSteps, Root

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_SOLVE, _PROJECT, _PULLBACK, _SPREAD = range(4)


def solve(z: Tensor, k: int, shard: LabelShard | None = None) -> Root:
    if shard is not None:  # the kernel has no sums over ranks
        return torch_lml.solve(z, k, shard)
    root = _new_root(z)
    _run(_SOLVE, z.contiguous(), root, k=k)
    return root


def project(z: Tensor, k: int) -> tuple[Tensor, Root]:
    root, y = _new_root(z), torch.empty_like(z, memory_format=torch.contiguous_format)
    _run(_PROJECT, z.contiguous(), root, k=k, out=y.data_ptr())
    return y, root


def pullback(grad: Tensor, z: Tensor, root: Root) -> Tensor:
    out, grad = torch.empty_like(z, memory_format=torch.contiguous_format), grad.contiguous()
    _run(_PULLBACK, z.contiguous(), root, grad=grad.data_ptr(), out=out.data_ptr())
    return out


def spread(z: Tensor, root: Root, total: Tensor, out: Tensor | None = None) -> Tensor:
    total = total.to(torch.float64).contiguous()
    if out is None:
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
    _run(_SPREAD, z.contiguous(), root, total=total.data_ptr(), out=out.data_ptr())
    return out


STEPS = LMLSteps(solve, project, pullback, spread)


def _new_root(z: Tensor) -> Root:
    return Root(*(torch.empty(z.shape[0], dtype=torch.float64) for _ in range(2)))


def _run(step: int, z: Tensor, root: Root, **arguments: Any) -> None:
    _C.lml(
        step=step,
        dtype=_DTYPES[z.dtype],
        rows=z.shape[0],
        n=z.shape[1],
        z=z.data_ptr(),
        nu=root.nu.data_ptr(),
        slope=root.slope.data_ptr(),
        threads=torch.get_num_threads(),
        **arguments,
    )
