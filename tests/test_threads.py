"""Several threads at once: every verb gives the bits that it gives alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from cases import random_sets

import sigkernels as sk

THREADS, ROUNDS = 4, 2


def tasks(head, h, sets):
    """Every verb as a function of nothing that gives tensors and arrays."""

    def step():
        value = head.loss(h, sets, unknown=sets)
        grads = torch.autograd.grad(head.loss(h, sets), [p for p in head.parameters() if p.requires_grad])
        return [value.detach(), *grads]

    def proofs():
        report = sk.verify(head.weight_matrix()[:12, :4], [[0], [1, 2], [3]])
        return [
            torch.from_numpy(np.array([str(v) == "ARGMAXABLE" for v in report.verdicts])),
            torch.from_numpy(report.radius_lo),
        ]

    def predicted():
        found = head.predict(h, torch.linspace(0.01, 0.3, head.num_labels))
        return [found.indices, found.offsets]

    return [
        step,
        lambda: [head.loss(h, sets, sk.SigmoidF1()).detach()],
        predicted,
        lambda: [t.detach() for t in head.topk(h, 5)],
        lambda: [sk.functional.lml(head(h).detach(), 3)],
        proofs,
    ]


def test_threads_give_the_bits_of_one():
    torch.manual_seed(0)
    work = []
    for head in (sk.DFTHead(40, 211, k=3, slack=8, codes=16, bias=True), sk.LinearHead(40, 90)):
        work += tasks(head, torch.randn(9, 40), random_sets(9, head.num_labels, most=2))
    alone = [task() for task in work]
    started = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        torch.manual_seed(thread)
        started.wait()
        for round_ in range(ROUNDS):
            order = list(range(len(work)))
            order = order[thread + round_ :] + order[: thread + round_]  # not all at the same task
            for at in order:
                for got, want in zip(work[at](), alone[at], strict=True):
                    assert torch.equal(got, want), f"task {at} of thread {thread}"

    # What is worked out once per shape is worked out by several threads at a time.
    for cache in (sk.backends.cpu._shapes, sk.backends.cpu._plans, sk.backends.library_tables._tables):
        cache.clear()
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, thread) for thread in range(THREADS)]:
            done.result()
