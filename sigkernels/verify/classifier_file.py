"""The output layer in a file: which array is its matrix, which is its bias, and what must not be overlooked."""

from __future__ import annotations

import argparse
import warnings
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from ..codes import CODES
from ..fixed_columns import MARK, FixedColumns
from .files import BadFile, existing_file, read_arrays
from .inputs import as_numpy

# Names of output layers where a file holds several matrices; a prefix such as "model." or "module." may come before.
WEIGHT_NAMES = (
    *("weight", "W", "coef_", "classifier.weight", "head.weight", "fc.weight"),
    *("score.weight", "lm_head.weight", "output.weight"),
)
PREFIXES = ("model.", "module.", "_orig_mod.", "net.")  # what frameworks put before the names of a model
BIAS_NAMES = ("bias", "b", "intercept_")  # beside the matrix
SLACK_NAMES = ("slack_weight", "Ws.weight")  # of a DFT head, beside its proj.weight [2k+1+s, e]; here and as published


class StoredClassifier(NamedTuple):
    """An output layer from a file: W [n, d], or the slack columns S [n, s] of a DFT head of this k."""

    weight: ndarray
    bias: ndarray | None  # [n]
    k: int | None
    codes: int  # columns of codes of a DFT head
    in_features: int | None  # of the projection before a DFT head
    weight_name: str
    bias_name: str | None
    unused: list[str]  # names of all other arrays

    def __str__(self) -> str:
        shape = " × ".join(map(str, self.weight.shape))
        weight = f"{self.weight_name or 'the array'} [{shape}]"
        bias = f"bias {self.bias_name}" if self.bias_name is not None else "no bias"
        rest = ", ".join(self.unused[:5]) + (f", … {len(self.unused)} in all" if len(self.unused) > 5 else "")
        return f"weight {weight}, {bias}" + (f"; not used: {rest}" if self.unused else "")


