"""Label sets in every form that users have them, as compressed rows: ``indices [nnz]`` and ``offsets [B+1]``, int64.

``LabelSets`` is the class around them; the functions below read other forms, check them and bring them into order.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .operator_dispatch import by_operator
from .validation import check_int, check_num_labels, refuse_meta

if TYPE_CHECKING:
    from .labels import LabelSets

# -- compressed rows: their contract -------------------------------------------------------------------------------


def check_offsets(name: str, offsets: Tensor, nnz: int) -> None:
    """Refuses offsets that do not go from 0 to ``nnz`` without decreasing."""
    if offsets.numel() < 1 or int(offsets[0]) != 0 or int(offsets[-1]) != nnz:
        ends = f"{int(offsets[0])} … {int(offsets[-1])}" if offsets.numel() else "nothing"
        raise ValueError(f"{name} must go from 0 to len(indices) = {nnz}, got {ends}")
    if bool((offsets.diff() < 0).any()):
        row = int((offsets.diff() < 0).nonzero()[0])
        raise ValueError(f"{name} must not decrease, but row {row} ends before it starts")


def check_range(indices: Tensor, offsets: Tensor, num_labels: int) -> None:
    """Refuses labels outside 0 … num_labels-1."""
    bad = (indices < 0) | (indices >= num_labels)
    if bool(bad.any()):
        at = bad.nonzero()[0]
        row = int(torch.searchsorted(offsets, at, right=True)) - 1
        raise ValueError(_out_of_range(row, int(indices[at]), num_labels))


def rows_of(indices: Tensor, offsets: Tensor) -> Tensor:
    """The row of each entry, ``[nnz]``."""
    batch = torch.arange(offsets.numel() - 1, device=offsets.device)
    # torch trusts a size that it is given, and would write beyond it. On a GPU it would wait for the size otherwise.
    is_plain = indices.device.type == "cpu" and not by_operator(indices, offsets)
    return torch.repeat_interleave(batch, offsets.diff(), output_size=None if is_plain else indices.numel())


def offsets_of(rows: Tensor, batch: int) -> Tensor:
    """Sorted row numbers ``[nnz]`` → offsets ``[batch+1]``."""
    counts = torch.bincount(rows, minlength=batch)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def is_ascending(indices: Tensor, rows: Tensor) -> bool:
    """Whether the labels of each row ascend without repeats."""
    return bool(((indices.diff() > 0) | (rows.diff() > 0)).all())


def check_sets(indices: Tensor, offsets: Tensor, num_labels: int) -> None:
    """Refuses compressed rows that do not keep the contract."""
    check_offsets("offsets", offsets, indices.numel())
    check_range(indices, offsets, num_labels)
    if not is_ascending(indices, rows_of(indices, offsets)):
        raise ValueError("the labels of a row are not in ascending order")


def check_values(name: str, indices: Tensor, offsets: Tensor, num_labels: int) -> None:
    """``check_sets`` for code that computes with the sets in torch. The kernels of the CPU check their own input, and on
    another device a check would wait for it."""
    if indices.device.type == "cpu" and not by_operator(indices, offsets):
        try:
            check_sets(indices, offsets, num_labels)
        except ValueError as error:
            raise ValueError(f"{name} are not valid label sets: {error}; build them with LabelSets(…)") from None


def checked_sets(sets: LabelSets) -> tuple[Tensor, Tensor]:
    """(indices, offsets) after ``check_values``: for kernels that trust them, which an interpreter runs on the CPU."""
    indices, offsets = sets.unchecked()
    check_values("targets", indices, offsets, sets.num_labels)
    return indices, offsets


def checked_rows(indices: Tensor, offsets: Tensor, num_labels: int) -> Tensor:
    """``rows_of`` after ``check_values``."""
    check_values("targets", indices, offsets, num_labels)
    return rows_of(indices, offsets)


def in_order(indices: Tensor, offsets: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """Checks compressed rows, sorts the labels of each row and merges repeats; returns copies, int64."""
    # Copies: what the caller does to its tensors later must not reach the sets.
    indices, offsets = (tensor.to(torch.int64, copy=True) for tensor in (indices, offsets))
    check_offsets("offsets", offsets, indices.numel())
    check_range(indices, offsets, num_labels)
    rows = rows_of(indices, offsets)
    if is_ascending(indices, rows):
        return indices, offsets
    order = torch.argsort(indices, stable=True)
    order = order[torch.argsort(rows[order], stable=True)]
    indices, rows = indices[order], rows[order]
    first = torch.ones_like(indices, dtype=torch.bool)  # of equal entries
    first[1:] = (indices.diff() != 0) | (rows.diff() != 0)
    return indices[first], offsets_of(rows[first], offsets.numel() - 1)


@torch.library.custom_op("sigkernels::label_sets_in_order", mutates_args=())
def in_order_operator(indices: Tensor, offsets: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    """``in_order`` for torch.compile and tracing: the values are looked at when the graph runs."""
    if indices.is_meta:
        return indices.to(torch.int64, copy=True), offsets.to(torch.int64, copy=True)
    return in_order(indices, offsets, num_labels)


@in_order_operator.register_fake
def _(indices: Tensor, offsets: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    nnz = torch.library.get_ctx().new_dynamic_size()  # repeats are merged
    return indices.new_empty(nnz, dtype=torch.int64), offsets.new_empty(offsets.shape, dtype=torch.int64)


# -- other forms ---------------------------------------------------------------------------------------------------


def tensor_of(name: str, array: Any) -> Tensor:
    """An array, or what numpy makes one of, as a tensor of its own."""
    try:
        table = hasattr(array, "to_numpy")
        array = np.asarray(array)
        if table and array.dtype == object:  # of nullable types of pandas, or of several
            array = np.array(array.tolist())
        if array.dtype.kind in "biuf":
            return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError):  # rows of different lengths, types that torch lacks
        pass
    got = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else repr(array)
    raise TypeError(f"{name} must be an array of booleans, integers or floating point numbers, got {got}")


def lists_to_rows(name: str, lists: Any, num_labels: int) -> tuple[Tensor, Tensor]:
    """One iterable of labels per row."""
    if isinstance(lists, (str, bytes, Mapping)) or not isinstance(lists, Iterable):
        raise TypeError(f"{name} must hold one list of labels per row, got {type(lists).__name__}")
    flat: list[int] = []
    ends = [0]
    for row, labels in enumerate(lists):
        flat += _labels_of(name, row, labels, num_labels)
        ends.append(len(flat))
    return torch.tensor(flat, dtype=torch.int64), torch.tensor(ends, dtype=torch.int64)


def dense_to_rows(name: str, dense: Any) -> tuple[Tensor, Tensor, int]:
    """A tensor or array ``[B, n]`` of zeros and ones → indices, offsets, n."""
    dense = dense if isinstance(dense, Tensor) else tensor_of(name, dense)
    if hasattr(dense, "full_tensor"):
        raise TypeError(
            f"{name} is a {type(dense).__name__}, sharded over processes; pass {name}.full_tensor(), or the sets of "
            f"this process, {name}.to_local()"
        )
    if dense.ndim != 2:
        raise ValueError(f"{name} must have shape [B, n], got {tuple(dense.shape)}; wrap one set as [[…]]")
    if dense.layout is not torch.strided or dense.is_nested:
        got, remedy = ("a nested tensor", "from_lists") if dense.is_nested else (f"layout {dense.layout}", "from_csr")
        raise TypeError(f"{name} must be a dense tensor, got {got}; use LabelSets.{remedy}")
    refuse_meta(name, dense)
    if dense.is_complex():
        raise TypeError(f"{name} must be bool, integer or floating point, got {dense.dtype}; take its real part")
    active = dense != 0
    if dense.dtype != torch.bool and bool(((dense != 1) & active).any()):
        row, label = ((dense != 1) & active).nonzero()[0].tolist()
        raise ValueError(_not_a_set(name, dense[row, label].item(), row, label))
    sizes = active.sum(1)  # of as many entries as there are rows, which the compiler knows
    return active.nonzero()[:, 1], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), check_num_labels(dense.shape[1])


def as_csr(sets: Any) -> Any:
    """A sparse torch tensor of any layout as CSR; others as they are."""
    return sets.to_sparse_csr() if isinstance(sets, Tensor) and sets.layout is not torch.sparse_csr else sets


def is_table(sets: Any) -> bool:
    """Whether this is an array that is no collection of lists: numpy's, or a data frame."""
    if isinstance(sets, np.ndarray):
        return sets.dtype != object
    return hasattr(sets, "to_numpy") and getattr(sets, "ndim", 0) == 2


