"""MultiLabelClassifier among scikit-learn's tools: its own checks, scorers, searches, pipelines."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

import sigkernels as sk

pytest.importorskip("sklearn", minversion="1.6")

from sklearn import set_config
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

# The two models are equal up to the rounding of float32, and the checks compare them to 1e-7.
# test_estimator.py compares them to 1e-4.
ROUNDING = "the model is float32, and Adam carries its rounding on; the check asks for seven equal digits"
EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": ROUNDING,
    "check_sample_weight_equivalence_on_sparse_data": ROUNDING,
}


@parametrize_with_checks(
    [sk.MultiLabelClassifier(), sk.MultiLabelClassifier("linear")],
    expected_failed_checks=lambda estimator: EXPECTED_FAILURES,
)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 8))
    return x, (x[:, :5] > 0.4).astype(int)


def small(**changes) -> sk.MultiLabelClassifier:
    return sk.MultiLabelClassifier(**({"epochs": 8, "hidden": 32, "learning_rate": 1e-2, "batch_size": 32} | changes))


@pytest.mark.parametrize("scoring", [None, "f1_micro", "f1_macro", "accuracy", "roc_auc", "average_precision"])
def test_scorers_give_numbers(data, scoring):
    scores = cross_val_score(small(), *data, cv=2, scoring=scoring, error_score="raise")
    assert np.isfinite(scores).all() and (scores > 0.1).all()


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix])
def test_grid_search(data, form):
    x, y = data[0], form(data[1])
    search = GridSearchCV(small(), {"slack": [0, 2], "epochs": [1, 8]}, cv=2, scoring="f1_micro", error_score="raise")
    search.fit(x, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all() and search.best_params_["epochs"] == 8
    assert search.predict(x).shape == y.shape


def test_names_in_cross_validation(data):
    x, y = data
    names = np.empty(len(y), dtype=object)
    names[:] = [{f"label{i}" for i in np.flatnonzero(row)} for row in y]
    assert (cross_val_score(small(), x, names, cv=KFold(2), error_score="raise") > 0.3).all()


def test_classes_in_cross_validation(data):
    x, y = data
    classes = np.where(y[:, 0], "on", "off")
    assert (cross_val_score(small(), x, classes, cv=2, scoring="roc_auc", error_score="raise") > 0.7).all()
    assert set(cross_val_predict(small(), x, classes, cv=2)) == {"on", "off"}


def test_pipelines_and_clones(data):
    x, y = data
    model = small(loss=sk.Focal())
    assert clone(model).get_params() == model.get_params()
    assert is_classifier(model)
    pipeline = make_pipeline(MaxAbsScaler(), model).fit(x, y)
    assert pipeline.score(x, y) > 0.3
    with pytest.raises(NotFittedError):
        clone(pipeline).predict(x)


def test_weights_are_routed(data):
    x, y = data
    weights = np.arange(len(x)) % 2
    expected = small().fit(x, y, sample_weight=weights).predict_proba(x)
    set_config(enable_metadata_routing=True)
    try:
        pipeline = make_pipeline(small().set_fit_request(sample_weight=True))
        routed = pipeline.fit(x, y, sample_weight=weights).predict_proba(x)
    finally:
        set_config(enable_metadata_routing=False)
    np.testing.assert_array_equal(routed, expected)
