"""Where the fused pass stands between the machine's arithmetic and its memory.

    python bench/roofline.py [--plot roofline.png]

Prints torch's own matrix-product rate and the copy bandwidth, the rate of each case with its share of the attainable, and how
the time of a step grows with n, k, s and B (exponents of a least-squares fit on logarithms).
"""

from __future__ import annotations

import argparse
import math

import torch
from bench_fused_loss import CASES
from peers import Case, Problem, interleaved

BASE = Case(20_000, 50, 64, 64)
SWEEPS = {
    "n": [BASE._replace(n=n) for n in (5_000, 10_000, 20_000, 40_000, 80_000)],
    "k": [BASE._replace(k=k) for k in (10, 20, 40, 80, 160)],
    "s": [BASE._replace(s=s) for s in (16, 32, 64, 128, 256)],
    "rows": [BASE._replace(rows=rows) for rows in (16, 32, 64, 128, 256)],
}


def peaks() -> tuple[float, float]:
    """(floating point operations, bytes) per second: a large sgemm, a large copy."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source = torch.randn(2**24)
    target = torch.empty_like(source)
    times = interleaved({"sgemm": lambda: a @ b, "copy": lambda: target.copy_(source)}, seconds=2.0)
    return 2 * 1024**3 / times["sgemm"], 2 * source.nbytes / times["copy"]


def traffic(case: Case) -> int:
    """Bytes that must move: the weight is read, its gradient is written."""
    return 8 * case.n * case.s


def exponent(name: str) -> tuple[float, list[tuple[int, float]]]:
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
    points = []
    for case in CASES:
        problem = Problem(case)
        seconds = interleaved({"us": problem.who("sigkernels")}, 1.0)["us"]
        intensity, rate = problem.flops / traffic(case), problem.flops / seconds
        attainable = min(flops, intensity * bandwidth)
        points.append((intensity, rate, str(case)))
        print(f"{case!s:32} {seconds * 1e3:9.2f} ms {rate / 1e9:6.0f} GFLOP/s {rate / attainable:6.0%} of attainable")
    for name in SWEEPS:
        power, measured = exponent(name)
        times = "  ".join(f"{a}: {t * 1e3:.2f} ms" for a, t in measured)
        print(f"time ~ {name}^{power:.2f}   {times}")
    if args.plot:
        plot(args.plot, flops, bandwidth, points)


def plot(path: str, flops: float, bandwidth: float, points: list[tuple[float, float, str]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    grid = [2.0**e for e in range(0, 9)]
    axes.loglog(grid, [min(flops, g * bandwidth) / 1e9 for g in grid], "k-", label="attainable")
    for intensity, rate, name in points:
        axes.loglog(intensity, rate / 1e9, "o", label=name)
    axes.set(xlabel="floating point operations per byte", ylabel="GFLOP/s", title="fused loss, forward + backward")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
