"""The encoder of the demo and the three output layers that it is trained with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sigkernels as sk
from sigkernels.datasets import SparseDataset
from sigkernels.labels import LabelSets

EMBEDDING, HIDDEN = 256, 512


class Encoder(nn.Module):
    """Mean of token embeddings, then one hidden layer: a bag of tokens → ``[B, 512]``."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(num_features, EMBEDDING, mode="mean")
        self.hidden = nn.Linear(EMBEDDING, HIDDEN)

    def forward(self, bags: LabelSets) -> Tensor:
        # Means of many small embeddings are small: ×4 brings them to the scale the next layer starts with.
        tokens = self.embedding(bags.indices, bags.offsets[:-1]) * 4
        return F.relu(self.hidden(F.relu(tokens)))


class PlainLinear(nn.Linear):
    """The usual layer: ``nn.Linear`` and ``BCEWithLogits`` on dense targets, with the verbs of a head."""

    def loss(self, hidden: Tensor, targets: LabelSets, reduction: str = "mean") -> Tensor:
        dense = targets.to_dense(hidden.dtype)
        return F.binary_cross_entropy_with_logits(self(hidden), dense, reduction=reduction)

    def topk(self, hidden: Tensor, m: int) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(self(hidden), m)
        return values, indices


class Model(nn.Module):
    """Encoder and head."""

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head: Any = head

    def loss(self, batch: SparseDataset) -> Tensor:
        """Binary cross-entropy, summed over the labels and averaged over the rows."""
        return self.head.loss(self.encoder(batch.features), batch.labels, reduction="sum") / len(batch)

    def head_parameters(self) -> int:
        """The number of trainable parameters of the head."""
        return sum(p.numel() for p in self.head.parameters() if p.requires_grad)

    def verify(self, label_sets: LabelSets, **options: Any) -> Any:
        """Which of the sets the trained head can predict for any input at all."""
        return sk.verify(self.head, label_sets, **options)


def build(kind: str, num_features: int, num_labels: int, k: int, width: int, seed: int) -> Model:
    """``kind``: plain, bottleneck or dft. The same seed gives every kind the same encoder."""
    torch.manual_seed(seed)
    encoder = Encoder(num_features)
    if kind == "plain":
        head: nn.Module = PlainLinear(HIDDEN, num_labels)
    elif kind == "bottleneck":
        head = sk.LinearHead(HIDDEN, num_labels, bottleneck=width)
    else:
        head = sk.DFTHead(HIDDEN, num_labels, k=k, slack=width)
    return Model(encoder, head)
