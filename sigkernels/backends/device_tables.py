"""Tables that are copied to a GPU once and used by every later call, safe with CUDA graphs and several streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..bounded_cache import BoundedCache


class Tables(Protocol):
    """Tensors that belong together."""

    def tensors(self) -> Iterable[Tensor]: ...


T = TypeVar("T", bound=Tables)


class DeviceTables(Generic[T]):
    """Tables by key, at most ``most_bytes`` of them beside those that captured CUDA graphs read.

    A graph replays with the addresses that it saw: what a capture has used is never let go. A call on another stream
    than the one the table was made on tells torch's allocator, which would otherwise hand freed memory out too early.
    """

    def __init__(self, most_bytes: int) -> None:
        self._cache: BoundedCache[T] = BoundedCache(most_bytes, lambda tables: sum(t.nbytes for t in tables.tensors()))
        self._captured: dict[Hashable, T] = {}

    def get(self, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """The tables of ``key`` on ``device``; ``make`` works them out, and its copies to the device must have ended."""
        if device.type != "cuda":  # no graphs, no streams
            return self._cache.get(key, make)
        recording = torch.cuda.is_current_stream_capturing()
        found = self._captured.get(key) if self._captured else None  # the hash of a key takes its time
        if found is None:
            found = self._cache.get(key, lambda: _make(make, recording))
        if recording:
            return self._captured.setdefault(key, found)
        stream = torch.cuda.current_stream(device)
        for tensor in found.tensors():
            tensor.record_stream(stream)
        return found

    def clear(self) -> None:
        """Lets everything go that no graph reads."""
        self._cache.clear()


def _make(make: Callable[[], T], recording: bool) -> T:
    if recording:
        raise RuntimeError(
            "a CUDA graph is being captured and this layer has no tables on the device yet: run the same call once "
            "before the capture, as torch.cuda.graph asks for any warm-up"
        )
    return _in_a_thread(make)


def _in_a_thread(make: Callable[[], T]) -> T:
    """The first call of a compiled "reduce-overhead" function allocates from the pool of its graph, which reuses the
    memory at every replay. The redirection holds for one stream or one thread: a new thread, on the default stream, has
    neither."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="sigkernels-tables")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
