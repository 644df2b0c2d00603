"""Decision rules: thresholds as biases, free thresholds, the highest logits; each against exact rational programs."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from verify_oracle import KINDS, degenerate_matrix, is_argmaxable, is_top

import sigkernels as sk
from sigkernels.verify import Certificate, Report, verify
from sigkernels.verify.question import Question
from sigkernels.verify.rules import DecisionRule
from sigkernels.verify.solvers.highest_logits import highest_logits

YES = ("ARGMAXABLE", "THIN")


def random_sets(rng, n, count):
    return [np.flatnonzero(rng.random(n) < rng.choice([0.2, 0.5, 0.8])).tolist() for _ in range(count)]


def decided(report):
    assert report.check(), report.check()
    assert report.counts()["UNDECIDED"] == report.counts()["NOT_EPS"] == 0
    return [v in YES for v in report.verdicts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", (False, True))
def test_fuzzed_top_sets_agree_with_exact_rational_programs(kind, biased):
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(4):
        n, d = int(rng.integers(1, 8)), int(rng.integers(1, 4))
        W = degenerate_matrix(rng, kind, n, d)
        bias = rng.integers(-2, 3, n).astype(float) if biased else None
        sets = random_sets(rng, n, 5)
        truth = [is_top(W, s, bias) for s in sets]
        assert decided(verify(W, sets, bias=bias, rule="topk")) == truth
        assert decided(verify(W, sets, bias=bias, threshold="free")) == truth
        assert decided(verify(W, [[i] for i in range(n)], bias=bias, rule="argmax")) == [
            is_top(W, [i], bias) for i in range(n)
        ]


@pytest.mark.parametrize("kind", ("gaussian", "integers", "zero rows", "thin"))
@pytest.mark.parametrize("biased", (False, True))
def test_fuzzed_thresholds_agree_with_exact_rational_programs(kind, biased):
    rng = np.random.default_rng(50 + KINDS.index(kind))
    for _ in range(4):
        n, d = int(rng.integers(1, 8)), int(rng.integers(1, 4))
        W = degenerate_matrix(rng, kind, n, d)
        bias = rng.standard_normal(n) if biased else None
        sets = random_sets(rng, n, 5)
        for threshold in (0.3, rng.uniform(0.05, 0.95, n)):
            shifted = (0.0 if bias is None else bias) - (np.log(threshold) - np.log1p(-threshold)) * np.ones(n)
            truth = [is_argmaxable(W, s, shifted) for s in sets]
            assert decided(verify(W, sets, bias=bias, threshold=threshold)) == truth


def test_a_threshold_makes_sets_possible_and_impossible():
    W = np.array([[1.0], [-1.0]])
    assert verify(W, [[0, 1], []], threshold=0.3).verdicts.tolist() == ["ARGMAXABLE", "UNARGMAXABLE"]
    assert verify(W, [[0, 1], []], threshold=0.5).verdicts.tolist() == ["UNARGMAXABLE", "UNARGMAXABLE"]
    assert verify(W, [[0, 1], []], threshold=0.7).verdicts.tolist() == ["UNARGMAXABLE", "ARGMAXABLE"]
    assert verify(W, [[0, 1], []], threshold="free").verdicts.tolist() == ["ARGMAXABLE", "ARGMAXABLE"]


@pytest.mark.parametrize("threshold", (0.2, 0.5, 0.9))
def test_witnesses_are_what_predict_predicts(threshold):
    torch.manual_seed(0)
    head = sk.LinearHead(4, 25, dtype=torch.float64)
    sets = head.predict(torch.randn(30, 4, dtype=torch.float64), threshold)
    report = verify(head, sets, threshold=threshold)
    assert report.counts()["ARGMAXABLE"] == 30
    x = torch.from_numpy(np.stack([report.witness(i) for i in range(30)]))
    assert head.predict(x, threshold) == sets
    assert report.logit_threshold(0) == pytest.approx(math.log(threshold / (1 - threshold)))


def test_witnesses_of_top_sets_have_the_highest_logits():
    rng = np.random.default_rng(0)
    W, bias = rng.standard_normal((30, 4)), rng.standard_normal(30)
    sets = [np.sort(np.argsort(-(W @ x + bias))[:3]) for x in rng.standard_normal((20, 4))]
    report = verify(W, sets, bias=bias, rule="topk")
    assert report.counts()["ARGMAXABLE"] == 20 and report.question.inputs == 4
    for i, active in enumerate(sets):
        logits = W @ report.witness(i) + bias
        assert sorted(np.argsort(-logits)[:3]) == active.tolist()
        assert np.flatnonzero(logits > report.logit_threshold(i)).tolist() == active.tolist()


@pytest.mark.parametrize("scale", (2.0**-900, 2.0**600, 2.0**-470))
def test_the_logit_threshold_is_in_the_units_of_the_matrix(scale):
    rng = np.random.default_rng(0)
    W, bias = rng.standard_normal((8, 3)) * scale, rng.standard_normal(8) * scale
    for x in rng.standard_normal((4, 3)):
        top = np.sort(np.argsort(-(W @ x + bias))[:2])
        report = verify(W, [top], bias=bias, rule="topk")
        logits = W @ report.witness(0) + bias
        assert np.flatnonzero(logits > report.logit_threshold(0)).tolist() == top.tolist()


def test_the_logit_threshold_of_an_exact_witness_is_exact():
    W = np.array([[1.0, 0.0], [-1.0, 1.0], [1.0 + 2.0**-45, -1.0], [0.0, 0.0]]) * 2.0**-600
    report = verify(W, [[0]], rule="topk")
    report.certificates[0] = Certificate("witness", witness=np.array([Fraction(3), Fraction(2), Fraction(-1)]))
    assert (
        report.logit_threshold(0) == Fraction(report.question.threshold_unit) / Fraction(2) ** report.question.exponent
    )
    assert isinstance(report.logit_threshold(0), Fraction)


def test_a_class_inside_the_hull_of_the_others_never_wins():
    W = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [0.1, 0.1]])
    report = verify(W, [[0], [1], [2], [3]], rule="argmax")
    assert report.verdicts.tolist() == ["ARGMAXABLE"] * 3 + ["UNARGMAXABLE"] and report.check()


@pytest.mark.parametrize("rule", ("topk", "argmax"))
def test_a_dft_head_needs_no_column_for_a_free_threshold(rule):
    head = sk.DFTHead(5, 16, 2)
    sets = [[i] for i in range(16)] if rule == "argmax" else list(map(list, itertools.combinations(range(16), 2)))
    report = verify(head, sets, rule=rule)
    assert all(v in YES for v in report.verdicts) and report.question.d == 5 and report.check()
    assert any("adds nothing" in note for note in report.notes)


@pytest.mark.parametrize("threshold", (0.1, 0.9))
def test_a_threshold_on_a_dft_head_changes_no_verdict(threshold):
    head = sk.DFTHead(5, 40, 2)
    sets = [[1], [3, 20], [], list(range(40)), list(range(0, 40, 2)), [0, 10, 20]]
    report, usual = verify(head, sets, threshold=threshold), verify(head, sets)
    assert decided(report) == decided(usual)
    assert report.counts() == usual.counts()
    assert {report.certificate(i).kind for i in (4, 5)} == {"alternation"}


@pytest.mark.parametrize("scale", (2.0**-600, 2.0**600))
def test_a_free_threshold_does_not_depend_on_the_scale_of_the_matrix(scale):
    W = np.random.default_rng(0).standard_normal((8, 2))
    sets = [[0], [1, 5], [2, 3, 4]]
    plain, scaled = (verify(m, sets, rule="topk", radius=True) for m in (W, W * scale))
    assert plain.verdicts.tolist() == scaled.verdicts.tolist()
    assert scaled.radius_lo == pytest.approx(plain.radius_lo, rel=1e-6)


@pytest.mark.parametrize("options", ({"threshold": 0.2}, {"threshold": np.linspace(0.1, 0.9, 12)}, {"rule": "topk"}))
@pytest.mark.parametrize("matrix", (True, False))
def test_a_saved_report_knows_its_rule(tmp_path, options, matrix):
    W, bias = np.random.default_rng(3).standard_normal((12, 3)), np.linspace(-1, 1, 12)
    sets = [np.flatnonzero(np.random.default_rng(i).random(12) < 0.3).tolist() for i in range(12)]
    report = verify(W, sets, bias=bias, **options)
    assert len(set(map(str, report.verdicts))) > 1
    report.save(tmp_path / "r.npz", matrix=matrix)
    loaded = Report.load(tmp_path / "r.npz") if matrix else Report.load(tmp_path / "r.npz", W, bias)
    assert loaded.check() and loaded.summary() == report.summary()
    assert loaded.check(W, bias) and not loaded.check(W, -bias)
    assert str(loaded.question.rule) == str(report.question.rule) in loaded.summary()


def test_a_bias_alone_replaces_that_of_the_report(tmp_path):
    W, bias = np.array([[1.0], [-1.0]]), np.array([1.0, 1.0])
    report = verify(W, [[0, 1]], bias=bias)
    assert report.verdicts[0] == "ARGMAXABLE"
    assert report.check() and report.check(bias=bias) and not report.check(bias=-bias)
    report.save(tmp_path / "r.npz")
    assert Report.load(tmp_path / "r.npz", bias=bias).check()
    assert not Report.load(tmp_path / "r.npz", bias=-bias).check()
    for read in (report.check, lambda bias: Report.load(tmp_path / "r.npz", bias=bias)):
        with pytest.raises(ValueError, match="bias must have shape"):
            read(bias=np.ones(3))
    with pytest.raises(ValueError, match="with a bias: pass bias="):
        Report.load(tmp_path / "r.npz", W)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "softmax"}, ValueError, "rule='softmax': use one of 'threshold', 'topk', 'argmax'"),
        ({"threshold": 0.0}, ValueError, "strictly between 0 and 1, got 0.0"),
        ({"threshold": 1}, ValueError, "strictly between 0 and 1, got 1"),
        ({"threshold": math.nan}, ValueError, "threshold must be finite"),
        ({"threshold": [0.5, math.nan, 0.5]}, ValueError, "strictly between"),
        ({"threshold": "any"}, ValueError, "threshold='any'"),
        ({"threshold": ["a", "b", "c"]}, TypeError, "threshold must hold one probability"),
        ({"threshold": [0.5, 0.5]}, ValueError, r"one for each of the 3 labels, got shape \(2,\)"),
        ({"threshold": 0.4, "rule": "topk"}, ValueError, "leave threshold out"),
        ({"rule": "argmax"}, ValueError, r"label_sets\[1\] has 2 labels"),
    ],
)
def test_bad_rules(options, error, message):
    with pytest.raises(error, match=message):
        verify(np.eye(3), [[0], [1, 2]], **options)


def test_an_estimator_is_verified_by_the_rule_it_predicts_by():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 5)).astype(np.float32)
    Y = sk.LabelSets.from_lists([np.flatnonzero(rng.random(8) < 0.3).tolist() for _ in range(60)], 8)
    many = sk.MultiLabelClassifier(head="linear", hidden=3, epochs=2, threshold=0.3, random_state=0).fit(X, Y)
    report = verify(many, many.predict_sets(X))
    assert report.question.rule.threshold == 0.3 and report.counts()["ARGMAXABLE"] == 60
    assert report.check(many)
    assert verify(many, Y, threshold=0.5).question.rule.threshold == 0.5
    one = sk.MultiLabelClassifier(head="linear", hidden=3, epochs=2, random_state=0).fit(X, rng.integers(0, 4, 60))
    assert verify(one, [[i] for i in range(4)]).question.rule.name == "argmax"
    with pytest.raises(ValueError, match="not fitted"):
        verify(sk.MultiLabelClassifier(), [[0]])


def test_an_estimator_of_names_is_asked_in_names():
    rng = np.random.default_rng(0)
    X, animals = rng.standard_normal((60, 5)), ("ant", "bee", "cat", "dog")
    y = [[name for name in animals if rng.random() < 0.4] for _ in range(60)]
    many = sk.MultiLabelClassifier(head="linear", bottleneck=2, hidden=3, epochs=2).fit(X, y)
    numbers = [[animals.index(name) for name in row] for row in y]
    report = verify(many, y)
    assert report.sets.to_lists() == numbers and report.names == animals
    assert list(report.verdicts) == list(verify(many, numbers).verdicts)
    assert "bee" in report.words(next(i for i, row in enumerate(y) if "bee" in row))
    assert verify(many, y, names=list("abcd")).names == tuple("abcd")
    assert sk.verify_all(many, 1).names == sk.verify_classes(many).names == animals
    with pytest.raises(ValueError, match="'eel', which is not among the 4 classes"):
        verify(many, [["eel"]])
    one = sk.MultiLabelClassifier(head="linear", hidden=3, epochs=2).fit(X, np.array(animals)[rng.integers(0, 4, 60)])
    assert (
        verify(one, animals).sets.to_lists() == verify(one, np.array(animals)).sets.to_lists() == [[0], [1], [2], [3]]
    )
    two = sk.MultiLabelClassifier(head="linear", hidden=3, epochs=2).fit(X, np.array([7, 9])[rng.integers(0, 2, 60)])
    assert verify(two, [9, 7]).sets.to_lists() == [[0], []] and verify(two, [9, 7]).names is None
    pandas = pytest.importorskip("pandas")
    assert verify(many, pandas.Series(y)).sets == report.sets
    assert verify(one, pandas.Series(animals)).sets.to_lists() == [[0], [1], [2], [3]]


def test_a_linear_classifier_of_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((80, 3)), rng.integers(0, 5, 80)
    model = linear_model.LogisticRegression().fit(X, y)
    report = verify(model, [[i] for i in range(5)])  # it predicts the highest score
    truth = [is_top(model.coef_, [i], model.intercept_) for i in range(5)]
    assert decided(report) == truth and report.question.rule.name == "argmax"
    for i in np.flatnonzero(truth):
        assert model.predict(report.witness(i)[None, :])[0] == i
    assert verify(model, [[1, 2]], threshold=0.5).question.rule.name == "threshold"
    binary = linear_model.LogisticRegression().fit(X, y > 2)
    assert verify(binary, [[0], []]).question.rule.name == "threshold"


def scikit_learns_classifiers():
    linear_model = pytest.importorskip("sklearn.linear_model")
    multiclass, multioutput = pytest.importorskip("sklearn.multiclass"), pytest.importorskip("sklearn.multioutput")
    svm, logistic = pytest.importorskip("sklearn.svm"), linear_model.LogisticRegression
    return {
        "classes": (linear_model.SGDClassifier(), svm.LinearSVC(), linear_model.Perceptron(), svm.LinearSVC(fit_intercept=False),
                    linear_model.RidgeClassifier(), linear_model.RidgeClassifier(fit_intercept=False),
                    multiclass.OneVsRestClassifier(svm.LinearSVC())),
        "labels": (multiclass.OneVsRestClassifier(logistic()), multioutput.MultiOutputClassifier(logistic(fit_intercept=False)),
                   linear_model.RidgeClassifier(), multiclass.OneVsRestClassifier(svm.SVC(kernel="linear"))),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ("classes", "labels"))
def test_classifiers_of_scikit_learn_are_verified_by_the_rule_by_which_they_predict(kind):
    """What one has predicted is possible, and at a witness it predicts the set."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((150, 2))
    Y = (X @ rng.standard_normal((2, 6)) + 0.3 * rng.standard_normal(6) > 0).astype(int)
    for model in scikit_learns_classifiers()[kind]:
        model.fit(X, Y[:, 0] + Y[:, 1] + 2 * Y[:, 2] if kind == "classes" else Y)
        predicted = np.unique(model.predict(X), axis=0)
        sets = [[list(model.classes_).index(c)] for c in predicted] if kind == "classes" else predicted
        report = verify(model, sets)
        assert all(decided(report)), (model, report.verdicts)
        assert report.question.rule.name == ("argmax" if kind == "classes" else "threshold")
        points = np.stack([report.witness(i) for i in range(len(report))])
        assert np.array_equal(model.predict(points), predicted), model


