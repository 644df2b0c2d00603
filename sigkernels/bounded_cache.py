"""One cache for what is worked out once per shape: bounded by bytes, the least recently used goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class BoundedCache(Generic[V]):
    """Values by key, of at most ``most_bytes`` in total; the latest is kept however large it is."""

    most_bytes: int
    nbytes: int

    def __init__(self, most_bytes: int, size: Callable[[V], int]) -> None:
        self.most_bytes, self._size = most_bytes, size
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of ``key``; ``make`` works it out, outside the lock, where it is not there."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                return found[0]
        value = make()
        with self._lock:
            replaced = self._entries.pop(key, None)
            self._entries[key] = value, self._size(value)
            self.nbytes += self._entries[key][1] - (0 if replaced is None else replaced[1])
            while len(self._entries) > 1 and self.nbytes > self.most_bytes:
                self.nbytes -= self._entries.popitem(last=False)[1][1]
        return value

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Lets everything go."""
        with self._lock:
            self._entries.clear()
            self.nbytes = 0
