"""Operations, one file each: the autograd Function, its torch.library registration, and the dispatch."""

from .fused_loss import fused_loss
from .logits import logits
from .predict import predict
from .topk import topk

__all__ = ["fused_loss", "logits", "predict", "topk"]
