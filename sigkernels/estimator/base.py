"""The base classes of scikit-learn, or stand-ins with the methods that the estimator needs where it is not installed.

Inheriting from scikit-learn's own classes, rather than imitating them, gives metadata routing, the display in
notebooks and whatever a later version asks of every estimator. The package imports this module with the estimator
only, since importing scikit-learn takes half as long as importing torch.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import DataConversionWarning, NotFittedError
except ImportError:
    if not TYPE_CHECKING:

        class NotFittedError(ValueError, AttributeError):
            """A method was called that needs ``fit`` first."""

        class DataConversionWarning(UserWarning):
            """The data was brought into another shape."""

        class ClassifierMixin:
            """Marks a classifier."""

        class BaseEstimator:
            """Parameters are the arguments of the constructor."""

            @classmethod
            def _parameter_defaults(cls) -> dict[str, Any]:
                parameters = inspect.signature(cls).parameters
                return {name: parameter.default for name, parameter in parameters.items()}

            def get_params(self, deep: bool = True) -> dict[str, Any]:
                """The arguments of the constructor."""
                return {name: getattr(self, name) for name in self._parameter_defaults()}

            def set_params(self, **params: Any) -> BaseEstimator:
                """Change arguments of the constructor; they take effect with the next ``fit``."""
                valid = list(self._parameter_defaults())
                for name in params:
                    if name not in valid:
                        raise ValueError(
                            f"Invalid parameter {name!r} for estimator {self!r}. Valid parameters are: {valid!r}."
                        )
                for name, value in params.items():
                    setattr(self, name, value)
                return self

            def __repr__(self) -> str:
                changed = (
                    f"{name}={getattr(self, name)!r}"
                    for name, default in self._parameter_defaults().items()
                    if repr(getattr(self, name)) != repr(default)
                )
                return f"{type(self).__name__}({', '.join(changed)})"


__all__ = ["BaseEstimator", "ClassifierMixin", "DataConversionWarning", "NotFittedError"]
