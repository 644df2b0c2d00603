"""Block sizes of the pointwise kernels: one choice for every device, compiled ahead and checked for spills."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

MAX_LIST = 64  # the longest list that the top-m kernel keeps; beyond it chunks are sorted
TOPK_PROGRAMS = 512  # of a launch, about
FINISHERS = 1024  # programs of the last kernel of a step, at the most where it has few rows
FINISH = {"BLOCK": 32, "PARTS": 64, "COUNT": 2048, "SHARE": 4096, "num_warps": 4}  # numbers that one takes at a time
MARKS = {"WORDS": 64, "ROWS": 32, "ENTRIES": 16}  # of a program that marks positives as bits
_PROGRAMS = 16  # of the elementwise kernel, that a multiprocessor runs at once
_PROCESSORS = 108  # of a device that does not say
_LEAST_RUN = 64  # labels


class Config(NamedTuple):
    """A block of rows and labels, and the warps that share it."""

    BM: int
    BN: int
    num_warps: int
    # Registers that a thread may have, on NVIDIA. Left alone, ptxas sometimes spills a few to get one more block onto a
    # multiprocessor.
    maxnreg: int = 0

    def options(self, platform: str) -> dict[str, int]:
        """As keywords of a launch on "cuda" or "hip"."""
        every = self._asdict()
        return every if self.maxnreg and platform == "cuda" else {n: v for n, v in every.items() if n != "maxnreg"}


TOPK = Config(16, 64, 4)


def elementwise(dtype: torch.dtype) -> Config:
    """A warp with blocks that a tensor core multiplies at once; it waits for no other. float64, which no DFT part of runs
    comes in, has one row, so that few numbers are exchanged for its sum."""
    return Config(1, 128, 2) if dtype == torch.float64 else Config(16, 16, 1)


@functools.cache
def _programs(device: torch.device) -> int:
    """Of the elementwise kernel, at once."""
    cuda = device.type == "cuda"
    return _PROGRAMS * (torch.cuda.get_device_properties(device).multi_processor_count if cuda else _PROCESSORS)


def run_labels(batch: int, labels: int, device: torch.device) -> int:
    """Labels of the elementwise kernel's programs where each makes the DFT part of its own."""
    blocks = -(-batch // elementwise(torch.float32).BM)
    return max(-(-labels * blocks // _programs(device)), _LEAST_RUN)


def parts(tiles: int, blocks: int, device: torch.device) -> tuple[int, int]:
    """How many parts share ``tiles`` of labels, beside ``blocks`` of rows, and how many tiles each has at the most."""
    each = -(-tiles // min(max(_programs(device) // max(blocks, 1), 1), tiles))
    return -(-tiles // each), each


# Programs that have all rows at once, in order of rows, by whether sums are float64.
_COLUMNS = {
    False: (Config(64, 16, 2, 255), Config(256, 8, 4, 255), Config(1024, 4, 8, 255)),
    True: (Config(64, 8, 2, 255), Config(256, 8, 8, 255)),
}


def columns(dtype: torch.dtype, batch: int) -> Config:
    """All rows of some labels in registers; with more rows blocks of them, of so few labels that enough programs share a chunk:
    a sector."""
    wide = dtype == torch.float64
    blocks = Config(32, 8, 4, 255) if wide else Config(64, 8, 4, 255)
    return next((config for config in _COLUMNS[wide] if batch <= config.BM), blocks)


def platform() -> str:
    """ "cuda" or "hip": whose device torch drives. The interpreter counts as cuda."""
    return "hip" if torch.version.hip else "cuda"
