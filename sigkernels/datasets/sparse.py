"""SparseDataset: sparse binary features and label sets, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigkernels.labels import LabelSets


@dataclass(frozen=True, repr=False)
class SparseDataset:
    """``N`` examples. A set of active features has the same form as a set of labels.

    ``features.indices`` and ``features.offsets[:-1]`` are what ``torch.nn.EmbeddingBag`` takes;
    ``features.to_scipy()`` is what scikit-learn takes.
    """

    features: LabelSets  # [N], num_labels = number of features
    labels: LabelSets  # [N], num_labels = number of labels
    names: np.ndarray | None = None  # [N] str: what each example is
    label_names: np.ndarray | None = None  # [n] str

    def __post_init__(self) -> None:
        if len(self.features) != len(self.labels):
            raise ValueError(
                f"features have {len(self.features)} rows and labels {len(self.labels)}: give both for the same rows"
            )

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

    def split(self, test: int, seed: int = 0) -> tuple[SparseDataset, SparseDataset]:
        """``(train, test)``: the test rows are the first ``test`` of ``default_rng(seed).permutation(N)``."""
        if not 0 <= test <= len(self):
            raise ValueError(f"test must be between 0 and the {len(self)} examples there are, got {test}")
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self)))
        return self[order[test:]], self[order[:test]]

    def batches(self, batch_size: int, seed: int | None = None, drop_last: bool = False) -> Iterator[SparseDataset]:
        """Consecutive batches; with a ``seed`` in a random order that depends on nothing else."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
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
