"""Operations, one file each: the autograd Function, its torch.library registration, and the dispatch."""

from .fused_update import updated_loss
from .layer_loss import layer_loss
from .lml import LML, lml, lml_nll
from .logits import logits
from .partial_loss import partial_loss
from .plain_loss import plain_loss
from .predict import predict
from .smooth_topk_svm import smooth_topk_svm
from .topk import topk
from .truncated_topk_entropy import truncated_topk_entropy

__all__ = [
    "LML",
    "layer_loss",
    "lml",
    "lml_nll",
    "logits",
    "partial_loss",
    "plain_loss",
    "predict",
    "smooth_topk_svm",
    "topk",
    "truncated_topk_entropy",
    "updated_loss",
]
