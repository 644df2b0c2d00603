"""What share of one core's multipliers a step keeps busy, and what bfloat16 takes of the time of float32.

    python bench/share_of_peak.py --peak 287                            # AVX-512: 2 * 16 * 2 * 4.5 GHz
    SIGKERNELS_ISA=avx2 python bench/share_of_peak.py --peak 143.5

One thread, lowest processor time of interleaved runs. Only the three products over the slack columns count as work.
"""

from __future__ import annotations

import argparse
import time

import torch
from bench_fused_loss import CASES, LINEAR
from peers import OURS, Problem, Step

from sigkernels.backends import cpu

ROUNDS = 6


def lowest(steps: list[Step], seconds: float) -> list[float]:
    """The lowest processor time of each step, in ``ROUNDS`` turns of so many seconds."""
    best = [float("inf")] * len(steps)
    for _ in range(ROUNDS):
        for i, step in enumerate(steps):
            step()
            end = time.perf_counter() + seconds / ROUNDS
            while time.perf_counter() < end:
                start = time.thread_time()
                step()
                best[i] = min(best[i], time.thread_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", type=float, required=True, help="GFLOP/s of one core's multiply-adds in float32")
    parser.add_argument("--seconds", type=float, default=0.6, help="for each case and type")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(cpu.isa())
    for case in (case for case in CASES + LINEAR if case.n < 1_000_000):
        steps = [Problem(case, dtype).who(OURS) for dtype in (torch.float32, torch.bfloat16)]
        single, half = lowest(steps, args.seconds)
        rate = 6 * case.rows * case.n * case.s / single / 1e9
        print(
            f"{case!s:28} {single * 1e3:7.3f} ms {rate:5.0f} GFLOP/s  {rate / args.peak:4.0%} of the peak   "
            f"bfloat16 {half / single:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
