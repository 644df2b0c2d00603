"""Label sets from files, for the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..labels import LabelSets
from .files import TORCH_SUFFIXES, BadFile, existing_file, read_arrays, read_utf8

NUMBER = re.compile("[+-]?[0-9]+")  # int() also takes 1_000 and digits of other scripts


def load_label_sets(path: str, num_labels: int) -> LabelSets:
    """Label sets from ``.npz`` (indices and offsets, a scipy sparse matrix, or one dense 0/1 matrix), ``.npy`` or text.

    Text has one set per line, labels separated by commas or spaces; in svmlight lines the features (``7:0.5``) and
    comments (``# …``) are skipped. An empty line is the empty set; a line that is a comment and no more is none.
    """
    file = existing_file(path)
    try:
        if file.suffix in (".npz", ".npy", *TORCH_SUFFIXES):
            return _stored_sets(file, num_labels)
        return LabelSets.from_lists(_text_sets(file), num_labels)
    except BadFile:
        raise
    except (ValueError, TypeError) as error:
        raise BadFile(f"{path}: {error}") from None


def _stored_sets(file: Path, num_labels: int) -> LabelSets:
    arrays = read_arrays(file)
    if file.suffix == ".npz" and "format" in arrays and "shape" in arrays:
        return _over(file, num_labels, _scipy_matrix(file, arrays), LabelSets.from_csr)
    for names in (("indices", "offsets"), ("label_indices", "label_offsets")):
        if all(name in arrays for name in names):
            indices, offsets = (_whole_numbers(file, name, arrays[name]) for name in names)
            stored = _whole_numbers(file, "num_labels", arrays.get("num_labels", num_labels))
            if stored.numel() != 1 or int(stored) != num_labels:
                over = stored.tolist()
                raise BadFile(f"{file}: holds sets over {over} labels, and the classifier has {num_labels}")
            return LabelSets(indices, offsets, num_labels)
    dense = [a for a in arrays.values() if a.ndim == 2]
    if len(dense) != 1:
        raise BadFile(f"{file}: needs indices and offsets, or one dense 0/1 matrix [sets, labels]")
    matrix = torch.as_tensor(dense[0])
    sparse = matrix.layout == torch.sparse_csr
    return _over(file, num_labels, matrix, LabelSets.from_csr if sparse else LabelSets.from_dense)


def _scipy_matrix(file: Path, arrays: dict[str, Any]) -> Any:
    """The matrix that ``scipy.sparse.save_npz`` wrote, in any of its forms."""
    from scipy.sparse import load_npz

    for name in ("indices", "indptr", "row", "col", "offsets"):
        if name in arrays:
            _whole_numbers(file, name, arrays[name])
    try:
        matrix = load_npz(file)
        if hasattr(matrix, "check_format"):  # scipy itself trusts the numbers in it
            matrix.check_format(full_check=True)
    except Exception as error:  # whatever scipy stumbles over in numbers that are not those of a matrix
        raise BadFile(f"{file}: is a damaged sparse matrix: {error.args[0] if error.args else error!r}") from None
    return matrix


def _over(file: Path, num_labels: int, matrix: Any, read: Callable[[Any], LabelSets]) -> LabelSets:
    """The sets in a matrix [sets, labels], if it has as many labels as the classifier."""
    if len(matrix.shape) != 2:
        raise BadFile(f"{file}: must hold a matrix [sets, labels], got shape {tuple(matrix.shape)}")
    if matrix.shape[1] != num_labels:
        raise BadFile(f"{file}: is a matrix over {matrix.shape[1]} labels, and the classifier has {num_labels}")
    return read(matrix)


def _whole_numbers(file: Path, name: str, values: Any) -> torch.Tensor:
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise BadFile(f"{file}: {name} must hold whole numbers, got {values.dtype}")
    return torch.from_numpy(values.astype(np.int64))


def _text_sets(file: Path) -> list[list[int]]:
    sets: list[list[int]] = []
    features = False
    for number, line in enumerate(read_utf8(file).splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        words = line.split("#")[0].replace(",", " ").split()
        labels = [word for word in words if ":" not in word]
        features = features or len(labels) < len(words)
        if not all(NUMBER.fullmatch(word) for word in labels):
            raise BadFile(
                f"{file}, line {number}: {line.strip()[:60]!r} is not a list of label numbers; a line is one set, its "
                "labels separated by commas or spaces"
            )
        sets.append([int(word) for word in labels])
    if features and not any(sets):
        raise BadFile(
            f"{file}: holds features alone (7:0.5), and no label in any line; a line is the labels of one set"
        )
    return sets
