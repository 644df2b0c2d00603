"""Heads: output layers that own a classifier matrix and share four verbs: logits, loss, topk, predict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import validation
from .dft import check_dft, dft_matrix, prior_coefficient
from .head_base import Head, check_shape
from .layer import Layer, LayerMeta
from .sharding import LabelShard
from .validation import check_int, check_memory, check_number

__all__ = ["DFTHead", "Head", "LinearHead"]

_DRAW_ROWS = 65536  # labels whose slack is drawn at a time


class DFTHead(Head):
    """``z = [W_dft | S] (P h + b)``: every set of up to ``k`` labels can be predicted, provably.

    ``W_dft [n, 2k+1]`` is the truncated DFT: fixed, never stored, exact in float64. ``S [n, slack]`` is learned.

    Args:
        in_features: width of the encoder output.
        num_labels: how many labels there are (``n``).
        k: the most labels that are ever active together; ``2k+1 ≤ n``.
        slack: learnable columns beside the DFT.
        init_prior: start with every label at probability ``k/n`` (see ``init_prior()``).
        process_group: keep only a range of the labels on each rank of this ``torch.distributed`` group. All ranks
            call every verb with the same batch and get the same results (``check_batches = True`` compares the batches);
            ``slack_weight`` holds the own labels. Clip gradients with ``sigkernels.clip_grad_norm_``.
            ``state_dict`` and ``weight_matrix`` gather the whole layer, and a state dict loads on any number of ranks.
    """

    def __init__(
        self,
        in_features: int,
        num_labels: int,
        k: int,
        slack: int = 0,
        *,
        init_prior: bool = True,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_labels, k = check_dft(num_labels, k)
        in_features, slack = check_int("in_features", in_features, 1), check_int("slack", slack, 0)
        validation.check_dtype(dtype)
        self.in_features, self.num_labels, self.k, self.slack = in_features, num_labels, k, slack
        width = 2 * k + 1 + slack
        if in_features < width:
            warnings.warn(
                f"in_features = {in_features} is less than 2k+1+slack = {width}: the projection cannot reach every "
                "feature vector, so the guarantee that every set of k labels can be predicted does not hold",
                stacklevel=2,
            )
        self.proj = nn.Linear(in_features, width, device=device, dtype=dtype)
        self.shard = None if process_group is None else LabelShard(num_labels, process_group)
        rows = num_labels if self.shard is None else self.shard.stop - self.shard.start
        empty = torch.empty(rows, slack, device=device, dtype=dtype)
        self.slack_weight = nn.Parameter(empty, requires_grad=slack > 0)  # FSDP fails on gradients without entries
        self._starts_at_prior = init_prior
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters as the constructor does; with one seed, the same on any number of ranks.

        Projection and slack are drawn as ``nn.Linear`` draws them; the bias starts at the prior if ``init_prior`` was set.
        """
        self.proj.reset_parameters()
        bound = 1 / math.sqrt(max(self.slack, 1))
        if self.shard is None:
            nn.init.uniform_(self.slack_weight, -bound, bound)
        else:
            self._draw_own_labels(self.shard, bound)
        if self._starts_at_prior:
            self.init_prior()

    def _draw_own_labels(self, shard: LabelShard, bound: float) -> None:
        for tensor in self.proj.parameters():
            shard.broadcast(tensor)
        # Draw everybody's labels and keep the own.
        for count, keep in (
            (shard.start, False),
            (len(self.slack_weight), True),
            (self.num_labels - shard.stop, False),
        ):
            for at in range(0, count, _DRAW_ROWS):
                rows = self.slack_weight[at : at + _DRAW_ROWS]
                target = rows if keep else rows.new_empty(min(_DRAW_ROWS, count - at), self.slack)
                target.uniform_(-bound, bound)

    @torch.no_grad()
    def init_prior(self) -> None:
        """Sets the bias so that every label starts at probability ``k/n``: ``b_0 = √n·logit(k/n)``, the rest 0."""
        self.proj.bias.zero_()
        self.proj.bias[0] = prior_coefficient(self.num_labels, self.k)

    @classmethod
    def from_spmlbl(cls, state_dict: Mapping[str, Tensor], k: int) -> DFTHead:
        """Loads a published layer: ``proj.weight [D, e]``, ``proj.bias [D]`` and ``Ws.weight [n, s]``."""
        k = check_int("k", k, 0)
        wanted = ("proj.weight", "proj.bias", "Ws.weight")
        missing = [key for key in wanted if key not in state_dict]
        if missing:
            raise ValueError(f"state_dict lacks {', '.join(missing)}; it has {', '.join(state_dict) or 'nothing'}")
        weight, bias, slack = (state_dict[key] for key in wanted)
        for key, tensor, ndim in zip(wanted, (weight, bias, slack), (2, 1, 2), strict=True):
            if not isinstance(tensor, Tensor) or tensor.ndim != ndim:
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"{key} must be a tensor with {ndim} dimensions, got {shape}; pass the layer's own state"
                )
        num_labels, columns = slack.shape
        if weight.shape[0] != 2 * k + 1 + columns or bias.shape != weight.shape[:1]:
            raise ValueError(
                f"proj.weight {tuple(weight.shape)} and proj.bias {tuple(bias.shape)} do not fit k = {k} and "
                f"Ws.weight {tuple(slack.shape)}: 2k+1+s = {2 * k + 1 + columns} rows are needed"
            )
        head = cls(
            weight.shape[1],
            num_labels,
            k,
            columns,
            init_prior=False,
            device=weight.device,
            dtype=weight.dtype,
        )
        head.load_state_dict({"proj.weight": weight, "proj.bias": bias, "slack_weight": slack})
        return head

    def _project(self, h: Tensor) -> Tensor:
        self._check_projection(self.proj, h, 2 * self.k + 1 + self.slack)
        return self.proj(h)

    def _plain_logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._matrix(self.slack_weight, x.dtype))

    def _flat(self, h: Tensor) -> tuple[Tensor, Tensor, Layer]:
        x = self.features(h)
        if self.shard is not None:
            x = self.shard.share(x)
        start = 0 if self.shard is None else self.shard.start
        return x, *validation.check_input(
            x, Layer(self.slack_weight, None, LayerMeta(self.num_labels, self.k, start)), "slack_weight"
        )

    def _label_parameters(self) -> Mapping[str, Tensor]:
        return {"slack_weight": self.slack_weight}

    def _check_parameters(self) -> None:
        rows = self.num_labels if self.shard is None else self.shard.stop - self.shard.start
        check_shape("slack_weight", self.slack_weight, (rows, self.slack))

    def weight_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """``W = [W_dft | S]``, ``[n, 2k+1+slack]``; the DFT part is made in float64 and rounded once."""
        return self._matrix(self._whole_slack(), dtype)

    def _matrix(self, slack: Tensor, dtype: torch.dtype) -> Tensor:
        dft = dft_matrix(self.num_labels, self.k, dtype=dtype, device=slack.device)
        return torch.cat([dft, slack.to(dtype)], dim=1)

    def _whole_slack(self) -> Tensor:
        slack = self.slack_weight.detach()
        check_memory("slack_weight", slack)
        return slack if self.shard is None else self.shard.gather(slack, 0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.shard is not None:
            destination[prefix + "slack_weight"] = self._whole_slack()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        key = prefix + "slack_weight"
        if self.shard is not None and key in state_dict:
            whole, errors = state_dict[key], args[-1]
            own = whole[self.shard.start : self.shard.stop]
            if whole.shape[0] != self.num_labels:
                errors.append(
                    f"{key} has {whole.shape[0]} rows for num_labels = {self.num_labels}; "
                    "give the state dict of a whole layer, as head.state_dict() makes it on any number of ranks"
                )
                own = self.slack_weight
            # A new dict: the caller's still belongs to the caller.
            state_dict = {**state_dict, key: own}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_labels={self.num_labels}, k={self.k}, slack={self.slack}"


class LinearHead(Head):
    """The usual sigmoid layer with the same verbs: ``z = W h + c``, or ``z = W (P h + b)`` through a bottleneck.

    Args:
        in_features: width of the encoder output.
        num_labels: how many labels there are (``n``).
        bottleneck: ``None`` for one full linear layer, or the width ``d`` of the bottleneck.
        bias: a bias for each label; by default the full layer has one and the bottlenecked has none.
    """

    def __init__(
        self,
        in_features: int,
        num_labels: int,
        bottleneck: int | None = None,
        *,
        bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        in_features, num_labels = check_int("in_features", in_features, 1), check_int("num_labels", num_labels, 1)
        bottleneck = None if bottleneck is None else check_int("bottleneck", bottleneck, 1)
        validation.check_dtype(dtype)
        self.in_features, self.num_labels, self.bottleneck = in_features, num_labels, bottleneck
        width = in_features if bottleneck is None else bottleneck
        self.proj = None if bottleneck is None else nn.Linear(in_features, bottleneck, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(num_labels, width, device=device, dtype=dtype))
        has_bias = bottleneck is None if bias is None else bias
        self.bias = nn.Parameter(torch.empty(num_labels, device=device, dtype=dtype)) if has_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters as ``nn.Linear`` does."""
        if self.proj is not None:
            self.proj.reset_parameters()
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight.shape[1])
            nn.init.uniform_(self.bias, -bound, bound)

    @torch.no_grad()
    def init_prior(self, active: float) -> None:
        """Sets the bias so that a label starts near probability ``active/n``, for ``active`` labels per row."""
        if self.bias is None:
            raise ValueError("init_prior needs a bias for each label; make the head with bias=True")
        if not 0 < (active := check_number("active", active)) < self.num_labels:
            raise ValueError(f"active must lie between 0 and num_labels = {self.num_labels}, got {active}")
        share = active / self.num_labels
        self.bias.fill_(math.log(share) - math.log1p(-share))

    def _project(self, h: Tensor) -> Tensor:
        if self.proj is None:
            return h
        self._check_projection(self.proj, h, self.bottleneck or self.in_features)
        return self.proj(h)

    def _plain_logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def _flat(self, h: Tensor) -> tuple[Tensor, Tensor, Layer]:
        x = self.features(h)
        return x, *validation.check_linear_layer(x, self.weight, self.bias)

    def _label_parameters(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    def _check_parameters(self) -> None:
        check_shape("weight", self.weight, (self.num_labels, self.bottleneck or self.in_features))
        if self.bias is not None:
            check_shape("bias", self.bias, (self.num_labels,))

    def weight_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """``W [n, d]``, a copy in ``dtype``."""
        check_memory("weight", self.weight)
        return self.weight.detach().to(dtype, copy=True)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_labels={self.num_labels}, bottleneck={self.bottleneck}, "
            f"bias={self.bias is not None}"
        )
