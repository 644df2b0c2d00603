"""MultiLabelClassifier: y in every form, and predictions in the same."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from estimator_cases import DENSE, X, tiny


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float64])
def test_dense_in_dense_out(dtype):
    y = DENSE.astype(dtype)
    predicted = tiny().fit(X, y).predict(X)
    assert isinstance(predicted, np.ndarray) and predicted.dtype == dtype
    np.testing.assert_array_equal(predicted, y)


@pytest.mark.parametrize("form", [scipy.sparse.csr_matrix, scipy.sparse.csr_array])
def test_sparse_in_sparse_out(form):
    model = tiny().fit(X, form(DENSE))
    predicted = model.predict(X)
    assert type(predicted) is form and predicted.dtype == DENSE.dtype
    np.testing.assert_array_equal(predicted.toarray(), DENSE)
    assert model.score(X, DENSE) == model.score(X, form(DENSE)) == 1.0
    assert isinstance(tiny(epochs=1).fit(X, form(DENSE).tocoo()).predict(X), form)


def test_names_in_names_out():
    names = np.array(["ham", "egg", "oil"])
    y = [list(names[row.astype(bool)]) for row in DENSE]
    model = tiny().fit(X, y)
    assert model.classes_.tolist() == ["egg", "ham", "oil"]
    predicted = model.predict(X)
    assert predicted == [tuple(sorted(row)) for row in y]
    probabilities, labels = model.topk(X[:1], 2)
    assert labels.shape == (1, 2) and labels[0, 0] == "ham" and probabilities[0, 0] > 0.5
    assert model.score(X, y) == 1.0
    assert model.score(X[[0, 8]], [["ham", "new"], ["egg"]]) == pytest.approx(2 * 2 / 5)  # "new" was missed
    assert model.score(X[-1:], [[]]) == 1.0
    sets = np.empty(len(y), dtype=object)
    sets[:] = [set(row) for row in y]
    assert tiny().fit(X, sets).predict(X) == predicted


@pytest.mark.parametrize("classes", [["no", "yes"], ["blue", "green", "red"], [7, 9], [2, 3, 5]])
@pytest.mark.parametrize("head", ["dft", "linear"])
def test_one_class_per_row(classes, head):
    classes = np.array(classes)
    y = classes[np.arange(6).repeat(8) % len(classes)]
    model = tiny(head=head).fit(X, y)
    np.testing.assert_array_equal(model.classes_, classes)
    predicted = model.predict(X)
    np.testing.assert_array_equal(predicted, y)
    assert predicted.dtype == y.dtype
    probabilities = model.predict_proba(X)
    assert probabilities.shape == (48, len(classes))
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-6)
    assert model.decision_function(X).shape == ((48,) if len(classes) == 2 else (48, len(classes)))
    best, labels = model.topk(X, 1)
    np.testing.assert_array_equal(labels[:, 0], y)
    np.testing.assert_array_equal(best[:, 0], probabilities.max(1))
    assert model.score(X, y) == 1.0 and model.score(X[:2], [y[0], classes[1]]) == 0.5
