"""MultiLabelClassifier: learns, repeats, takes what scikit-learn users have, refuses what makes no sense."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse
import torch

import sigkernels as sk
from sigkernels import datasets


@pytest.fixture(scope="module")
def data():
    stream = datasets.synthetic(60, 4, num_examples=1500, num_features=512, mean_active=2, noise_tokens=2)
    return stream.load().split(300)


def small(**changes) -> sk.MultiLabelClassifier:
    return sk.MultiLabelClassifier(
        **({"epochs": 12, "hidden": 64, "slack": 8, "batch_size": 64, "learning_rate": 1e-2} | changes)
    )


@pytest.fixture(scope="module")
def fitted(data):
    train, _ = data
    return small().fit(train.features.to_scipy(), train.labels)


def test_it_learns(fitted, data):
    train, test = data
    assert fitted.score(test.features.to_scipy(), test.labels) > 0.5
    assert fitted.losses_[-1] < fitted.losses_[0] / 2
    assert (fitted.n_features_in_, fitted.n_labels_) == (512, 60)
    assert fitted.head_.k == train.labels.max_active


def test_every_form_of_the_same_data_gives_the_same_model(fitted, data):
    train, test = data
    x = test.features.to_scipy()
    expected = fitted.predict_proba(x)
    forms = [
        (train.features.to_scipy(), train.labels.to_scipy()),
        (train.features.to_scipy().tocoo(), train.labels.to_dense(torch.bool)),
        (train.features.to_scipy(), train.labels.to_dense().numpy()),
    ]
    for features, labels in forms:
        np.testing.assert_array_equal(small().fit(features, labels).predict_proba(x), expected)
    dense = small().fit(train.features.to_dense().numpy(), train.labels)
    np.testing.assert_allclose(dense.predict_proba(test.features.to_dense().numpy()), expected, atol=0.02)
    assert not np.array_equal(small(seed=1).fit(*forms[0]).predict_proba(x), expected)


def test_the_verbs_agree(fitted, data):
    x = data[1].features.to_scipy()
    probabilities = fitted.predict_proba(x)
    assert probabilities.shape == (300, 60) and probabilities.dtype == np.float32
    predicted = fitted.predict(x)
    assert scipy.sparse.issparse(predicted)
    np.testing.assert_array_equal(predicted.toarray(), probabilities > 0.5)
    assert fitted.predict_sets(x).to_scipy().astype(np.int64).toarray().tolist() == predicted.toarray().tolist()
    values, labels = fitted.topk(x, 3)
    np.testing.assert_allclose(values, np.sort(probabilities, 1)[:, ::-1][:, :3], rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(probabilities, labels, 1), values, rtol=1e-5)


def test_score_is_the_micro_f1_of_scikit_learn(fitted, data):
    metrics = pytest.importorskip("sklearn.metrics")
    x, y = data[1].features.to_scipy(), data[1].labels.to_dense().numpy()
    expected = metrics.f1_score(y, fitted.predict(x).toarray(), average="micro")
    assert fitted.score(x, y) == pytest.approx(expected)


def test_empty_inputs_of_a_fitted_model(fitted):
    x = scipy.sparse.csr_matrix((0, 512))
    assert fitted.predict_proba(x).shape == (0, 60)
    assert fitted.predict(x).shape == (0, 60)
    assert fitted.topk(x, 3)[1].shape == (0, 3)


def test_linear_heads_and_other_losses(data):
    train, test = data
    x, y = train.features.to_scipy(), train.labels
    full = small(head="linear", slack=None).fit(x, y)
    assert full.head_.bottleneck is None and full.score(test.features.to_scipy(), test.labels) > 0.5
    narrow = small(head="linear", slack=None, bottleneck=6, epochs=1).fit(x, y)
    assert narrow.head_.bottleneck == 6
    weighted = small(loss=sk.BCE(pos_weight=torch.full((60,), 3.0)), epochs=1).fit(x, y)
    assert weighted.losses_[-1] > 0


def test_defaults_come_from_the_labels(data):
    train, _ = data
    model = sk.MultiLabelClassifier(epochs=1).fit(train.features.to_scipy(), train.labels)
    suggested = sk.suggest(train.labels, sample=0)
    assert (model.head_.k, model.head_.slack) == (suggested.k, suggested.slack)


def test_training_leaves_the_global_generator_alone(data):
    train, _ = data
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    small(epochs=1).fit(train.features.to_scipy(), train.labels)
    assert torch.equal(torch.rand(3), expected)


def test_it_pickles(fitted, data):
    x = data[1].features.to_scipy()
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(x), fitted.predict_proba(x))


def test_it_is_an_estimator_to_scikit_learn(data):
    base = pytest.importorskip("sklearn.base")
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler

    train, test = data
    model = small(epochs=2)
    assert base.clone(model).get_params() == model.get_params()
    assert base.is_classifier(model)
    x, y = train.features.to_scipy(), train.labels.to_scipy()
    pipeline = make_pipeline(MaxAbsScaler(), small(epochs=2)).fit(x, y)
    assert pipeline.predict(test.features.to_scipy()).shape == (300, 60)
    search = GridSearchCV(model, {"slack": [0, 8]}, cv=2).fit(x, y)
    assert search.best_params_["slack"] in (0, 8)


def test_repr_and_params():
    assert repr(small(head="linear", slack=None)) == (
        "MultiLabelClassifier(head='linear', hidden=64, epochs=12, batch_size=64, learning_rate=0.01)"
    )
    model = small().set_params(epochs=3)
    assert model.epochs == 3
    with pytest.raises(ValueError, match="'depth' is no parameter; there are head, k, slack"):
        model.set_params(depth=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "softmax"}, "head must be one of dft, linear, got 'softmax'"),
        ({"bottleneck": 4}, "bottleneck is not for head='dft'"),
        ({"head": "linear"}, "slack is not for head='linear'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"threshold": 2.0}, "threshold is a probability"),
    ],
)
def test_bad_parameters(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes).fit(np.ones((4, 3)), np.ones((4, 5)))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.ones((4, 3)), np.ones((5, 7)), "X has 4 rows and Y 5"),
        (np.ones(4), np.ones((4, 7)), r"X must have shape \[N, d\]"),
        (np.full((4, 3), np.nan), np.ones((4, 7)), "X holds NaN or infinity"),
        (np.ones((0, 3)), np.ones((0, 7)), "X has no rows"),
        (np.ones((2, 3)), [[1], [2, 3]], "LabelSets.from_lists"),
        (np.ones((2, 3)), np.full((2, 7), 0.5), "a set has only 0 and 1"),
        (np.ones((2, 3)), np.array([["a"], ["b"]]), "Y must be a 0/1 array"),
    ],
)
def test_bad_data(x, y, message):
    with pytest.raises(ValueError, match=message):
        small().fit(x, y)


def test_bad_use(fitted):
    with pytest.raises(TypeError, match="X must hold numbers"):
        small().fit(np.array([["a"]]), np.ones((1, 7)))
    with pytest.raises(ValueError, match="not fitted yet"):
        small().predict(np.ones((4, 3)))
    with pytest.raises(ValueError, match="X has 3 features, but the model was fitted with 512"):
        fitted.predict_proba(np.ones((4, 3)))
    with pytest.raises(ValueError, match=r"Y has shape \[4, 7\]"):
        fitted.score(np.ones((4, 512)), np.ones((4, 7)))
