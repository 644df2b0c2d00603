"""MultiLabelClassifier: fit, predict, score, for people who do not write training loops."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from .heads import DFTHead, Head, LinearHead
from .labels import LabelSets
from .losses import BCE, Loss
from .validation import check_int, check_number

HEADS = ("dft", "linear")
DEFAULT_HIDDEN = 512
PREDICT_BATCH = 1024


class MultiLabelClassifier:
    """One hidden layer and a head, trained with Adam; the methods are those of scikit-learn.

    ``X`` is a dense array or a ``scipy.sparse`` matrix ``[N, d]``; ``Y`` a 0/1 array or sparse matrix ``[N, n]``, or
    LabelSets. Works with ``sklearn.base.clone``, pipelines and grid searches; scikit-learn itself is not needed.

    Args:
        head: ``"dft"`` for a DFTHead, ``"linear"`` for a LinearHead.
        k: most labels that are active together; default: the largest set of ``Y``. Only for ``"dft"``.
        slack: learnable columns of the DFTHead; default: what ``sk.suggest`` says of ``Y``.
        bottleneck: width of the LinearHead's bottleneck; ``None`` for a full layer. Only for ``"linear"``.
        hidden: width of the hidden layer; default 512, or what the guarantee of the head needs if that is more.
        loss: any loss of the package; default ``BCE()``.
        epochs, batch_size, learning_rate, weight_decay: of the training.
        threshold: probability above which ``predict`` reports a label.
        device: where to train and predict.
        seed: of the weights and of the order of the examples. The same seed gives the same model.
        verbose: show a progress bar.
    """

    head_: Head
    encoder_: nn.Module
    n_features_in_: int
    n_labels_: int
    losses_: list[float]

    def __init__(
        self,
        head: str = "dft",
        *,
        k: int | None = None,
        slack: int | None = None,
        bottleneck: int | None = None,
        hidden: int | None = None,
        loss: Loss | None = None,
        epochs: int = 10,
        batch_size: int = 256,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        threshold: float = 0.5,
        device: str = "cpu",
        seed: int = 0,
        verbose: bool = False,
    ) -> None:
        self.head = head
        self.k = k
        self.slack = slack
        self.bottleneck = bottleneck
        self.hidden = hidden
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.threshold = threshold
        self.device = device
        self.seed = seed
        self.verbose = verbose

    # -- what scikit-learn asks of an estimator ----------------------------------------------------------------

    @classmethod
    def _names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **params: Any) -> MultiLabelClassifier:
        """Change arguments of the constructor; they take effect with the next ``fit``."""
        for name, value in params.items():
            if name not in self._names():
                raise ValueError(f"{name!r} is no parameter; there are {', '.join(self._names())}")
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True, multi_output=True, single_output=False),
            classifier_tags=ClassifierTags(multi_class=False, multi_label=True),
            input_tags=InputTags(sparse=True),
        )

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "head_")

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self).__init__).parameters
        changed = [f"{n}={v!r}" for n, v in self.get_params().items() if v != defaults[n].default]
        return f"MultiLabelClassifier({', '.join(changed)})"

    # -- training ----------------------------------------------------------------------------------------------

    def fit(self, X: Any, Y: Any) -> MultiLabelClassifier:
        """Train from scratch on ``X [N, d]`` and ``Y [N, n]``."""
        self._check_params()
        features, labels = _Features(X), _label_sets(Y)
        if len(features) != len(labels):
            raise ValueError(f"X has {len(features)} rows and Y {len(labels)}; give one label set for each row of X")
        if len(features) == 0:
            raise ValueError("X has no rows: there is nothing to fit")
        rng_state = torch.get_rng_state()
        torch.manual_seed(self.seed)
        try:
            head = self._build_head(labels)
            encoder = _Encoder(features.width, head.in_features, features.mean_square())
        finally:
            torch.set_rng_state(rng_state)
        head, encoder = head.to(self.device), encoder.to(self.device)
        self.losses_ = self._train(encoder, head, features, labels)
        self.head_, self.encoder_ = head.eval(), encoder.eval()
        self.n_features_in_, self.n_labels_ = features.width, labels.num_labels
        return self

    def _check_params(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head must be one of {', '.join(HEADS)}, got {self.head!r}")
        foreign = {"dft": ("bottleneck",), "linear": ("k", "slack")}[self.head]
        for name in foreign:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not for head={self.head!r}, got {name}={getattr(self, name)!r}")
        for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0)):
            check_int(name, getattr(self, name), least)
        for name in ("learning_rate", "weight_decay", "threshold"):
            check_number(name, getattr(self, name))
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is a probability and must lie in [0, 1], got {self.threshold}")

    def _build_head(self, labels: LabelSets) -> Head:
        if self.head == "linear":
            hidden = DEFAULT_HIDDEN if self.hidden is None else self.hidden
            return LinearHead(hidden, labels.num_labels, bottleneck=self.bottleneck)
        from .suggest import suggest_k, suggest_slack

        k = suggest_k(labels) if self.k is None else self.k
        slack = suggest_slack(labels) if self.slack is None else self.slack
        hidden = max(DEFAULT_HIDDEN, 2 * k + 1 + slack) if self.hidden is None else self.hidden
        return DFTHead(hidden, labels.num_labels, k=k, slack=slack)

    def _train(self, encoder: nn.Module, head: Head, features: _Features, labels: LabelSets) -> list[float]:
        loss = BCE() if self.loss is None else self.loss
        parameters = [*encoder.parameters(), *head.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        # Adam does not see the scale of a loss until its gradients come near its epsilon, as those of a mean over
        # B·n terms do at large n: train on n times that.
        rng = np.random.default_rng(self.seed)
        history = []
        batches = -(-len(features) // self.batch_size)
        with tqdm(total=self.epochs * batches, unit="step", disable=None if self.verbose else True) as bar:
            for _ in range(self.epochs):
                order = torch.from_numpy(rng.permutation(len(features)))
                total = 0.0
                for rows in order.split(self.batch_size):
                    optimizer.zero_grad(set_to_none=True)
                    hidden = encoder(features.batch(rows, self.device))
                    value = head.loss(hidden, labels[rows].to(self.device), loss)
                    (value * labels.num_labels).backward()
                    optimizer.step()
                    total += float(value.detach()) * len(rows)
                    bar.update()
                history.append(total / len(features))
                bar.set_postfix(loss=history[-1])
        return history

    # -- using it ----------------------------------------------------------------------------------------------

    def _batches(self, X: Any) -> Any:
        if not hasattr(self, "head_"):
            raise ValueError("this MultiLabelClassifier is not fitted yet: call fit(X, Y) first")
        features = _Features(X)
        if features.width != self.n_features_in_:
            raise ValueError(f"X has {features.width} features, but the model was fitted with {self.n_features_in_}")
        with torch.no_grad():
            for rows in torch.arange(len(features)).split(PREDICT_BATCH):
                yield self.encoder_(features.batch(rows, self.device))

    def predict(self, X: Any) -> Any:
        """The labels with a probability above ``threshold``: a ``scipy.sparse`` matrix of 0 and 1, ``[N, n]``."""
        return self.predict_sets(X).to_scipy().astype(np.int64)

    def predict_sets(self, X: Any) -> LabelSets:
        """The same as LabelSets."""
        return _join([self.head_.predict(hidden, self.threshold).to("cpu") for hidden in self._batches(X)], self)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every label, ``[N, n]`` float32: large; ``topk`` is what most people need."""
        parts = [self.head_(hidden).sigmoid().float().cpu().numpy() for hidden in self._batches(X)]
        return np.concatenate(parts) if parts else np.zeros((0, self.n_labels_), np.float32)

    def topk(self, X: Any, m: int) -> tuple[np.ndarray, np.ndarray]:
        """The m most probable labels of each row: (probabilities, labels), ``[N, m]`` each, best first."""
        parts = [self.head_.topk(hidden, m) for hidden in self._batches(X)]
        if not parts:
            return np.zeros((0, m), np.float32), np.zeros((0, m), np.int64)
        values, indices = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return values.sigmoid().float().numpy(), indices.numpy()

    def score(self, X: Any, Y: Any) -> float:
        """Micro-averaged F1 of ``predict(X)``: exact matches of whole sets say little at thousands of labels."""
        predicted, truth = self.predict_sets(X), _label_sets(Y)
        if (len(predicted), predicted.num_labels) != (len(truth), truth.num_labels):
            raise ValueError(
                f"Y has shape [{len(truth)}, {truth.num_labels}], but X and the model give "
                f"[{len(predicted)}, {predicted.num_labels}]"
            )
        hits = float(predicted.to_scipy().multiply(truth.to_scipy()).sum())
        size = predicted.indices.numel() + truth.indices.numel()
        return 2 * hits / size if size else 1.0


