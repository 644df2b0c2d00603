"""Classifier matrices and label sets from files, for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..labels import LabelSets

WEIGHT_NAMES = ("weight", "W", "classifier.weight", "slack_weight")


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
        raise BadFile(f"{file}: cannot be read ({type(error).__name__}: {str(error).splitlines()[0]})") from None
    raise BadFile(f"{file}: unknown kind of file; use .npz, .npy, .pt or .safetensors")


def load_weights(path: str, key: str | None = None, bias_key: str | None = None) -> tuple[Any, Any]:
    """W [n, d] and the bias [n] (or None) from a file; ``key`` names the matrix where there are several."""
    arrays = _arrays(_existing(path))
    matrices = [name for name, a in arrays.items() if a.ndim == 2]
    if key is None:
        known = [name for name in WEIGHT_NAMES if name in matrices]
        if len(matrices) == 1:
            key = matrices[0]
        elif known:
            key = known[0]
        else:
            shown = ", ".join(sorted(matrices)[:8]) or "none"
            raise BadFile(f"{path}: which matrix is the output layer? Say --weight NAME (matrices: {shown})")
    if key not in arrays:
        raise BadFile(f"{path}: holds no array {key!r} (it has: {', '.join(sorted(arrays)[:8])})")
    if bias_key is None:
        guess = key[: -len("weight")] + "bias" if key.endswith("weight") else "bias"
        found = arrays.get(guess)
        return arrays[key], found if found is not None and found.ndim == 1 else None
    if bias_key not in arrays:
        raise BadFile(f"{path}: holds no array {bias_key!r} for the bias")
    return arrays[key], arrays[bias_key]


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
    for indices, offsets in (("indices", "offsets"), ("label_indices", "label_offsets"), ("indices", "indptr")):
        if indices in arrays and offsets in arrays:
            a, b = (torch.as_tensor(np.asarray(arrays[name]).astype(np.int64)) for name in (indices, offsets))
            return LabelSets(a, b, num_labels)
    dense = [a for a in arrays.values() if a.ndim == 2]
    if len(dense) != 1:
        raise BadFile(f"{file}: needs indices and offsets, or one dense 0/1 matrix [sets, labels]")
    matrix = torch.as_tensor(dense[0])
    if matrix.shape[1] != num_labels:
        raise BadFile(f"{file}: is a matrix over {matrix.shape[1]} labels, and the classifier has {num_labels}")
    return LabelSets.from_dense(matrix)


def _text_sets(file: Path) -> list[list[int]]:
    sets = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        words = line.split("#")[0].replace(",", " ").split()
        try:
            sets.append([int(w) for w in words if ":" not in w])
        except ValueError:
            raise BadFile(f"{file}, line {number}: {line.strip()[:60]!r} is not a list of label numbers") from None
    return sets
