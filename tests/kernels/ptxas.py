"""What ptxas says about kernels: registers, spills and shared memory, by kernel and dtype."""

from __future__ import annotations

import re
from typing import NamedTuple

# How the mangled name of a kernel says its type: as what Shape or WavesGradient is a template of.
_TYPES = {"13__nv_bfloat16": "bfloat16", "6__half": "float16", "ShapeIf": "tf32", "GradientIf": "tf32"}
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\S+)'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def dtype_of(mangled: str) -> str:
    """The dtype of a kernel, ``"?"`` where its name has none."""
    return next((dtype for part, dtype in _TYPES.items() if part in mangled), "?")


class Usage(NamedTuple):
    kernel: str
    dtype: str
    arch: str
    registers: int
    spills: int


def usages(text: str) -> list[Usage]:
    """One entry per kernel in the output of ``ptxas -v``."""
    found = []
    for entry in _ENTRY.finditer(text):
        name = re.search(r"\d+([a-z_]+)_kernel", entry["name"])
        spills = int(entry["stores"]) + int(entry["loads"])
        found.append(
            Usage(name[1] if name else "?", dtype_of(entry["name"]), entry["arch"], int(entry["registers"]), spills)
        )
    return found
