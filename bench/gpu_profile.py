"""Profiles training steps on a GPU: which kernels ran, how long, and what the host did meanwhile.

    python bench/gpu_profile.py --output bench/out/gpu

For each of a few shapes a table and a trace for chrome://tracing, of the path that ``auto`` takes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peers import OURS, Case, Problem
from torch.profiler import ProfilerActivity, profile

CASES = [Case(8921, 80, 50, 64), Case(20_000, 50, 100, 256), Case(100_000, 50, 64, 256), Case(131_072, -1, 768, 1024)]
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("bench/out/gpu"))
    folder: Path = parser.parse_args().output
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu_profile.py: torch sees no GPU")
    folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for case in CASES:
        step = Problem(case, torch.bfloat16, "cuda").who(OURS)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
        name = f"{case.n}-{case.k}-{case.s}-{case.rows}"
        profiled.export_chrome_trace(str(folder / f"trace-{name}.json"))
        table = profiled.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60)
        tables.append(f"{STEPS} steps, bfloat16, {case}\n{table}")
    text = "\n\n".join(tables)
    (folder / "profile.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
