"""MultiLabelClassifier: one hidden layer and a head behind the methods of scikit-learn."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dft_head import DFTHead
from ..head_base import Head
from ..labels import LabelSets
from ..linear_head import LinearHead
from ..losses import BCE, ConfusionLoss, Loss
from ..seeding import seeded
from ..suggest import suggest_codes, suggest_k, suggest_slack
from ..validation import check_bool, check_device, check_int, check_number
from .base import BaseEstimator, ClassifierMixin
from .examples import Examples, check_fraction, check_threshold
from .features import Features, sample_weights
from .prediction import Predictor
from .targets import LabelCoder, Target, read_target
from .training import EarlyStopping, Encoder, Trainer, TrainingDiverged, generator

HEADS = ("dft", "linear")
DEFAULT_HIDDEN = 512


class MultiLabelClassifier(Predictor, ClassifierMixin, BaseEstimator):
    """One hidden layer and a head, trained with Adam; a scikit-learn estimator that does not need scikit-learn.

    ``X [N, d]`` is a dense array, a data frame or a ``scipy.sparse`` matrix. ``y`` has one of these forms, and
    ``predict`` answers in the same:

    ==================================================  ==============================================
    ``y``                                               ``predict``
    ==================================================  ==============================================
    array, data frame or tensor of 0 and 1, ``[N, n]``  array of 0 and 1 in the dtype of ``y``
    ``scipy.sparse`` matrix of 0 and 1, ``[N, n]``      ``csr_matrix`` or ``csr_array`` in that dtype
    ``LabelSets``                                       ``LabelSets``
    a list of names for each row                        a tuple of names for each row
    one class for each row, ``[N]``                     one class for each row
    ==================================================  ==============================================

    With one class for each row the labels are trained one against the rest: ``predict`` gives the most probable
    class (of two classes the second where its probability is above ``threshold``), and probabilities sum to one.

    Args:
        head: ``"dft"`` for a DFTHead, ``"linear"`` for a LinearHead.
        k: most labels that are active together; default: the largest set of ``y``. Only for ``"dft"``.
        slack: learnable columns of the DFTHead; default: what ``sk.suggest`` says of ``y``.
        codes: fixed code columns of the DFTHead; default: what ``sk.suggest`` says, where the hidden layer has room.
        bottleneck: width of the LinearHead's bottleneck; ``None`` for a full layer. Only for ``"linear"``.
        hidden: width of the hidden layer; default 512, or what the guarantee of the head needs if that is more.
        loss: any loss of the package; default ``BCE()``.
        epochs, batch_size, learning_rate, weight_decay: of the training.
        threshold: probability above which ``predict`` reports a label; one for each label, ``[n]``; ``"tuned"``: for
            each label the one with the best F1 on held-out rows; ``"tuned_global"``: one for all, with the best micro F1.
        early_stopping: stop when the loss of held-out rows has not improved for ``n_iter_no_change`` epochs, and keep the
            weights of the epoch where it was lowest.
        validation_fraction: the share of the rows that is held out, at random, for early stopping and tuned thresholds.
        n_iter_no_change: see ``early_stopping``.
        device: where to train and predict.
        random_state: an int, ``None`` for another model each time, or a numpy ``RandomState`` or ``Generator``. Draws
            the initial weights and the order of the examples: the same int gives the same bits.
        verbose: show progress, as a bar on a terminal and as a line for each epoch elsewhere.

    Attributes:
        classes_: the classes or names, sorted; for the other forms of ``y`` the label numbers ``0 … n-1``.
        n_features_in_, feature_names_in_: of ``X``; the latter only for data frames with names.
        head_, encoder_: the trained modules.
        losses_, n_iter_: mean loss of each epoch, and how many there were.
        validation_losses_, best_epoch_: mean loss of the held-out rows after each epoch, and the epoch, counted from 1,
            whose weights were kept; only with ``early_stopping``.
        threshold_: what ``predict`` compares with, a number or an array ``[n]``.

    Example:
        >>> data = sk.datasets.synthetic(50, 3, num_examples=200, num_features=64).load()
        >>> model = sk.MultiLabelClassifier(epochs=1, hidden=64).fit(data.features.to_scipy(), data.labels)
        >>> model.predict(data.features.to_scipy()[:5]).num_labels
        50
    """

    validation_losses_: list[float]
    best_epoch_: int

    def __init__(
        self,
        head: str = "dft",
        *,
        k: int | None = None,
        slack: int | None = None,
        codes: int | None = None,
        bottleneck: int | None = None,
        hidden: int | None = None,
        loss: Loss | None = None,
        epochs: int = 10,
        batch_size: int = 256,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        threshold: Any = 0.5,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        device: str = "cpu",
        random_state: int | np.random.RandomState | np.random.Generator | None = 0,
        verbose: bool = False,
    ) -> None:
        self.head = head
        self.k = k
        self.slack = slack
        self.codes = codes
        self.bottleneck = bottleneck
        self.hidden = hidden
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.threshold = threshold
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.input_tags.sparse = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "head_")

    # -- training ----------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MultiLabelClassifier:
        """Train from scratch.

        Args:
            X: ``[N, d]``.
            y: the labels in any of the forms above.
            sample_weight: a factor for the loss of each row, ``[N]``; only their ratios matter. Rows of weight 0 are
                left out.

        Raises:
            FloatingPointError: the loss became NaN or infinite. The model of the last good epoch is kept; if there is
                none, the estimator is as it was before.
        """
        self._check_params()
        features, target, weights = self._read(X, y, sample_weight)
        coder = LabelCoder(target)
        labels = coder.encode(target)
        self._check_tuning(coder)
        rng = generator(self.random_state)
        trainer = self._new_trainer(features, labels, weights, rng)
        if weights is not None:
            weights = weights / weights.mean()
        train, held = Examples(features, labels, weights), None
        if self.early_stopping or self._is_tuned:
            train, held = train.split(self.validation_fraction, rng)
        stopping = None
        if held is not None and self.early_stopping:
            stopping = EarlyStopping(held, self.n_iter_no_change, trainer.parameters)
        try:
            losses = self._run(trainer, train, rng, self.epochs, stopping)
        except TrainingDiverged as stop:
            if stop.losses:
                self._adopt(trainer, features, coder, stop.losses, stopping, held)
            raise
        self._adopt(trainer, features, coder, losses, stopping, held)
        return self

    def _check_tuning(self, coder: LabelCoder) -> None:
        if coder.kind == "classes" and not coder.binary and self._is_tuned:
            raise ValueError(
                f"threshold={self.threshold!r} has nothing to tune: with one of {len(coder.classes)} classes for each row "
                "the most probable is predicted, whatever the threshold"
            )
        if np.ndim(self.threshold) and len(self.threshold) != coder.num_labels:
            raise ValueError(f"threshold has {len(self.threshold)} entries, but y has {coder.num_labels} labels")

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> MultiLabelClassifier:
        """Train one more epoch, on these rows.

        The first call (if ``fit`` was none) makes the model; give ``k`` and ``slack`` to the constructor unless the
        sets of the first call are like those to come.

        Args:
            X, y: as for ``fit``, in the same form at every call.
            classes: all classes or names that will occur; needed at the first call where ``y`` holds those.
            sample_weight: a factor for the loss of each row, ``[N]``, taken as it is.

        Raises:
            FloatingPointError: the loss became NaN or infinite. The weights are as they were before this call.
        """
        self._check_params()
        if self.early_stopping:
            raise ValueError("partial_fit trains one epoch and cannot stop early: use fit, or early_stopping=False")
        if self._is_tuned and not hasattr(self, "_tuned"):
            raise ValueError(
                f"partial_fit holds no rows out for threshold={self.threshold!r}: call fit first, or give a probability; "
                "head_.tune_thresholds finds thresholds afterwards"
            )
        features, target, weights = self._read(X, y, sample_weight)
        if first := not hasattr(self, "head_"):
            if classes is None and target.kind in ("classes", "names"):
                raise ValueError("classes must be passed on the first call to partial_fit: all that will ever occur")
            coder = LabelCoder(target, classes)
        else:
            self._check_features(features)
            coder = self._coder
            if classes is not None and not np.array_equal(np.unique(classes), coder.classes):
                raise ValueError(f"classes must be those of the first call, classes_, or left out, got {classes!r}")
        labels = coder.encode(target)
        rng = getattr(self, "_rng", None) or generator(self.random_state)
        trainer = self._new_trainer(features, labels, weights, rng) if first else self._continued_trainer(labels)
        self.__dict__.pop("_trainer", None)  # its moments are no longer good if this call stops early
        losses = self._run(trainer, Examples(features, labels, weights), rng, 1)
        if first:
            self._adopt(trainer, features, coder, losses)
        else:
            self.losses_ = [*self.losses_, *losses]
        self._trainer, self._rng = trainer, rng
        return self

    def _check_params(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head must be one of {', '.join(HEADS)}, got {self.head!r}")
        foreign = {"dft": ("bottleneck",), "linear": ("k", "slack", "codes")}[self.head]
        for name in foreign:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not for head={self.head!r}, got {name}={getattr(self, name)!r}")
        for name, least in (("epochs", 1), ("batch_size", 1), ("n_iter_no_change", 1)):
            check_int(name, getattr(self, name), least)
        for name, least in (("hidden", 1), ("k", 0), ("slack", 0), ("codes", 0), ("bottleneck", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least)
        for name in ("learning_rate", "weight_decay"):
            check_number(name, getattr(self, name))
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        check_bool("early_stopping", self.early_stopping)
        if not isinstance(self.verbose, (bool, int, np.bool_, np.integer)):
            raise TypeError(f"verbose must be True or False, got {self.verbose!r}")
        check_threshold(self.threshold)
        check_fraction(self.validation_fraction)

    def _read(self, X: Any, y: Any, sample_weight: Any) -> tuple[Features, Target, Tensor | None]:
        """The arguments of a fit, checked, without the rows of weight 0."""
        features = Features(X)
        features.require_content()
        target = read_target(y, self._coder.kind if hasattr(self, "_coder") else None)
        if len(features) != len(target):
            raise ValueError(f"X has {len(features)} rows and y {len(target)}; give one label set for each row of X")
        if sample_weight is None:
            return features, target, None
        if isinstance(self.loss, ConfusionLoss):
            raise ValueError(
                f"sample_weight needs a loss for each row, and {type(self.loss).__name__} is one for each label over "
                "all rows; leave it out, or use a loss such as BCE()"
            )
        weights = sample_weights(sample_weight, len(features))
        if not weights.all():
            keep = np.flatnonzero(weights)
            features, target, weights = features.take(keep), target.take(keep), weights[keep]
        return features, target, torch.from_numpy(weights)

    def _new_trainer(
        self, features: Features, labels: LabelSets, weights: Tensor | None, rng: np.random.Generator
    ) -> Trainer:
        scale = features.mean_square(None if weights is None else weights.numpy())
        with seeded(int(rng.integers(2**63))):
            head = self._build_head(labels, _frequencies(labels, weights))
            encoder = Encoder(features.width, head.in_features, scale)
        device = check_device(self.device)
        return Trainer(encoder.to(device), head.to(device))

    def _continued_trainer(self, labels: LabelSets) -> Trainer:
        """The one of the last ``partial_fit``; after ``fit`` one whose Adam starts anew."""
        if isinstance(self.head_, DFTHead) and self.k is None and suggest_k(labels) > self.head_.k:
            warnings.warn(
                f"y has a set of {labels.max_active} labels, but k = {self.head_.k} was chosen for the sets seen first: "
                "not every set of that size can be predicted; give k to the constructor",
                stacklevel=3,
            )
        return getattr(self, "_trainer", None) or Trainer(self.encoder_, self.head_)

    def _build_head(self, labels: LabelSets, prior: Tensor) -> Head:
        """The head, with a bias for each label that starts at its frequency, ``prior [n]``."""
        n = labels.num_labels
        settings: dict[str, Any] = {"bias": True, "prior": prior, "dtype": torch.float32}
        if self.head == "linear":
            hidden = DEFAULT_HIDDEN if self.hidden is None else self.hidden
            return LinearHead(hidden, n, bottleneck=self.bottleneck, **settings)
        k = suggest_k(labels) if self.k is None else self.k
        slack = suggest_slack(labels) if self.slack is None else self.slack
        codes = self._codes(labels, 2 * k + 1 + slack)
        width = 2 * k + 1 + codes + slack
        hidden = max(DEFAULT_HIDDEN, width) if self.hidden is None else self.hidden
        if hidden < width:
            warnings.warn(
                f"hidden = {hidden} is less than 2k+1+codes+slack = {width}: the guarantee that every set of k = {k} "
                "labels can be predicted does not hold",
                stacklevel=4,
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "in_features")  # the same, by the name of the head's argument
            return DFTHead(hidden, n, k=k, slack=slack, codes=codes, **settings)

    def _codes(self, labels: LabelSets, other_columns: int) -> int:
        if self.codes is not None:
            return self.codes
        codes = suggest_codes(labels)
        return codes if other_columns + codes <= (self.hidden or DEFAULT_HIDDEN) else 0

    def _run(
        self,
        trainer: Trainer,
        examples: Examples,
        rng: np.random.Generator,
        epochs: int,
        stopping: EarlyStopping | None = None,
    ) -> list[float]:
        trainer.configure(BCE() if self.loss is None else self.loss, self.learning_rate, self.weight_decay)
        return trainer.run(
            examples,
            rng,
            epochs=epochs,
            batch_size=self.batch_size,
            verbose=bool(self.verbose),
            stopping=stopping,
        )

    def _adopt(
        self,
        trainer: Trainer,
        features: Features,
        coder: LabelCoder,
        losses: list[float],
        stopping: EarlyStopping | None = None,
        held: Examples | None = None,
    ) -> None:
        """Becomes the model that was trained from scratch."""
        for name in ("_trainer", "_rng", "_tuned", "feature_names_in_", "validation_losses_", "best_epoch_"):
            self.__dict__.pop(name, None)
        self.head_, self.encoder_ = trainer.head.eval(), trainer.encoder.eval()
        self.losses_ = losses
        self._coder, self.classes_ = coder, coder.classes
        self.n_features_in_ = features.width
        if features.names is not None:
            self.feature_names_in_ = features.names
        if stopping is not None:
            self.validation_losses_, self.best_epoch_ = stopping.losses, stopping.best.epochs
        if held is not None and self._is_tuned:
            self._tuned = self._tune(held)

    @torch.no_grad()
    def _tune(self, held: Examples) -> Any:
        hidden = torch.cat(list(self._encoded(held.features)))
        found = self.head_.tune_thresholds(hidden, held.labels, per_label=self.threshold == "tuned").values
        return found.numpy() if found.ndim else float(found)


def _frequencies(labels: LabelSets, weights: Tensor | None) -> Tensor:
    """How often each label occurs, float64 ``[n]``, each example counted as often as its weight says.

    Weights below 1 on average, such as those that add up to 1, are scaled to it: ½ and 1 must not outweigh them.
    """
    one = torch.ones(len(labels), dtype=torch.float64)
    weights = one if weights is None else weights / weights.mean().clamp(max=1)
    counts = torch.bincount(labels.indices, weights[labels.rows()], minlength=labels.num_labels)
    return (counts + 0.5) / (weights.sum() + 1)
