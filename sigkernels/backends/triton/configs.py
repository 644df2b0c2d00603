"""Block sizes of the pointwise kernels: one choice for every device, compiled ahead and checked for spills."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_LIST = 64  # the longest list that the top-m kernel keeps; beyond it chunks are sorted
TOPK_PROGRAMS = 512  # of a launch, about
ROWS_AT_LEAST, ROWS_AT_ONCE = 64, 1024  # whose total one program makes
_ROW_TOTALS = 1024  # numbers that it takes at a time
_PROGRAMS = 1536  # of the elementwise kernel: what the larger devices run at once


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
    """One row, so that few numbers are exchanged for its sum; float64 takes twice the registers."""
    return Config(1, 128 if dtype == torch.float64 else 512, 2)


def parts(tiles: int, blocks: int) -> tuple[int, int]:
    """How many parts share ``tiles`` of labels, beside ``blocks`` of rows, and how many tiles each has at the most."""
    each = -(-tiles // min(max(_PROGRAMS // max(blocks, 1), 1), tiles))
    return -(-tiles // each), each


def columns(dtype: torch.dtype) -> Config:
    """Few labels, so that many programs share a chunk; they walk over the rows."""
    return Config(8 if dtype == torch.float64 else 16, 32, 4, 255)


def row_totals(block: int) -> dict[str, int]:
    """For the kernel that adds the sums of rows, ``block`` rows to a program."""
    return {"BLOCK": block, "PARTS": max(_ROW_TOTALS // block, 1), "num_warps": 8}


def platform() -> str:
    """ "cuda" or "hip": whose device torch drives. The interpreter counts as cuda."""
    return "hip" if torch.version.hip else "cuda"
