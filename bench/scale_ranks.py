"""A sharded head on 1, 2, … ranks of this machine (gloo): time of a step, and the bytes that a rank sends for it.

    python bench/scale_ranks.py [--labels 100000] [--slack 64] [--batch 64] [--ranks 1 2]

The least that a rank can send for an elementwise loss is one all-reduce of grad_x ``[B, D]``: 2·(r-1)/r·B·D numbers on a
ring of r ranks, 2·B·D for many. "sent" is what our collectives come to by the same formula (an all-gather: r-1 times
its input); "loopback" what the kernel counted on the interface, of all ranks and everybody else on this machine.
Processor time, not wall time, is per rank: ranks that share cores wait for each other.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import sigkernels as sk

STEPS = 10


def loopback() -> int:
    """Bytes that were sent over the loopback interface since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    return 0


class Traffic:
    """Counts what this rank sends: stands in for the two collectives that sharded heads use."""

    def __init__(self) -> None:
        self.sent, self.calls = 0.0, 0
        self._reduce, self._gather = dist.all_reduce, dist.all_gather
        dist.all_reduce, dist.all_gather = self.all_reduce, self.all_gather

    def all_reduce(self, tensor: Tensor, *args: object, **kwargs: object) -> object:
        ranks = dist.get_world_size()
        self.sent, self.calls = self.sent + 2 * (ranks - 1) / ranks * tensor.nbytes, self.calls + 1
        return self._reduce(tensor, *args, **kwargs)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, *args: object, **kwargs: object) -> object:
        self.sent, self.calls = self.sent + (len(parts) - 1) * tensor.nbytes, self.calls + 1
        return self._gather(parts, tensor, *args, **kwargs)


def worker(rank: int, ranks: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timeout)
    torch.manual_seed(0)
    features = 2 * args.k + 1 + args.slack
    head = sk.DFTHead(features, args.labels, args.k, args.slack, process_group=dist.group.WORLD)
    h = torch.randn(args.batch, features, requires_grad=True)
    labels = torch.randint(args.labels, (args.batch, 5)).tolist()
    sets = sk.LabelSets.from_lists([sorted(set(row)) for row in labels], args.labels)
    losses = {"BCE": sk.BCE(), "SigmoidF1 pooled": sk.SigmoidF1(average="pooled"), "LMLNLL": sk.LMLNLL(5)}
    losses |= {"TruncatedTopKEntropy": sk.TruncatedTopKEntropy(5), "SmoothTopKSVM": sk.SmoothTopKSVM(5)}
    traffic = Traffic()
    least = 2 * (ranks - 1) / ranks * args.batch * features * 4
    for name, loss in losses.items():
        head.loss(h, sets, loss).backward()
        dist.barrier()
        traffic.sent, traffic.calls, before = 0.0, 0, loopback()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            head.loss(h, sets, loss).backward()
        wall, cpu = ((now - then) / STEPS for now, then in ((time.perf_counter(), wall), (time.process_time(), cpu)))
        dist.barrier()
        if rank == 0:
            sent, calls, all_ranks = traffic.sent / STEPS, traffic.calls / STEPS, (loopback() - before) / STEPS
            factor = f"{sent / least:.2f}" if least else "-"
            print(
                f"| {name} | {ranks} | {wall * 1e3:.1f} | {cpu * 1e3:.1f} | {calls:.0f} | {sent:,.0f} | {least:,.0f} | "
                f"{factor} | {all_ranks:,.0f} |",
                flush=True,
            )
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--slack", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    print(f"n = {args.labels}, D = {2 * args.k + 1 + args.slack}, B = {args.batch}, float32, one thread per rank")
    print("| loss | ranks | ms | processor ms per rank | collectives | sent bytes | least bytes | factor | loopback |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(worker, (ranks, folder, args), nprocs=ranks)


if __name__ == "__main__":
    main()
