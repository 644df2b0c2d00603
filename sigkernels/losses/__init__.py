"""Losses: frozen dataclasses that say what is measured and hold all of its settings."""

from .base import Loss
from .confusion import ConfusionLoss, SigmoidF1, UnboundedF1
from .elementwise import BCE, Asymmetric, Focal
from .row import LMLNLL, RowLoss, TruncatedTopKEntropy

__all__ = [
    "BCE",
    "LMLNLL",
    "Asymmetric",
    "ConfusionLoss",
    "Focal",
    "Loss",
    "RowLoss",
    "SigmoidF1",
    "TruncatedTopKEntropy",
    "UnboundedF1",
]
