"""How far a verification is, or a check or a repair of one: a progress bar, or a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Asked: TypeAlias = bool | Callable[[int, int], None] | None


class Progress:
    """Counts sets (or another unit) that are done: a tqdm bar, a function of the caller's, or nothing."""

    total: int
    done: int
    callback: Callable[[int, int], None] | None

    def __init__(self, progress: Asked, total: int, what: str = "verify", unit: str = "set"):
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise TypeError(f"progress must be True, False, None or a function of (done, total), got {progress!r}")
        self.total, self.done = total, 0
        self.callback = progress if callable(progress) else None
        self.bar: Any = None
        if self.callback is None and progress is not False:
            from tqdm import tqdm

            # None: only on a terminal, and only once it has taken two seconds.
            disable, delay = (None, 2.0) if progress is None else (False, 0.0)
            self.bar = tqdm(total=total, desc=what, unit=unit, disable=disable, delay=delay, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.callback is not None and self.done < self.total:
            self.callback(self.total, self.total)
        if self.bar is not None:
            self.bar.close()

    def add(self, count: int) -> None:
        """Count sets that were decided just now (a set that is decided twice counts once in the total)."""
        count = min(count, self.total - self.done)
        if count <= 0:
            return
        self.done += count
        if self.callback is not None:
            self.callback(self.done, self.total)
        if self.bar is not None:
            self.bar.update(count)

    def part(self) -> Callable[[int, int], None]:
        """The progress of a verification that is part of this one."""
        before = 0

        def advance(done: int, _total: int) -> None:
            nonlocal before
            self.add(done - before)
            before = done

        return advance
