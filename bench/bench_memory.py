"""Peak memory of one training step with each loss, ours and eager torch with the same formula on materialised logits.

    pytest bench/bench_memory.py
    python bench/bench_memory.py            # the same as a table

Every entry has a process of its own, so that nothing is inherited: no cache, no thread pool, no freed memory that
malloc keeps. What is counted is what a step adds to inputs, targets and weights that are there already: the gradients,
which every step needs (``gradient_bytes``), and everything else that lives at the peak (``beyond_gradient_bytes``).
``first_step_bytes`` is the same for the first step of the process, after one at a tiny size: with the tables and the
workspace that later steps find in place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import peers
import pytest
import torch
from peers import CLOCK, QUICK, Case, Problem, peak_bytes, samples

import sigkernels as sk

pytestmark = pytest.mark.benchmark(timer=CLOCK)

CASE = Case(20_000, 50, 64, 64) if QUICK else Case(100_000, 50, 64, 256)
TINY = Case(500, 3, 4, 8)
LOSSES = peers.LOSSES | {"sigmoidF1, learned β": sk.SigmoidF1(beta=torch.ones(CASE.n, requires_grad=True))}
WHO = ("sigkernels", "eager, frozen DFT")


def entrants(name: str) -> tuple[str, ...]:
    """LML and learned settings: ours alone."""
    return WHO[:1] if name.startswith("LML") or "learned" in name else WHO


def measure(name: str, who: str) -> dict[str, Any]:
    """Runs in a fresh process."""
    problem, loss = Problem(CASE), LOSSES[name]
    learned = getattr(loss, "beta", None)
    _ = problem.dft, problem.dense_targets, problem.slack  # inputs exist before anything is measured
    run = problem.who(who, loss)

    def step() -> None:
        run()
        if isinstance(learned, torch.Tensor):
            learned.grad = None

    first = peak_bytes(step, repeats=1, warm_up=Problem(TINY).who(who))
    peak = peak_bytes(step)
    gradients = sum(t.nbytes for t in (problem.x, problem.weight, learned) if isinstance(t, torch.Tensor))
    seconds = samples({who: step}, 0.5, 3)[who]
    return {"peak_bytes": peak, "first_step_bytes": first, "gradient_bytes": gradients, "seconds": seconds}


def in_fresh_process(name: str, who: str) -> dict[str, Any]:
    same = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, __file__, name, who], stdout=subprocess.PIPE, text=True, check=True, env=same
    )
    measured = json.loads(done.stdout)
    if measured["peak_bytes"] is not None:
        measured["beyond_gradient_bytes"] = max(measured["peak_bytes"] - measured["gradient_bytes"], 0)
    return measured


@pytest.mark.parametrize(("name", "who"), [(name, who) for name in LOSSES for who in entrants(name)])
def test_memory(benchmark, name, who):
    measured = in_fresh_process(name, who)
    seconds = measured.pop("seconds")
    benchmark.group = f"memory of a step, {name}, {CASE}"
    benchmark.extra_info.update(who=who, n=CASE.n, rows=CASE.rows, **measured)
    benchmark.pedantic(CLOCK.replay(seconds), rounds=len(seconds))


def main(arguments: list[str]) -> None:
    if arguments:
        print(json.dumps(measure(*arguments)))
        return
    print(f"{CASE}: MiB at the peak of a step")
    for name in LOSSES:
        for who in entrants(name):
            measured = in_fresh_process(name, who)
            if measured["peak_bytes"] is None:
                raise SystemExit("peak memory is read from /proc of Linux, which is not here")
            keys = ("peak_bytes", "gradient_bytes", "beyond_gradient_bytes", "first_step_bytes")
            parts = (measured[key] / 2**20 for key in keys)
            text = "{:24} {:20} {:8.1f} = {:6.1f} gradients + {:6.1f}   (first step {:8.1f})"
            print(text.format(name, who, *parts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
