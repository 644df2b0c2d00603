"""Data to try things on: a real set that ships with the package, and a synthetic one of any size."""

from .debian import debian_deps
from .sparse import SparseDataset
from .synthetic import SyntheticStream, synthetic

__all__ = ["SparseDataset", "SyntheticStream", "debian_deps", "synthetic"]
