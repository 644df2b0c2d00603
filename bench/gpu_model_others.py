"""Predicted times of what is not an elementwise loss: column losses, top-m and logits, all on the library path.

Launches are counted on the real host code (``gpu_launches.py``), kernels simulated as in ``gpu_model.py``. Operations of
torch count what they write, from L2, and a launch. How torch sorts, chooses and lists what is not zero is not modelled:
of top-m the choice among the parts' candidates is left out here and ``torch.topk`` there, and predictions, which wait for
the device, are not predicted at all.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from gpu_launches import Kernel, Launch, Other, Product, Recorder, call, recorded
from gpu_model import LAUNCH, MACHINES, baselines, compiled, last_seconds, product_seconds, report

from sigkernels.losses import SigmoidF1

TOP = 10
# Reads and writes of an array like the logits by a column loss, forward and backward, and launches: of eager torch (σ, three
# sums over the rows, the same for gradients), and of a compiler that makes the score again and reads each array as often
# as the sums need. A guess, as the others' are.
EAGER, EAGER_LAUNCHES = 16, 12
COMPILED, COMPILED_LAUNCHES = 6, 4


class Times(NamedTuple):
    """Seconds."""

    ours: float
    launches: int
    eager: float
    compiled: float | None = None


def _counted(machine: str, run: Callable[[], Any], *stubs: tuple[Any, str]) -> list[Launch]:
    m = MACHINES[machine]
    with recorded(m.l2_mib * 2**20, m.sms) as recorder:
        with _stubbed(recorder, stubs), torch.no_grad():
            run()  # makes tables
            recorder.launches.clear()
            run()
        return recorder.launches


def _stubbed(recorder: Recorder, stubs: tuple[tuple[Any, str], ...]) -> Any:
    stack = contextlib.ExitStack()
    for module, name in stubs:
        stack.enter_context(mock.patch.object(module, name, recorder.kernel(name.removesuffix("_kernel"))))
    return stack


def _problem(dtype: str, n: int, k: int, s: int, batch: int) -> Any:
    return call(n, k, s, batch, torch.bfloat16 if dtype == "bf16" else torch.float32)


def _seconds(machine: str, dtype: str, batch: int, launches: list[Launch], kernel: Callable[[Kernel], float]) -> float:
    total = 0.0
    for launch in launches:
        if isinstance(launch, Product):
            total += product_seconds(machine, dtype, batch, launch)
        elif isinstance(launch, Other):
            total += launch.nbytes / baselines.l2_bandwidth(MACHINES[machine]) + LAUNCH
        else:
            total += kernel(launch)
    return total


# -- column losses ------------------------------------------------------------------------------------------------------


def column_loss(machine: str, dtype: str, n: int, k: int, s: int, batch: int) -> Times:
    """A step of SigmoidF1, all gradients."""
    from sigkernels.backends.triton import columns

    problem = _problem(dtype, n, k, s, batch)._replace(loss=SigmoidF1(), scale=1 / n)
    launches = _counted(
        machine, lambda: columns.column_loss(problem), (columns, "columns_kernel"), (columns, "mark_kernel")
    )

    def kernel(launch: Kernel) -> float:
        if launch.name == "mark":
            return _mark_seconds(machine, launch.grid[0] * launch.grid[1])
        if launch.name == "finish":
            return last_seconds(machine, dtype, launch)
        return _columns_seconds(machine, dtype, batch, launch.grid[0], tuple(sorted(_constants(launch).items())))

    ours = _seconds(machine, dtype, batch, launches, kernel) + LAUNCH  # the upstream gradient
    m, size = MACHINES[machine], 2 if dtype == "bf16" else 4
    made = baselines.baselines(m, dtype, n, k, s, batch)
    z = batch * n * size
    speed = baselines.l2_bandwidth(m) if 2 * z <= 0.7 * m.l2_mib * 2**20 else m.hbm
    eager = made.products + EAGER * z / speed + EAGER_LAUNCHES * LAUNCH
    return Times(ours, len(launches) + 1, eager, made.products + COMPILED * z / speed + COMPILED_LAUNCHES * LAUNCH)


def _constants(launch: Kernel) -> dict[str, Any]:
    return {n: v for n, v in launch.keywords.items() if n not in ("numbers", "maxnreg", "enable_fp_fusion")}


@functools.cache
def _columns_seconds(
    machine: str, dtype: str, batch: int, programs: int, constants: tuple[tuple[str, Any], ...]
) -> float:
    from sigkernels.backends.triton.kernels.columns import columns_kernel

    known = dict(constants)
    warps = known.pop("num_warps")
    code, registers, shared = compiled(columns_kernel, dtype, warps, **known)
    # A thread takes four labels. Few labels make short rows: a warp's lie in several lines of the cache, each a wavefront, and
    # sectors come and go as a whole.
    rows, size = max(32 * 4 // known["BN"], 1), 2 if dtype == "bf16" else 4
    row = max(32, min(known["BN"], 128) * size)
    spec: dict[str, Any] = {
        "memory": [
            {"at": r"tl\.load\(z \+ place", "l2_bytes": max(512, 32 * rows), "lsu": max(4, rows)},
            {"at": r"tl\.store\(g \+ place", "l2_bytes": rows * row, "lsu": max(size, rows)},
        ],
        "loops": [{"at": r"for row0 in range", "trips": "steps"}],
        "branches": [{"at": r"if last >= labels", "take": True}, {"at": r"for row0|scored_rows", "take": False}],
        "unused_ok": True,
    }
    steps = -(-batch // known["BM"])
    made = report.predict(
        code, spec, MACHINES[machine], warps=warps, tiles=programs, registers=registers, shared=shared, steps=steps
    )
    return float(made.seconds) + LAUNCH


@functools.cache
def _mark_seconds(machine: str, programs: int) -> float:
    from sigkernels.backends.triton import configs
    from sigkernels.backends.triton.kernels.targets import mark_kernel

    code, registers, shared = compiled(mark_kernel, "bf16", 4, **configs.MARKS)
    spec: dict[str, Any] = {
        "loops": [
            {"at": r"while tl\.max\(high", "trips": 0}, {"at": r"while tl\.max\(end", "trips": 1},
            {"at": r"for start in range", "trips": 1},
        ],
        "branches": [{"at": r"while tl\.max\(high", "take": True}, {"at": r".", "take": False}],
        "unused_ok": True,
    }  # fmt: skip
    made = report.predict(
        code, spec, MACHINES[machine], warps=4, tiles=programs, registers=registers, shared=shared, reps=2
    )
    return float(made.seconds) + LAUNCH


# -- top-m ----------------------------------------------------------------------------------------------------------------


def topk(machine: str, dtype: str, n: int, k: int, s: int, batch: int) -> Times:
    """The best labels of every part of the labels. The others: the product and one reading of the logits, no choice."""
    from sigkernels.backends.triton import topk as home

    problem = _problem(dtype, n, k, s, batch)
    launches = _counted(machine, lambda: home.topk(problem.x, problem.layer, TOP), (home, "topk_kernel"))
    launches = [launch for launch in launches if not isinstance(launch, Other)]

    def kernel(launch: Kernel) -> float:
        labels = launch.keywords["numbers"][3]
        tiles = -(-labels // (launch.keywords["BN"] * launch.grid[1]))
        programs = launch.grid[0] * launch.grid[1]
        return _topk_seconds(machine, dtype, programs, tiles, tuple(sorted(_constants(launch).items())))

    m, size = MACHINES[machine], 2 if dtype == "bf16" else 4
    one = baselines.product(m, dtype, batch, n, s + (2 * k + 1 if k >= 0 else 0), n * s * size)
    z = batch * n * size
    speed = baselines.l2_bandwidth(m) if z <= 0.7 * m.l2_mib * 2**20 else m.hbm
    return Times(_seconds(machine, dtype, batch, launches, kernel), len(launches), one + z / speed + LAUNCH)


@functools.cache
def _topk_seconds(machine: str, dtype: str, programs: int, tiles: int, constants: tuple[tuple[str, Any], ...]) -> float:
    from sigkernels.backends.triton.kernels.topk import topk_kernel

    known = dict(constants)
    warps = known.pop("num_warps")
    code, registers, shared = compiled(topk_kernel, dtype, warps, **known)
    rounds = insertions(tiles, known["BM"], known["BN"])
    spec: dict[str, Any] = {
        "loops": [{"at": r"for tile in range", "trips": "tiles_", "name": "tile"}, {"at": r"while more", "trips": "rounds"}],
        "branches": [{"at": r"if last >= labels", "take": True}, {"at": r"for tile|while more", "take": False}],
        "unused_ok": True,
    }  # fmt: skip
    few = min(tiles, 8)
    made = report.predict(
        code, spec, MACHINES[machine], warps=warps, tiles=programs, registers=registers, shared=shared, tiles_=few,
        rounds=max(round(rounds / tiles), 1),
    )  # fmt: skip
    return float(made.seconds) * tiles / few + LAUNCH


@functools.cache
def insertions(tiles: int, rows: int, labels: int) -> float:
    """How often a program goes around its inner loop, for random logits: until no row takes anything from a tile."""
    rng = np.random.default_rng(0)
    best, rounds = np.full((rows, TOP), -np.inf), 0.0
    for _ in range(tiles):
        made = rng.standard_normal((rows, labels))
        taken = (made > best.min(1, keepdims=True)).sum(1).clip(max=TOP)
        best = np.sort(np.concatenate((best, made), 1), 1)[:, -TOP:]
        rounds += taken.max() + 1
    return rounds


# -- logits ---------------------------------------------------------------------------------------------------------------


def logits(machine: str, dtype: str, n: int, k: int, s: int, batch: int) -> Times:
    """The logits themselves. The others: one product with the DFT as a matrix. Both read the weight from memory and write the
    logits there; the DFT is in L2, and so is the matrix that ours lays together."""
    from sigkernels.backends import library_scans

    problem = _problem(dtype, n, k, s, batch)
    m, size = MACHINES[machine], 2 if dtype == "bf16" else 4
    launches = _counted(machine, lambda: library_scans.logits(problem.x, problem.layer))
    ours = n * s * size / m.hbm
    for launch in launches:
        if isinstance(launch, Product):
            written = launch.rows * launch.columns * size
            ours += baselines.product(m, dtype, launch.rows, launch.columns, launch.inner, written)
        else:
            ours += _seconds(machine, dtype, batch, [launch], lambda launch: math.nan)
    one = baselines.product(m, dtype, batch, n, s + (2 * k + 1 if k >= 0 else 0), n * s * size + batch * n * size)
    return Times(ours, len(launches), one)


OPERATIONS: dict[str, Callable[..., Times]] = {
    "SigmoidF1": column_loss, f"top {TOP}, without the last choice": topk, "logits": logits,
}  # fmt: skip
CASES = [(8_921, 80, 50, 64), (8_921, 80, 50, 256), (100_000, 50, 64, 256), (8_921, 80, 500, 1024)]