def test_a_label_that_all_examples_have():
    multiclass, linear_model = pytest.importorskip("sklearn.multiclass"), pytest.importorskip("sklearn.linear_model")
    X = np.random.default_rng(2).standard_normal((40, 2))
    Y = np.stack([X[:, 0] > 0, np.ones(40), np.zeros(40)], axis=1).astype(int)
    with pytest.warns(UserWarning, match="Label"):
        model = multiclass.OneVsRestClassifier(linear_model.LogisticRegression()).fit(X, Y)
    assert decided(verify(model, [[0, 1], [1], [0], [1, 2]])) == [True, True, False, False]


@pytest.mark.parametrize("threshold", (None, 0.3))
def test_estimators_without_weights_are_told_to_fit(threshold):
    linear_model, ensemble, neural = (
        pytest.importorskip(f"sklearn.{name}") for name in ("linear_model", "ensemble", "neural_network")
    )
    X = np.random.default_rng(0).standard_normal((30, 3))
    for estimator in (linear_model.LogisticRegression(), linear_model.Ridge(), ensemble.RandomForestClassifier(2)):
        name = type(estimator).__name__
        with pytest.raises(ValueError, match=f"is a {name} that has no weights yet: call fit first"):
            verify(estimator, [[0]], threshold=threshold)
        with pytest.raises(TypeError, match=f"is the class {name}, which has no weights"):
            verify(type(estimator), [[0]], threshold=threshold)
    with pytest.raises(
        TypeError, match="is a RandomForestClassifier, which has no matrix coef_ with an intercept_; verify"
    ):
        verify(ensemble.RandomForestClassifier(2).fit(X, X[:, 0] > 0), [[0]], threshold=threshold)
    network = neural.MLPClassifier((4,), max_iter=1).fit(X, X > 0)
    with pytest.raises(TypeError, match=r"give its last layer: coefs_\[-1\]\.T, with bias=intercepts_\[-1\]"):
        verify(network, [[0]], threshold=threshold)
    assert verify(network.coefs_[-1].T, [[0]], bias=network.intercepts_[-1], domain="nonnegative").check()


