"""MultiLabelClassifier: learns, repeats, takes what scikit-learn users have, refuses what makes no sense."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
import torch
from estimator_cases import DENSE, X, small, tiny

import sigkernels as sk
from sigkernels import datasets


@pytest.fixture(scope="module")
def data():
    stream = datasets.synthetic(60, 4, num_examples=1500, num_features=512, mean_active=2, noise_tokens=2)
    return stream.load().split(300)


@pytest.fixture(scope="module")
def fitted(data):
    train, _ = data
    return small().fit(train.features.to_scipy(), train.labels)


def test_it_learns(fitted, data):
    train, test = data
    assert fitted.score(test.features.to_scipy(), test.labels) > 0.5
    assert fitted.losses_[-1] < fitted.losses_[0] / 2
    assert fitted.n_features_in_ == 512
    np.testing.assert_array_equal(fitted.classes_, np.arange(60))
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
    assert not np.array_equal(small(random_state=1).fit(*forms[0]).predict_proba(x), expected)


def test_the_verbs_agree(fitted, data):
    x = data[1].features.to_scipy()
    probabilities = fitted.predict_proba(x)
    assert probabilities.shape == (300, 60) and probabilities.dtype == np.float32
    logits = fitted.decision_function(x)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), probabilities, rtol=1e-5)
    predicted = fitted.predict(x)
    assert isinstance(predicted, sk.LabelSets) and predicted == fitted.predict_sets(x)
    np.testing.assert_array_equal(predicted.to_dense().numpy(), logits > 0)
    values, labels = fitted.topk(x, 3)
    np.testing.assert_allclose(values, np.sort(probabilities, 1)[:, ::-1][:, :3], rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(probabilities, labels, 1), values, rtol=1e-5)


def test_score_is_the_micro_f1_of_scikit_learn(fitted, data):
    metrics = pytest.importorskip("sklearn.metrics")
    x, y = data[1].features.to_scipy(), data[1].labels.to_dense().numpy()
    expected = metrics.f1_score(y, fitted.predict(x).to_dense().numpy(), average="micro")
    assert fitted.score(x, y) == pytest.approx(expected)


def test_empty_inputs_of_a_fitted_model(fitted):
    x = scipy.sparse.csr_matrix((0, 512))
    assert fitted.predict_proba(x).shape == (0, 60)
    assert fitted.predict(x) == sk.LabelSets.from_lists([], 60)
    assert fitted.decision_function(x).shape == (0, 60)
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


def test_repr_and_params():
    shown = repr(sk.MultiLabelClassifier("linear", epochs=12)).replace("\n", "")
    assert {shown} <= {
        "MultiLabelClassifier(epochs=12, head='linear')",
        "MultiLabelClassifier(head='linear', epochs=12)",
    }
    model = small().set_params(epochs=3)
    assert model.epochs == 3
    with pytest.raises(ValueError, match=r"(?s)Invalid parameter 'depth' for estimator.*'hidden'"):
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
        (np.ones((4, 3)), np.ones((5, 7)), "X has 4 rows and y 5"),
        (np.ones(4), np.ones((4, 7)), r"X must have shape \[N, d\].*Reshape your data"),
        (np.full((4, 3), np.nan), np.ones((4, 7)), "X holds NaN or infinity"),
        (np.full((4, 3), 1e39), np.ones((4, 7)), r"X holds 1e\+39, which is too large for float32"),
        (np.ones((4, 3)) * 1j, np.ones((4, 7)), "Complex data not supported: X has dtype complex128"),
        (scipy.sparse.eye(4, dtype=complex), np.ones((4, 7)), "Complex data not supported"),
        (np.ones((0, 3)), np.ones((0, 7)), r"X has 0 sample\(s\)"),
        (np.ones((2, 3)), [[1], [2, 3]], "LabelSets.from_lists"),
        (np.ones((2, 3)), [[4, 1], [2, 3]], "y holds 4 at row 0, column 0.*LabelSets.from_lists"),
        (np.ones((2, 3)), [{1}, {2, 3}], "row 0 of y must hold names"),
        (np.ones((2, 3)), [["a"], "b"], "row 1 of y must hold names like the other rows, got 'b'"),
        (np.ones((2, 3)), np.full((2, 7), 0.5), "y holds 0.5 at row 0, column 0"),
        (np.ones((2, 3)), np.array([["a", "b"], ["b", "c"]]), "y must be zeros and ones"),
        (np.ones((2, 3)), [0.5, 1.5], "Unknown label type: continuous"),
        (np.ones((2, 3)), [1, "a"], "y holds strings and other values"),
        (np.ones((2, 3)), np.array([1, "a"], dtype=object), "Unknown label type: y holds objects of type int, str"),
        (np.ones((2, 3)), ["a", "a"], "only one class, .*'a'"),
        (np.ones((2, 3)), None, "the target y is None"),
        (np.ones((2, 3)), "ab", "y must be zeros and ones.*got str"),
    ],
)
def test_bad_data(x, y, message):
    with pytest.raises((ValueError, TypeError), match=message):
        small().fit(x, y)


def test_bad_use(fitted):
    with pytest.raises(TypeError, match="X must hold numbers, got dtype <U1"):
        small().fit(np.array([["a"]]), np.ones((1, 7)))
    for method in ("predict", "predict_proba", "decision_function", "predict_sets"):
        with pytest.raises(ValueError, match="not fitted yet"):
            getattr(small(), method)(np.ones((4, 3)))
    with pytest.raises(ValueError, match="X has 3 features, but MultiLabelClassifier is expecting 512"):
        fitted.predict_proba(np.ones((4, 3)))
    with pytest.raises(ValueError, match="y has 7 labels, but the model was fitted with 60"):
        fitted.score(np.ones((4, 512)), np.ones((4, 7)))
    with pytest.raises(ValueError, match="X has 4 rows and y 5"):
        fitted.score(np.ones((4, 512)), np.ones((5, 60)))
    with pytest.raises(ValueError, match="y is one class per row, but the model was fitted with LabelSets"):
        fitted.score(np.ones((4, 512)), [0, 1, 2, 3])
    with pytest.raises(ValueError, match="m must lie in 1 … num_labels = 60"):
        fitted.topk(np.ones((4, 512)), 61)
    with pytest.warns(UserWarning, match=r"hidden = 4 is less than 2k\+1\+codes\+slack"):
        small(hidden=4, epochs=1).fit(np.eye(4), np.eye(4, 30))


# -- randomness, output, other packages --------------------------------------------------------------------------


def test_random_state():
    def fit(random_state):
        return tiny(epochs=2, random_state=random_state).fit(X, DENSE).predict_proba(X)

    np.testing.assert_array_equal(fit(3), fit(3))
    np.testing.assert_array_equal(fit(np.random.RandomState(3)), fit(np.random.RandomState(3)))
    np.testing.assert_array_equal(fit(np.random.default_rng(3)), fit(3))
    assert not np.array_equal(fit(None), fit(None))
    shared = np.random.RandomState(3)
    assert not np.array_equal(fit(shared), fit(shared))


@pytest.mark.parametrize("terminal", [False, True])
def test_verbose_shows_progress(monkeypatch, terminal):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    tiny(epochs=2).fit(X, DENSE)
    assert stream.getvalue() == ""
    tiny(epochs=2, verbose=True).fit(X, DENSE)
    lines = stream.getvalue().splitlines()
    if terminal:
        assert "6/6" in lines[-1]
    else:
        assert [line[: line.index(",")] for line in lines][-1].startswith("epoch 2/2: loss 0.") and len(lines) == 2


def test_pandas_frames():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X, columns=list("abcdef"))
    model = tiny(epochs=2).fit(frame, DENSE)
    assert model.feature_names_in_.tolist() == list("abcdef")
    expected = model.predict_proba(frame)
    nullable = frame.astype("Int64").astype({"a": "Float64", "b": "boolean"})
    again = tiny(epochs=2).fit(nullable, pd.DataFrame(DENSE).astype("Int64"))
    np.testing.assert_array_equal(again.predict_proba(nullable), expected)
    classes = tiny(epochs=1).fit(nullable, pd.Series(np.arange(48) % 3).astype("Int64"))
    assert classes.classes_.dtype == np.int64
    assert tiny(epochs=1).fit(frame, pd.Series(["a", "b"] * 24)).classes_.tolist() == ["a", "b"]
    with pytest.raises(ValueError, match=r"(?s)The feature names should match.*same order"):
        model.predict(frame[list("bacdef")])
    with pytest.raises(ValueError, match=r"(?s)unseen at fit time:.- z.*now missing:.- a"):
        model.predict(frame.rename(columns={"a": "z"}))
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        model.predict(X)
    with pytest.raises(ValueError, match="X holds NaN"):
        nullable.loc[0, "a"] = pd.NA
        model.predict(nullable)
    with pytest.raises(ValueError, match=r"y holds NaN|y holds objects of type .*NAType"):
        model.fit(frame, pd.Series([0, 1, None] * 16).astype("Int64"))
    with pytest.raises(ValueError, match="X must hold numbers: could not convert"):
        model.fit(frame.astype({"a": object}).replace({"a": {1.0: "x"}}), DENSE)


def test_tensors_of_any_floating_dtype_are_taken():
    """Encoders give bfloat16, which numpy does not have."""
    features, model = torch.from_numpy(X).bfloat16(), tiny(epochs=1)
    model.fit(features, DENSE, sample_weight=torch.ones(48, dtype=torch.bfloat16))
    np.testing.assert_array_equal(model.predict_proba(features), model.predict_proba(features.float().numpy()))


def test_it_works_without_scikit_learn():
    code = """
