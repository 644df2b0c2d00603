"""LabelSets: a batch of sparse label sets, the one form that training, prediction and proofs share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .operator_dispatch import by_operator
from .validation import check_int

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_PREVIEW_SETS, _PREVIEW_LABELS = 3, 6


class LabelSets:
    """A batch of sets of labels ``0 … num_labels-1`` in compressed rows.

    Row ``b`` holds ``indices[offsets[b]:offsets[b+1]]``, sorted and without repeats. A set has no
    multiplicity, so a label that is given twice in a row counts once.

    Args:
        indices: integer tensor ``[nnz]``, the labels of all rows one after another.
        offsets: integer tensor ``[B+1]``, where each row starts; the last entry is ``nnz``.
        num_labels: how many labels there are (``n``).
    """

    __slots__ = ("indices", "num_labels", "offsets")

    indices: Tensor  # [nnz] int64
    offsets: Tensor  # [B+1] int64
    num_labels: int

    def __init__(self, indices: Tensor, offsets: Tensor, num_labels: int) -> None:
        num_labels = check_int("num_labels", num_labels, 1)
        for name, tensor in (("indices", indices), ("offsets", offsets)):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{name} must be a torch tensor, got {type(tensor).__name__}; use LabelSets.from_lists for lists"
                )
            if tensor.ndim != 1 or tensor.dtype not in _INTEGERS:
                raise ValueError(
                    f"{name} must be a 1-D integer tensor, got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        if indices.device != offsets.device:
            raise ValueError(
                f"indices are on {indices.device} and offsets on {offsets.device}; move both to one device"
            )
        # A copy: what the caller does to its tensors later must not reach the sets.
        indices, offsets = (tensor.to(torch.int64, copy=True) for tensor in (indices, offsets))
        if not by_operator(indices, offsets):  # else there are no numbers to look at
            _check_offsets(offsets, indices.numel())
            _check_range(indices, offsets, num_labels)
            indices, offsets = _sort_rows(indices, offsets, num_labels)
        self.indices, self.offsets, self.num_labels = indices, offsets, num_labels

    @classmethod
    def _trusted(cls, indices: Tensor, offsets: Tensor, num_labels: int) -> LabelSets:
        """Wraps int64 tensors that already satisfy the contract, without looking at their values."""
        self = cls.__new__(cls)
        self.indices, self.offsets, self.num_labels = indices, offsets, num_labels
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that sets from a file are checked like any others.
        return LabelSets, (self.indices, self.offsets, self.num_labels)

    # -- from other forms ------------------------------------------------------------------------------------

    @classmethod
    def from_lists(cls, lists: Iterable[Iterable[int] | Tensor], num_labels: int) -> LabelSets:
        """From one iterable of labels per row: ``from_lists([[3, 17], [], [5]], num_labels=20_000)``."""
        num_labels = check_int("num_labels", num_labels, 1)
        if isinstance(lists, (str, bytes)) or not isinstance(lists, Iterable):
            raise TypeError(f"lists must hold one list of labels per row, got {type(lists).__name__}")
        flat: list[int] = []
        ends = [0]
        for row, labels in enumerate(lists):
            flat += _labels_of(row, labels, num_labels)
            ends.append(len(flat))
        return cls._trusted(torch.tensor(flat, dtype=torch.int64), torch.tensor(ends, dtype=torch.int64), num_labels)

    @classmethod
    def from_dense(cls, dense: Tensor | np.ndarray | Sequence[Sequence[float]]) -> LabelSets:
        """From a tensor or array ``[B, n]`` of zeros and ones (bool, integer or floating point)."""
        dense = dense if isinstance(dense, Tensor) else tensor_of("dense", dense)
        if dense.ndim != 2:
            raise ValueError(f"dense must have shape [B, n], got {tuple(dense.shape)}")
        if dense.layout is not torch.strided:
            raise TypeError(f"dense must be a dense tensor, got layout {dense.layout}; use LabelSets.from_csr")
        if dense.is_complex():
            raise TypeError(f"dense must be bool, integer or floating point, got {dense.dtype}; take its real part")
        active = dense != 0
        if dense.dtype != torch.bool and bool(((dense != 1) & active).any()):
            row, label = ((dense != 1) & active).nonzero()[0].tolist()
            raise ValueError(
                f"dense holds {dense[row, label].item()} at row {row}, label {label}; "
                "a set has only 0 and 1: threshold soft labels first, or give them to the loss as a dense target"
            )
        rows, indices = active.nonzero(as_tuple=True)
        return cls._trusted(indices, _offsets_of(rows, dense.shape[0]), check_int("num_labels", dense.shape[1], 1))

    @classmethod
    def from_csr(cls, matrix: Any) -> LabelSets:
        """From a ``torch.sparse_csr`` tensor or a ``scipy.sparse`` matrix ``[B, n]`` of zeros and ones.

        Stored zeros are dropped.
        """
        if isinstance(matrix, Tensor):
            if matrix.layout != torch.sparse_csr or matrix.ndim != 2:
                raise ValueError(
                    f"matrix must be a 2-D torch.sparse_csr tensor, got layout {matrix.layout}; "
                    "call .to_sparse_csr(), or use from_dense"
                )
            if matrix.is_complex():
                raise TypeError(f"matrix must hold real numbers, got dtype {matrix.dtype}; take its real part")
            indices, offsets, values = matrix.col_indices(), matrix.crow_indices(), matrix.values()
        elif hasattr(matrix, "tocsr"):
            csr = matrix.tocsr()
            if csr.dtype.kind not in "biuf":
                raise TypeError(f"matrix must hold real numbers, got dtype {csr.dtype}; call .real or .astype(float)")
            indices, offsets = (
                torch.from_numpy(csr.indices.astype("int64")),
                torch.from_numpy(csr.indptr.astype("int64")),
            )
            values = torch.from_numpy(csr.data.astype("float64"))
        else:
            raise TypeError(
                f"matrix must be a scipy.sparse matrix or a torch.sparse_csr tensor, got {type(matrix).__name__}"
            )
        batch, num_labels = matrix.shape
        offsets, indices = offsets.to(torch.int64), indices.to(torch.int64)
        rows = torch.repeat_interleave(torch.arange(batch, device=offsets.device), offsets.diff())
        keep = values != 0
        if bool((keep & (values != 1)).any()):
            at = int((keep & (values != 1)).nonzero()[0])
            raise ValueError(
                f"matrix holds {values[at].item()} at row {int(rows[at])}, label {int(indices[at])}; "
                "a set has only 0 and 1: threshold soft labels first, or give them to the loss as a dense target"
            )
        return cls(indices[keep], _offsets_of(rows[keep], batch), num_labels)

    @staticmethod
    def collate_fn(num_labels: int) -> functools.partial[Any]:
        """A ``collate_fn`` for ``DataLoader`` (it pickles, so workers can use it).

        Samples are label sets, or tuples whose last entry is one: ``(x, [3, 17])`` batches to
        ``(x [B, …], LabelSets)``.
        """
        return functools.partial(_collate, num_labels=check_int("num_labels", num_labels, 1))

    # -- to other forms --------------------------------------------------------------------------------------

    def to_dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same sets as zeros and ones ``[B, n]``."""
        dense = torch.zeros(len(self), self.num_labels, dtype=dtype, device=self.device)
        dense[self.rows(), self.indices] = 1
        return dense

    def to_lists(self) -> list[list[int]]:
        """One sorted list of labels per row."""
        flat, ends = self.indices.tolist(), self.offsets.tolist()
        return [flat[a:b] for a, b in itertools.pairwise(ends)]

    def to_scipy(self) -> Any:
        """The same sets as a ``scipy.sparse.csr_matrix`` of ones ``[B, n]``."""
        from scipy.sparse import csr_matrix

        indices, offsets = self.indices.cpu().numpy(), self.offsets.cpu().numpy()
        return csr_matrix((np.ones(len(indices), np.float32), indices, offsets), (len(self), self.num_labels))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> LabelSets:
        """The same sets on another device. They have no dtype: labels are int64."""
        if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
            raise TypeError(
                f"device must be a torch.device or its name, got {device!r}; labels are int64 and keep that dtype"
            )
        return LabelSets._trusted(
            self.indices.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
            self.num_labels,
        )

    def pin_memory(self) -> LabelSets:
        """The same sets in page-locked memory, for fast copies to a GPU."""
        return LabelSets._trusted(self.indices.pin_memory(), self.offsets.pin_memory(), self.num_labels)

    # -- what they are ---------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the sets are."""
        return self.indices.device

    @property
    def sizes(self) -> Tensor:
        """Active labels in each row, ``[B]``."""
        return self.offsets.diff()

    @property
    def max_active(self) -> int:
        """The size of the largest set: the smallest ``k`` with which a DFTHead can predict all of them."""
        return int(self.sizes.max()) if len(self) else 0

    def rows(self) -> Tensor:
        """The row of each entry of ``indices``, ``[nnz]``."""
        return torch.repeat_interleave(
            torch.arange(len(self), device=self.device), self.sizes, output_size=self.indices.numel()
        )

    def runs(self) -> Tensor:
        """How many runs of neighbouring active labels each row has around the circle of labels, ``[B]``.

        Label ``n-1`` is a neighbour of label 0. A run is counted where it starts, so the full set has none.
        A DFTHead can predict exactly the sets with at most ``k`` runs by its DFT part alone.
        """
        keys = self.rows() * self.num_labels + self.indices
        before = self.rows() * self.num_labels + (self.indices - 1) % self.num_labels
        starts = ~torch.isin(before, keys)
        return torch.zeros(len(self), dtype=torch.int64, device=self.device).index_add_(
            0, self.rows(), starts.to(torch.int64)
        )

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def __getitem__(self, key: int | slice | Tensor | np.ndarray | Sequence[int]) -> Any:
        """An int gives the labels of that row as a tensor; a slice, or an index or mask, gives LabelSets."""
        if isinstance(key, np.ndarray):
            key = _index_tensor(key)
        if isinstance(key, Tensor) and key.ndim == 0 and key.dtype != torch.bool:
            key = int(key)
        if hasattr(key, "__index__") and not isinstance(key, Tensor):
            row = key.__index__()  # type: ignore[union-attr]
            if not -len(self) <= row < len(self):
                raise IndexError(f"row {row} is out of range for {len(self)} label sets")
            row %= len(self)
            return self.indices[self.offsets[row] : self.offsets[row + 1]]
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            ends = self.offsets[start : max(start, stop) + 1]
            return LabelSets._trusted(self.indices[ends[0] : ends[-1]], ends - ends[0], self.num_labels)
        if isinstance(key, slice):  # torch has no negative steps
            key = torch.tensor(range(*key.indices(len(self))), dtype=torch.int64, device=self.device)
        chosen = torch.arange(len(self), device=self.device)[key]
        if chosen.ndim != 1:
            raise IndexError(f"label sets are indexed by one dimension, got an index of shape {tuple(chosen.shape)}")
        sizes = self.sizes[chosen]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        shift = torch.repeat_interleave(self.offsets[chosen] - offsets[:-1], sizes)
        return LabelSets._trusted(
            self.indices[torch.arange(shift.numel(), device=self.device) + shift], offsets, self.num_labels
        )

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.indices.split(self.sizes.tolist()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LabelSets):
            return NotImplemented
        return (
            self.num_labels == other.num_labels
            and self.device == other.device
            and torch.equal(self.offsets, other.offsets)
            and torch.equal(self.indices, other.indices)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if by_operator(self.indices):
            return f"LabelSets({len(self)} sets without numbers, num_labels={self.num_labels}, device='{self.device}')"
        first = [self[row].tolist() for row in range(min(len(self), _PREVIEW_SETS))]
        shown = ", ".join(
            "{" + ", ".join(map(str, labels[:_PREVIEW_LABELS])) + (", …}" if len(labels) > _PREVIEW_LABELS else "}")
            for labels in first
        )
        more = ", …" if len(self) > _PREVIEW_SETS else ""
        where = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return (
            f"LabelSets([{shown}{more}], {len(self)} sets, num_labels={self.num_labels}, "
            f"max_active={self.max_active}{where})"
        )


torch.serialization.add_safe_globals([LabelSets])  # torch.load(weights_only=True), the default, takes them


def _collate(batch: Sequence[Any], num_labels: int) -> Any:
    """Batches samples whose (last) entry is a label set."""
    from torch.utils.data import default_collate

    if not batch:
        raise ValueError("the batch is empty: there is nothing to collate; give collate_fn at least one sample")
    if isinstance(batch[0], tuple):
        *inputs, labels = zip(*batch, strict=True)
        return (*(default_collate(list(part)) for part in inputs), LabelSets.from_lists(labels, num_labels))
    return LabelSets.from_lists(batch, num_labels)


def tensor_of(name: str, array: Any) -> Tensor:
    """An array, or what numpy makes one of, as a tensor of its own."""
    try:
        array = np.asarray(array)
        if array.dtype.kind in "biuf":
            return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError):  # rows of different lengths, types that torch lacks
        pass
    what = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else repr(array)
    raise TypeError(f"{name} must be an array of booleans, integers or floating point numbers, got {what}")


