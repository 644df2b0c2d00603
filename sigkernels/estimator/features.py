"""X: rows of a dense array, a data frame or a sparse matrix, checked once and handed out as float32 batches."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..label_forms import check_scipy_format

Batch = Tensor | tuple[Tensor, Tensor, Tensor]  # [B, d], or (indices [nnz], offsets [B], values [nnz])

_LARGEST = float(np.finfo(np.float32).max)
_SHOWN_NAMES = 5


class Features:
    """``X [N, d]``: finite real numbers that float32 can hold. The caller's array is neither copied nor changed."""

    names: np.ndarray | None
    sparse: bool

    def __init__(self, X: Any) -> None:
        self.names = feature_names(X)
        self.sparse = hasattr(X, "tocsr")
        if self.sparse:
            check_scipy_format("X", X)
        self.matrix: Any = X.tocsr() if self.sparse else _numbers(X)
        if self.matrix.ndim != 2:
            raise ValueError(
                f"X must have shape [N, d], got {self.matrix.shape}. Reshape your data: X.reshape(1, -1) if it is one "
                "row, X.reshape(-1, 1) if it is one feature"
            )
        _check_values(self._values())

    def _values(self) -> np.ndarray:
        return self.matrix.data if self.sparse else self.matrix

    def __len__(self) -> int:
        return self.matrix.shape[0]

    @property
    def width(self) -> int:
        """How many features there are, d."""
        return self.matrix.shape[1]

    def require_content(self) -> None:
        """Refuses what nothing can be learned from."""
        for count, unit in ((len(self), "sample"), (self.width, "feature")):
            if count == 0:
                raise ValueError(f"X has 0 {unit}(s) (shape={self.matrix.shape}) while a minimum of 1 is required.")

    def take(self, rows: np.ndarray) -> Features:
        """The rows of these numbers."""
        part = Features.__new__(Features)
        part.names, part.sparse, part.matrix = self.names, self.sparse, self.matrix[rows]
        return part

    def mean_square(self, weights: np.ndarray | None) -> float:
        """Mean squared length of a row, weighted by ``weights [N]``."""
        if self.sparse:
            squares = np.square(self.matrix.data, dtype=np.float64)
            rows = np.repeat(np.arange(len(self)), np.diff(self.matrix.indptr))
            lengths = np.bincount(rows, squares, minlength=len(self))
        else:
            lengths = np.einsum("ij,ij->i", self.matrix, self.matrix, dtype=np.float64, casting="same_kind")
        return float(np.average(lengths, weights=weights))

    def batch(self, rows: Tensor, device: torch.device) -> Batch:
        """Some rows as tensors on ``device``."""
        part = self.matrix[rows.numpy()]
        if not self.sparse:
            return torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32)).to(device)
        arrays = (part.indices.astype(np.int64), part.indptr[:-1].astype(np.int64), part.data.astype(np.float32))
        indices, offsets, values = (torch.from_numpy(array).to(device) for array in arrays)
        return indices, offsets, values


def _numbers(X: Any) -> np.ndarray:
    if isinstance(X, Tensor):
        X = X.detach().cpu()
        X = X.float() if X.dtype == torch.bfloat16 else X  # which numpy does not have
    array = np.asarray(X)
    if array.dtype.kind != "O":
        return array
    try:
        if hasattr(X, "to_numpy") and hasattr(X, "isna"):  # nullable types of pandas, whose pd.NA float() does not know
            return X.to_numpy(dtype=np.float64, na_value=np.nan)
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise type(error)(f"X must hold numbers: {error}") from None


def _check_values(values: np.ndarray) -> None:
    if values.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: X has dtype {values.dtype}; give real and imaginary part apart")
    if values.dtype.kind not in "biuf":
        raise TypeError(f"X must hold numbers, got dtype {values.dtype}; encode text and dates first")
    if values.dtype.kind != "f" or values.size == 0:
        return
    low, high = float(values.min()), float(values.max())  # NaN if there is one; no array of booleans is made
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError("X holds NaN or infinity: impute or remove those values first")
    if max(-low, high) > _LARGEST:
        raise ValueError(f"X holds {low if -low > high else high}, which is too large for float32: scale X first")


def feature_names(X: Any) -> np.ndarray | None:
    """The column names of a data frame if all are strings, as scikit-learn has it."""
    columns = getattr(X, "columns", None)
    if columns is None:
        return None
    text = [isinstance(name, str) for name in columns]
    if all(text) and text:
        return np.asarray(list(columns), dtype=object)
    if any(text):
        raise TypeError("the columns of X are named by strings and by others; use X.columns = X.columns.astype(str)")
    return None


def check_names(fitted: np.ndarray | None, given: np.ndarray | None, owner: str) -> None:
    """Warns where only one side has names, raises where they differ: columns in another order are other features."""
    if fitted is None and given is None:
        return
    if fitted is None:
        warnings.warn(f"X has feature names, but {owner} was fitted without feature names", stacklevel=4)
        return
    if given is None:
        warnings.warn(f"X does not have valid feature names, but {owner} was fitted with feature names", stacklevel=4)
        return
    if np.array_equal(fitted, given):
        return
    lines = ["The feature names should match those that were passed during fit."]
    for title, names in (
        ("Feature names unseen at fit time", sorted(set(given) - set(fitted))),
        ("Feature names seen at fit time, yet now missing", sorted(set(fitted) - set(given))),
    ):
        if names:
            shown = [f"- {name}" for name in names[:_SHOWN_NAMES]] + ["- ..."] * (len(names) > _SHOWN_NAMES)
            lines += [f"{title}:", *shown]
    if len(lines) == 1:
        lines.append("Feature names must be in the same order as they were in fit.")
    raise ValueError("\n".join(lines))


def sample_weights(values: Any, rows: int) -> np.ndarray:
    """``values`` as float64 factors ``[rows]``, none negative, not all zero, and none too large for float32."""
    weights = _numbers(values)
    if weights.shape != (rows,) or weights.dtype.kind not in "biuf":
        raise ValueError(
            f"sample_weight must hold one number for each of the {rows} rows of X, got {weights.dtype} of shape "
            f"{weights.shape}"
        )
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("sample_weight must be finite and not negative; leave rows out by a weight of 0")
    if weights.max() > _LARGEST:
        raise ValueError(f"sample_weight holds {weights.max()}, which is too large for float32: scale all of them")
    if not weights.any():
        raise ValueError("sample_weight is zero for every row: there is nothing to learn from")
    return weights.astype(np.float64)
