"""MultiLabelClassifier: sample weights, training in parts, divergence."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse
import torch
from estimator_cases import DENSE, X, tiny

import sigkernels as sk


@pytest.mark.parametrize("loss", [sk.BCE(), sk.LMLNLL(2)])
@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix])
def test_sample_weights_are_repetitions(form, loss):
    weights = np.random.default_rng(0).integers(0, 4, len(X))
    x = X + 0.1 * np.random.default_rng(1).normal(size=X.shape)
    # One batch for an epoch: otherwise the batches differ.
    make = {"epochs": 5, "batch_size": 1000, "k": 2, "slack": 0, "hidden": 16, "loss": loss, "head": "dft"}
    y = np.hstack([DENSE, DENSE])
    y[:, 5] = 1
    weighted = tiny(**make).fit(form(x), y, sample_weight=weights)
    repeated = tiny(**make).fit(form(x.repeat(weights, 0)), y.repeat(weights, 0))
    np.testing.assert_allclose(weighted.losses_, repeated.losses_, rtol=1e-5)
    # LML does not see a shift of all logits, so Adam follows the rounding of its gradient there.
    logits = [model.decision_function(x) for model in (weighted, repeated)]
    np.testing.assert_allclose(*(z - z.mean(1, keepdims=True) for z in logits), atol=1e-4)
    if isinstance(loss, sk.BCE):
        np.testing.assert_allclose(*logits, atol=1e-4)
    scores = weighted.score(x, y, weights), weighted.score(x.repeat(weights, 0), y.repeat(weights, 0))
    assert scores[0] == pytest.approx(scores[1])


@pytest.mark.parametrize("scale", [1 / 48, 1e-50])
def test_small_sample_weights_leave_the_prior_alone(scale):
    """Weights that add up to 1 made every label start near a probability of ½."""
    weights = np.random.default_rng(0).uniform(0.5, 1.5, 48)
    plain, scaled = (tiny().fit(X, DENSE, sample_weight=w / weights.mean()) for w in (weights, scale * weights))
    np.testing.assert_allclose(scaled.losses_, plain.losses_, rtol=1e-5)
    np.testing.assert_allclose(scaled.head_.bias.detach(), plain.head_.bias.detach(), atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(5), "one number for each of the 48 rows"),
        (np.full(48, -1.0), "finite and not negative"),
        (np.full(48, np.nan), "finite and not negative"),
        (np.zeros(48), "zero for every row"),
        (np.full(48, 1e39), "holds 1e\\+39, which is too large for float32"),
    ],
)
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        tiny().fit(X, DENSE, sample_weight=weights)
    with pytest.raises(ValueError, match="sample_weight needs a loss for each row, and SigmoidF1"):
        tiny(loss=sk.SigmoidF1()).fit(X, DENSE, sample_weight=np.ones(48))


def test_partial_fit_learns_in_parts():
    model = tiny(k=1, slack=0)
    for epoch in range(40):
        for part in (slice(0, None, 2), slice(1, None, 2)):
            model.partial_fit(X[part], DENSE[part], classes=[0, 1, 2] if epoch == 0 else None)
    np.testing.assert_array_equal(model.predict(X), DENSE)
    assert len(model.losses_) == 80 and model.losses_[-1] < model.losses_[0] / 2


def test_partial_fit_goes_on_after_pickling_and_after_fit():
    first = tiny(k=1, slack=0).partial_fit(X, DENSE)
    copy = pickle.loads(pickle.dumps(first))
    for model in (first, copy):
        model.partial_fit(X, DENSE)
    np.testing.assert_array_equal(copy.predict_proba(X), first.predict_proba(X))
    fitted = tiny(epochs=2).fit(X, DENSE)
    before = fitted.predict_proba(X)
    fitted.partial_fit(X, DENSE)
    assert len(fitted.losses_) == 3 and not np.array_equal(fitted.predict_proba(X), before)


def test_partial_fit_takes_new_parameters():
    def second_step(**changes):
        model = tiny(k=1, slack=0).partial_fit(X, DENSE)
        return model.set_params(**changes).partial_fit(X, DENSE).predict_proba(X)

    usual = second_step()
    for changes in ({"learning_rate": 0.1}, {"weight_decay": 0.5}, {"loss": sk.Focal()}):
        assert not np.array_equal(second_step(**changes), usual)


def test_partial_fit_of_classes_and_names():
    y = np.array(["a", "b", "c"])[np.arange(48) % 3]
    with pytest.raises(ValueError, match="classes must be passed on the first call to partial_fit"):
        tiny().partial_fit(X, y)
    model = tiny().partial_fit(X, y, classes=["c", "b", "a", "d"])
    assert model.classes_.tolist() == ["a", "b", "c", "d"] and model.predict_proba(X).shape == (48, 4)
    with pytest.raises(ValueError, match=r"y holds .*'e'.*classes_"):
        model.partial_fit(X[:2], ["a", "e"])
    with pytest.raises(ValueError, match="classes must be those of the first call"):
        model.partial_fit(X[:2], ["a", "b"], classes=["a", "b"])
    named = tiny().partial_fit(X[:2], [["a"], []], classes=["a", "b"])
    named.partial_fit(X[:2], [[], []])
    with pytest.raises(ValueError, match="y holds 'z'"):
        named.partial_fit(X[:1], [["z"]])
    with pytest.raises(ValueError, match=r"classes must be 0 … 2 for an array of zeros and ones"):
        tiny().partial_fit(X, DENSE, classes=[1, 2, 3])
    model = tiny().partial_fit(X[:8], np.eye(8))
    with pytest.warns(UserWarning, match="y has a set of 3 labels, but k = 1 was chosen"):
        model.partial_fit(X[:1], [[1, 1, 1, 0, 0, 0, 0, 0]])


class Exploding:
    """Lets the loss of the head be NaN from the given call on."""

    def __init__(self, monkeypatch, at):
        self.calls, self.at, self.loss = 0, at, sk.DFTHead.loss
        monkeypatch.setattr(sk.DFTHead, "loss", lambda *args, **kwargs: self(*args, **kwargs))

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.loss(*args, **kwargs) * (float("nan") if self.calls >= self.at else 1)


@pytest.mark.parametrize(
    ("call", "epochs", "message"),
    [
        (2, 0, "nan in epoch 1, step 2 of 3; the model is as it was before this call. Lower learning_rate"),
        (4, 0, "nan in epoch 2, step 1 of 3; the model is as it was"),  # nothing shows that epoch 1 was good
        (8, 2, "nan in epoch 3, step 2 of 3; the weights after epoch 2 are kept"),
        (13, 3, "nan after the last step of epoch 4; the weights after epoch 3 are kept"),
    ],
)
def test_a_loss_that_is_not_finite_stops_with_the_last_good_weights(monkeypatch, call, epochs, message):
    model = tiny(epochs=4)
    with monkeypatch.context() as patch:
        Exploding(patch, call)
        with pytest.raises(FloatingPointError, match=message):
            model.fit(X, DENSE)
    assert hasattr(model, "head_") == (epochs > 0)
    if epochs:
        expected = tiny(epochs=epochs).fit(X, DENSE)
        np.testing.assert_array_equal(model.predict_proba(X), expected.predict_proba(X))
        assert model.losses_ == expected.losses_


def test_divergence_leaves_a_fitted_model_alone(monkeypatch):
    model = tiny(epochs=1, k=1).partial_fit(X, DENSE).partial_fit(X, DENSE)
    before = model.predict_proba(X)
    for method in (model.fit, model.partial_fit):
        with monkeypatch.context() as patch:
            Exploding(patch, 3)
            with pytest.raises(FloatingPointError, match="as it was before this call"):
                method(X, DENSE)
        np.testing.assert_array_equal(model.predict_proba(X), before)
    model.partial_fit(X, DENSE)
    assert len(model.losses_) == 3


def test_a_real_divergence():
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) .*Lower learning_rate \(it is 1e\+30\)"):
        tiny(learning_rate=1e30, loss=sk.UnboundedF1()).fit(X, DENSE)


def test_adam_is_the_fused_one(monkeypatch):
    made = []

    class Adam(torch.optim.Adam):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    tiny(epochs=1).fit(X, DENSE)
    assert [optimizer.defaults["fused"] for optimizer in made] == [True]


@pytest.mark.parametrize("head", ["dft", "linear"])
def test_torchs_default_dtype_is_not_ours(head):
    """Features come as float32, and a program that works in float64 may fit a classifier, too."""
    expected = tiny(head=head).fit(X, DENSE)
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny(head=head).fit(X, DENSE)
        sparse = tiny(head=head).fit(scipy.sparse.csr_matrix(X), DENSE)
        assert np.array_equal(model.decision_function(X), expected.decision_function(X))
        assert np.array_equal(sparse.predict(X), model.predict(X))
        assert sk.verify(model, DENSE[:2]).check()
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_that_fit_at_once_get_the_models_of_their_seeds():
    """scikit-learn's searches may fit in threads; torch's generator is one for all of them."""
    interval = sys.getswitchinterval()
    labels = (np.random.default_rng(0).random((len(X), 3000)) < 0.01).astype(int)  # drawing the weights takes a while

    def fit(seed):
        return sk.MultiLabelClassifier(epochs=1, random_state=seed).fit(X, labels).decision_function(X[:2])

    expected = [fit(seed) for seed in range(4)]
    state = torch.get_rng_state()
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(3):
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(fit, range(4)))
            assert all(map(np.array_equal, found, expected))
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(torch.get_rng_state(), state)
