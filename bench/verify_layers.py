"""Classifier matrices and label sets for the verifier's benchmarks: trained, gaussian, and DFT with slack.

A trained layer is a bottlenecked sigmoid layer (``features → d → n labels``) fitted with binary cross-entropy, on the
Debian dependencies (n up to 11,732) or on synthetic topics (any n). Matrices are cached as ``.npz`` files.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

CACHE = Path(__file__).parent / "out" / "layers"


@functools.cache
def debian(path: str | None, num_labels: int):
    """Features and label sets (CSR), restricted to the ``num_labels`` most frequent labels."""
    if path is None:
        import sigkernels.datasets

        path = str(Path(sigkernels.datasets.__file__).parent / "debian_deps.npz")
    data = np.load(path)
    labels, offsets = data["label_indices"].astype(np.int64), data["label_offsets"].astype(np.int64)
    counts = np.bincount(labels, minlength=len(data["label_names"]))
    keep = np.sort(np.argsort(-counts, kind="stable")[:num_labels])
    new_id = np.full(len(counts), -1)
    new_id[keep] = np.arange(len(keep))
    sets = [np.sort(x[x >= 0]) for x in (new_id[labels[a:b]] for a, b in pairwise(offsets))]
    f, fo = data["feature_indices"].astype(np.int64), data["feature_offsets"].astype(np.int64)
    features = [f[a:b] for a, b in pairwise(fo)]
    rows = [i for i, s in enumerate(sets) if len(s)]
    return [features[i] for i in rows], [sets[i] for i in rows], 32_768


@functools.cache
def synthetic(num_labels: int, rows: int = 30_000, topics: int = 400, seed: int = 0):
    """Zipf-distributed labels from a few topics per row; the features are the topics and some noise."""
    rng = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, num_labels + 1)
    pool = rng.choice(num_labels, size=(topics, 200), p=popularity / popularity.sum())
    features, sets = [], []
    for _ in range(rows):
        mine = rng.integers(0, topics, size=rng.integers(1, 4))
        size = 1 + min(rng.geometric(0.2), 40)
        common = pool[rng.choice(mine, size), np.minimum(rng.geometric(0.03, size) - 1, 199)]
        rare = rng.integers(0, num_labels, size=rng.integers(0, 3))
        sets.append(np.unique(np.concatenate([common, rare])))
        features.append(np.concatenate([mine, topics + rng.integers(0, 2000, 4)]))
    return features, sets, topics + 2000


def train(features, sets, vocabulary: int, num_labels: int, d: int, steps: int = 250, batch: int = 256, seed: int = 0):
    """The output matrix W [n, d] (float32) of a small network after ``steps`` of Adam."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    embed = torch.nn.EmbeddingBag(vocabulary, 256, mode="mean")
    body = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(256, d))
    out = torch.nn.Linear(d, num_labels, bias=False)
    torch.nn.init.normal_(out.weight, std=d**-0.5)
    optimiser = torch.optim.Adam([*embed.parameters(), *body.parameters(), *out.parameters()], lr=3e-3)
    for _ in range(steps):
        pick = rng.integers(0, len(sets), batch)
        lengths = np.array([len(features[i]) for i in pick])
        flat = torch.from_numpy(np.concatenate([features[i] for i in pick]))
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]]))
        target = torch.zeros(batch, num_labels)
        rows = np.repeat(np.arange(batch), [len(sets[i]) for i in pick])
        target[torch.from_numpy(rows), torch.from_numpy(np.concatenate([sets[i] for i in pick]))] = 1.0
        logits = out(body(4.0 * embed(flat, starts)))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="sum") / batch
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return out.weight.detach().numpy().copy()


def layer(kind: str, n: int, d: int, data: str | None = None, cache: Path = CACHE, steps: int = 250):
    """W [n, d] of this kind ("trained" or "gaussian") and held-out label sets (a list of index arrays)."""
    file = Path(cache) / f"{kind}-{n}-{d}-{steps}.npz"
    features, sets, vocabulary = debian(data, n) if n <= 11_732 else synthetic(n)
    order = np.random.default_rng(0).permutation(len(sets))
    held_out = [sets[i] for i in order[:3000]]
    if kind == "gaussian":
        return np.random.default_rng(d).standard_normal((n, d)), held_out
    if file.exists():
        return np.load(file)["W"], held_out
    rest = order[3000:]
    W = train([features[i] for i in rest], [sets[i] for i in rest], vocabulary, n, d, steps)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, W=W)
    return W, held_out