class _Features:
    """Rows of a dense array or of a sparse matrix, as float32 batches."""

    def __init__(self, X: Any) -> None:
        self.sparse = hasattr(X, "tocsr")
        self.matrix: Any = X.tocsr() if self.sparse else np.asarray(X)
        if self.matrix.ndim != 2:
            raise ValueError(f"X must have shape [N, d], got {self.matrix.shape}")
        values: Any = self.matrix.data if self.sparse else self.matrix
        if not (np.issubdtype(values.dtype, np.number) or values.dtype == bool):
            raise TypeError(f"X must hold numbers, got dtype {values.dtype}")
        if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            raise ValueError("X holds NaN or infinity: impute or remove those values first")

    def __len__(self) -> int:
        return self.matrix.shape[0]

    @property
    def width(self) -> int:
        return self.matrix.shape[1]

    def mean_square(self) -> float:
        """Mean squared length of a row."""
        values = (self.matrix.data if self.sparse else self.matrix).astype(np.float64)
        return float(np.square(values).sum()) / max(len(self), 1)

    def batch(self, rows: Tensor, device: str) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        part = self.matrix[rows.numpy()]
        if not self.sparse:
            return torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32)).to(device)
        arrays = (part.indices.astype(np.int64), part.indptr[:-1].astype(np.int64), part.data.astype(np.float32))
        indices, offsets, values = (torch.from_numpy(array).to(device) for array in arrays)
        return indices, offsets, values


