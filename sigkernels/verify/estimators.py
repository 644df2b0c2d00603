"""Output layers of fitted estimators, our own and the linear ones of scikit-learn, and the rule by which each predicts.

scikit-learn is not imported to find out: an estimator of a module that nobody has imported cannot be here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from ..labels import LabelSets
from .rules import DecisionRule

CLASSIFIER = "head_or_matrix"  # what errors call it


def layer_of(classifier: Any, bias: Any) -> tuple[Any, Any]:
    """The output layer of a fitted estimator and its bias; anything else as it is."""
    if _is_ours(classifier):
        if not hasattr(classifier, "head_"):
            raise ValueError(f"{CLASSIFIER} is a MultiLabelClassifier that has no weights yet: call fit first")
        return classifier.head_, bias
    _refuse_wrappers(classifier)
    parts = _one_estimator_per_label(classifier)
    if parts is None and not (hasattr(classifier, "coef_") and hasattr(classifier, "intercept_")):
        _refuse_without_weights(classifier)
        return classifier, bias
    if bias is not None:
        raise ValueError("bias was given, but the estimator has an intercept_ of its own: leave bias=None")
    if parts is not None:
        return np.concatenate([row for row, _ in parts]), np.concatenate([own for _, own in parts])
    return _linear(classifier)


def rule_of(classifier: Any, rule: Any, threshold: Any) -> DecisionRule:
    """The rule that was asked for; where nothing was, that by which the classifier itself predicts."""
    if rule is None and threshold is None:
        if _is_ours(classifier):
            rule, threshold = ("argmax", None) if classifier.predicts_one_class else (None, classifier.threshold_)
        elif _predicts_one_class(classifier):
            rule = "argmax"
    return DecisionRule.of("threshold" if rule is None else rule, threshold)


def sets_of(classifier: Any, label_sets: Any) -> Any:
    """Names or classes as the y of a MultiLabelClassifier holds them, as label sets; anything else as it is."""
    if _is_ours(classifier) and hasattr(label_sets, "to_list"):  # a Series of pandas
        label_sets = label_sets.to_list()
    if not _is_ours(classifier) or isinstance(label_sets, LabelSets) or not isinstance(label_sets, (Sequence, ndarray)):
        return label_sets
    in_rows = [row for row in label_sets if not isinstance(row, str) and hasattr(row, "__len__")]
    classes = len(label_sets) > 0 and not in_rows  # one for each row
    named = any(isinstance(label, str) for row in in_rows for label in row)
    return classifier.label_sets(label_sets) if classes or named else label_sets


def names_of(classifier: Any, names: Any) -> Any:
    """The names of labels that were given; else those that a MultiLabelClassifier was fitted with, one for each."""
    if names is None and _is_ours(classifier):
        found = classifier.classes_
        if len(found) == classifier.head_.num_labels and all(isinstance(name, str) for name in found.tolist()):
            return found.tolist()
    return names


def _linear(estimator: Any) -> tuple[ndarray, ndarray]:
    """(``coef_`` [n, d], ``intercept_`` [n]) of a linear estimator, which is one number where it fits none."""
    coefficients = estimator.coef_
    rows = np.atleast_2d(coefficients.toarray() if hasattr(coefficients, "toarray") else np.asarray(coefficients))
    intercept = np.ravel(estimator.intercept_)
    return rows, np.repeat(intercept, len(rows)) if intercept.size == 1 else intercept


def _is_ours(classifier: Any) -> bool:
    estimator = sys.modules.get("sigkernels.estimator")
    return estimator is not None and isinstance(classifier, estimator.MultiLabelClassifier)


def _is(classifier: Any, module: str, name: str) -> bool:
    """Whether it is an estimator of this class of scikit-learn."""
    found = sys.modules.get(module)
    return found is not None and isinstance(classifier, getattr(found, name))


def _predicts_one_class(classifier: Any) -> bool:
    """Whether it is a classifier of scikit-learn with a row for each of three classes or more, of which the highest wins."""
    if _is(classifier, "sklearn.multiclass", "OneVsRestClassifier"):
        return len(getattr(classifier, "estimators_", ())) > 1 and not classifier.multilabel_
    classes, rows = getattr(classifier, "classes_", None), getattr(classifier, "coef_", None)
    if not isinstance(classes, ndarray) or classes.ndim != 1 or rows is None:
        return False
    given = getattr(getattr(classifier, "_label_binarizer", None), "y_type_", "")  # of a RidgeClassifier
    return len(classes) > 2 and not given.startswith("multilabel")


def _refuse_wrappers(classifier: Any) -> None:
    if _is(classifier, "sklearn.pipeline", "Pipeline"):
        raise TypeError(f"{CLASSIFIER} is a Pipeline; give its last step, which sees the features: pipeline[-1]")
    if hasattr(classifier, "best_estimator_"):
        raise TypeError(
            f"{CLASSIFIER} is a {type(classifier).__name__}; give the estimator that it found: best_estimator_"
        )
    if hasattr(classifier, "dual_coef_") and len(getattr(classifier, "classes_", ())) > 2:
        raise TypeError(
            f"{CLASSIFIER} is a {type(classifier).__name__}, which compares classes in pairs, so that no row of coef_ is a "
            "label; use LinearSVC or OneVsRestClassifier"
        )


def _refuse_without_weights(classifier: Any) -> None:
    """Refuses an estimator that has not been fitted, or has no matrix when it is; anything else may have one."""
    if isinstance(classifier, type):
        raise TypeError(f"{CLASSIFIER} is the class {classifier.__name__}, which has no weights: give a trained one")
    if not (hasattr(classifier, "get_params") and hasattr(classifier, "fit")):
        return
    name = type(classifier).__name__
    if not any(found.endswith("_") and not found.startswith("_") for found in vars(classifier)):
        raise ValueError(f"{CLASSIFIER} is a {name} that has no weights yet: call fit first")
    layers = getattr(classifier, "coefs_", None)  # of a multilayer perceptron
    remedy = (
        "give its last layer: coefs_[-1].T, with bias=intercepts_[-1]"
        if isinstance(layers, list)
        else "verify a linear classifier, such as LogisticRegression, LinearSVC or OneVsRestClassifier of these"
    )
    raise TypeError(f"{CLASSIFIER} is a {name}, which has no matrix coef_ with an intercept_; {remedy}")


def _one_estimator_per_label(classifier: Any) -> list[tuple[ndarray, ndarray]] | None:
    """(row ``[1, d]``, bias ``[1]``) of each label of a OneVsRestClassifier or MultiOutputClassifier, else None."""
    if not (
        _is(classifier, "sklearn.multiclass", "OneVsRestClassifier")
        or _is(classifier, "sklearn.multioutput", "MultiOutputClassifier")
    ):
        return None
    name = type(classifier).__name__
    if not hasattr(classifier, "estimators_"):
        raise ValueError(f"{CLASSIFIER} is a {name} that has no weights yet: call fit first")
    width = next((part.coef_.shape[1] for part in classifier.estimators_ if hasattr(part, "coef_")), 0)
    rows = []
    for label, part in enumerate(classifier.estimators_):
        if type(part).__name__ == "_ConstantPredictor":  # of a label that all examples have, or none
            rows.append((np.zeros((1, width)), np.where(np.ravel(part.y_) > 0, 1.0, -1.0)))
            continue
        if not hasattr(part, "coef_") or part.coef_.shape != (1, width):
            raise TypeError(
                f"{CLASSIFIER} is a {name}, whose estimator {label} is no linear classifier of two classes: "
                f"{type(part).__name__}; verify estimators with one row of coef_, such as LogisticRegression or LinearSVC"
            )
        rows.append(_linear(part))
    return rows
