"""A synthetic multi-label task of any size: topic-model labels with a Zipf tail, streamed in blocks.

Labels are dealt to topics; an example has a few topics, and its labels are Zipf draws within them (a few are
drawn from all labels). Every label owns a handful of tokens, and an example shows some tokens of each of its
labels among Zipf noise: it can be learnt, and the tail is as hard as a tail is.

No table of size n is ever held: Zipf draws invert the continuous distribution, and topics, tokens and the
order of the labels are arithmetic. Example ``i`` depends on the seed and on ``i`` alone, however it is reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..labels import LabelSets
from ..validation import check_int, check_number
from .sparse import SparseDataset

BLOCK = 1024  # examples that are drawn from one generator
TOPICS_PER_EXAMPLE = 3
TOKENS_PER_LABEL = 4
OFF_TOPIC = 0.1  # share of the labels that ignore the topics


def synthetic(
    n: int,
    k: int,
    num_examples: int = 10_000,
    num_features: int = 32_768,
    topics: int | None = None,
    mean_active: float | None = None,
    zipf: float = 1.1,
    noise_tokens: int = 6,
    seed: int = 0,
) -> SyntheticStream:
    """A stream of examples with ``n`` labels, at most ``k`` of them active together and at least one.

    Args:
        n, k: number of labels; most labels of one example.
        num_examples: length of the stream.
        num_features: hash buckets of the tokens.
        topics: default √n, at most 1000.
        mean_active: labels of an example on average (before repeats are merged); default ``min(k, 1 + k/8)``.
        zipf: exponent of the label and token frequencies; larger is steeper.
        noise_tokens: tokens of an example that say nothing.
        seed: the whole stream depends on it and on the arguments above.

    Example:
        >>> stream = sk.datasets.synthetic(n=1000, k=8, num_examples=100)
        >>> len(stream), stream.load().labels.max_active <= 8
        (100, True)
    """
    n, k = check_int("n", n, 1), check_int("k", k, 1)
    num_examples, num_features = check_int("num_examples", num_examples, 0), check_int("num_features", num_features, 1)
    noise_tokens, seed = check_int("noise_tokens", noise_tokens, 0), check_int("seed", seed, 0)
    zipf = check_number("zipf", zipf)
    if k > n:
        raise ValueError(f"k must be at most n = {n}, got {k}: no example can have more labels than there are")
    if not zipf > 0:
        raise ValueError(f"zipf must be positive, got {zipf}")
    topics = min(max(math.isqrt(n), 1), 1000) if topics is None else check_int("topics", topics)
    if not 1 <= topics <= n:
        raise ValueError(f"topics must be between 1 and n = {n}, got {topics}")
    mean_active = min(float(k), 1 + k / 8) if mean_active is None else check_number("mean_active", mean_active)
    if not 1 <= mean_active <= k:
        raise ValueError(f"mean_active must be between 1 and k = {k}, got {mean_active}")
    return SyntheticStream(
        n, k, num_examples, num_features, topics, float(mean_active), float(zipf), noise_tokens, seed
    )


@dataclass(frozen=True)
class SyntheticStream:
    """See ``synthetic``. Iterate ``batches(size)``, or ``load()`` it when it fits in memory.

    Example:
        >>> stream = sk.datasets.synthetic(n=1000, k=8, num_examples=100)
        >>> [len(batch) for batch in stream.batches(64)]
        [64, 36]
    """

    n: int
    k: int
    num_examples: int
    num_features: int
    topics: int
    mean_active: float
    zipf: float
    noise_tokens: int
    seed: int

    def __len__(self) -> int:
        return self.num_examples

    def load(self) -> SparseDataset:
        """All examples at once."""
        return self._rows(0, self.num_examples)

    def batches(self, batch_size: int) -> Iterator[SparseDataset]:
        """Consecutive batches; holds one batch and at most one block more."""
        batch_size = check_int("batch_size", batch_size, 1)
        for start in range(0, self.num_examples, batch_size):
            yield self._rows(start, min(start + batch_size, self.num_examples))

    def _rows(self, start: int, stop: int) -> SparseDataset:
        labels: list[np.ndarray] = []
        features: list[np.ndarray] = []
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            drawn_labels, drawn_features = self._block(block)
            first, last = max(start - block * BLOCK, 0), min(stop - block * BLOCK, BLOCK)
            labels += drawn_labels[first:last]
            features += drawn_features[first:last]
        return SparseDataset(_sets(features, self.num_features), _sets(labels, self.n))

    def _block(self, block: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The labels and tokens of ``BLOCK`` examples, repeats not yet merged."""
        rng = np.random.default_rng([self.seed, block])
        # 1 + binomial: between 1 and k with the wanted mean.
        spread = (self.mean_active - 1) / (self.k - 1) if self.k > 1 else 0.0
        sizes = 1 + rng.binomial(self.k - 1, spread, BLOCK)
        rows = np.repeat(np.arange(BLOCK), sizes)
        example_topics = self._zipf(rng.random((BLOCK, TOPICS_PER_EXAMPLE)), self.topics)
        topic = example_topics[rows, rng.integers(TOPICS_PER_EXAMPLE, size=len(rows))]
        # Topic t holds the labels t, t + topics, t + 2·topics, …, the most frequent first.
        held = (self.n - 1 - topic) // self.topics + 1
        ranked = self._zipf(rng.random(len(rows)), held) * self.topics + topic
        anywhere = self._zipf(rng.random(len(rows)), self.n)
        ranked = np.where(rng.random(len(rows)) < OFF_TOPIC, anywhere, ranked)
        labels = self._shuffle(ranked)
        shown = rng.integers(TOKENS_PER_LABEL, size=(2, len(rows)))
        tokens = _hash(labels * TOKENS_PER_LABEL + shown) % self.num_features  # [2, nnz]
        noise = _hash(-1 - self._zipf(rng.random((BLOCK, self.noise_tokens)), self.num_features))
        noise %= self.num_features
        ends = np.cumsum(sizes)[:-1]
        by_example = zip(np.split(tokens[0], ends), np.split(tokens[1], ends), noise, strict=True)
        return np.split(labels, ends), [np.concatenate(parts) for parts in by_example]

    def _zipf(self, uniform: np.ndarray, size: int | np.ndarray) -> np.ndarray:
        """Ranks ``0 … size-1`` with frequency ∝ (rank+1)^-zipf, by inverting the continuous distribution."""
        top = np.asarray(size, dtype=np.float64) + 1.0
        if abs(self.zipf - 1) < 1e-9:
            value = np.exp(uniform * np.log(top))
        else:
            power = 1 - self.zipf
            value = (1 + uniform * (top**power - 1)) ** (1 / power)
        return np.minimum(value.astype(np.int64), size) - 1

    def _shuffle(self, ranks: np.ndarray) -> np.ndarray:
        """A fixed bijection of the labels, so that neighbours in number are not neighbours in frequency."""
        step = max(round(self.n * 0.618_033_988_75), 1)
        while math.gcd(step, self.n) != 1:
            step += 1
        return (ranks * step + self.seed) % self.n


def _hash(values: np.ndarray) -> np.ndarray:
    """A mixer of 64-bit integers (splitmix64), non-negative."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def _sets(rows: list[np.ndarray], size: int) -> LabelSets:
    flat = np.concatenate([np.zeros(0, np.int64), *rows])
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return LabelSets(torch.from_numpy(flat), torch.from_numpy(offsets), size)
