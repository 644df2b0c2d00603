"""The mark in the state of a ``DFTHead``: its k and codes, which the shapes of the parameters do not tell.

It is the module's extra state, one int64 without dimensions as BatchNorm's ``num_batches_tracked`` is: torch.save, safetensors,
Hugging Face and torch.distributed.checkpoint all carry it, and DDP, unlike for a buffer, sends nothing at any step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MARK = "_extra_state"  # torch's own name for it in a state dict
_RADIX = 10**9  # for the eye: 16 codes beside k = 10 are 16000000010


class FixedColumns(NamedTuple):
    """The columns of a DFT head that are never stored."""

    k: int
    codes: int

    @property
    def mark(self) -> Tensor:
        """``[]``, int64, in ordinary memory."""
        return torch.tensor(self.codes * _RADIX + self.k, device="cpu")

    @classmethod
    def of_mark(cls, mark: Any) -> FixedColumns | None:
        """None where there is no mark, as in states of before there was one, or it is not one any more."""
        if isinstance(mark, np.ndarray):
            mark = torch.as_tensor(mark, device="cpu")
        if not isinstance(mark, Tensor) or mark.ndim or mark.is_meta or mark.dtype != torch.int64:
            return None
        codes, k = divmod(int(mark), _RADIX)
        return cls(k, codes)

    def refuse(self, other: FixedColumns | None, whose: str) -> str | None:
        """One sentence against a state with other fixed columns than these."""
        if other is None or other == self:
            return None
        differences = " and ".join(
            f"{name} = {there}, not {here}"
            for name, here, there in zip(self._fields, self, other, strict=True)
            if here != there
        )
        return f"{whose} is of a DFTHead with {differences}; build one like it"
