"""Labels per second, rows per second and memory of a training step from ten thousand to ten million labels.

    pytest bench/bench_scale.py
    python bench/bench_scale.py               # the same as a table, every entry in a process of its own

One machine: ours with FusedSGD, a loop over label chunks in plain torch (``ChunkedSGD``), both in float32 and bfloat16,
and eager torch with its own SGD, which makes ``[B, n]`` arrays and a gradient.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peers import ACTIVE, CLOCK, OURS, QUICK, ChunkedSGD, Step

import sigkernels as sk
from sigkernels.memory import peak_bytes

pytestmark = pytest.mark.benchmark(timer=CLOCK)

# -- one machine ---------------------------------------------------------------------------------------------------

WIDTH, ROWS = 64, 64
LABELS = (10_000,) if QUICK else (10_000, 100_000, 1_000_000, 10_000_000)
EAGER_MOST = 1_000_000  # beyond that its arrays do not fit
CHUNKS, EAGER = "torch, label chunks", "eager torch"
ENTRIES = [(who, dtype) for dtype in ("float32", "bfloat16") for who in (OURS, CHUNKS)] + [(EAGER, "float32")]


def one_machine(who: str, dtype: str, n: int) -> Step:
    """A training step."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    sets = sk.LabelSets.from_lists([set(row) for row in torch.randint(0, n, (ROWS, ACTIVE)).tolist()], n)
    x = torch.randn(ROWS, WIDTH).to(kind).requires_grad_()
    head = sk.LinearHead(WIDTH, n, bias=False, dtype=kind)
    if who == OURS:
        opt: torch.optim.Optimizer = sk.optim.FusedSGD(head, 1e-2)
    else:
        opt = torch.optim.SGD(head.parameters(), 1e-2, fused=True)
    loop, dense = ChunkedSGD(head.weight.detach(), 1e-2), sets.to_dense(kind) if who == EAGER else None

    def ours() -> None:
        head.loss(x, sets, update=opt).backward()  # type: ignore[arg-type]
        opt.step()
        x.grad = None

    def chunks() -> None:
        loop.step(x.detach().float(), sets)

    def eager() -> None:
        assert dense is not None
        F.binary_cross_entropy_with_logits(F.linear(x, head.weight), dense).backward()
        opt.step()
        opt.zero_grad()
        x.grad = None

    return {OURS: ours, CHUNKS: chunks, EAGER: eager}[who]


def measure(who: str, dtype: str, n: int) -> dict[str, Any]:
    step = one_machine(who, dtype, n)
    memory = peak_bytes(step, repeats=1)
    taken: list[float] = []
    stop = time.perf_counter() + (0.2 if QUICK else 3.0)
    while len(taken) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return {"seconds": sorted(taken), "peak_bytes": memory}


def in_fresh_process(who: str, dtype: str, n: int) -> dict[str, Any]:
    command = [sys.executable, __file__, who, dtype, str(n)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def cases() -> list[tuple[str, str, int]]:
    return [(who, dtype, n) for n in LABELS for who, dtype in ENTRIES if who != EAGER or n <= EAGER_MOST]


@pytest.mark.parametrize("who,dtype,n", cases())
def test_scale(benchmark: Any, who: str, dtype: str, n: int) -> None:
    measured = in_fresh_process(who, dtype, n)
    benchmark.group = f"training step by size, n={n} s={WIDTH} B={ROWS}"
    benchmark.extra_info.update(who=f"{who}, {dtype}", n=n, rows=ROWS, peak_bytes=measured["peak_bytes"])
    benchmark.pedantic(CLOCK.replay(measured["seconds"]), rounds=len(measured["seconds"]))


def table() -> None:
    print(
        f"s = {WIDTH}, B = {ROWS}, one step: median time, rates, and the memory that it adds to the weights at its peak.\n"
    )
    print("| labels | | dtype | ms | of ours | million labels/s | rows/s | weights, MiB | adds, MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    ours: dict[tuple[int, str], float] = {}
    for who, dtype, n in cases():
        measured = in_fresh_process(who, dtype, n)
        seconds = statistics.median(measured["seconds"])
        factor = seconds / ours.setdefault((n, dtype), seconds)  # ours is the first of its kind
        weights = n * WIDTH * getattr(torch, dtype).itemsize / 2**20
        cells = [f"{n:,}", who, dtype, f"{seconds * 1e3:.1f}", f"{factor:.1f}", f"{n / seconds / 1e6:.1f}"]
        cells += [f"{ROWS / seconds:.1f}", f"{weights:.0f}", f"{(measured['peak_bytes'] or 0) / 2**20:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
    else:
        table()
