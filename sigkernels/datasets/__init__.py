"""Data to try things on: a real set that ships with the package, and a synthetic one of any size."""

from sigkernels.datasets.debian import debian_deps
from sigkernels.datasets.sparse import SparseDataset
from sigkernels.datasets.synthetic import SyntheticStream, synthetic

__all__ = ["SparseDataset", "SyntheticStream", "debian_deps", "synthetic"]
