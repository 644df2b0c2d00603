"""The encoder of the demo and the output layers that it is trained with."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sigkernels as sk

from ..datasets import SparseDataset
from ..labels import LabelSets

EMBEDDING, HIDDEN = 256, 512
CODES = 256
KINDS = ("plain", "bottleneck", "dft", "codes")


class Encoder(nn.Module):
    """Mean of token embeddings, then one hidden layer: a bag of tokens → ``[B, 512]``."""

    embedding: nn.EmbeddingBag
    hidden: nn.Linear

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

    @torch.no_grad()
    def init_prior(self, labels: LabelSets | float) -> None:
        """What ``LinearHead.init_prior`` does."""
        self.bias.copy_(sk.LinearHead(1, self.out_features, bias=True, prior=labels).state_dict()["bias"])


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

    def radii(self, label_sets: LabelSets) -> list[float]:
        """A proved lower bound on the radius of each set, 0 for impossible ones."""
        return [max(float(lowest), 0.0) for lowest in self.verify(label_sets, radius=True).radius_lo]


class Problem(NamedTuple):
    """What a layer has to be made for."""

    num_features: int
    labels: LabelSets  # of the training examples
    k: int  # the most labels that are active together

    @classmethod
    def of(cls, data: SparseDataset, k: int) -> Problem:
        """``data``: the training examples."""
        return cls(data.features.num_labels, data.labels, k)


def build(kind: str, problem: Problem, width: int, seed: int, *, prior: str = "frequencies") -> Model:
    """A model of ``KINDS``. The same seed gives every kind the same encoder, and every kind gets the same prior.

    ``prior``: "frequencies" starts every label at its own by a label bias, "mean" all at one number, "none" at torch's
    own initialisation, without a label bias where the kind can do without.
    """
    torch.manual_seed(seed)
    encoder = Encoder(problem.num_features)
    head = _head(kind, problem, width, label_bias=prior != "none")
    if prior == "frequencies":
        head.init_prior(problem.labels)
    elif prior == "mean":
        head.init_prior(problem.labels.indices.numel() / len(problem.labels))
    return Model(encoder, head)


def _head(kind: str, problem: Problem, width: int, label_bias: bool) -> Any:
    n = problem.labels.num_labels
    if kind == "plain":
        return PlainLinear(HIDDEN, n)
    if kind == "bottleneck":
        return sk.LinearHead(HIDDEN, n, bottleneck=width, bias=label_bias)
    codes = CODES if kind == "codes" else 0
    k = min(problem.k, (HIDDEN - 1 - codes - width) // 2)  # more features than the encoder has could not be reached
    return sk.DFTHead(HIDDEN, n, k, slack=width, codes=codes, bias=label_bias, prior=None)


def upgrade(trained: Model, problem: Problem) -> Model:
    """The encoder and bottleneck of a trained model, with fixed columns beside the bottleneck; the model stays as it is."""
    trained = copy.deepcopy(trained)
    width = trained.head.bottleneck
    k = min(problem.k, (HIDDEN - 1 - CODES - width) // 2)
    return Model(trained.encoder, sk.DFTHead.from_linear(trained.head, k, codes=CODES))


def describe(head: Any) -> str:
    """The call that makes such a head."""
    if isinstance(head, sk.DFTHead):
        codes = f", codes={head.codes}" if head.codes else ""
        return f"DFTHead(k={head.k}, slack={head.slack}{codes})"
    if isinstance(head, sk.LinearHead):
        return f"LinearHead(bottleneck={head.bottleneck})"
    return "nn.Linear and BCEWithLogits, plain torch"