def _index_tensor(key: np.ndarray) -> Tensor:
    if key.dtype.kind not in "biu":
        raise IndexError(f"label sets are indexed by integers or booleans, got an array of {key.dtype}")
    return torch.from_numpy(key.astype(bool if key.dtype.kind == "b" else np.int64))


def _labels_of(row: int, labels: Any, num_labels: int) -> list[int]:
    """One row of ``from_lists``, checked, sorted and without repeats."""
    values = labels.tolist() if hasattr(labels, "tolist") else labels
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"row {row} of lists must be a list of labels, got {labels!r}; wrap a single set as [[…]]")
    values = [value if type(value) is int else _label(row, value) for value in values]
    made = sorted(set(values))
    if made and (made[0] < 0 or made[-1] >= num_labels):
        wrong = made[0] if made[0] < 0 else made[-1]
        raise ValueError(_out_of_range(row, wrong, num_labels))
    if len(values) == num_labels > len(made) and made[-1] <= 1:
        raise ValueError(
            f"row {row} of lists holds {num_labels} zeros and ones, one per label: that is a dense target, not a list "
            "of labels; use LabelSets.from_dense, or give the loss a tensor"
        )
    return made


def _label(row: int, value: Any) -> int:
    try:
        return check_int("label", value)
    except TypeError:
        raise TypeError(
            f"row {row} of lists holds {value!r}, which is not a whole number; labels are integers: "
            "for zeros and ones or booleans [B, n] use LabelSets.from_dense"
        ) from None


