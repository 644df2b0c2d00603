"""What a fitted classifier does: labels, logits, probabilities, the best labels and a score of new rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..head_base import Head
from ..labels import LabelSets
from ..validation import check_m
from .base import NotFittedError
from .features import Features, check_names, sample_weights
from .targets import LabelCoder, count_hits, read_target
from .training import Encoder

PREDICT_BATCH = 1024


class Predictor:
    """The methods of ``MultiLabelClassifier`` that need ``fit`` first."""

    head_: Head
    encoder_: Encoder
    classes_: np.ndarray
    n_features_in_: int
    feature_names_in_: np.ndarray
    losses_: list[float]
    threshold: Any
    _coder: LabelCoder
    _tuned: Any  # thresholds that fit has tuned

    @property
    def _is_tuned(self) -> bool:
        return isinstance(self.threshold, str)

    def _require_fit(self) -> None:
        if not hasattr(self, "head_"):
            raise NotFittedError(
                f"This {type(self).__name__} instance is not fitted yet. Call 'fit' with appropriate arguments before "
                "using this estimator."
            )

    def _check_features(self, features: Features) -> None:
        check_names(getattr(self, "feature_names_in_", None), features.names, type(self).__name__)
        if features.width != self.n_features_in_:
            raise ValueError(
                f"X has {features.width} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input"
            )

    def _hidden(self, X: Any) -> Iterator[Tensor]:
        """The input of the head for each batch of rows, ``[≤ PREDICT_BATCH, hidden]``."""
        self._require_fit()
        features = Features(X)
        self._check_features(features)
        return self._encoded(features)

    def _encoded(self, features: Features) -> Iterator[Tensor]:
        for rows in torch.arange(len(features)).split(PREDICT_BATCH):  # one empty batch if there are no rows
            with torch.no_grad():  # not around the yield: whoever takes the batch would run in it
                hidden = self.encoder_(features.batch(rows, self.encoder_.bias.device))
            yield hidden

    @property
    def n_iter_(self) -> int:
        """How many epochs were trained."""
        self._require_fit()
        return len(self.losses_)

    @property
    def threshold_(self) -> Any:
        """The probability above which a label is predicted, or one for each label, ``[n]``."""
        self._require_fit()
        if not self._is_tuned:
            return self.threshold
        if not hasattr(self, "_tuned"):
            raise NotFittedError(f"threshold={self.threshold!r} was set after fit: call fit again to tune it")
        return self._tuned

    @torch.no_grad()
    def predict(self, X: Any) -> Any:
        """The labels with a probability above ``threshold``, in the form that ``y`` had (see the class)."""
        self._require_fit()
        if self._coder.kind != "classes":
            return self._coder.decode(self.predict_sets(X))
        if self._coder.binary:
            return self.classes_[self.predict_sets(X).sizes.numpy()]
        best = [self.head_.topk(hidden, 1)[1][:, 0].cpu() for hidden in self._hidden(X)]
        return self.classes_[torch.cat(best).numpy()]

    @property
    def predicts_one_class(self) -> bool:
        """Whether ``predict`` gives the class with the highest logit, rather than labels above the threshold."""
        self._require_fit()
        return self._coder.kind == "classes" and not self._coder.binary

    def predict_sets(self, X: Any) -> LabelSets:
        """The labels of the head with a probability above ``threshold``, by their number in ``classes_``.

        Of two classes the head has one label, which stands for the second.
        """
        parts = [self.head_.predict(hidden, self.threshold_).to("cpu") for hidden in self._hidden(X)]
        sizes = torch.cat([part.sizes for part in parts])
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return LabelSets(torch.cat([part.indices for part in parts]), offsets, self.head_.num_labels)

    def label_sets(self, y: Any) -> LabelSets:
        """``y`` in the form that the model was fitted with, as sets of the head's labels: their numbers in ``classes_``.

        ``sk.verify(model, y)`` does it by itself for names and classes.
        """
        self._require_fit()
        return self._coder.encode(read_target(y, self._coder.kind))

    @torch.no_grad()
    def decision_function(self, X: Any) -> np.ndarray:
        """The logit of every label, ``[N, n]`` float32; for two classes that of the second, ``[N]``."""
        z = torch.cat([self.head_(hidden).cpu() for hidden in self._hidden(X)]).numpy()
        return z[:, 0] if self._coder.binary else z

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every label, ``[N, n]`` float32: large; ``topk`` is what most people need.

        For one class per row the probabilities of a row sum to one.
        """
        z = torch.from_numpy(self.decision_function(X))
        if self._coder.binary:
            return torch.stack([(-z).sigmoid(), z.sigmoid()], 1).numpy()
        if self._coder.kind == "classes":  # the sigmoids, divided by their sum; all of them may underflow
            return F.logsigmoid(z).softmax(1).numpy()
        return z.sigmoid_().numpy()

    @torch.no_grad()
    def topk(self, X: Any, m: int) -> tuple[np.ndarray, np.ndarray]:
        """The m most probable labels of each row: (probabilities, labels), ``[N, m]`` each, best first.

        Labels are entries of ``classes_``.
        """
        self._require_fit()
        m = check_m(m, len(self.classes_))
        if self._coder.kind == "classes":
            probabilities = self.predict_proba(X)
            order = np.argsort(-probabilities, axis=1, kind="stable")[:, :m]
            return np.take_along_axis(probabilities, order, 1), self.classes_[order]
        parts = [self.head_.topk(hidden, m) for hidden in self._hidden(X)]
        values, indices = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return values.sigmoid().numpy(), self.classes_[indices.numpy()]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Micro-averaged F1 of ``predict(X)``: exact matches of whole sets say little at thousands of labels.

        For one class per row that is the accuracy. Names that the model does not know count as missed.
        """
        self._require_fit()
        target = read_target(y, self._coder.kind)
        self._coder.check(target)
        predicted = self.predict(X) if self._coder.kind in ("classes", "names") else self.predict_sets(X)
        if len(predicted) != len(target):
            raise ValueError(f"X has {len(predicted)} rows and y {len(target)}; give one label set for each row of X")
        hits, sizes = count_hits(predicted, target)
        weights = np.ones(len(target)) if sample_weight is None else sample_weights(sample_weight, len(target))
        return float(2 * (weights @ hits) / (weights @ sizes)) if weights @ sizes else 1.0
