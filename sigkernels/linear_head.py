"""``LinearHead``: the usual sigmoid layer, full or through a bottleneck, with the verbs of every head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import validation
from .head_base import Head
from .head_checks import check_projection, check_resets, check_writable, present
from .layer import Layer, LayerMeta
from .prior import Prior, log_odds
from .sharding import LabelShard, write_whole


class LinearHead(Head):
    """The usual sigmoid layer with the same verbs: ``z = W h + c``, or ``z = W (P h + b)`` through a bottleneck.

    Args:
        in_features: width of the encoder output.
        num_labels: how many labels there are (``n``).
        bottleneck: ``None`` for one full linear layer, or the width ``d`` of the bottleneck.
        bias: a bias for each label; by default the full layer has one and the bottlenecked has none.
        prior: where the labels start, as for ``init_prior``; needs a bias. ``None``: torch's own initialisation.
        device_mesh, process_group: shard the labels over ranks, as for ``DFTHead``; ``weight`` and ``bias`` are DTensors.
        device, dtype: of the parameters, as for ``nn.Linear``; float16, bfloat16, float32 or float64.

    Example:
        >>> head = sk.LinearHead(in_features=64, num_labels=1000, bottleneck=16)
        >>> head(torch.randn(4, 64)).shape
        torch.Size([4, 1000])
        >>> head.loss(torch.randn(4, 64), [[3, 17], [], [5], [1]]).shape
        torch.Size([])
    """

    in_features: int
    num_labels: int
    bottleneck: int | None
    proj: nn.Linear | None
    shard: LabelShard | None
    weight: nn.Parameter  # [n, d]
    bias: nn.Parameter | None  # [n]

    def __init__(
        self,
        in_features: int,
        num_labels: int,
        bottleneck: int | None = None,
        *,
        bias: bool | None = None,
        prior: Prior | None = None,
        device_mesh: Any = None,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        bottleneck = None if bottleneck is None else validation.check_width("bottleneck", bottleneck, 1)
        has_bias = bottleneck is None if bias is None else validation.check_bool("bias", bias)
        super().__init__(in_features, num_labels, device_mesh, process_group, device, dtype)
        self.bottleneck = bottleneck
        place = self._place(device, dtype)
        self.proj = None if bottleneck is None else nn.Linear(self.in_features, bottleneck, **place)
        width = self.in_features if bottleneck is None else bottleneck
        self.weight = nn.Parameter(self._label_parameter(width, **place))
        self.bias = nn.Parameter(self._label_parameter(**place)) if has_bias else None
        self._log_odds: Tensor | float | None = None
        self.reset_parameters()
        if prior is not None:
            self.init_prior(prior)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all parameters as ``nn.Linear`` does; the labels start at their prior, if one was given.

        With one seed, the same on any number of ranks.
        """
        check_resets(self, self.proj, self.weight.shape[1], "proj.weight", "proj.bias", "weight", "bias")
        if self.proj is not None:
            self.proj.reset_parameters()
        gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))  # as kaiming_uniform_(a=√5), to the last bit
        self._draw(self.weight, math.sqrt(3.0) * (gain / math.sqrt(self.weight.shape[1])))
        if self.bias is not None:
            self._draw(self.bias, 1 / math.sqrt(self.weight.shape[1]))
        if self.shard is not None:
            self.shard.broadcast(self)
        if self.bias is not None and self._log_odds is not None:
            write_whole(self.bias, self._log_odds)

    @torch.no_grad()
    def init_prior(self, labels: Prior) -> None:
        """Starts each label at its frequency, by its bias; other parameters stay.

        Args:
            labels: LabelSets of the training examples, frequencies ``[n]``, or one number: how many labels
                are active on average.
        """
        if self.bias is None:
            raise ValueError("init_prior needs a bias for each label; make the head with bias=True")
        check_writable(self, "init_prior", "bias")
        self._log_odds = log_odds(labels, self.num_labels, per_label=True)
        write_whole(self.bias, self._log_odds)

    def _project(self, h: Tensor) -> Tensor:
        proj = self.proj
        if proj is None:
            return h
        check_projection(self, proj, h, self.bottleneck or self.in_features)
        return self._call_projection(proj, h)

    def _plain_logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def _layer(self, x: Tensor) -> tuple[Tensor, Layer]:
        if self.shard is None:
            return validation.check_linear_layer(x, self.weight, self.bias)
        meta = LayerMeta(self.num_labels, -1, self.shard.start)
        layer = Layer(self._own_rows("weight"), self._own_rows("bias"), meta)
        return validation.check_input(self.shard.share(x), layer, "weight")

    def _own_layer(self) -> tuple[Tensor, Tensor | None, int, int, int, int]:
        return self.weight, self.bias, self.num_labels, -1, 0, self.bottleneck or self.in_features

    def label_parameters(self) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        rows, width = self.num_labels if self.shard is None else self.shard.rows, self.bottleneck or self.in_features
        return present(weight=(self._own_rows("weight"), (rows, width)), bias=(self._own_rows("bias"), (rows,)))

    def label_bias(self) -> Tensor | None:
        return None if self.bias is None else self.all_rows("bias")

    def weight_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """``W [n, d]``, a copy in ``dtype``."""
        return self.all_rows("weight").to(dtype, copy=True)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_labels={self.num_labels}, bottleneck={self.bottleneck}, "
            f"bias={self.bias is not None}"
        )
