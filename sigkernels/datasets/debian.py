"""debian_deps: from the name and the one-line description of a Debian package, predict what it depends on.

53,422 examples, 11,732 labels, 4.6 labels on average, at most 80: the shape of a clinical-coding benchmark,
free of anybody's records. ``bench/data/build_debian_deps.py`` rebuilds it from ``apt-cache dumpavail``.
"""

from __future__ import annotations

import importlib.resources
import os
import zipfile

import numpy as np
import torch

from ..labels import LabelSets
from .sparse import SparseDataset

NUM_FEATURES = 32_768  # hash buckets of the tokens


def debian_deps(path: str | os.PathLike[str] | None = None) -> SparseDataset:
    """The data set that ships with the package, or a variant that ``build_debian_deps.py`` wrote to ``path``.

    ``features`` are the distinct hashed tokens of a package's name, description, section and architecture;
    ``labels`` the packages it depends on; ``names`` and ``label_names`` say which is which.

    Example:
        >>> data = sk.datasets.debian_deps()
        >>> data
        SparseDataset(53,422 examples, 32,768 features, 11,732 labels, 4.6 labels on average, at most 80)
        >>> str(data.names[0])
        '0ad'
    """
    if path is not None:
        return _load(path)
    resource = importlib.resources.files("sigkernels.datasets").joinpath("debian_deps.npz")
    with importlib.resources.as_file(resource) as file:
        return _load(file)


def _open(path: str | os.PathLike[str]) -> np.lib.npyio.NpzFile:
    try:
        data = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile):  # what numpy says of a file of another kind
        data = None
    if not isinstance(data, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} is no .npz file; give one that bench/data/build_debian_deps.py wrote")
    return data


def _load(path: str | os.PathLike[str]) -> SparseDataset:
    with _open(path) as data:
        missing = [name for name in ("feature_indices", "label_indices", "label_names") if name not in data]
        if missing:
            raise ValueError(f"{path} has no {missing[0]!r}: it was not written by bench/data/build_debian_deps.py")

        def sets(name: str, size: int) -> LabelSets:
            indices, offsets = (data[f"{name}_{part}"].astype(np.int64) for part in ("indices", "offsets"))
            return LabelSets(torch.from_numpy(indices), torch.from_numpy(offsets), size)

        label_names = data["label_names"]
        names = data.get("names")
        return SparseDataset(sets("feature", NUM_FEATURES), sets("label", len(label_names)), names, label_names)
