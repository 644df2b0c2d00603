"""A small estimator that the tests of estimators share."""

from __future__ import annotations

import numpy as np

import sigkernels as sk


def small(**changes) -> sk.MultiLabelClassifier:
    return sk.MultiLabelClassifier(
        **({"epochs": 12, "hidden": 64, "slack": 8, "batch_size": 64, "learning_rate": 1e-2} | changes)
    )


X = np.eye(6).repeat(8, 0)
DENSE = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 0, 0]]).repeat(8, 0)


def tiny(**changes) -> sk.MultiLabelClassifier:
    return sk.MultiLabelClassifier(**({"epochs": 30, "hidden": 32, "batch_size": 16, "learning_rate": 2e-2} | changes))
