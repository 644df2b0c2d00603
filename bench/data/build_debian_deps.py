"""Rebuilds ``sigkernels/datasets/debian_deps.npz`` from the package lists of a Debian machine.

    apt-get update && apt-cache dumpavail > avail.txt
    python bench/data/build_debian_deps.py avail.txt -o debian_deps.npz

Without a file it asks ``apt-cache dumpavail`` itself. ``--min-count 3`` (the default) gives the set that
ships, ``2`` the one with 17,863 labels and ``1`` the one with 34,840 (of Debian bookworm in 2026; a later
list differs a little).

One example per package name: the first record counts.
    labels  the first alternative of every entry of Depends and Pre-Depends. Labels with fewer than
            ``--min-count`` examples are dropped, then examples with no label or more than ``--max-active``.
    tokens  ``[a-z0-9]+`` of the lower-cased "name description section=… arch=…", and those of the name
            again with the prefix ``n:``; bucket = crc32(token) mod 32768; distinct and sorted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

BUCKETS = 32_768


class Package(NamedTuple):
    name: str
    tokens: list[int]  # hashed, sorted, distinct
    depends: list[str]  # sorted, distinct


def records(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """The stanzas of a Debian control file. A continued field is one line."""
    fields: dict[str, str] = {}
    key = ""
    for line in lines:
        if not line.strip():
            if fields:
                yield fields
            fields = {}
        elif line[0].isspace():
            fields[key] = f"{fields.get(key, '')} {line.strip()}"
        else:
            key, _, value = line.partition(":")
            fields[key] = value.strip()
    if fields:
        yield fields


def dependencies(fields: dict[str, str]) -> list[str]:
    """``"a (>= 1) | b, c:any"`` → ``["a", "c"]``."""
    names = set()
    for field in ("Depends", "Pre-Depends"):
        for entry in fields.get(field, "").split(","):
            first = entry.partition("|")[0].split("(")[0].strip().partition(":")[0]
            if first:
                names.add(first)
    return sorted(names)


def tokens(fields: dict[str, str]) -> list[int]:
    name = fields["Package"]
    section, arch = fields.get("Section", ""), fields.get("Architecture", "")
    text = f"{name} {fields.get('Description', '')} section={section} arch={arch}".lower()
    words = set(re.findall("[a-z0-9]+", text)) | {f"n:{w}" for w in re.findall("[a-z0-9]+", name.lower())}
    return sorted({zlib.crc32(word.encode()) % BUCKETS for word in words})


def packages(lines: Iterable[str]) -> list[Package]:
    """The first record of each package name, in the order of the list."""
    found: dict[str, Package] = {}
    for fields in records(lines):
        name = fields.get("Package")
        if name and name not in found:
            found[name] = Package(name, tokens(fields), dependencies(fields))
    return list(found.values())


def build(lines: Iterable[str], min_count: int = 3, max_active: int = 80) -> dict[str, np.ndarray]:
    """The arrays of the npz file (see ``sigkernels.datasets.debian_deps`` for what they are)."""
    everything = packages(lines)
    counts = Counter(label for package in everything for label in package.depends)
    names = sorted(label for label, count in counts.items() if count >= min_count)
    number = {label: i for i, label in enumerate(names)}
    kept = []
    for package in everything:
        labels = [number[label] for label in package.depends if label in number]
        if 1 <= len(labels) <= max_active:
            kept.append((package, labels))
    if not kept:
        raise ValueError("no package is left: is the input the output of `apt-cache dumpavail`?")
    return {
        "feature_indices": _flat([p.tokens for p, _ in kept], BUCKETS),
        "feature_offsets": _offsets([p.tokens for p, _ in kept]),
        "label_indices": _flat([labels for _, labels in kept], len(names)),
        "label_offsets": _offsets([labels for _, labels in kept]),
        "label_names": np.array(names),
        "names": np.array([p.name for p, _ in kept]),
    }


def _flat(rows: list[list[int]], limit: int) -> np.ndarray:
    return np.fromiter((i for row in rows for i in row), np.uint16 if limit <= 65_536 else np.int32)


def _offsets(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)


def save(path: Path, data: dict[str, np.ndarray]) -> None:
    """An npz file like numpy's own, compressed by LZMA: a quarter smaller, and ``np.load`` reads it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in data.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Rebuild the debian_deps data set.")
    parser.add_argument("avail", nargs="?", type=Path, help="output of `apt-cache dumpavail`; default: run it")
    parser.add_argument("-o", "--output", type=Path, default=Path("debian_deps.npz"))
    parser.add_argument("--min-count", type=int, default=3, help="drop labels with fewer examples (default 3)")
    parser.add_argument("--max-active", type=int, default=80, help="drop examples with more labels (default 80)")
    args = parser.parse_args()
    if args.avail:
        text = args.avail.read_text(encoding="utf-8")
    else:
        text = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True).stdout.decode()
    data = build(text.splitlines(), args.min_count, args.max_active)
    save(args.output, data)
    rows, labels = len(data["label_offsets"]) - 1, len(data["label_names"])
    mean = len(data["label_indices"]) / rows
    print(f"{args.output}: {rows} examples, {labels} labels, {mean:.2f} on average", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
