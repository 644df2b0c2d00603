"""Losses: frozen dataclasses that say what is minimised and hold all of its settings."""

import torch

from .base import ColumnLoss, ElementwiseLoss, Loss, Reduction, RowLoss
from .confusion import Average, ConfusionLoss, Metric, SigmoidF1, UnboundedF1
from .elementwise import BCE, Asymmetric, Focal, Poly1BCE
from .kernel_params import ConfusionParams, ElementwiseParams
from .row import LMLNLL, RankedRowLoss, SmoothTopKSVM, TruncatedTopKEntropy

__all__ = [
    "BCE",
    "LMLNLL",
    "Asymmetric",
    "Average",
    "ColumnLoss",
    "ConfusionLoss",
    "ConfusionParams",
    "ElementwiseLoss",
    "ElementwiseParams",
    "Focal",
    "Loss",
    "Metric",
    "Poly1BCE",
    "RankedRowLoss",
    "Reduction",
    "RowLoss",
    "SigmoidF1",
    "SmoothTopKSVM",
    "TruncatedTopKEntropy",
    "UnboundedF1",
]

# So that checkpoints whose hyperparameters hold a loss load with torch.load's default, weights_only=True.
torch.serialization.add_safe_globals(
    [BCE, Asymmetric, Focal, Poly1BCE, SigmoidF1, UnboundedF1, LMLNLL, SmoothTopKSVM, TruncatedTopKEntropy]
)
