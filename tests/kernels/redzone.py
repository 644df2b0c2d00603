"""Red zones: tensors that lie inside larger buffers full of NaN (or of an absurd integer).

A kernel that reads outside its inputs makes a NaN, or a crash; one that writes outside its outputs changes a zone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

_PAD = 256


class RedZones:
    """Hands out guarded tensors, and makes ``torch.empty`` do so."""

    def __init__(self) -> None:
        self._zones: list[Tensor] = []
        self._empty = torch.empty

    def around(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor`` with zones before and after it."""
        inside = self.like(tensor.shape, tensor.dtype)
        return inside.copy_(tensor)

    def like(self, shape: Any, dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        fill = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max // 3
        buffer = self._empty(count + 2 * _PAD, dtype=dtype).fill_(fill)
        self._zones += [buffer[:_PAD], buffer[-_PAD:]]
        return buffer[_PAD : _PAD + count].view(shape)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Everything that a backend allocates for its kernels is guarded, and starts as NaN."""

        def empty(*shape: Any, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
            sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            return self.like(sizes, dtype or torch.get_default_dtype())

        def new_empty(self_: Tensor, *shape: Any, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
            return empty(*shape, dtype=dtype or self_.dtype)

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(Tensor, "new_empty", new_empty)

    def check(self) -> None:
        assert self._zones
        for zone in self._zones:
            clean = zone.isnan() if zone.is_floating_point() else zone == torch.iinfo(zone.dtype).max // 3
            assert clean.all(), "a kernel wrote outside its output"
