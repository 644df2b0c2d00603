"""An operator and its eager twin: one implementation, one ``setup_context``, one backward.

The operator is for calls that are traced. torch.func refuses operators that have a backward, and forward-mode derivatives
take them for constants; the twin maps, is differentiated by torch.func, and refuses forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..operator_dispatch import by_operator
from .missing_derivatives import ReverseModeOnly


class Differentiable:
    """``operator`` where a call is traced, else a Function of the same ``forward``."""

    def __init__(
        self,
        operator: Any,
        forward: Callable[..., Any],
        setup_context: Callable[..., None],
        backward: Callable[..., Any],
    ) -> None:
        operator.register_autograd(backward, setup_context=setup_context)
        rules = {"forward": forward, "setup_context": setup_context, "backward": backward, "vmap": self._vmap}
        twin = {name: staticmethod(rule) for name, rule in rules.items()}
        self.operator = operator
        self._function: Any = type(operator._name, (ReverseModeOnly,), twin)

    def _vmap(self, info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        return one_by_one(self._function.apply, info, in_dims, arguments)

    def __call__(self, *arguments: Any) -> Any:
        if by_operator(*(a for a in arguments if isinstance(a, Tensor))):
            return self.operator(*arguments)
        return self._function.apply(*arguments)


def one_by_one(
    function: Callable[..., Any], info: Any, dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """The function of each entry of the mapped dimension, stacked, as a ``vmap`` rule returns it."""
    results = [
        function(*(a.select(dim, i) if isinstance(dim, int) else a for a, dim in zip(arguments, dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])
