"""What ptxas says about kernels: registers, spills and shared memory, by kernel and dtype."""

from __future__ import annotations

import re
from typing import NamedTuple

# How the mangled name of a kernel's description begins; see `Kind` in csrc/cuda/types.cuh.
_KINDS = {
    "KindIfffLNS_6EngineE0": "float32",
    "KindIfffLNS_6EngineE1": "tf32",
    "KindI6__half": "float16",
    "KindI13__nv_bfloat16": "bfloat16",
    "KindIddd": "float64",
    "add_slabs_kernelIf": "float32",
    "add_slabs_kernelId": "float64",
}
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\S+)'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


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
        dtype = next((kind for part, kind in _KINDS.items() if part in entry["name"]), "?")
        spills = int(entry["stores"]) + int(entry["loads"])
        found.append(Usage(name[1] if name else "?", dtype, entry["arch"], int(entry["registers"]), spills))
    return found
