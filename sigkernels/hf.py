"""Hugging Face models with a head: initialisation in ``from_pretrained``, and the head's settings in the config.

transformers itself is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .dft_head import DFTHead
from .head_base import Head


class HeadMixin:
    """Stands before a ``PreTrainedModel`` that holds a head: ``class Model(HeadMixin, BertPreTrainedModel)``.

    ``from_pretrained`` builds a model without data and initialises what the checkpoint lacks through ``_init_weights``,
    which does not know heads: without this mixin their parameters stay whatever lay in memory.

    ``config.head`` holds the keyword arguments of the ``DFTHead``, such as ``{"k": 50, "slack": 100}``. It is saved and
    loaded with the config.

    Example:
        >>> from types import SimpleNamespace
        >>> from sigkernels.hf import HeadMixin
        >>> class Model(HeadMixin):  # beside a PreTrainedModel
        ...     config = SimpleNamespace(num_labels=500, head={"k": 5, "slack": 16})
        >>> Model().build_head(in_features=64).num_labels
        500
    """

    config: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(HeadMixin)]:
            if issubclass(base, nn.Module) and "_init_weights" in vars(base) and not issubclass(base, HeadMixin):
                raise TypeError(
                    f"the _init_weights of {base.__name__}, which does not know heads, stands before that of HeadMixin: name "
                    f"the mixin first, class {cls.__name__}(HeadMixin, …)"
                )

    def build_head(self, in_features: int) -> DFTHead:
        """The head that ``config.head`` describes, over ``config.num_labels`` labels."""
        settings = getattr(self.config, "head", None)
        if not isinstance(settings, Mapping) or "k" not in settings:
            raise ValueError(
                f"config.head must hold the arguments of the DFTHead, such as {{'k': 50, 'slack': 100}}, got {settings!r}"
            )
        return DFTHead(in_features, self.config.num_labels, **settings)

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, Head):
            super()._init_weights(module)  # type: ignore[misc]
            return
        loaded = [
            (parameter, parameter.detach().clone())
            for parameter in module.parameters()
            if getattr(parameter, "_is_hf_initialized", False)  # transformers' mark for what the checkpoint had
        ]
        module.reset_parameters()
        with torch.no_grad():
            for parameter, value in loaded:
                parameter.copy_(value)
