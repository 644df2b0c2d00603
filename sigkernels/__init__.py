"""Multi-label output layers: fused losses, heads that can predict every label set, and proofs.

Three nouns: a **head** (``DFTHead``, ``LinearHead``) owns a classifier matrix, **LabelSets** are a batch of sparse
label sets, a **loss** (``BCE``, …) says what is minimised.
"""

from typing import TYPE_CHECKING

from . import datasets, functional, metrics, optim, signs
from .backends import available_backends, backend, backend_status
from .clip import clip_grad_norm_
from .dft import dft_matrix
from .dft_head import DFTHead
from .guarantee import Guarantee
from .head_base import Head
from .labels import LabelSets
from .linear_head import LinearHead
from .losses import (
    BCE,
    LMLNLL,
    Asymmetric,
    ColumnLoss,
    ElementwiseLoss,
    Focal,
    Loss,
    Poly1BCE,
    RowLoss,
    SigmoidF1,
    SmoothTopKSVM,
    TruncatedTopKEntropy,
    UnboundedF1,
)
from .ops import LML
from .suggest import suggest
from .swap import swap_output_layer
from .thresholds import Thresholds
from .verify import AllSetsReport, Report, Verdict, verify, verify_all, verify_classes

if TYPE_CHECKING:
    from .estimator import MultiLabelClassifier
else:

    def __getattr__(name):
        # Imported with its first use, since scikit-learn, where it is installed, comes along and takes a second.
        if name == "MultiLabelClassifier":
            from .estimator import MultiLabelClassifier

            return MultiLabelClassifier
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "BCE",
    "LML",
    "LMLNLL",
    "AllSetsReport",
    "Asymmetric",
    "ColumnLoss",
    "DFTHead",
    "ElementwiseLoss",
    "Focal",
    "Guarantee",
    "Head",
    "LabelSets",
    "LinearHead",
    "Loss",
    "MultiLabelClassifier",
    "Poly1BCE",
    "Report",
    "RowLoss",
    "SigmoidF1",
    "SmoothTopKSVM",
    "Thresholds",
    "TruncatedTopKEntropy",
    "UnboundedF1",
    "Verdict",
    "available_backends",
    "backend",
    "backend_status",
    "clip_grad_norm_",
    "datasets",
    "dft_matrix",
    "functional",
    "metrics",
    "optim",
    "signs",
    "suggest",
    "swap_output_layer",
    "verify",
    "verify_all",
    "verify_classes",
]