import sys
import sigkernels as sk
assert "sklearn" not in sys.modules, "importing the package should not import scikit-learn"
sys.modules["sklearn"] = None
import numpy as np, pickle
model = sk.MultiLabelClassifier(epochs=1, hidden=8)
assert repr(model) == "MultiLabelClassifier(hidden=8, epochs=1)", repr(model)
try:
    model.predict(np.eye(4))
except ValueError as error:
    assert "not fitted yet" in str(error)
assert model.set_params(k=1).get_params()["k"] == 1
try:
    model.set_params(depth=1)
except ValueError as error:
    assert "Invalid parameter 'depth'" in str(error)
model.fit(np.eye(4), np.eye(4, dtype=int)).partial_fit(np.eye(4), np.eye(4, dtype=int))
assert pickle.loads(pickle.dumps(model)).predict(np.eye(4)).shape == (4, 4)
assert not any(name.startswith("sklearn.") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- held-out rows -------------------------------------------------------------------------------------------------


def test_early_stopping_keeps_the_best_epoch(data):
    train, test = data
    x, y = train.features.to_scipy(), train.labels
    model = small(early_stopping=True, epochs=60, n_iter_no_change=2, learning_rate=0.05).fit(x, y)
    losses = model.validation_losses_
    assert model.n_iter_ == len(model.losses_) == len(losses) < 60
    assert model.best_epoch_ == int(np.argmin(losses)) + 1 == model.n_iter_ - 2
    again = small(early_stopping=True, epochs=model.best_epoch_, learning_rate=0.05).fit(x, y)
    z = test.features.to_scipy()
    np.testing.assert_array_equal(again.predict_proba(z), model.predict_proba(z))
    assert not hasattr(small(epochs=1).fit(x, y), "validation_losses_")


def test_tuned_thresholds_are_what_predict_and_verify_use(data):
    train, test = data
    x, y = train.features.to_scipy(), train.labels
    model = small(epochs=6, threshold="tuned", validation_fraction=0.3).fit(x, y)
    assert model.threshold_.shape == (60,)
    probabilities = model.predict_proba(test.features.to_scipy())
    assert model.predict_sets(test.features.to_scipy()) == sk.LabelSets.of(probabilities > model.threshold_)
    report = sk.verify(model, test.labels[:5])
    np.testing.assert_array_equal(report.question.rule.threshold, model.threshold_)
    assert report.check()
    one = small(epochs=6, threshold="tuned_global", validation_fraction=0.3).fit(x, y)
    assert isinstance(one.threshold_, float)
    assert one.score(test.features.to_scipy(), test.labels) > 0.5
    fixed = one.set_params(threshold=np.full(60, 0.5))
    assert fixed.predict_sets(test.features.to_scipy()) == one.set_params(threshold=0.5).predict_sets(
        test.features.to_scipy()
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threshold": "best"}, "'tuned', 'tuned_global'"),
        ({"threshold": [0.5, 0.5]}, "2 entries"),
        ({"threshold": [0.5, 7.0]}, r"\[0, 1\]"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"n_iter_no_change": 0}, "n_iter_no_change"),
    ],
)
def test_held_out_rows_refused(data, changes, words):
    train, _ = data
    with pytest.raises(ValueError, match=words):
        small(**changes).fit(train.features.to_scipy(), train.labels)


def test_what_held_out_rows_are_not_for():
    x, y = np.eye(6), np.array([0, 1, 2, 0, 1, 2])
    with pytest.raises(ValueError, match="nothing to tune"):
        small(threshold="tuned").fit(x, y)
    with pytest.raises(ValueError, match="at least 2"):
        small(early_stopping=True).fit(x[:1], np.ones((1, 2), int))
    for changes in ({"early_stopping": True}, {"threshold": "tuned"}):
        with pytest.raises(ValueError, match="partial_fit"):
            small(**changes).partial_fit(x, y % 2, classes=[0, 1])
    binary = small(threshold="tuned", early_stopping=True, validation_fraction=0.5).fit(x, y % 2)
    assert set(binary.predict(x)) <= {0, 1}
    with pytest.raises(ValueError, match="was set after fit"):
        small(epochs=1).fit(x, y % 2).set_params(threshold="tuned").predict(x)