def add_array_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which arrays in WEIGHTS are the output layer."""
    parser.add_argument("--weight", metavar="NAME", help="which array in WEIGHTS is the matrix")
    parser.add_argument(
        "--bias", metavar="NAME", help="which array in WEIGHTS is the bias (default: beside the matrix)"
    )
    parser.add_argument("--no-bias", action="store_true", help="the classifier has no bias, whatever WEIGHTS holds")
    parser.add_argument(
        "--dft",
        type=int,
        metavar="K",
        help="WEIGHTS are the slack columns of a DFT head with this k (a head's state dict says so itself)",
    )


def load_output_layer(args: argparse.Namespace) -> tuple[Any, StoredClassifier]:
    """The classifier that ``verify`` takes, from ``args.weights`` and the options above, and where it came from."""
    layer = load_classifier(args.weights, args.weight, args.bias, args.no_bias, args.dft)
    return layer.weight if layer.k is None else _dft_head(layer, layer.k), layer


def load_classifier(
    path: str, weight: str | None = None, bias: str | None = None, no_bias: bool = False, k: int | None = None
) -> StoredClassifier:
    """The output layer in a file.

    ``weight`` and ``bias`` name its arrays where there is doubt, ``no_bias`` says that it has none; ``k`` says that
    these are the slack columns of a DFT head, where the file does not say so itself. An array that may be a bias and
    is not used is refused: it would be another classifier.
    """
    if no_bias and bias is not None:
        raise BadFile(f"--bias {bias} and --no-bias contradict each other: leave one of them out")
    arrays = read_arrays(existing_file(path))
    key = _which_matrix(path, arrays, weight)
    shape = tuple(arrays[key].shape)
    if len(shape) != 2 or not shape[0]:
        name = f"array {key!r}" if key else "its array"
        raise BadFile(f"{path}: {name} has shape {shape}; an output layer is a matrix [labels, features]")
    codes, in_features, projection = 0, None, f"{_prefix(key)}proj.weight"
    if _is_slack(key):
        k, codes, in_features = _dft_degree(path, arrays, key, projection, k)
    bias_key = None if no_bias else _which_bias(path, arrays, key, bias)
    own = (projection, f"{_prefix(key)}proj.bias", _prefix(key) + MARK)  # of a DFT head
    used = {key, bias_key, *(own if in_features else ())}
    unused = sorted(name for name in arrays if name not in used)
    if not no_bias and bias is None:
        _refuse_overlooked(path, arrays, unused, shape[0], bias_key)
    return StoredClassifier(
        _numbers(path, key, arrays[key]),
        None if bias_key is None else _numbers(path, bias_key, arrays[bias_key]).reshape(-1),
        k,
        codes,
        in_features,
        key,
        bias_key,
        unused,
    )


def _numbers(path: str, key: str, array: Any) -> ndarray:
    try:
        return as_numpy(f"{key!r}" if key else "its array", array)
    except (TypeError, ValueError) as error:
        raise BadFile(f"{path}: {error}") from None


def _prefix(key: str) -> str:
    """The module that an array belongs to, with its dot."""
    slack = next((name for name in SLACK_NAMES if _is_slack(key, name)), None)
    return key.removesuffix(slack) if slack else key[: key.rfind(".") + 1]


def _is_slack(key: str, *names: str) -> bool:
    return any(key == name or key.endswith(f".{name}") for name in names or SLACK_NAMES)


def _bare(name: str) -> str:
    """A name without what frameworks put before it."""
    while prefix := next((p for p in PREFIXES if name.startswith(p)), ""):
        name = name.removeprefix(prefix)
    return name


def _which_matrix(path: str, arrays: dict[str, Any], key: str | None) -> str:
    """The name of the output layer, if it is given or there is no doubt."""
    if key is not None:
        return _named(path, arrays, key)
    if len(arrays) == 1:
        return next(iter(arrays))
    matrices = [name for name, a in arrays.items() if a.ndim == 2]
    if not matrices:
        shown = f"; it holds {', '.join(sorted(arrays)[:8])}" if arrays else ""
        raise BadFile(f"{path}: has no matrix [labels, features], which an output layer is{shown}")
    # A [n, 1] beside a matrix of n rows is a bias.
    columns = [name for name in matrices if arrays[name].shape[1] == 1]
    wide = [name for name in matrices if name not in columns]
    if len(matrices) == 1 or len(wide) == 1:
        return (wide or matrices)[0]
    slack = [name for name in matrices if _is_slack(name)]
    known = [name for name in matrices if _bare(name) in WEIGHT_NAMES]
    if len(slack) + len(known) == 1:
        return (slack + known)[0]
    shown = ", ".join(sorted(matrices)[:8])
    raise BadFile(f"{path}: which matrix is the output layer? Say --weight NAME (matrices: {shown})")


def _named(path: str, arrays: dict[str, Any], key: str) -> str:
    if key not in arrays:
        shown = ", ".join(sorted(arrays)[:8]) or "one, without a name"
        raise BadFile(f"{path}: holds no array {key!r} (it has: {shown})")
    return key


def _which_bias(path: str, arrays: dict[str, Any], key: str, bias: str | None) -> str | None:
    """The name of the bias that belongs to the matrix ``key``; None when there is none."""
    labels = arrays[key].shape[0]
    beside = [name for name in (_prefix(key) + b for b in BIAS_NAMES) if name in arrays]
    found = [_named(path, arrays, bias)] if bias is not None else beside
    if not found:
        return None
    if len(found) > 1:
        raise BadFile(f"{path}: which of {', '.join(found)} is the bias? Say --bias NAME or --no-bias")
    if not _is_vector(arrays[found[0]], labels):
        shape = tuple(arrays[found[0]].shape)
        transposed = shape == (arrays[key].shape[1],)
        hint = "; if the matrix is [features, labels], save its transpose" if transposed else ", or say --no-bias"
        raise BadFile(f"{path}: {found[0]!r} has shape {shape}, and {key!r} has {labels} labels{hint}")
    return found[0]


def _is_vector(array: Any, labels: int) -> bool:
    """Whether it has one number for each label: [n], [n, 1] or [1, n]."""
    return tuple(array.shape) in ((labels,), (labels, 1), (1, labels))


def _refuse_overlooked(path: str, arrays: dict[str, Any], unused: list[str], labels: int, bias: str | None) -> None:
    """Refuse arrays with one number for each label that nothing was done with."""
    candidates = [name for name in unused if _is_vector(arrays[name], labels) and _may_be_bias(arrays[name], bias)]
    if candidates:
        found = f"the bias is {bias!r}, but" if bias is not None else "there may be a bias:"
        raise BadFile(
            f"{path}: {found} {candidates[0]!r} has one number for each of the {labels} labels too; "
            "say --bias NAME or --no-bias"
        )


def _may_be_bias(array: Any, bias: str | None) -> bool:
    dtype = str(array.dtype)
    return "float" in dtype or (bias is None and np.dtype(dtype.removeprefix("torch.")).kind in "iu")


def _dft_degree(
    path: str, arrays: dict[str, Any], key: str, projection: str, k: int | None
) -> tuple[int, int, int | None]:
    """k and the codes of a DFT head and the width of its input, from the 2k+1+codes+s rows of its projection."""
    matrix = arrays.get(projection)
    if matrix is None or matrix.ndim != 2:
        if k is None:
            raise BadFile(f"{path}: {key!r} holds the slack columns of a DFT head; say its k with --dft K")
        return k, 0, None
    rows, columns = matrix.shape[0], arrays[key].shape[1]
    if rows <= columns or (rows - columns) % 2 == 0:
        raise BadFile(
            f"{path}: {projection} has {rows} rows, which is not 2k+1+codes+s for the s = {columns} columns of {key!r}"
        )
    fixed = rows - columns - 1  # 2k + codes
    possible = {(fixed - codes) // 2: codes for codes in CODES if codes <= fixed}
    name = _prefix(key) + MARK
    if (marked := FixedColumns.of_mark(arrays.get(name))) is not None:
        if possible.get(marked.k) != marked.codes:
            raise BadFile(
                f"{path}: {name} says k = {marked.k} with {marked.codes} codes, which contradicts the {rows} rows of "
                f"{projection}"
            )
        possible = {marked.k: marked.codes}
    if k is None and len(possible) > 1:
        shown = ", ".join(f"k = {degree} with {codes} codes" for degree, codes in possible.items())
        raise BadFile(f"{path}: {projection} has {rows} rows, which fits {shown}; say which with --dft K")
    if k is None:
        (k,) = possible
    if k not in possible:
        shown = " or ".join(str(degree) for degree in possible)
        where = f"{name}, which says" if marked is not None else f"{projection}, whose {rows} rows say"
        raise BadFile(f"{path}: --dft {k} contradicts {where} k = {shown}")
    return k, possible[k], matrix.shape[1]


def _dft_head(layer: StoredClassifier, k: int) -> Any:
    """The head whose slack columns were in the file."""
    import torch

    from ..dft_head import DFTHead

    slack = torch.as_tensor(layer.weight)
    slack = slack if slack.is_floating_point() else slack.double()
    n, columns = slack.shape
    width = 2 * k + 1 + layer.codes + columns
    with warnings.catch_warnings():  # what the head says about a narrow projection, the report says too
        warnings.simplefilter("ignore")
        head = DFTHead(layer.in_features or width, n, k, columns, codes=layer.codes, dtype=slack.dtype)
    with torch.no_grad():
        head.slack_weight.copy_(slack)
    return head
