"""Predicted times of everything a GPU step launches: kernels from their machine code, products by a model of cuBLAS.

Needs the package ``gpumodel`` on PYTHONPATH, a model of a multiprocessor which is not part of this project: it walks the
code that Triton and nvcc compile for sm_80 and simulates it. Nothing here has been compared with a device. The model's own
error is 15 to 30 %, of the ratio of two kernels 10 to 15 %.
"""

from __future__ import annotations

import functools
from typing import Any

from gpu_launches import ACTIVE, Kernel, Launch, Other, Product, call, library_launches

try:
    from gpumodel import baselines, machines, report, sass
    from gpumodel.ahead import triton_cubin
except ImportError as error:
    raise SystemExit(
        f"{error}: this needs the package gpumodel on PYTHONPATH, which is not part of this project"
    ) from None

MACHINES = machines.MACHINES
LAUNCH = baselines.LAUNCH
ELEMENT = {"bf16": 2, "tf32": 4}
TILE = 128  # rows and columns of a product's result, a block of the library


def product_seconds(machine: str, dtype: str, batch: int, work: Product) -> float:
    """A product one of whose matrices, the one without rows of the batch, comes from memory or goes there; the others are
    in the L2 cache."""
    m, size = MACHINES[machine], ELEMENT[dtype]
    rows, columns, inner = work.rows, work.columns, work.inner
    sides = [rows, columns, inner]
    if batch in sides:
        sides.remove(batch)
    else:
        sides.remove(min(sides))
    split = -(-rows // TILE) * -(-columns // TILE) < m.sms and inner > 1024
    seconds: float = baselines.product(m, dtype, rows, columns, inner, sides[0] * sides[1] * size, split)
    return seconds


# -- the kernels of the library path -----------------------------------------------------------------------------------


_POINTERS = dict.fromkeys(("z", "label_weight", "label_pos_weight", "row_scale", "losses", "value", "wide"), "*fp32")
_POINTERS |= dict.fromkeys(("indices", "offsets", "unknown", "best_labels"), "*i64") | {
    "rows": "*fp64",
    "values": "*fp64",
}
_POINTERS |= dict.fromkeys(("betas", "etas", "column_sums"), "*fp32") | {"marks": "*i32", "best_keys": "*i32"}
_POINTERS |= dict.fromkeys(("pooled", "sums", "grad_beta", "grad_eta"), "*fp64")
_NUMBERS = dict.fromkeys(("constant", "scale", "scale_low"), "fp32")
# A program finds the positives of its rows in three steps; each positive is one pass of a loop, at most one in a tile.
# A number of each row is a sector of L2 for each; every other entry of a search lies in a sector that L1 has. All programs
# of a multiprocessor read the same factor of the DFT, from L1.
_ROWS = 16  # of a program
_WALK = {
    "memory": [
        {"at": r"tl\.load\(indices", "l2_bytes": 16 * _ROWS, "lsu": _ROWS},
        {"at": r"tl\.load\(features", "l2_bytes": 32 * _ROWS, "lsu": _ROWS},
        {"at": r"tl\.load\(offsets", "l2_bytes": 160, "lsu": 2},
        {"at": r"sums", "l2_bytes": 64, "lsu": 2},
        {"at": r"tl\.load\(waves", "l1": True},
    ],
    "loops": [
        {"at": r"while tl\.max\(high", "trips": 3},
        {"at": r"while tl\.min\(place", "trips": "1 if tile < positives else 0"},
        {"at": r"for tile in range", "trips": "each", "name": "tile"},
    ],
    "branches": [
        {"at": r"if last >= labels", "take": True},
        {"at": r"while tl\.min\(place", "take": "tile >= positives"},
        {"at": r"while tl|below = open_|for tile in range", "take": False},
    ],
}
_FINISH: dict[str, Any] = {
    "loops": [
        {"at": r"for first in range", "trips": "passes"},
        {"at": r"for begin in range", "trips": "steps"},
        {"at": r"for start in range", "trips": "shares"},
    ],
    "branches": [{"at": r"if first_row|if TOTAL|for \w+ in range", "take": False}],
}


@functools.cache
def compiled(kernel: Any, dtype: str, warps: int, **constants: Any) -> tuple[Any, int, int]:
    """Machine code, registers and bytes of shared memory of a pointwise kernel."""
    element = {"bf16": "*bf16", "tf32": "*fp32"}[dtype]
    types = {n: _POINTERS.get(n) or _NUMBERS.get(n) or "i32" for n in kernel.arg_names if not n.isupper()}
    types |= {n: element for n in ("g", "features", "bias", "dense", "waves", "coef", "narrow") if n in types}
    odd = tuple(n for n, kind in types.items() if not kind.startswith("*") and n not in ("stride", "coef_stride"))
    cubin, shared = triton_cubin(kernel, types, constants, warps, 1, odd=odd)
    name = kernel.fn.__name__
    return sass.load(cubin, f"^{name}$"), sass.registers(cubin)[name], shared


@functools.cache
def _elementwise_seconds(machine: str, dtype: str, programs: int, each: int, positives: int, **settings: Any) -> float:
    """So many programs of the pointwise kernel: a block of rows by ``each`` tiles of labels."""
    from sigkernels.backends.triton.kernels.elementwise import elementwise_kernel

    warps, limit = settings.pop("num_warps"), settings.pop("maxnreg", 0)
    assert not limit, "gpumodel compiles without a limit of registers"
    code, registers, shared = compiled(elementwise_kernel, dtype, warps, **settings)
    known = dict(warps=warps, tiles=programs, registers=registers, shared=shared, each=each, positives=positives)
    seconds: float = report.predict(code, _WALK, MACHINES[machine], **known).seconds
    return seconds + LAUNCH


@functools.cache
def _finish_seconds(
    machine: str, dtype: str, programs: int, parts: int, blocks: int, size: int, **settings: Any
) -> float:
    from sigkernels.backends.triton.kernels.elementwise import finish_kernel

    warps = settings.pop("num_warps")
    code, registers, shared = compiled(finish_kernel, dtype, warps, **settings)
    loops = dict(
        passes=-(-parts // settings["PARTS"]), steps=-(-parts * blocks // settings["COUNT"]),
        shares=-(-size // (settings["SHARE"] * programs)),
    )  # fmt: skip
    known = dict(warps=warps, tiles=1, registers=registers, shared=shared)  # of one program that does everything
    seconds: float = report.predict(code, _FINISH, MACHINES[machine], **known, **loops).seconds
    return seconds + LAUNCH


def library(machine: str, dtype: str, n: int, k: int, s: int, batch: int) -> tuple[float, int]:
    """Seconds and launches of a step by the library path."""
    import torch

    m = MACHINES[machine]
    problem = call(n, k, s, batch, torch.bfloat16 if dtype == "bf16" else torch.float32)
    launches = library_launches(problem, m.l2_mib * 2**20, m.sms)
    return sum(_library_launch(machine, dtype, n, batch, launch) for launch in launches), len(launches)


def _library_launch(machine: str, dtype: str, n: int, batch: int, launch: Launch) -> float:
    if isinstance(launch, Product):
        return product_seconds(machine, dtype, batch, launch)
    if isinstance(launch, Other):
        return launch.nbytes / baselines.l2_bandwidth(MACHINES[machine]) + LAUNCH
    if launch.name == "scale":
        return LAUNCH  # it reads a 1
    settings = dict(launch.keywords)
    numbers = settings.pop("numbers")
    if launch.name == "elementwise":
        each = numbers[-2]
        positives = max(round(_ROWS * ACTIVE * each * settings["BN"] / n), 1)  # of a program, on average
        return _elementwise_seconds(machine, dtype, launch.grid[0] * launch.grid[1], each, positives, **settings)
    return last_seconds(machine, dtype, launch)


def last_seconds(machine: str, dtype: str, launch: Kernel) -> float:
    """The last kernel of a step."""
    settings = dict(launch.keywords)
    numbers = settings.pop("numbers")
    return _finish_seconds(machine, dtype, launch.grid[0], *numbers[1:4], **settings)
