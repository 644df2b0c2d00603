"""Heads: output layers that own a classifier matrix and share four verbs: logits, loss, topk, predict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import functional, ops, validation
from .dft import check_dft, dft_matrix, prior_coefficient
from .labels import LabelSets
from .layer import Layer
from .losses import BCE, ConfusionLoss, Loss, RowLoss
from .sharding import LabelShard
from .validation import check_int, check_memory, check_number

_DRAW_ROWS = 65536  # labels whose slack is drawn at a time


class Head(nn.Module):
    """What every head does. ``h`` is ``[..., in_features]``; ``n`` is ``num_labels``."""

    in_features: int
    num_labels: int
    shard: LabelShard | None = None  # this rank's labels, where they are spread over processes

    def features(self, h: Tensor) -> Tensor:
        """The input of the classifier matrix, ``[..., D]``."""
        raise NotImplementedError

    def _flat(self, h: Tensor) -> tuple[Tensor, Tensor, Layer]:
        """(features ``[..., D]``, the same as ``[B, D]``, the layer)."""
        raise NotImplementedError

    def weight_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The classifier matrix W, ``[n, D]``."""
        raise NotImplementedError

    def _check_input(self, h: Any) -> None:
        if not isinstance(h, Tensor):
            raise TypeError(f"h must be a tensor, got {type(h).__name__}")
        if h.ndim < 1 or h.shape[-1] != self.in_features:
            raise ValueError(
                f"the last dimension of h must be in_features = {self.in_features}, got shape {tuple(h.shape)}"
            )
        check_memory("h", h)
        check_memory("the head's weight", self._label_weight())

    def forward(self, h: Tensor) -> Tensor:
        """Logits, ``[..., n]``. ``loss``, ``topk`` and ``predict`` do without this array."""
        x, flat, layer = self._flat(h)
        z = ops.logits(flat, layer)
        if self.shard is not None:
            z = self.shard.gather(z, 1)
        return z.reshape(*x.shape[:-1], self.num_labels)

    def loss(
        self,
        h: Tensor,
        targets: Any,
        loss: Loss = BCE(),  # noqa: B008 (frozen)
        reduction: str = "mean",
        *,
        accumulate_grad: bool = False,
    ) -> Tensor:
        """The loss against ``targets``, fused with the layer: no ``[B, n]`` array is made.

        Args:
            targets: LabelSets, a dense ``[..., n]`` tensor or array in [0, 1], a sparse CSR matrix or a list of lists.
            loss: what is measured, with all its settings. Losses of whole rows (``LMLNLL``,
                ``TruncatedTopKEntropy``) need all logits: they make one ``[B, n]`` array, and use it for everything.
            reduction: ``"mean"`` over all B·n terms as torch, ``"sum"``, or ``"none"``: one loss per row. Losses of
                columns (``SigmoidF1``, …) average over labels, losses of rows over rows; see their docstrings.
            accumulate_grad: add the gradient of the label weights straight into their ``.grad`` during the
                forward pass. Saves a fresh ``[n, s]`` array per step at very large n; use it with
                ``optimizer.zero_grad(set_to_none=False)``, and only for losses that are sent backward.
        """
        x, flat, layer = self._flat(h)
        if self.shard is not None and isinstance(loss, (ConfusionLoss, RowLoss)):
            raise ValueError(
                f"{type(loss).__name__} needs all labels of a row or a batch at once, and this head keeps its labels on "
                f"{self.shard.world} ranks; use a loss over single labels such as BCE(), or take the logits head(h)"
            )
        into = self._grad_buffer(layer) if accumulate_grad and torch.is_grad_enabled() else None
        value = functional._loss(x, flat, layer, targets, loss, reduction, into)
        return value if self.shard is None else self.shard.sum(value)

    def topk(self, h: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """The m highest logits and their labels, ``[..., m]`` each, highest first; ties go to the lower label.

        Gradients reach the values, as through ``torch.topk``; where labels are spread over processes they do not.
        """
        x, flat, layer = self._flat(h)
        if self.shard is None:
            return functional._topk(x, flat, layer, m)
        m = validation.check_m(m, self.num_labels)
        with torch.no_grad():
            values, labels = self.shard.merge_topk(*ops.topk(flat, layer, min(m, layer.num_rows)), m)
        return values.reshape(*x.shape[:-1], m), labels.reshape(*x.shape[:-1], m)

    @torch.no_grad()
    def predict(self, h: Tensor, threshold: float = 0.5) -> LabelSets:
        """The labels whose probability is above ``threshold``, one set per row of ``h``."""
        threshold = check_number("threshold", threshold, "a threshold is a probability in [0, 1]")
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold is a probability and must lie in [0, 1], got {threshold}")
        _, flat, layer = self._flat(h)
        if threshold in (0.0, 1.0):
            bound = math.inf if threshold else -math.inf
        else:
            bound = math.log(threshold) - math.log1p(-threshold)
        sets = ops.predict(flat, layer, bound)
        return sets if self.shard is None else self.shard.merge_sets(sets)

    def _grad_buffer(self, layer: Layer) -> Tensor:
        weight = self._label_weight()
        if not weight.requires_grad or layer.weight is not weight:
            raise ValueError(
                "accumulate_grad needs label weights that require a gradient and are used as they are: "
                "not under autocast to another dtype"
            )
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return weight.grad

    def _label_weight(self) -> Tensor:
        raise NotImplementedError


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
            call every verb with the same batch and get the same results; ``slack_weight`` holds the own labels.
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
        self.slack_weight = nn.Parameter(torch.empty(rows, slack, device=device, dtype=dtype))
        self.reset_parameters()
        if init_prior:
            self.init_prior()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the projection and the slack as ``nn.Linear`` does; with one seed, the same on any number of ranks."""
        self.proj.reset_parameters()
        bound = 1 / math.sqrt(max(self.slack, 1))
        if self.shard is None:
            self.slack_weight.uniform_(-bound, bound)
            return
        for tensor in self.proj.parameters():
            self.shard.broadcast(tensor)
        # Draw everybody's labels and keep the own.
        for count, keep in (
            (self.shard.start, False),
            (len(self.slack_weight), True),
            (self.num_labels - self.shard.stop, False),
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

    def features(self, h: Tensor) -> Tensor:
        self._check_input(h)
        return self.proj(h)

    def _flat(self, h: Tensor) -> tuple[Tensor, Tensor, Layer]:
        x = self.features(h)
        if self.shard is not None:
            x = self.shard.share(x)
        start = 0 if self.shard is None else self.shard.start
        return x, *validation.check_input(
            x, Layer(self.slack_weight, None, self.num_labels, self.k, start), "slack_weight"
        )

    def _label_weight(self) -> Tensor:
        return self.slack_weight

    def weight_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """``W = [W_dft | S]``, ``[n, 2k+1+slack]``; the DFT part is made in float64 and rounded once."""
        dft = dft_matrix(self.num_labels, self.k, dtype=dtype, device=self.slack_weight.device)
        return torch.cat([dft, self._whole_slack().to(dtype)], dim=1)

    def _whole_slack(self) -> Tensor:
        slack = self.slack_weight.detach()
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

    def features(self, h: Tensor) -> Tensor:
        self._check_input(h)
        return h if self.proj is None else self.proj(h)

    def _flat(self, h: Tensor) -> tuple[Tensor, Tensor, Layer]:
        x = self.features(h)
        return x, *validation.check_linear_layer(x, self.weight, self.bias)

    def _label_weight(self) -> Tensor:
        return self.weight

    def weight_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """``W [n, d]``, a copy in ``dtype``."""
        return self.weight.detach().to(dtype, copy=True)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_labels={self.num_labels}, bottleneck={self.bottleneck}, "
            f"bias={self.bias is not None}"
        )
