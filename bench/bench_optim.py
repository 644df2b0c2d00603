"""A training step of the label weights: the loss with a fused optimizer beside the loss and torch's own.

    pytest bench/bench_optim.py
    python bench/bench_optim.py               # the same as two tables
    python bench/bench_optim.py amazon        # the second alone: 2,812,281 x 768 bfloat16, FusedSGD, B = 64

The Amazon-3M shape is measured in two processes, ours and a loop over label chunks in plain torch (``ChunkedSGD``), which
has no gradient array either: each needs the weights once, 4.3 GB.
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
from peers import ACTIVE, CLOCK, OURS, QUICK, ChunkedSGD, Step, median_interval, race, samples

import sigkernels as sk
from sigkernels.memory import CLEAR_REFS, RESET_PEAK, STATUS, peak_bytes

pytestmark = pytest.mark.benchmark(timer=CLOCK)

ROWS = 64
N, S = (20_000, 64) if QUICK else (1_000_000, 64)
AMAZON = (5_000, 768) if QUICK else (2_812_281, 768)
CHUNKS = "torch, label chunks"
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "SGD": (lambda head: sk.optim.FusedSGD(head, 1e-2), lambda p: torch.optim.SGD(p, 1e-2, fused=True)),
    "AdamW": (lambda head: sk.optim.FusedAdamW(head), lambda p: torch.optim.AdamW(p, fused=True)),
}


def batch(n: int, s: int, dtype: torch.dtype) -> tuple[torch.Tensor, sk.LabelSets]:
    torch.manual_seed(0)
    sets = sk.LabelSets.from_lists([set(row) for row in torch.randint(0, n, (ROWS, ACTIVE)).tolist()], n)
    return torch.randn(ROWS, s).to(dtype).requires_grad_(), sets


def steps(kind: str) -> dict[str, Step]:
    fused, plain = OPTIMIZERS[kind]
    x, sets = batch(N, S, torch.float32)
    ours, theirs = (sk.LinearHead(S, N, bias=False) for _ in range(2))
    opt, other = fused(ours), plain(theirs.parameters())

    def with_update() -> None:
        ours.loss(x, sets, update=opt).backward()
        opt.step()
        x.grad = None

    def with_gradient() -> None:
        theirs.loss(x, sets).backward()
        other.step()
        other.zero_grad()
        x.grad = None

    return {OURS: with_update, f"our loss + torch.optim.{kind}(fused=True)": with_gradient}


NAMES = {kind: (OURS, f"our loss + torch.optim.{kind}(fused=True)") for kind in OPTIMIZERS}


@pytest.mark.parametrize("kind,who", [(kind, who) for kind, names in NAMES.items() for who in names])
def test_optim(benchmark: Any, kind: str, who: str) -> None:
    benchmark.extra_info.update(n=N, rows=ROWS)
    race(benchmark, f"loss and {kind} step, n={N} s={S} B={ROWS}", who, lambda: steps(kind), seconds=6.0)


# -- the shape of Amazon-3M ----------------------------------------------------------------------------------------


def amazon(who: str, rounds: int = 3) -> dict[str, float]:
    """Seconds of a step (the least of a few) and the peak of the resident memory, in this process."""
    n, s = AMAZON
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text(RESET_PEAK)
    x, sets = batch(n, s, torch.bfloat16)
    head = sk.LinearHead(s, n, bias=False, dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for part in head.weight.split(65536):
            part.uniform_(-0.03, 0.03)
    opt = sk.optim.FusedSGD(head, 1e-2)
    loop = ChunkedSGD(head.weight.detach(), 1e-2)

    def ours() -> None:
        head.loss(x, sets, update=opt).backward()
        opt.step()

    def theirs() -> None:
        loop.step(x.detach().float(), sets)

    step, taken = ours if who == OURS else theirs, []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    peak = next((line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")), "VmHWM: 0")
    return {"seconds": min(taken), "peak_bytes": int(peak.split()[1]) * 1024, "weight_bytes": n * s * 2}


def in_fresh_process(who: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, who], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("who", (OURS, CHUNKS))
def test_amazon(benchmark: Any, who: str) -> None:
    measured = in_fresh_process(who)
    benchmark.group = f"bfloat16 FusedSGD step, n={AMAZON[0]} s={AMAZON[1]} B={ROWS}"
    benchmark.extra_info.update(who=who, n=AMAZON[0], rows=ROWS, peak_bytes=measured["peak_bytes"])
    benchmark.pedantic(CLOCK.replay([measured["seconds"]]), rounds=1)


# -- tables for the documents ---------------------------------------------------------------------------------------


def race_table(seconds: float = 30.0) -> None:
    print(f"One step of loss and optimizer, n = {N:,}, s = {S}, B = {ROWS}, float32: medians, interleaved.\n")
    print(
        "| optimizer | ours, ms | adds, MiB | our loss + torch's fused one, ms | adds, MiB | ours / theirs | 95 % interval |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in OPTIMIZERS:
        functions = steps(kind)
        memory = [(peak_bytes(function) or 0) / 2**20 for function in functions.values()]
        ours, theirs = samples(functions, 0.3 if QUICK else seconds).values()
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        low, high = median_interval(ratios)
        cells = [f"{statistics.median(taken) * 1e3:.1f} | {added:.0f}" for taken, added in zip((ours, theirs), memory, strict=True)]  # fmt: skip
        print(
            f"| {kind} | {' | '.join(cells)} | {statistics.median(ratios):.2f} | {low:.2f} … {high:.2f} |", flush=True
        )


def amazon_table() -> None:
    print(
        f"n = {AMAZON[0]:,}, {AMAZON[1]} columns, bfloat16, B = {ROWS}: the least of three steps, and the whole process.\n"
    )
    print("| | s per step | peak RSS, GB | weights, GB | beyond, GB |")
    print("|---|---|---|---|---|")
    for name in (OURS, CHUNKS):
        found = in_fresh_process(name)
        sizes = (found["peak_bytes"], found["weight_bytes"], found["peak_bytes"] - found["weight_bytes"])
        cells = " | ".join(f"{size / 1e9:.2f}" for size in sizes)
        print(f"| {name} | {found['seconds']:.2f} | {cells} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] != "amazon":
        print(json.dumps(amazon(sys.argv[1])))
    else:
        if len(sys.argv) == 1:
            race_table()
            print()
        amazon_table()
