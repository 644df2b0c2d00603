"""LabelSets: a batch of sparse label sets, the one form that training, prediction and proofs share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from . import label_forms as forms
from .operator_dispatch import by_operator
from .validation import check_num_labels, refuse_meta

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_PREVIEW_SETS, _PREVIEW_LABELS = 3, 6

if TYPE_CHECKING:
    _read_only = property
else:

    class _read_only(property):
        """A property whose error says what to do instead."""

        def __set__(self, sets: Any, value: Any) -> None:
            raise AttributeError(
                f"{self.fget.__name__} of LabelSets cannot be changed; "
                "build new sets: LabelSets(indices, offsets, num_labels)"
            )


class LabelSets:
    """A batch of sets of labels ``0 … num_labels-1`` in compressed rows.

    Row ``b`` holds ``indices[offsets[b]:offsets[b+1]]``, sorted and without repeats. A set has no
    multiplicity, so a label that is given twice in a row counts once. The sets cannot be changed: attributes are read
    only, and where a tensor was written to in place, the next use checks the values again and refuses what is no set.

    Args:
        indices: integer tensor ``[nnz]``, the labels of all rows one after another.
        offsets: integer tensor ``[B+1]``, where each row starts; the last entry is ``nnz``.
        num_labels: how many labels there are (``n``).

    Example:
        >>> sets = sk.LabelSets.from_lists([[17, 3], [], [5]], num_labels=20)
        >>> sets
        LabelSets([{3, 17}, {}, {5}], 3 sets, num_labels=20, max_active=2)
        >>> sets[0], sets.sizes
        (tensor([ 3, 17]), tensor([2, 0, 1]))
        >>> sets[1:].to_lists()
        [[], [5]]
        >>> sets.to_dense().shape
        torch.Size([3, 20])
    """

    __slots__ = ("_indices", "_num_labels", "_offsets", "_versions")

    _indices: Tensor  # [nnz] int64
    _offsets: Tensor  # [B+1] int64
    _num_labels: int
    # How often each tensor had been written to when it was last known to keep the contract; None: not known.
    _versions: tuple[int, int] | None

    def __init__(self, indices: Tensor, offsets: Tensor, num_labels: int) -> None:
        num_labels = check_num_labels(num_labels)
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
        if indices.is_meta:  # there are no values to look at, now or later
            indices, offsets = (tensor.to(torch.int64, copy=True) for tensor in (indices, offsets))
        elif by_operator(indices, offsets):
            indices, offsets = forms.in_order_operator(indices, offsets, num_labels)
        else:
            indices, offsets = forms.in_order(indices, offsets, num_labels)
        self._set(indices, offsets, num_labels)

    @classmethod
    def from_sorted(cls, indices: Tensor, offsets: Tensor, num_labels: int) -> LabelSets:
        """Wraps tensors that already keep the contract, without a copy and without looking at their values.

        For kernels and loaders that make sorted rows; the constructor is the same with every check. On the CPU a loss
        refuses rows that break the contract, eager or compiled.

        Args:
            indices: int64 ``[nnz]``, ascending in each row, without repeats, in ``0 … num_labels-1``.
            offsets: int64 ``[B+1]``, from 0 to nnz, not decreasing.
            num_labels: ``n``.
        """
        self = cls.__new__(cls)
        self._set(indices, offsets, num_labels)
        return self

    def _set(self, indices: Tensor, offsets: Tensor, num_labels: int) -> None:
        if not torch.compiler.is_compiling() and (indices.is_inference() or offsets.is_inference()):
            with torch.inference_mode(False):  # sets outlive the mode: predictions may become the targets of a training
                indices, offsets = indices.clone(), offsets.clone()
        self._indices, self._offsets, self._num_labels = indices, offsets, num_labels
        self._versions = None if torch.compiler.is_compiling() else (indices._version, offsets._version)

    @_read_only
    def indices(self) -> Tensor:
        """The labels of all rows one after another, int64 ``[nnz]``. Read only."""
        self._check_unchanged()
        return self._indices

    @_read_only
    def offsets(self) -> Tensor:
        """Where each row starts in ``indices``, int64 ``[B+1]``. Read only."""
        self._check_unchanged()
        return self._offsets

    @_read_only
    def num_labels(self) -> int:
        """How many labels there are, ``n``."""
        return self._num_labels

    def checked(self) -> tuple[Tensor, Tensor]:
        """(indices, offsets), after one check for both."""
        self._check_unchanged()
        return self._indices, self._offsets

    def unchecked(self) -> tuple[Tensor, Tensor]:
        """(indices, offsets), for code below the functions that have checked them."""
        return self._indices, self._offsets

    def is_plain(self, num_labels: int) -> bool:
        """Whether they are sets of so many labels that nobody has written to since they were checked."""
        versions = self._versions
        return (
            versions is not None
            and self._num_labels == num_labels
            and versions[0] == self._indices._version
            and versions[1] == self._offsets._version
        )

    def _check_unchanged(self) -> None:
        """Looks at the values again where somebody has written to the tensors in place."""
        if torch.compiler.is_compiling():
            return
        versions = self._indices._version, self._offsets._version
        if versions == self._versions:
            return
        if by_operator(self._indices, self._offsets):
            return
        try:
            forms.check_sets(self._indices, self._offsets, self._num_labels)
        except ValueError as error:
            raise ValueError(
                f"the tensors of these LabelSets were changed in place and are no label sets any more: {error}. "
                "Build new sets instead: LabelSets(indices, offsets, num_labels)"
            ) from None
        self._versions = versions

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that sets from a file are checked like any others.
        indices, offsets = self.checked()
        if indices.untyped_storage().nbytes() > indices.nbytes:  # torch would save all sets that these are a slice of
            indices = indices.clone()
        return LabelSets, (indices, offsets, self.num_labels)

    # -- from other forms ------------------------------------------------------------------------------------

    @classmethod
    def of(cls, sets: Any, num_labels: int | None = None, *, name: str = "label_sets") -> LabelSets:
        """Label sets in any form as LabelSets.

        Args:
            sets: LabelSets; a 0/1 tensor, array or data frame ``[B, n]``; a sparse torch tensor or ``scipy.sparse``
                matrix ``[B, n]``; or an iterable with one collection of labels per row (lists, sets, arrays, a
                pandas Series of lists, a nested tensor).
            num_labels: ``n``. All forms but lists of labels know it themselves; then it is compared.
            name: what errors call the argument.
        """
        num_labels = None if num_labels is None else check_num_labels(num_labels)
        if isinstance(sets, Tensor) and sets.is_nested:
            sets = sets.unbind()  # one tensor of labels for each row
        if isinstance(sets, LabelSets):
            forms.check_values(name, *sets.checked(), sets.num_labels)  # from_sorted did not look at them
            result = sets
        elif hasattr(sets, "tocsr") or (isinstance(sets, Tensor) and sets.layout is not torch.strided):
            result = cls.from_sorted(*forms.csr_to_rows(name, forms.as_csr(sets)))
        elif isinstance(sets, Tensor) or forms.is_table(sets):
            result = cls.from_sorted(*forms.dense_to_rows(name, sets))
        elif isinstance(sets, (str, bytes, Mapping)) or not isinstance(sets, Iterable):
            raise TypeError(
                f"{name} must be LabelSets, a 0/1 tensor or array [B, n], a sparse matrix or one list of labels per "
                f"row, got {type(sets).__name__}"
            )
        elif num_labels is None:
            raise TypeError(f"{name} holds lists, which do not say how many labels there are; use LabelSets.from_lists")
        else:
            return cls.from_sorted(*forms.lists_to_rows(name, sets, num_labels), num_labels)
        if num_labels is not None and result.num_labels != num_labels:
            raise ValueError(
                f"{name} has num_labels = {result.num_labels}, but {num_labels} labels are expected; for arrays of label "
                "numbers use LabelSets.from_lists"
            )
        return result

    @classmethod
    def cat(cls, parts: Iterable[LabelSets]) -> LabelSets:
        """The rows of all parts one after another; they must have one ``num_labels`` and one device."""
        if isinstance(parts, LabelSets) or not isinstance(parts, Iterable):
            got = "one LabelSets" if isinstance(parts, LabelSets) else type(parts).__name__
            raise TypeError(f"parts must be a list of LabelSets, got {got}; write LabelSets.cat([first, second])")
        parts = list(parts)
        if not parts:
            raise ValueError("parts is empty, so num_labels is not known; use LabelSets.from_lists([], num_labels)")
        first = parts[0]
        for at, part in enumerate(parts):
            if not isinstance(part, LabelSets):
                raise TypeError(f"parts[{at}] must be LabelSets, got {type(part).__name__}; use LabelSets.of")
            if (part.num_labels, part.device) != (first.num_labels, first.device):
                raise ValueError(
                    f"parts[{at}] has num_labels = {part.num_labels} on {part.device}, parts[0] has "
                    f"{first.num_labels} on {first.device}; all parts must agree"
                )
        sizes = torch.cat([part.sizes for part in parts])
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return cls.from_sorted(torch.cat([part.indices for part in parts]), offsets, first.num_labels)

    @classmethod
    def from_lists(cls, lists: Iterable[Iterable[int] | Tensor], num_labels: int) -> LabelSets:
        """From one iterable of labels per row: ``from_lists([[3, 17], [], [5]], num_labels=20_000)``."""
        num_labels = check_num_labels(num_labels)
        return cls.from_sorted(*forms.lists_to_rows("lists", lists, num_labels), num_labels)

    @classmethod
    def from_dense(cls, dense: Tensor | np.ndarray | Sequence[Sequence[float]]) -> LabelSets:
        """From a tensor or array ``[B, n]`` of zeros and ones (bool, integer or floating point)."""
        if isinstance(dense, LabelSets):  # numpy would take its rows of labels for rows of zeros and ones
            raise TypeError("dense must be a tensor or array [B, n], got LabelSets; they are label sets already")
        return cls.from_sorted(*forms.dense_to_rows("dense", dense))

    @classmethod
    def from_csr(cls, matrix: Any) -> LabelSets:
        """From a ``torch.sparse_csr`` tensor or a ``scipy.sparse`` matrix ``[B, n]`` of zeros and ones.

        Stored zeros are dropped.
        """
        return cls.from_sorted(*forms.csr_to_rows("matrix", matrix))

    @staticmethod
    def collate_fn(num_labels: int, key: str = "labels") -> functools.partial[Any]:
        """A ``collate_fn`` for ``DataLoader`` (it pickles, so workers can use it).

        Samples are dicts whose entry ``key`` is a label set (``{"x": x, "labels": [3, 17]}`` batches to
        ``{"x": [B, …], "labels": LabelSets}``), tuples or lists whose last entry is one (``(x, [3, 17])`` batches to
        ``(x [B, …], LabelSets)``), or label sets alone.
        """
        from .collate import collate

        return functools.partial(collate, num_labels=check_num_labels(num_labels), key=key)

    # -- to other forms --------------------------------------------------------------------------------------

    def to_dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same sets as zeros and ones ``[B, n]``."""
        batch = self.offsets.shape[0] - 1  # not len(self), which is no symbol under torch.export
        dense = torch.zeros(batch, self.num_labels, dtype=dtype, device=self.device)
        dense[self.rows(), self.indices] = 1
        return dense

    def to_lists(self) -> list[list[int]]:
        """One sorted list of labels per row."""
        forms.check_values("these", *self.checked(), self.num_labels)
        flat, ends = self.indices.tolist(), self.offsets.tolist()
        return [flat[a:b] for a, b in itertools.pairwise(ends)]

    def to_scipy(self) -> Any:
        """The same sets as a ``scipy.sparse.csr_matrix`` of ones ``[B, n]``."""
        from scipy.sparse import csr_matrix

        forms.check_values("these", *self.checked(), self.num_labels)  # scipy's own code would read beyond its arrays
        indices, offsets = self.indices.cpu().numpy(), self.offsets.cpu().numpy()
        return csr_matrix((np.ones(len(indices), np.float32), indices, offsets), (len(self), self.num_labels))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> LabelSets:
        """The same sets on another device. They have no dtype: labels are int64."""
        if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
            raise TypeError(
                f"device must be a torch.device or its name, got {device!r}; labels are int64 and keep that dtype"
            )
        if torch.device(device).type != "meta":
            refuse_meta("the tensor of these label sets", self._indices)
        return LabelSets.from_sorted(
            self.indices.to(device, non_blocking=non_blocking),
            self.offsets.to(device, non_blocking=non_blocking),
            self.num_labels,
        )

    def pin_memory(self) -> LabelSets:
        """The same sets in page-locked memory, for fast copies to a GPU."""
        return LabelSets.from_sorted(self.indices.pin_memory(), self.offsets.pin_memory(), self.num_labels)

    # -- what they are ---------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the sets are."""
        return self._indices.device

    @property
    def sizes(self) -> Tensor:
        """Active labels in each row, ``[B]``."""
        return self.offsets.diff()

    @property
    def max_active(self) -> int:
        """The size of the largest set, which is the smallest ``k`` with which a DFTHead can predict all of them."""
        return int(self.sizes.max()) if len(self) else 0

    def rows(self) -> Tensor:
        """The row of each entry of ``indices``, ``[nnz]``."""
        forms.check_values("these", *self.checked(), self.num_labels)
        return forms.rows_of(*self.unchecked())

    def runs(self) -> Tensor:
        """How many runs of neighbouring active labels each row has around the circle of labels, ``[B]``.

        Label ``n-1`` is a neighbour of label 0. A run is counted where it starts, so the full set has none.
        A DFTHead can predict exactly the sets with at most ``k`` runs by its DFT part alone.
        """
        indices, rows, last = self.indices, self.rows(), self.num_labels - 1
        starts = torch.ones_like(indices, dtype=torch.bool)
        starts[1:] = (rows.diff() != 0) | (indices.diff() != 1)
        # Label 0 continues a run that reaches the end of the circle.
        closed = torch.zeros(len(self), dtype=torch.bool, device=self.device)
        closed[rows[indices == last]] = True
        starts &= ~((indices == 0) & closed[rows])
        return torch.bincount(rows[starts], minlength=len(self))

    def keys(self) -> Tensor:
        """``row·num_labels + label`` of each entry, ascending, ``[nnz]``: to look entries up by one number."""
        if len(self) * self.num_labels >= 2**63:
            raise ValueError(f"{len(self)} rows of {self.num_labels} labels have no positions in int64; use fewer rows")
        return self.rows() * self.num_labels + self.indices

    def __len__(self) -> int:
        return self._offsets.numel() - 1

    @overload
    def __getitem__(self, key: int | np.integer[Any]) -> Tensor: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | Sequence[bool] | np.ndarray | Tensor) -> LabelSets: ...
    def __getitem__(self, key: Any) -> Tensor | LabelSets:
        """An int gives the labels of that row as a tensor; a slice, or an index or mask, gives LabelSets."""
        if isinstance(key, tuple):
            raise IndexError(f"label sets are indexed by one dimension, got {key!r}; write sets[[…]] for several rows")
        if isinstance(key, np.ndarray):
            key = forms.index_tensor(key)
        if isinstance(key, Tensor) and key.ndim == 0 and key.dtype != torch.bool:
            key = int(key)
        if hasattr(key, "__index__") and not isinstance(key, Tensor):
            row = key.__index__()
            if not -len(self) <= row < len(self):
                raise IndexError(f"row {row} is out of range for {len(self)} label sets")
            row %= len(self)
            return self.indices[self.offsets[row] : self.offsets[row + 1]]
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            ends = self.offsets[start : max(start, stop) + 1]
            return LabelSets.from_sorted(self.indices[ends[0] : ends[-1]], ends - ends[0], self.num_labels)
        if isinstance(key, slice):  # torch has no negative steps
            key = torch.tensor(range(*key.indices(len(self))), dtype=torch.int64, device=self.device)
        if not isinstance(key, Tensor):
            key = forms.index_tensor(np.asarray(key))
        chosen = torch.arange(len(self), device=self.device)[key]
        if chosen.ndim != 1:
            raise IndexError(f"label sets are indexed by one dimension, got an index of shape {tuple(chosen.shape)}")
        sizes = self.sizes[chosen]
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        shift = torch.repeat_interleave(self.offsets[chosen] - offsets[:-1], sizes)
        return LabelSets.from_sorted(
            self.indices[torch.arange(shift.numel(), device=self.device) + shift], offsets, self.num_labels
        )

    def __iter__(self) -> Iterator[Tensor]:
        forms.check_values("these", *self.checked(), self.num_labels)
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

    __hash__: ClassVar[None]  # type: ignore[assignment]

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
