"""Batches of samples that hold label sets, for ``DataLoader``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .label_forms import is_set
from .labels import LabelSets


def collate(batch: Sequence[Any], num_labels: int, key: str) -> Any:
    """Batches samples that hold a label set."""
    from torch.utils.data import default_collate

    if not batch:
        raise ValueError("the batch is empty: there is nothing to collate; give collate_fn at least one sample")
    rest, kind, labels = _split(batch, key)
    sets = LabelSets.from_lists(labels, num_labels)
    if kind is None:
        return sets
    if kind is dict:
        return {**(default_collate(rest) if rest[0] else {}), key: sets}
    return (*(default_collate(list(part)) for part in zip(*rest, strict=True)), sets)


def _split(batch: Sequence[Any], key: str) -> tuple[list[Any], Any, list[Any]]:
    """Samples → what goes with the labels (a list of the same length), how to rebuild it, and their label sets.

    A sample is a dict with its labels at ``key``, a tuple or list whose last entry is a label set, or a label set.
    """
    first = batch[0]
    other = next((row for row, sample in enumerate(batch) if _kind(sample) is not _kind(first)), None)
    if other is not None:
        raise TypeError(
            f"sample {other} is a {type(batch[other]).__name__} and sample 0 a {type(first).__name__}; give samples of one "
            "form: dicts, tuples with the labels last, or label sets"
        )
    if isinstance(first, Mapping):
        missing = next((row for row, sample in enumerate(batch) if key not in sample), None)
        if missing is not None:
            raise KeyError(
                f"sample {missing} has no {key!r}, only {', '.join(map(repr, batch[missing]))}; name the entry that "
                "holds the labels: collate_fn(num_labels, key=…)"
            )
        rest = [{name: value for name, value in sample.items() if name != key} for sample in batch]
        return rest, dict, [sample[key] for sample in batch]
    if isinstance(first, tuple) or (isinstance(first, list) and first and is_set(first[-1])):
        length = next((row for row, sample in enumerate(batch) if len(sample) != len(first)), None)
        if length is not None:
            raise ValueError(f"sample {length} has {len(batch[length])} entries and sample 0 has {len(first)}")
        return [tuple(sample[:-1]) for sample in batch], tuple, [sample[-1] for sample in batch]
    return [], None, list(batch)


def _kind(sample: Any) -> type:
    """What tells the forms of samples apart."""
    return next((kind for kind in (Mapping, tuple) if isinstance(sample, kind)), list)