def test_classifiers_of_scikit_learn_whose_rows_are_no_labels_are_refused():
    svm, pipeline = pytest.importorskip("sklearn.svm"), pytest.importorskip("sklearn.pipeline")
    search, tree = pytest.importorskip("sklearn.model_selection"), pytest.importorskip("sklearn.tree")
    multiclass = pytest.importorskip("sklearn.multiclass")
    rng = np.random.default_rng(3)
    X, y = rng.standard_normal((60, 2)), rng.integers(0, 3, 60)
    for model, words in (
        (svm.SVC(kernel="linear"), "SVC, which compares classes in pairs"),
        (pipeline.make_pipeline(svm.LinearSVC()), r"pipeline\[-1\]"),
        (search.GridSearchCV(svm.LinearSVC(), {"C": [1.0]}, cv=2), "best_estimator_"),
        (multiclass.OneVsRestClassifier(tree.DecisionTreeClassifier()), "estimator 0 is no linear classifier"),
        (multiclass.OneVsOneClassifier(svm.LinearSVC()), "OneVsOneClassifier, which has no matrix coef_"),
    ):
        with pytest.raises(TypeError, match=words):
            verify(model.fit(X, y), [[0]])
    with pytest.raises(ValueError, match="OneVsRestClassifier that has no weights yet"):
        verify(multiclass.OneVsRestClassifier(svm.LinearSVC()), [[0]])
    with pytest.raises(ValueError, match="bias was given"):
        verify(multiclass.OneVsRestClassifier(svm.LinearSVC()).fit(X, y), [[0]], np.zeros(3))


