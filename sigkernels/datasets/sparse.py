"""SparseDataset: sparse binary features and label sets, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..labels import LabelSets
from ..validation import check_int


@dataclass(frozen=True, repr=False)
class SparseDataset:
    """``N`` examples. A set of active features has the same form as a set of labels.

    ``features.indices`` and ``features.offsets[:-1]`` are what ``torch.nn.EmbeddingBag`` takes;
    ``features.to_scipy()`` is what scikit-learn takes.

    Attributes:
        features: N sets; their ``num_labels`` is the number of features.
        labels: N sets; their ``num_labels`` is the number of labels.
        names: ``[N]`` strings, what each example is, or None.
        label_names: ``[n]`` strings, or None.

    Example:
        >>> data = sk.datasets.synthetic(n=1000, k=8, num_examples=100).load()
        >>> train, test = data.split(0.2)
        >>> len(train), len(test)
        (80, 20)
    """

    features: LabelSets
    labels: LabelSets
    names: np.ndarray | None = None
    label_names: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("features", "labels"):
            if not isinstance(getattr(self, name), LabelSets):
                raise TypeError(f"{name} must be LabelSets, got {type(getattr(self, name)).__name__}; use LabelSets.of")
        if len(self.features) != len(self.labels):
            raise ValueError(
                f"features have {len(self.features)} rows and labels {len(self.labels)}: give both for the same rows"
            )
        wanted = {"names": len(self.labels), "label_names": self.labels.num_labels}
        for name, size in wanted.items():
            given = getattr(self, name)
            if given is not None and np.shape(given) != (size,):
                raise ValueError(f"{name} must have shape [{size}], one for each, got {list(np.shape(given))}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | Tensor | np.ndarray) -> SparseDataset:
        """The examples of a slice, an index tensor or a mask."""
        if isinstance(rows, np.ndarray):
            rows = torch.from_numpy(rows)
        if not isinstance(rows, (slice, Tensor)):
            raise TypeError(f"rows must be a slice or an index tensor, got {type(rows).__name__}: use data[i:i+1]")
        at: Any = rows.numpy() if isinstance(rows, Tensor) else rows
        names = None if self.names is None else self.names[at]
        return SparseDataset(self.features[rows], self.labels[rows], names, self.label_names)

    def split(self, test: int | float, seed: int = 0) -> tuple[SparseDataset, SparseDataset]:
        """``(train, test)``: the test rows are the first of ``default_rng(seed).permutation(N)``.

        ``test`` is how many, or a float between 0 and 1: which share, rounded up, as in scikit-learn.
        """
        if isinstance(test, float):
            if not 0 <= test <= 1:
                raise ValueError(f"test must be a share between 0.0 and 1.0, or a whole number of rows, got {test}")
            test = math.ceil(test * len(self))
        test = check_int("test", test)
        if not 0 <= test <= len(self):
            raise ValueError(f"test must be between 0 and the {len(self)} examples there are, got {test}")
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self)))
        return self[order[test:]], self[order[:test]]

    def batches(self, batch_size: int, seed: int | None = None, drop_last: bool = False) -> Iterator[SparseDataset]:
        """Consecutive batches of ``batch_size`` examples; with a ``seed`` in a random order that depends on nothing else.

        ``drop_last``: leave out a last batch that is shorter.
        """
        batch_size = check_int("batch_size", batch_size, 1)
        order = None if seed is None else torch.from_numpy(np.random.default_rng(seed).permutation(len(self)))
        end = len(self) - len(self) % batch_size if drop_last else len(self)
        for start in range(0, end, batch_size):
            stop = min(start + batch_size, len(self))
            yield self[slice(start, stop)] if order is None else self[order[start:stop]]

    def __repr__(self) -> str:
        mean = self.labels.indices.numel() / max(len(self), 1)
        return (
            f"SparseDataset({len(self):,} examples, {self.features.num_labels:,} features, "
            f"{self.labels.num_labels:,} labels, {mean:.1f} labels on average, at most {self.labels.max_active})"
        )
