"""Every pair of n documents under top-2 retrieval: closed forms, and learned embeddings with a proof for each pair.

    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python bench/bench_verify_all.py --d 15 30 --radius

One thread, seconds of processor time. Embeddings of documents are learned by Adam from a fixed seed so that the query
``w_i + w_j`` gives the pair (i, j) the highest probabilities (sigmoid, binary cross-entropy on normalised rows); the
verifier then finds the best query for each pair by itself, or proves that there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from sigkernels import DFTHead  # noqa: E402
from sigkernels.verify import verify_all  # noqa: E402

OUT = Path(__file__).parent / "out"


def learn(n: int, d: int, steps: int, batch: int = 2048, seed: int = 0) -> np.ndarray:
    """Unit embeddings of n documents [n, d] for which sums of two retrieve these two."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.randn(n, d))
    scale, offset = torch.nn.Parameter(torch.tensor(10.0)), torch.nn.Parameter(torch.tensor(-5.0))
    pairs = torch.combinations(torch.arange(n), 2)
    optimizer = torch.optim.Adam([weight, scale, offset], lr=0.02)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 - step / steps)
        chosen = pairs[torch.randint(len(pairs), (batch,))]
        rows = torch.nn.functional.normalize(weight, dim=1)
        query = torch.nn.functional.normalize(rows[chosen].sum(1), dim=1)
        logits = scale * query @ rows.T + offset
        target = torch.zeros(batch, n).scatter_(1, chosen, 1.0)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, target, pos_weight=torch.tensor(n / 4.0), reduction="mean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.nn.functional.normalize(weight, dim=1).detach().numpy()


def circle(n: int) -> np.ndarray:
    """Waves of one and two periods around n documents [n, 4]: every pair of neighbours or not comes first somewhere."""
    angle = 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)], axis=1)


def measure(name: str, classifier, **options) -> dict:
    """Decide all pairs and prove them again."""
    began = time.process_time()
    report = verify_all(classifier, 2, rule="topk", exactly=True, **options)
    seconds = time.process_time() - began
    began = time.process_time()
    proved = bool(report.check())
    row = {"case": name, "pairs": len(report), "proofs": report.proofs, "seconds": seconds, **options}
    row |= {"check": time.process_time() - began, "proved": proved, "radius at least": report.radius_lo}
    if options.get("radius"):
        lo, hi = report.sets.radius_lo, report.sets.radius_hi
        yes = np.array([v in ("ARGMAXABLE", "THIN") for v in report.sets.verdicts])
        row["radius quantiles 0, .01, .5, 1"] = np.quantile(lo[yes], [0, 0.01, 0.5, 1]).tolist() if yes.any() else None
        row["widest relative gap"] = float(np.max((hi[yes] - lo[yes]) / hi[yes], initial=0.0))
    row |= {k: v for k, v in report.counts().items() if v}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Closed forms at two sizes, four waves, then learned embeddings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=240, help="documents")
    parser.add_argument("--d", type=int, nargs="*", default=[4, 6, 8, 10, 15, 30], help="widths of learned embeddings")
    parser.add_argument("--steps", type=int, default=1500, help="of Adam")
    parser.add_argument(
        "--radius", action="store_true", help="close the interval of every radius of learned embeddings"
    )
    args = parser.parse_args()
    rows = [measure(f"DFT k=2, n={n}", DFTHead(5, n, 2)) for n in (args.n, 46)]
    rows.append(measure(f"the same columns but the constant one, as a plain matrix, n={args.n}, d=4", circle(args.n)))
    for d in args.d:
        rows.append(measure(f"learned, n={args.n}, d={d}", learn(args.n, d, args.steps), radius=args.radius))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "verify_all.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
