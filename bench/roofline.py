"""Where the fused pass stands between the machine's arithmetic and its memory.

    python bench/roofline.py [--plot roofline.png]

Prints torch's own matrix-product rate and the copy bandwidth, the rate of each case with its share of the attainable,
and how the time of a step grows with n, k, s and B (exponents of a least-squares fit on logarithms). The same goes
into the report of ``sigkernels bench`` by ``bench_roofline.py``.
"""

from __future__ import annotations

import argparse
import functools
import math

import torch
from peers import DFT_CASES, Case, Problem, Step, interleaved

CASES = DFT_CASES[1:]  # 16 rows tell of the fixed cost of a step, not of the kernel
BASE = Case(20_000, 50, 64, 64)
SWEEPS = {
    "n": [BASE._replace(n=n) for n in (5_000, 10_000, 20_000, 40_000, 80_000)],
    "k": [BASE._replace(k=k) for k in (10, 20, 40, 80, 160)],
    "s": [BASE._replace(s=s) for s in (16, 32, 64, 128, 256)],
    "rows": [BASE._replace(rows=rows) for rows in (16, 32, 64, 128, 256)],
}


def peak_steps() -> tuple[dict[str, Step], dict[str, int]]:
    """A large sgemm and a large copy, and the floating point operations and bytes that each takes."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source = torch.randn(2**24)
    target = torch.empty_like(source)
    steps: dict[str, Step] = {"torch sgemm": lambda: a @ b, "copy": lambda: target.copy_(source)}
    return steps, {"torch sgemm": 2 * 1024**3, "copy": 2 * source.nbytes}


@functools.cache
def peaks() -> tuple[float, float]:
    """(floating point operations, bytes) per second."""
    steps, work = peak_steps()
    times = interleaved(steps, seconds=2.0)
    return work["torch sgemm"] / times["torch sgemm"], work["copy"] / times["copy"]


def traffic(case: Case) -> int:
    """Bytes that must move: the weight is read, its gradient is written."""
    return 8 * case.n * case.s


def attainable(case: Case) -> float:
    """Floating point operations per second that the machine allows for this case."""
    flops, bandwidth = peaks()
    return min(flops, 6 * case.rows * case.n * case.s / traffic(case) * bandwidth)


def exponent(name: str) -> tuple[float, list[tuple[int, float]]]:
    """The power of the named size that the time of a step goes with, and the times."""
    points = [
        (getattr(case, name), interleaved({"us": Problem(case).who("sigkernels")}, 0.5)["us"]) for case in SWEEPS[name]
    ]
    logs = torch.tensor([[math.log(a), math.log(t)] for a, t in points], dtype=torch.float64)
    x, y = (logs - logs.mean(0)).T
    return float((x @ y) / (x @ x)), points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="write a roofline picture")
    args = parser.parse_args()
    flops, bandwidth = peaks()
    print(f"torch sgemm {flops / 1e9:.0f} GFLOP/s, copy {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    records = [_record("torch sgemm", 0.0, {"GFLOP/s": flops / 1e9}), _record("copy", 0.0, {"GB/s": bandwidth / 1e9})]
    for case in CASES:
        problem = Problem(case)
        seconds = interleaved({"us": problem.who("sigkernels")}, 1.0)["us"]
        rate = problem.flops / seconds
        share = rate / attainable(case)
        more = {"flop_per_byte": problem.flops / traffic(case), "GFLOP/s": rate / 1e9, "of attainable": share}
        records.append(_record("sigkernels", seconds, more, f"roofline, {case}"))
        print(f"{case!s:32} {seconds * 1e3:9.2f} ms {rate / 1e9:6.0f} GFLOP/s {share:6.0%} of attainable")
    for name in SWEEPS:
        power, measured = exponent(name)
        times = "  ".join(f"{a}: {t * 1e3:.2f} ms" for a, t in measured)
        print(f"time ~ {name}^{power:.2f}   {times}")
    if args.plot:
        import plots

        plots.roofline(records).savefig(args.plot, dpi=130)


def _record(who: str, seconds: float, more: dict[str, float], group: str = "peaks"):
    from report import Record

    return Record(suite="roofline", group=group, who=who, seconds=seconds, spread=0.0, more=more)


if __name__ == "__main__":
    main()