def csr_to_rows(name: str, matrix: Any) -> tuple[Tensor, Tensor, int]:
    """A sparse torch tensor or scipy matrix ``[B, n]`` of zeros and ones → indices, offsets, n; zeros are dropped."""
    if isinstance(matrix, Tensor):
        indices, offsets, values = _torch_csr(name, matrix)
    elif hasattr(matrix, "tocsr"):
        indices, offsets, values = _scipy_csr(name, matrix)
    else:
        raise TypeError(
            f"{name} must be a scipy.sparse matrix or a torch.sparse_csr tensor, got {type(matrix).__name__}"
        )
    batch, num_labels = matrix.shape
    if values.numel() != indices.numel() or offsets.numel() != batch + 1:
        raise ValueError(
            f"{name} is damaged: {batch} rows, {offsets.numel()} row pointers, {indices.numel()} column indices and "
            f"{values.numel()} values do not fit together; build it anew"
        )
    check_offsets(f"the row pointers of {name}", offsets, indices.numel())
    num_labels = check_num_labels(num_labels)
    check_range(indices, offsets, num_labels)
    rows = rows_of(indices, offsets)
    keep = values != 0
    if bool((keep & (values != 1)).any()):
        at = int((keep & (values != 1)).nonzero()[0])
        raise ValueError(_not_a_set(name, values[at].item(), int(rows[at]), int(indices[at])))
    return *in_order(indices[keep], offsets_of(rows[keep], batch), num_labels), num_labels