@pytest.mark.parametrize("biased", (False, True))
def test_every_class_of_a_softmax(biased):
    rng = np.random.default_rng(0)
    W, bias = rng.standard_normal((24, 3)), rng.standard_normal(24) if biased else None
    report = sk.verify_classes(W, bias)
    truth = [is_top(W, [i], bias) for i in range(24)]
    assert decided(report) == truth and 3 < sum(truth) < 22
    for i in np.flatnonzero(truth):
        assert np.argmax(W @ report.witness(i) + (0.0 if bias is None else bias)) == i
    linear = torch.nn.Linear(3, 24, dtype=torch.float64, bias=biased)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(W))
        if biased:
            linear.bias.copy_(torch.from_numpy(bias))
    assert sk.verify_classes(linear).verdicts.tolist() == report.verdicts.tolist()


def test_duplicate_classes_never_win_alone():
    W = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    assert sk.verify_classes(W).verdicts.tolist() == ["UNARGMAXABLE", "UNARGMAXABLE", "ARGMAXABLE", "ARGMAXABLE"]


@pytest.mark.parametrize("xp", (np, pytest.param("strict", marks=pytest.mark.filterwarnings("ignore"))))
@pytest.mark.parametrize("biased", (False, True))
def test_reflections_find_wide_regions(xp, biased):
    xp = pytest.importorskip("array_api_strict") if xp == "strict" else xp
    rng = np.random.default_rng(2)
    W, bias = rng.standard_normal((50, 8)), 0.1 * rng.standard_normal(50) if biased else None
    sets = [np.sort(np.argsort(-(W @ x))[:2]) for x in rng.standard_normal((20, 8))]
    question = Question(W, bias, -1, 1e-8, 1e4, DecisionRule("topk", "free"))
    found = [f for f in highest_logits(question, xp, sets, np.arange(20))]
    number = np.concatenate([f.witness_of for f in found])
    points = np.concatenate([f.witness for f in found])
    assert len(number) >= 10 and len(set(number.tolist())) == len(number)
    for i, x in zip(number, points, strict=True):
        logits = W @ x[:8] + (0.0 if bias is None else bias) + question.threshold_unit * x[8]
        assert np.flatnonzero(logits > 0).tolist() == sets[i].tolist()
