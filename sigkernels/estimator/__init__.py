"""MultiLabelClassifier: fit, predict, score, for people who do not write training loops."""

from .classifier import MultiLabelClassifier

__all__ = ["MultiLabelClassifier"]
