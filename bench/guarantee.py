"""The guarantee of the codes, tried: random sets of every size that it covers, on fresh and on trained heads.

    python bench/guarantee.py                # 12,000 sets for each of c = 16, 64, 256, 1024; two minutes
    python bench/guarantee.py --codes 256    # for one of them

For every set the witness of the closed form is put into the whole layer, slack, bias and DFT included, and the distance
to the nearest boundary is computed in float64: it must not be below what ``head.guarantee(r)`` promises. Where a trained
biases lie too far apart for the box, nothing is promised for the largest sets, and they are not counted.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

import sigkernels as sk
from sigkernels.codes import code_logits, code_witness, guarantee, guaranteed_size

COLUMNS = {16: 128, 64: 2_048, 256: 11_732, 1024: 20_000}  # codes → labels
IN_FEATURES, STEPS, BATCH, BOX = 64, 100, 64, 1e4
SETS_AT_ONCE = 250


def make_head(codes: int, n: int, trained: bool) -> sk.DFTHead:
    """A head with a bias and a prior; trained: on random inputs and sets for some steps of a large size."""
    torch.manual_seed(codes)
    sets = sk.LabelSets.from_lists([torch.randperm(n)[: 1 + i % 5].tolist() for i in range(BATCH)], n)
    head = sk.DFTHead(2 * codes + IN_FEATURES, n, k=2, slack=8, codes=codes, bias=True, prior=sets)
    if trained:
        h = torch.randn(BATCH, head.in_features)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(STEPS):
            optimizer.zero_grad()
            head(h, sets, reduction="sum").backward()
            optimizer.step()
    return head


def margins(head: sk.DFTHead, sets: list[list[int]]) -> Tensor:
    """The distance from the witness of each set (of one size) to the nearest boundary of its region, float64 ``[sets]``."""
    n, c, bias = head.num_labels, head.codes, head.bias.detach().double()
    active = sk.LabelSets.from_lists(sets, n)
    constant, features = code_witness(n, c, active.indices.numpy(), active.offsets.numpy())
    promised = guarantee(len(sets[0]), n, c, max_norm=1.0, bias=(float(bias.min()), float(bias.max())), box=BOX)
    features, constant = promised.scale * features, promised.scale * constant + promised.shift
    assert max(abs(constant), np.abs(features).max()) <= BOX * (1 + 1e-12)
    z = code_logits(torch.from_numpy(features), 0, n) + constant / np.sqrt(n) + bias
    signs = 2 * active.to_dense(torch.float64) - 1
    return (signs * z / head.weight_matrix().norm(dim=1)).amin(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=12_000, help="for each number of code columns and each head")
    parser.add_argument("--codes", type=int, nargs="+", choices=COLUMNS, default=list(COLUMNS))
    args = parser.parse_args()
    print(
        f"{'codes':>6} {'labels':>7} {'head':>8} {'sizes':>7} {'sets':>7} {'below':>6} {'least found / promised':>23}"
    )
    for codes in args.codes:
        n = COLUMNS[codes]
        largest = guaranteed_size(codes, n)
        for trained in (False, True):
            head, random = make_head(codes, n, trained), np.random.default_rng(codes)
            tried = below = wide = 0
            closest = np.inf
            per_size = -(-args.sets // largest)
            for size in range(1, largest + 1):
                promised = head.guarantee(size, BOX).radius
                if not promised:
                    continue
                wide = size
                for first in range(0, per_size, SETS_AT_ONCE):
                    count = min(SETS_AT_ONCE, per_size - first)
                    sets = [random.choice(n, size, replace=False).tolist() for _ in range(count)]
                    found = margins(head, sets)
                    tried += count
                    below += int((found < promised * (1 - 1e-12)).sum())
                    closest = min(closest, float(found.min()) / promised)
            name = "trained" if trained else "fresh"
            print(f"{codes:>6} {n:>7} {name:>8} {f'1…{wide}':>7} {tried:>7} {below:>6} {closest:>23.4f}", flush=True)


if __name__ == "__main__":
    main()
