"""Certificates as plain arrays, and many of them in a temporary file, so that memory does not grow with their number."""

from __future__ import annotations

import copy
import io
import tempfile
import threading
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, overload

import numpy as np
from numpy import ndarray

from .certificate import Certificate

VECTORS = ("witness", "support", "multipliers", "roots")  # of a certificate
IN_MEMORY = 64_000_000  # bytes up to which no file is made


class CertificateStore(Sequence[Certificate]):
    """Certificates that are added in blocks and read one by one; beyond ``IN_MEMORY`` they lie in a temporary file.

    The file has no name, and goes with the last report that uses it; ``TMPDIR`` says where it is. Only the block that
    was read last is in memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a report may be read from several threads; the file has one position
        self._file: Any = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - it lives as long as the store
        weakref.finalize(self, self._file.close)
        self._first = [0]  # the number of the first certificate of each block, and of the one that would follow
        self._starts = [0]  # where the blocks begin in the file, and where the next one will
        self._read: tuple[int, list[Certificate]] = (-1, [])

    def add(self, certificates: Sequence[Certificate]) -> None:
        """Put these at the end."""
        if not certificates:
            return
        block = io.BytesIO()
        arrays: dict[str, Any] = pack_certificates(certificates)
        np.savez(block, **arrays)
        self._file.seek(self._starts[-1])
        self._file.write(block.getbuffer())
        self._starts.append(self._file.tell())
        self._first.append(len(self) + len(certificates))

    def __len__(self) -> int:
        return self._first[-1]

    @overload
    def __getitem__(self, i: int) -> Certificate: ...
    @overload
    def __getitem__(self, i: slice) -> list[Certificate]: ...
    def __getitem__(self, i: int | slice) -> Certificate | list[Certificate]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"certificate {i} of {len(self)}")
        i %= len(self)
        block = bisect_right(self._first, i) - 1
        with self._lock:
            if self._read[0] != block:
                self._file.seek(self._starts[block])
                data = self._file.read(self._starts[block + 1] - self._starts[block])
                with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                    self._read = (block, unpack_certificates(dict(arrays)))
            return self._read[1][i - self._first[block]]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # a copy in another process has them all in memory

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Certificate]:
        return copy.deepcopy(list(self), memo)


def pack_certificates(certificates: Sequence[Certificate]) -> dict[str, ndarray]:
    """Certificates as named arrays; those that bound a radius more closely come after all others."""
    certificates = list(certificates)
    bounds = [(i, c.bounds) for i, c in enumerate(certificates) if c.bounds is not None]
    certificates += [c for _, c in bounds]
    arrays = {
        "kinds": np.array([c.kind for c in certificates], dtype="U12"),
        "bounds_of": np.array([i for i, _ in bounds], dtype=np.int64),
    }
    for name in VECTORS:
        arrays.update(_pack(name, [getattr(c, name) for c in certificates]))
    return arrays


def numbers_below(count: int, name: str, values: ndarray) -> ndarray:
    """The values, if they are whole numbers from 0 to count - 1."""
    if values.ndim != 1 or values.dtype.kind not in "iu" or np.any((values < 0) | (values >= count)):
        raise ValueError(f"{name} must hold numbers from 0 to {count - 1}")
    return values.astype(np.int64)


def unpack_certificates(data: Mapping[str, ndarray]) -> list[Certificate]:
    """The certificates; the last ones bound the radius more closely for some of the others."""
    kinds = [str(kind) for kind in data["kinds"]]
    columns = [_unpack(name, data, len(kinds)) for name in VECTORS]
    every = [Certificate(*fields) for fields in zip(kinds, *columns, strict=True)]
    proofs = len(kinds) - len(data["bounds_of"])
    out = every[: max(0, proofs)]
    bounds_of = numbers_below(len(out), "bounds_of", data["bounds_of"])
    for i, inner in zip(bounds_of.tolist(), every[len(out) :], strict=True):
        out[i] = replace(out[i], bounds=inner)
    return out


def _pack(name: str, column: list[ndarray | None]) -> dict[str, ndarray]:
    """A column of vectors (or None) as flat arrays; Fractions as text, hexadecimal since digits are many."""
    lengths = np.array([-1 if v is None else len(v) for v in column], dtype=np.int64)
    exact = np.array([v is not None and v.dtype == object for v in column], dtype=bool)
    numbers = [v for v, e in zip(column, exact, strict=True) if v is not None and not e]
    fractions = [f for v, e in zip(column, exact, strict=True) if v is not None and e for f in v]
    texts = [f"{f.numerator:#x}/{f.denominator:#x}" for f in fractions]
    flat = np.concatenate(numbers) if numbers else np.zeros(0)
    return {
        f"{name}_lengths": lengths,
        f"{name}_exact": exact,
        f"{name}_values": flat,
        f"{name}_text": np.frombuffer("\n".join(texts).encode(), dtype=np.uint8),
    }


def _unpack(name: str, data: Mapping[str, ndarray], count: int) -> list[ndarray | None]:
    lengths, exact, flat = data[f"{name}_lengths"], data[f"{name}_exact"], data[f"{name}_values"]
    texts = bytes(data[f"{name}_text"]).decode().split()
    if lengths.shape != (count,) or exact.shape != (count,) or flat.ndim != 1:
        raise ValueError(f"{name} does not have one vector for each of the {count} certificates")
    exact_at = at = 0
    out: list[ndarray | None] = []
    for i in range(count):
        length = int(lengths[i])
        if length < 0:
            out.append(None)
        elif exact[i]:
            part = texts[exact_at : exact_at + length]
            out.append(np.array([Fraction(*(int(v, 0) for v in text.split("/"))) for text in part], dtype=object))
            exact_at += length
        else:
            out.append(flat[at : at + length].copy())
            at += length
    if (exact_at, at) != (len(texts), len(flat)):
        raise ValueError(f"the vectors of {name} do not have the lengths they should")
    return out