class _Encoder(nn.Module):
    """``relu(x A + b)`` for dense or sparse ``x``; starts with outputs of unit variance whatever the scale of x."""

    def __init__(self, width: int, hidden: int, mean_square: float) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(width, hidden, mode="sum")
        nn.init.normal_(self.embedding.weight, std=max(mean_square, 1e-12) ** -0.5)
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor | tuple[Tensor, Tensor, Tensor]) -> Tensor:
        if isinstance(x, Tensor):
            return torch.relu(torch.addmm(self.bias, x, self.embedding.weight))
        indices, offsets, values = x
        return torch.relu(self.embedding(indices, offsets, per_sample_weights=values) + self.bias)


def _label_sets(Y: Any) -> LabelSets:
    if isinstance(Y, LabelSets):
        return Y.to("cpu")
    if hasattr(Y, "tocsr"):
        return LabelSets.from_csr(Y)
    if isinstance(Y, Tensor):
        return LabelSets.from_csr(Y) if Y.layout == torch.sparse_csr else LabelSets.from_dense(Y)
    remedy = "Y must be a 0/1 array or sparse matrix [N, n]; for lists of labels use LabelSets.from_lists(Y, n)"
    try:
        array = np.asarray(Y)
    except ValueError as error:  # rows of different lengths
        raise ValueError(remedy) from error
    if array.ndim != 2 or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise ValueError(f"{remedy}; got {array.dtype} of shape {array.shape}")
    return LabelSets.from_dense(torch.from_numpy(np.ascontiguousarray(array)))


def _join(parts: list[LabelSets], model: MultiLabelClassifier) -> LabelSets:
    indices = [part.indices for part in parts]
    sizes = [part.sizes for part in parts]
    empty = torch.zeros(0, dtype=torch.int64)
    counts = torch.cat([empty, *sizes])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return LabelSets(torch.cat([empty, *indices]), offsets, model.n_labels_)
