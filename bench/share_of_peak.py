"""What share of one core's multipliers a step keeps busy, and what bfloat16 takes of the time of float32.

    python bench/share_of_peak.py
    SIGKERNELS_ISA=avx2 python bench/share_of_peak.py

One thread, lowest time of interleaved runs. Only the three products over the slack columns count as work. The
peak is measured between them, with the vectors that the pass uses: a loop of nothing but multiply-adds, which needs gcc
and takes as long as a step, so that both find the same quiet moments.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_fused_loss import CASES, LINEAR
from peers import OURS, Problem, Step

from sigkernels.backends import cpu

ROUNDS = 6
SECONDS = 1.5  # for each case and type
CHAINS = 12  # more multiply-adds than wait for each other, and fewer than there are registers
REGISTERS = {"avx512": ("zmm", 16), "avx2": ("ymm", 8)}  # the vectors of the pass, and how many floats they hold


def multiply_adds() -> tuple[Callable[[int], None], int]:
    """So many loops of multiply-adds with the vectors of the pass, and how many floating point operations one loop is."""
    register, lanes = REGISTERS[cpu.isa()]
    zeros = " ".join(f"vxorps %%xmm{i},%%xmm{i},%%xmm{i};" for i in range(CHAINS + 1))
    adds = " ".join(f"vfmadd231ps %%{register}0,%%{register}0,%%{register}{i + 1};" for i in range(CHAINS))
    changed = ", ".join(f'"xmm{i}"' for i in range(CHAINS + 1))
    code = f'__asm__ volatile("{zeros} 1: {adds} dec %0; jnz 1b" : "+r"(loops) : : {changed}, "cc");'
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.c"), Path(folder, "peak.so")
        source.write_text(f"void multiply_adds(long loops) {{ {code} }}")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        loop = ctypes.CDLL(str(library)).multiply_adds
    loop.argtypes, loop.restype = (ctypes.c_long,), None
    return loop, 2 * lanes * CHAINS


def lowest(steps: list[Step]) -> list[float]:
    """The lowest time of each step, in ``ROUNDS`` turns. By the wall clock: the processor time of a thread on a virtual
    machine is now and then less than it can have been."""
    best = [float("inf")] * len(steps)
    for _ in range(ROUNDS):
        for i, step in enumerate(steps):
            step()
            end = time.perf_counter() + SECONDS / ROUNDS
            while (start := time.perf_counter()) < end:
                step()
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def seconds_of(step: Step) -> float:
    step()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    multiply, operations = multiply_adds()
    one_loop = seconds_of(lambda: multiply(100_000)) / 100_000
    print(cpu.isa())
    for case in (case for case in CASES + LINEAR if case.n < 1_000_000):
        steps = [Problem(case, dtype).who(OURS) for dtype in (torch.float32, torch.bfloat16)]
        loops = round(seconds_of(steps[0]) / one_loop)
        single, half, alone = lowest([*steps, functools.partial(multiply, loops)])
        rate, highest = 6 * case.rows * case.n * case.s / single / 1e9, loops * operations / alone / 1e9
        print(
            f"{case!s:28} {single * 1e3:7.3f} ms {rate:5.0f} GFLOP/s  {rate / highest:4.0%} of {highest:.0f}   "
            f"bfloat16 {half / single:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