def _out_of_range(row: int, label: int, num_labels: int) -> str:
    return f"label {label} in row {row} is out of range: labels are 0 … {num_labels - 1} (num_labels={num_labels})"


def _check_offsets(offsets: Tensor, nnz: int) -> None:
    if offsets.numel() < 1 or int(offsets[0]) != 0 or int(offsets[-1]) != nnz:
        ends = f"{int(offsets[0])} … {int(offsets[-1])}" if offsets.numel() else "nothing"
        raise ValueError(f"offsets must go from 0 to len(indices) = {nnz}, got {ends}")
    if bool((offsets.diff() < 0).any()):
        row = int((offsets.diff() < 0).nonzero()[0])
        raise ValueError(f"offsets must not decrease, but row {row} ends before it starts")


def _check_range(indices: Tensor, offsets: Tensor, num_labels: int) -> None:
    bad = (indices < 0) | (indices >= num_labels)
    if bool(bad.any()):
        at = bad.nonzero()[0]
        row = int(torch.searchsorted(offsets, at, right=True)) - 1
        raise ValueError(_out_of_range(row, int(indices[at]), num_labels))


def _sort_rows(indices: Tensor, offsets: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """Sorts the labels of each row and merges repeats; returns the inputs when there is nothing to do."""
    rows = torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff())
    keys = rows * num_labels + indices
    if bool((keys.diff() > 0).all()):
        return indices, offsets
    keys = torch.unique(keys)  # sorted
    rows = torch.div(keys, num_labels, rounding_mode="floor")
    return keys - rows * num_labels, _offsets_of(rows, offsets.numel() - 1)


def _offsets_of(rows: Tensor, batch: int) -> Tensor:
    """Sorted row numbers ``[nnz]`` → offsets ``[batch+1]``."""
    counts = torch.bincount(rows, minlength=batch)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
