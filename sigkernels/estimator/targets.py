"""y: the forms in which labels may be given, and predictions in the form that y had."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from ..labels import LabelSets
from .base import DataConversionWarning

Kind = Literal["classes", "names", "dense", "sparse", "sets"]

DESCRIPTIONS: dict[Kind, str] = {
    "classes": "one class per row",
    "names": "a list of names per row",
    "dense": "an array of zeros and ones",
    "sparse": "a sparse matrix of zeros and ones",
    "sets": "LabelSets",
}
_FORMS = (
    "y must be zeros and ones [N, n] (an array or a sparse matrix), LabelSets, a list of names for each row, or one "
    "class per row [N]; for lists of label numbers use LabelSets.from_lists(y, n)"
)


@dataclass(frozen=True)
class Target:
    """``y`` as it was given: what kind it is, and its rows.

    ``rows`` is an array ``[N]`` of classes, a list of lists of names, or LabelSets for the other kinds.
    """

    kind: Kind
    rows: Any
    like: Any = None  # the dtype of predictions, for a sparse matrix with its class

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, keep: np.ndarray) -> Target:
        """The rows of these numbers."""
        if self.kind == "names":
            return replace(self, rows=[self.rows[row] for row in keep])
        return replace(self, rows=self.rows[torch.from_numpy(keep) if isinstance(self.rows, LabelSets) else keep])

    def classes(self) -> np.ndarray:
        """What there is to predict: the classes or names that occur, sorted, or the numbers of the labels."""
        if self.kind == "classes":
            return np.unique(self.rows)
        if self.kind == "names":
            return np.asarray(sorted({name for row in self.rows for name in row}), dtype=object)
        return np.arange(self.rows.num_labels)


def read_target(y: Any, expected: Kind | None = None) -> Target:
    """``y`` in any form. ``expected`` is that of a fitted model: it says what rows are if all of them are empty."""
    if y is None:
        raise ValueError("MultiLabelClassifier requires y to be passed, but the target y is None")
    if isinstance(y, LabelSets):
        return Target("sets", y.to("cpu"))
    if isinstance(y, Tensor):
        y = LabelSets.from_csr(y).to("cpu").to_scipy() if y.layout == torch.sparse_csr else y.detach().cpu().numpy()
    if sparse.issparse(y):
        csr = sparse.csr_array if isinstance(y, sparse.sparray) else sparse.csr_matrix
        return Target("sparse", LabelSets.from_csr(y), (csr, y.dtype))
    rows = _rows_of_names(y, expected == "names")
    if rows is not None:
        return Target("names", rows)
    array = _array(y)
    if array.ndim == 2 and array.shape[1] == 1:
        warnings.warn(
            "A column-vector y was passed when a 1d array was expected. Please change the shape of y to "
            "(n_samples,), for example using ravel().",
            DataConversionWarning,
            stacklevel=4,
        )
        array = array.ravel()
    if array.ndim == 1:
        return Target("classes", _check_classes(array))
    if array.ndim != 2 or array.dtype.kind not in "biuf" or array.shape[1] == 0:
        raise ValueError(f"{_FORMS}; got {array.dtype} of shape {array.shape}")
    wrong = (array != 0) & (array != 1)
    if wrong.any():
        row, label = np.argwhere(wrong)[0]
        raise ValueError(
            f"y holds {array[row, label]} at row {row}, column {label}, but an array [N, n] has only 0 and 1: threshold "
            "continuous values first; for lists of label numbers use LabelSets.from_lists(y, n)"
        )
    return Target("dense", LabelSets.from_dense(array), array.dtype)


def _rows_of_names(y: Any, expected: bool) -> list[list[str]] | None:
    """One list of names per row, or None if that is not what ``y`` holds."""
    if isinstance(y, (str, bytes, dict)) or not hasattr(y, "__len__"):
        return None
    if hasattr(y, "ndim") and (y.ndim != 1 or np.dtype(object) != getattr(y, "dtype", None)):
        return None
    containers = (list, tuple, set, frozenset, np.ndarray)
    rows = list(y)
    first = next((row for row in rows if isinstance(row, containers) and len(row)), None)
    if first is None:
        return [[] for _ in rows] if expected and all(isinstance(row, containers) for row in rows) else None
    if not isinstance(first, (set, frozenset)) and not isinstance(next(iter(first)), str):
        return None
    for number, row in enumerate(rows):
        if not isinstance(row, containers) or not all(isinstance(name, str) for name in row):
            raise TypeError(
                f"row {number} of y must hold names like the other rows, got {row!r}; names are strings, and for label "
                "numbers there is LabelSets.from_lists(y, n)"
            )
    return [[str(name) for name in row] for row in rows]


def _array(y: Any) -> np.ndarray:
    if isinstance(y, (str, bytes, dict)) or not (hasattr(y, "__len__") or hasattr(y, "__array__")):
        raise ValueError(f"{_FORMS}; got {type(y).__name__}")
    try:
        array = np.asarray(y)
    except ValueError as error:  # rows of different lengths
        raise ValueError(_FORMS) from error
    if array.dtype.kind == "O":
        types = {type(value) for value in array.flat}
        if all(issubclass(kind, (bool, int, float, np.number, np.bool_)) for kind in types):
            return np.array(array.tolist())  # numbers, as nullable types of pandas give them
        if not all(issubclass(kind, str) for kind in types):
            names = ", ".join(sorted(kind.__name__ for kind in types))
            raise ValueError(f"Unknown label type: y holds objects of type {names}; {_FORMS}")
    if array.dtype.kind == "U" and isinstance(y, (list, tuple)) and any(isinstance(v, (bool, int, float)) for v in y):
        raise ValueError("Unknown label type: y holds strings and other values; give classes of one type")
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: y has dtype {array.dtype}")
    return array


def _check_classes(classes: np.ndarray) -> np.ndarray:
    """Refuses what is no class."""
    if classes.dtype.kind == "f":
        if not np.isfinite(classes).all():
            raise ValueError("y holds NaN or infinity: remove those rows first")
        if (classes != np.floor(classes)).any():
            raise ValueError(
                f"Unknown label type: continuous. y holds {classes[classes != np.floor(classes)][0]}; classes are "
                "whole numbers or strings: this is a classifier, not a regressor"
            )
    if classes.dtype.kind not in "biufUSO":
        raise ValueError(f"Unknown label type: {classes.dtype}. {_FORMS}")
    return classes


def count_hits(predicted: Any, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """(labels that both have, labels of both added up) of each row, ``[N]`` each.

    ``predicted`` are classes or names as ``target`` holds them, else LabelSets.
    """
    if target.kind == "classes":
        return np.asarray(predicted == target.rows, dtype=np.int64), np.full(len(target), 2)
    if target.kind == "names":
        pairs = [(set(row), set(truth)) for row, truth in zip(predicted, target.rows, strict=True)]
        return np.array([len(a & b) for a, b in pairs]), np.array([len(a) + len(b) for a, b in pairs])
    common = predicted.to_scipy().multiply(target.rows.to_scipy())
    return np.asarray(common.sum(1)).ravel(), (predicted.sizes + target.rows.sizes).numpy()


class LabelCoder:
    """Translates between the user's labels and the head's: fixed by the first ``y``.

    A ``y`` of classes is coded one against the rest, two classes as one label that is active for the second.
    """

    like: Any

    def __init__(self, first: Target, classes: Any = None) -> None:
        self.kind, self.like = first.kind, first.like
        found = first.classes() if classes is None else check_classes_argument(classes, first)
        if self.kind == "classes" and len(found) < 2:
            raise ValueError(
                f"y holds only one class, {found[:1].tolist()[0]!r}; a classifier needs at least two classes"
            )
        if len(found) == 0:
            raise ValueError("y holds no name in any row: there is nothing to predict")
        self.classes: np.ndarray = found

    @property
    def num_labels(self) -> int:
        """How many labels the head has."""
        return 1 if self.binary else len(self.classes)

    @property
    def binary(self) -> bool:
        """Is it a choice between two classes?"""
        return self.kind == "classes" and len(self.classes) == 2

    def encode(self, target: Target) -> LabelSets:
        """The label sets of the head."""
        self.check(target)
        if isinstance(target.rows, LabelSets):
            return target.rows
        if self.kind == "names":
            numbers = {name: number for number, name in enumerate(self.classes)}
            unseen = next((name for row in target.rows for name in row if name not in numbers), None)
            if unseen is not None:
                raise ValueError(self._unseen(unseen))
            return LabelSets.from_lists([[numbers[name] for name in row] for row in target.rows], len(self.classes))
        at = np.searchsorted(self.classes, target.rows).clip(max=len(self.classes) - 1)
        if (wrong := self.classes[at] != target.rows).any():
            raise ValueError(self._unseen(target.rows[wrong][0]))
        indices, counts = (np.zeros(at.sum(), np.int64), at) if self.binary else (at, np.ones_like(at))
        offsets = np.concatenate([[0], counts.cumsum()])
        return LabelSets(torch.from_numpy(indices), torch.from_numpy(offsets), self.num_labels)

    def check(self, target: Target) -> None:
        """Refuses another kind of y, or another number of labels."""
        indicators = ("dense", "sparse", "sets")
        if target.kind != self.kind and not (target.kind in indicators and self.kind in indicators):
            raise ValueError(
                f"y is {DESCRIPTIONS[target.kind]}, but the model was fitted with {DESCRIPTIONS[self.kind]}"
            )
        if isinstance(target.rows, LabelSets) and target.rows.num_labels != len(self.classes):
            raise ValueError(
                f"y has {target.rows.num_labels} labels, but the model was fitted with {len(self.classes)}"
            )

    def decode(self, sets: LabelSets) -> Any:
        """Predicted sets of labels in the form that y had."""
        if self.kind == "names":
            return [tuple(self.classes[row.numpy()]) for row in sets]
        if self.kind == "dense":
            return sets.to_dense(torch.bool).numpy().astype(self.like)
        if self.kind == "sparse":
            csr, dtype = self.like
            return csr(sets.to_scipy().astype(dtype))
        return sets

    def _unseen(self, label: Any) -> str:
        return (
            f"y holds {label!r}, which is not among the {len(self.classes)} classes of the model (classes_); give all of "
            "them as classes= at the first call of partial_fit"
        )


def check_classes_argument(classes: Any, first: Target) -> np.ndarray:
    """``classes`` of ``partial_fit``: sorted, without repeats, and of the kind of y."""
    if isinstance(classes, (str, bytes)) or not isinstance(classes, (Sequence, np.ndarray)):
        raise TypeError(f"classes must be a list or an array of all classes, got {classes!r}")
    if first.kind in ("classes", "names"):
        found = np.unique(_check_classes(_array(list(classes))))
        return found.astype(object) if first.kind == "names" else found
    numbers = first.classes()
    if not np.array_equal(classes, numbers):
        raise ValueError(
            f"classes must be 0 … {len(numbers) - 1} for {DESCRIPTIONS[first.kind]} over {len(numbers)} labels, or left "
            f"out, got {classes!r}"
        )
    return numbers
