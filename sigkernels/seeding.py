"""Draws that depend on a seed alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block in which torch's CPU generator begins at ``seed``; afterwards it goes on where it was.

    The generator is that of the process, so one thread at a time has it. Those of other devices are left alone.
    """
    with _lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