def _torch_csr(name: str, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if matrix.layout != torch.sparse_csr or matrix.ndim != 2:
        raise ValueError(
            f"{name} must be a 2-D torch.sparse_csr tensor, got layout {matrix.layout}; "
            "call .to_sparse_csr(), or use from_dense"
        )
    refuse_meta(name, matrix)
    if matrix.is_complex():
        raise TypeError(f"{name} must hold real numbers, got dtype {matrix.dtype}; take its real part")
    return matrix.col_indices().to(torch.int64), matrix.crow_indices().to(torch.int64), matrix.values()


def _scipy_csr(name: str, matrix: Any) -> tuple[Tensor, Tensor, Tensor]:
    if matrix.format != "csr":  # whose own arrays are checked below
        check_scipy_format(name, matrix)
    csr = matrix.tocsr()
    if csr.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold real numbers, got dtype {csr.dtype}; call .real or .astype(float)")
    arrays = csr.indices.astype("int64"), csr.indptr.astype("int64"), csr.data.astype("float64")
    indices, offsets, values = (torch.from_numpy(array) for array in arrays)
    return indices, offsets, values


def check_scipy_format(name: str, matrix: Any) -> None:
    """Refuses indices outside of a scipy matrix, which scipy trusts: it would read and write beyond its arrays."""
    try:
        if matrix.format in ("csr", "csc", "bsr"):
            matrix.check_format(full_check=True)
        elif matrix.format == "coo":
            for axis, (indices, size) in enumerate(zip(matrix.coords, matrix.shape, strict=True)):
                if len(indices) != len(matrix.data) or (
                    len(indices) and not 0 <= indices.min() <= indices.max() < size
                ):
                    raise ValueError(f"its indices of axis {axis} are not {len(matrix.data)} numbers in 0 … {size - 1}")
    except (ValueError, IndexError) as error:
        raise ValueError(f"{name} is damaged, scipy cannot read it: {error}; build it anew") from error


def index_tensor(key: np.ndarray) -> Tensor:
    """A numpy index or mask as a tensor."""
    if key.size and key.dtype.kind not in "biu":
        raise IndexError(f"label sets are indexed by integers or booleans, got {reprlib.repr(key.tolist())}")
    return torch.from_numpy(key.astype(bool if key.dtype.kind == "b" else np.int64))


def is_set(value: Any) -> bool:
    """Whether a value is a collection of labels rather than one number or a text."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes))


def _labels_of(name: str, row: int, labels: Any, num_labels: int) -> list[int]:
    """One row of lists, checked, sorted and without repeats."""
    values = labels.tolist() if hasattr(labels, "tolist") else labels
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"row {row} of {name} must be a list of labels, got {labels!r}; wrap a single set as [[…]]")
    values = [value if type(value) is int else _label(name, row, value) for value in values]
    distinct = sorted(set(values))
    if distinct and (distinct[0] < 0 or distinct[-1] >= num_labels):
        wrong = distinct[0] if distinct[0] < 0 else distinct[-1]
        raise ValueError(_out_of_range(row, wrong, num_labels))
    if len(values) == num_labels > len(distinct) and distinct[-1] <= 1:
        raise ValueError(
            f"row {row} of {name} holds {num_labels} zeros and ones, one per label: that is a dense target, not a list "
            "of labels; use LabelSets.from_dense, or give the loss a tensor"
        )
    return distinct


def _label(name: str, row: int, value: Any) -> int:
    try:
        return check_int("label", value)
    except TypeError:
        raise TypeError(
            f"row {row} of {name} holds {value!r}, which is not a whole number; labels are integers: "
            "for zeros and ones or booleans [B, n] use LabelSets.from_dense"
        ) from None


def _out_of_range(row: int, label: int, num_labels: int) -> str:
    return f"label {label} in row {row} is out of range: labels are 0 … {num_labels - 1} (num_labels={num_labels})"


def _not_a_set(name: str, value: float, row: int, label: int) -> str:
    if isinstance(value, float) and 0 < value < 1:
        remedy = f"threshold soft labels, {name} > 0.5, or give them to a loss as a dense floating point target"
    else:
        remedy = f"where every entry but 0 means active, pass {name} != 0"
    return f"{name} holds {value} at row {row}, label {label}; a set has only 0 and 1: {remedy}"
