"""Block sizes per architecture: a short table that was compiled ahead and checked for spills, and an optional tuner.

The table decides without measuring anything. ``SIGKERNELS_TRITON_TUNE=1`` times the table's candidates once per
(kernel, device, kind of product, shape class) and keeps the fastest: worth it for long training runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

TILE = 64  # labels per tile: BN. The DFT part of a tile has rank ≈ 2k·64/n + 5
SLAB_BLOCK = 64  # numbers that a program of the slab-adding kernel makes
MAX_LIST = 64  # the longest list the top-m kernel keeps; beyond it logits are sorted chunk by chunk


class Config(NamedTuple):
    """Rows per block, slack columns per step, and how the compiler lays the block out.

    ``maxnreg`` (NVIDIA): registers that a thread may have. Left alone, ptxas sometimes spills a few numbers to get one
    more block onto a multiprocessor.
    """

    BM: int
    BK: int
    num_warps: int
    num_stages: int
    maxnreg: int = 0

    def options(self) -> dict[str, int]:
        """As keywords of a launch."""
        return {name: value for name, value in self._asdict().items() if name != "maxnreg" or value}


# First entry: the choice without a tuner. The losses hold a tile's elementwise work and the products of its gradients:
# they take fewer rows and more registers than the bare logits. No entry spills, whatever the slack: all are compiled
# ahead (tests/kernels/triton_ahead.py).
_LOSSES: dict[str, tuple[Config, ...]] = {
    "16-bit": (Config(32, 64, 8, 2, 255),),
    "tf32": (Config(32, 32, 8, 2, 255),),
    "float32": (Config(32, 32, 8, 2, 168),),
    "float64": (Config(16, 16, 8, 2, 255),),
}
_TABLE: dict[str, dict[str, tuple[Config, ...]]] = {
    "logits": {
        "16-bit": (Config(64, 64, 8, 2), Config(64, 32, 8, 2)),
        "tf32": (Config(64, 32, 8, 2),),
        "float32": (Config(64, 32, 8, 2),),
        "float64": (Config(32, 16, 8, 2),),
    },
    "fused_loss": _LOSSES,
    "confusion_loss": _LOSSES | {"16-bit": (Config(32, 32, 8, 2, 255),), "float32": (Config(16, 32, 8, 2, 255),)},
    "predict": {
        "16-bit": (Config(64, 64, 8, 2, 255),),
        "tf32": (Config(64, 32, 8, 2, 255),),
        "float32": (Config(64, 32, 8, 2, 255),),
        "float64": (Config(16, 16, 8, 2, 255),),
    },
    "topk": {
        "16-bit": (Config(32, 64, 8, 2, 255),),
        "tf32": (Config(32, 32, 8, 2, 255),),
        "float32": (Config(32, 32, 8, 2, 255),),
        "float64": (Config(16, 16, 8, 2, 255),),
    },
}
# Where rows are loaded 16 bytes at a time the copies in flight take registers.
_ALIGNED = {("fused_loss", "16-bit"): (Config(32, 32, 8, 2, 255),)}
# AMD: 4 warps of 64 lanes with 512 registers each, and no pipelining through registers, which only spills.
_HIP_LOSSES = {
    "16-bit": (Config(64, 32, 4, 1), Config(16, 32, 4, 1)),
    "float32": (Config(64, 32, 4, 1), Config(16, 32, 4, 1)),
    "float64": (Config(16, 16, 4, 1),),
}
_HIP_SCANS = {
    "16-bit": (Config(64, 64, 4, 1), Config(64, 32, 4, 1)),
    "float32": (Config(64, 32, 4, 1),),
    "float64": (Config(16, 16, 4, 1),),
}
_HIP_TABLE = _TABLE | {
    "logits": _HIP_SCANS,
    "fused_loss": _HIP_LOSSES,
    "confusion_loss": _HIP_LOSSES,
    "predict": _HIP_SCANS,
    "topk": {
        "16-bit": (Config(32, 64, 4, 1),),
        "float32": (Config(32, 32, 4, 1),),
        "float64": (Config(16, 16, 4, 1),),
    },
}


def kind_of(dtype: torch.dtype, tf32: bool = False) -> str:
    """The column of the table: what a product is made of."""
    return "tf32" if tf32 else {torch.float32: "float32", torch.float64: "float64"}.get(dtype, "16-bit")


def candidates(platform: str, kind: str, kernel: str, slack: int) -> tuple[Config, ...]:
    """The configurations of a kernel on "cuda" or "hip", best guess first."""
    if platform == "hip":
        return _HIP_TABLE[kernel][kind]
    return _ALIGNED.get((kernel, kind), _TABLE[kernel][kind]) if slack % 16 == 0 else _TABLE[kernel][kind]


def platform() -> str:
    """ "cuda" or "hip": whose device torch drives. The interpreter counts as cuda."""
    return "hip" if torch.version.hip else "cuda"


_chosen: dict[tuple[object, ...], Config] = {}


def choose(kernel: str, kind: str, device: torch.device, shape: tuple[int, ...]) -> Config:
    """The configuration for a launch of ``shape`` (batch, labels, slack): the measured one if a tuner ran for this shape
    class, else the table's first."""
    return _chosen.get(_key(kernel, kind, device, shape)) or candidates(platform(), kind, kernel, shape[2])[0]


def tune(
    kernel: str,
    kind: str,
    device: torch.device,
    shape: tuple[int, ...],
    run: Callable[[Config], object],
) -> None:
    """Times ``run`` with every candidate and remembers the fastest. Does nothing unless asked, or when already done."""
    key = _key(kernel, kind, device, shape)
    if not os.environ.get("SIGKERNELS_TRITON_TUNE") or device.type != "cuda" or key in _chosen:
        return
    if torch.cuda.is_current_stream_capturing():
        return  # a graph cannot be timed while it is captured: the table decides
    from triton.testing import do_bench

    options = candidates(platform(), kind, kernel, shape[2])
    _chosen[key] = min(options, key=lambda config: do_bench(lambda: run(config), warmup=5, rep=20))


def _key(kernel: str, kind: str, device: torch.device, shape: tuple[int, ...]) -> tuple[object, ...]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return kernel, kind, name, shape[2] % 16 == 0, *(size.bit_length() for size in shape)
