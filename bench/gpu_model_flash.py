"""Predicted times of a step by the flash kernel in Triton, from its machine code, and what a step by any flash path is made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

from gpu_launches import Other, Product, call, flash_launches
from gpu_model import ELEMENT, LAUNCH, MACHINES, baselines, machines, product_seconds, report, sass, triton_cubin

from sigkernels.backends import flash_pass
from sigkernels.backends.flash_kernels import FlashSizes

Case = tuple[int, int, int, int]  # n, k (-1: no DFT), s, B

# The positives of a row are read at once.
_TRITON = {
    "loops": [
        {"at": r"for at in tl\.range", "trips": "steps", "name": "tile"},
        {"at": r"while tl\.max\(high", "trips": 0},
        {"at": r"while tl\.max\(end", "trips": 1},
        {"at": r"for start in range\(0, words", "trips": "words"},
    ],
    "branches": [
        {"at": r"while tl\.max\(high", "take": True},
        {"at": r"tl\.load\(indices|for \w+ in |while|tl\.atomic_or", "take": False},
    ],
    "unused_ok": True,
}
_FINISH: dict[str, Any] = {
    "loops": [{"at": r"for start in range", "trips": "steps"}],
    "branches": [{"at": r"program < sums|for start", "take": False}],
    "unused_ok": True,
}
_MANY = 24  # tiles of a block: more are not walked one by one


def _cubin(kernel: Any, constants: dict[str, Any], element: str, accumulate: bool, odd: tuple[str, ...]) -> Any:
    """(code, registers, shared memory) of a kernel, for BCE of label sets."""
    import triton

    types = dict.fromkeys(["x", "weight", "bias", "basis", "coef", "dense", "grad_coef", "grad_x"], element)
    types |= dict.fromkeys(("grad_weight", "grad_bias"), "*fp32" if accumulate else element)
    types |= dict.fromkeys(
        ["label_weight", "pos_weight", "row_factor", "out_scale", "slabs", "row_sums", "value"], "*fp32"
    )
    types |= {
        "marks": "*i32",
        "indices": "*i64",
        "offsets": "*i64",
        "totals": "*fp64",
        "rows": "*fp64",
        "scale": "fp32",
    }
    types = {name: types.get(name, "i32") for name in kernel.arg_names if not name.isupper()}
    constants = dict(constants)
    warps, limit = constants.pop("num_warps", 4), constants.pop("maxnreg", None)
    made = triton.compile

    def compiled(source: Any, target: Any, options: dict[str, Any]) -> Any:
        return made(source, target=target, options=options | {"maxnreg": limit})

    with mock.patch.object(triton, "compile", compiled):  # gpumodel knows of no limit of registers
        cubin, shared = triton_cubin(kernel, types, constants, warps, 3, odd=odd)
    name = kernel.fn.__name__
    return sass.load(cubin, f"^{name}$"), sass.registers(cubin)[name], shared


@functools.cache
def _triton_cubin(dtype: str, s: int, chosen: Any, dft: bool, accumulate: bool) -> Any:
    import torch

    from sigkernels.backends.triton import flash
    from sigkernels.backends.triton.kernels.flash import flash_kernel
    from sigkernels.losses import BCE

    params: Any = BCE().kernel_params()
    constants = flash._keywords(
        chosen, params, s, torch.bfloat16 if dtype == "bf16" else torch.float32, dft=dft, bias=False, sparse=True,
        label_weight=False, pos_weight=False, row_factor=False, scaled=False, accumulate=accumulate, need_x=True,
        need_weight=True, need_bias=False,
    )  # fmt: skip
    odd = ("x", "x_stride", "dense_stride", "label_start", "batch", "labels", "block_labels")
    return _cubin(flash_kernel, constants, "*bf16" if dtype == "bf16" else "*fp32", accumulate, odd)


@functools.cache
def _triton_seconds(
    machine: str, dtype: str, s: int, chosen: Any, dft: bool, accumulate: bool, blocks: int, tiles: int
) -> float:
    """A program of so many tiles of labels, from its first instruction to its last, where so many run on a multiprocessor."""
    from sigkernels.backends.triton import flash

    m = MACHINES[machine]
    code, registers, shared = _triton_cubin(dtype, s, chosen, dft, accumulate)

    def cycles(steps: int) -> float:
        words = -(-steps * chosen.BN // (32 * flash._MARKS["WORDS"]))
        known = dict(warps=chosen.num_warps, registers=registers, shared=shared, blocks=blocks, tiles=blocks * m.sms)
        return report.predict(code, _TRITON, m, reps=1, steps=steps, words=words, **known).result.cycles  # type: ignore[no-any-return]

    few = cycles(min(tiles, _MANY))
    if tiles > _MANY:
        few += (tiles - _MANY) * (few - cycles(_MANY // 2)) / (_MANY - _MANY // 2)
    return few / (m.ghz * 1e9)


@functools.cache
def _finish_seconds(machine: str, dtype: str, s: int, rows: int, blocks: int) -> float:
    """The last kernel."""
    import torch

    from sigkernels.backends.triton import flash
    from sigkernels.backends.triton.kernels.flash import finish_kernel

    m, sums = MACHINES[machine], flash.sums(rows)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    constants = sums | dict(SLACK=s, NEED_X=True, SCALED=False, HAS_VALUE=True, DTYPE=flash.operand(kind))
    odd = ("grad_x", "grad_stride", "batch", "blocks")
    code, registers, shared = _cubin(finish_kernel, constants, "*bf16" if dtype == "bf16" else "*fp32", False, odd)
    known = dict(warps=4, registers=registers, shared=shared, steps=-(-blocks // sums["PARTS"]))
    made = report.predict(code, _FINISH, m, tiles=-(-rows * s // sums["BLOCK"]), reps=1, **known)
    seconds: float = made.seconds + LAUNCH
    return seconds


def triton_flash(machine: str, dtype: str, n: int, k: int, s: int, batch: int) -> tuple[float, int]:
    """Seconds and launches of a step by the kernel in Triton; infinite where it refuses."""
    from sigkernels.backends.triton import flash

    m, dft = MACHINES[machine], k >= 0
    if s > flash.WIDEST:
        return math.inf, 0
    chosen = flash.shape("tf32" if dtype == "tf32" else "16-bit", flash.width(s), batch)
    if batch > flash._LAUNCHES * chosen.BM or chosen.shared > m.shared - 1024:
        return math.inf, 0
    accumulate = batch > chosen.BM
    _, registers, shared = _triton_cubin(dtype, s, chosen, dft, accumulate)
    resident = min(machines.occupancy(m, chosen.num_warps, registers, shared)[0], chosen.resident)
    if not resident:
        return math.inf, 0
    sizes = FlashSizes(chosen.BN, chosen.BM, chosen.resident * m.sms, chosen.BM, marks=True, turns=False)
    labels = flash_pass.block_labels(n, sizes)
    blocks = -(-n // labels)
    together = min(resident, -(-blocks // m.sms))
    waves = -(-blocks // (resident * m.sms))  # more than one where fewer run at once than was thought

    def kernel(rows: int) -> float:
        return waves * _triton_seconds(machine, dtype, s, chosen, dft, accumulate, together, labels // chosen.BN)

    def finish(rows: int) -> float:
        return _finish_seconds(machine, dtype, s, rows, blocks)

    return flash_step(machine, dtype, (n, k, s, batch), sizes, kernel, finish)


def flash_step(
    machine: str,
    dtype: str,
    case: Case,
    sizes: FlashSizes,
    kernel: Callable[[int], float],
    finish: Callable[[int], float],
) -> tuple[float, int]:
    """``kernel(rows)``: the seconds of a launch; ``finish(rows)``: of the last kernel and its launch."""
    import torch

    m, size, (n, k, s, batch) = MACHINES[machine], ELEMENT[dtype], case
    problem = call(n, k, s, batch, torch.bfloat16 if dtype == "bf16" else torch.float32)
    if k >= 0 and flash_pass.rank_refusal(problem.layer.meta, n, problem.x.dtype, sizes) is not None:
        return math.inf, 0
    launches = flash_launches(problem, sizes)
    seconds = 0.0
    for launch in launches:
        if isinstance(launch, Product):
            seconds += product_seconds(machine, dtype, batch, launch)
        elif isinstance(launch, Other):
            seconds += launch.nbytes / baselines.l2_bandwidth(m) + LAUNCH
        elif launch.name == "flash":
            rows = launch.keywords["batch"]
            groups = -(-rows // sizes.group)
            # Weights and their gradients; those of several launches are float32 sums, read and written. So are those of
            # several groups, which come from memory again where the L2 cache has no room for them.
            moved = n * s * (size + (8 if batch > sizes.rows else size)) + n * rows / 8
            if n * s * (size + 4) > 0.7 * m.l2_mib * 2**20:
                moved += (groups - 1) * n * s * (size + 8)
            seconds += max(kernel(rows), moved / m.hbm) + LAUNCH
        elif launch.name == "finish":
            seconds += finish(launch.keywords["batch"])
        else:
            seconds += LAUNCH
    return seconds, len(launches)
