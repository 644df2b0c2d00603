"""Classifier matrices and label sets from files, for the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..labels import LabelSets

WEIGHT_NAMES = ("weight", "W", "classifier.weight")
SLACK_NAMES = ("slack_weight", "Ws.weight")  # of a DFT head, beside its proj.weight [2k+1+s, e]; here and as published


class Classifier(NamedTuple):
    """An output layer from a file: W [n, d], or the slack columns S [n, s] of a DFT head of this k."""

    weight: Any
    bias: Any  # [n] or None
    k: int | None
    in_features: int | None = None  # of the projection before a DFT head


class BadFile(ValueError):
    """A file that cannot be used, with one line that says why."""


def _existing(path: str) -> Path:
    file = Path(path)
    if not file.is_file():
        raise BadFile(f"{path}: no such file")
    return file


def _arrays(file: Path) -> dict[str, Any]:
    """The named arrays in a file; a file with one array has the name ''."""
    try:
        if file.suffix == ".npy":
            return {"": np.load(file, allow_pickle=False)}
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as data:
                return {name: data[name] for name in data.files}
        if file.suffix in (".pt", ".pth", ".bin"):
            data = torch.load(file, map_location="cpu", weights_only=True)
            if isinstance(data, torch.Tensor):
                return {"": data}
            if isinstance(data, LabelSets):
                return {"indices": data.indices, "offsets": data.offsets}
            if isinstance(data, dict):
                inner = data.get("state_dict", data)
                return {str(k): v for k, v in inner.items() if isinstance(v, torch.Tensor)}
            raise BadFile(f"{file}: holds a {type(data).__name__}; save a tensor or a state dict")
        if file.suffix == ".safetensors":
            try:
                from safetensors.torch import load_file
            except ImportError:
                raise BadFile(f"{file}: reading .safetensors needs: pip install safetensors") from None
            return dict(load_file(file))
    except BadFile:
        raise
    except Exception as error:
        if file.suffix in (".npy", ".npz"):
            raise BadFile(f"{file}: cannot be read: damaged, or not a numpy file of plain numbers") from None
        raise BadFile(
            f"{file}: cannot be read ({type(error).__name__}: {(str(error).splitlines() or ['empty'])[0]})"
        ) from None
    raise BadFile(f"{file}: unknown kind of file; use .npz, .npy, .pt or .safetensors")


def load_classifier(path: str, key: str | None = None, bias_key: str | None = None, k: int | None = None) -> Classifier:
    """The output layer in a file.

    ``key`` names its matrix where there are several; ``k`` says that these are the slack columns of a DFT head, where
    the file does not say so itself.
    """
    arrays = _arrays(_existing(path))
    key = _which_matrix(path, arrays, key)
    weight = arrays[key]
    if weight.ndim != 2:
        name = f"array {key!r}" if key else "its array"
        raise BadFile(f"{path}: {name} has shape {tuple(weight.shape)}; an output layer is a matrix [labels, features]")
    if bias_key is not None and bias_key not in arrays:
        raise BadFile(f"{path}: holds no array {bias_key!r} for the bias")
    guess = key[: -len("weight")] + "bias" if key.endswith("weight") else "bias"
    bias = arrays.get(guess if bias_key is None else bias_key)
    if bias_key is None and bias is not None and bias.ndim != 1:
        bias = None
    if not _is_slack(key):
        return Classifier(weight, bias, k)
    prefix = next(key.removesuffix(name) for name in SLACK_NAMES if _is_slack(key, name))
    projection = arrays.get(f"{prefix}proj.weight")
    if projection is None or projection.ndim != 2:
        if k is None:
            raise BadFile(f"{path}: {key!r} holds the slack columns of a DFT head; say its k with --dft K")
        return Classifier(weight, bias, k)
    # The projection has 2k+1+s rows.
    rows, columns = projection.shape[0], weight.shape[1]
    if rows <= columns or (rows - columns) % 2 == 0:
        raise BadFile(
            f"{path}: {prefix}proj.weight has {rows} rows, which is not 2k+1+s for the s = {columns} columns of {key!r}"
        )
    stored = (rows - columns - 1) // 2
    if k not in (None, stored):
        raise BadFile(f"{path}: --dft {k} contradicts {prefix}proj.weight, whose {rows} rows say k = {stored}")
    return Classifier(weight, bias, stored, projection.shape[1])


def _is_slack(key: str, *names: str) -> bool:
    return any(key == name or key.endswith(f".{name}") for name in names or SLACK_NAMES)


def _which_matrix(path: str, arrays: dict[str, Any], key: str | None) -> str:
    """The name of the output layer, if it is given or there is no doubt."""
    if key is not None:
        if key not in arrays:
            raise BadFile(f"{path}: holds no array {key!r} (it has: {', '.join(sorted(arrays)[:8])})")
        return key
    if len(arrays) == 1:
        return next(iter(arrays))
    matrices = [name for name, a in arrays.items() if a.ndim == 2]
    slack = [name for name in matrices if _is_slack(name)]
    known = [name for name in WEIGHT_NAMES if name in matrices]
    if len(matrices) == 1:
        return matrices[0]
    if len(slack) == 1 and not known:
        return slack[0]
    if known and not slack:
        return known[0]
    shown = ", ".join(sorted(matrices)[:8]) or "none"
    raise BadFile(f"{path}: which matrix is the output layer? Say --weight NAME (matrices: {shown})")


def load_label_sets(path: str, num_labels: int) -> LabelSets:
    """Label sets from ``.npz`` (indices and offsets, a scipy sparse matrix, or one dense 0/1 matrix), ``.npy`` or text.

    Text has one set per line, labels separated by commas or spaces; in svmlight lines the features (``7:0.5``) and
    comments (``# …``) are skipped. An empty line is the empty set.
    """
    file = _existing(path)
    try:
        if file.suffix in (".npz", ".npy", ".pt", ".pth"):
            return _stored_sets(file, num_labels)
        return LabelSets.from_lists(_text_sets(file), num_labels)
    except BadFile:
        raise
    except (ValueError, TypeError) as error:
        raise BadFile(f"{path}: {error}") from None


def _stored_sets(file: Path, num_labels: int) -> LabelSets:
    arrays = _arrays(file)
    if file.suffix == ".npz" and "format" in arrays and "shape" in arrays:
        return _over(file, num_labels, _scipy_matrix(file, arrays), LabelSets.from_csr)
    for names in (("indices", "offsets"), ("label_indices", "label_offsets")):
        if all(name in arrays for name in names):
            indices, offsets = (_whole_numbers(file, name, arrays[name]) for name in names)
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
    sets = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), start=1):
        words = line.split("#")[0].replace(",", " ").split()
        try:
            sets.append([int(w) for w in words if ":" not in w])
        except ValueError:
            raise BadFile(f"{file}, line {number}: {line.strip()[:60]!r} is not a list of label numbers") from None
    return sets
