"""What every head shares: four verbs, logits, loss, topk and predict, and the checks of what they are given.

Every verb goes through ``__call__``, so that hooks fire, and with them DDP, FSDP, pruning, weight norm and autocast wrappers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from . import functional, ops, validation
from . import head_checks as checks
from .labels import LabelSets
from .layer import Layer
from .losses import BCE, Loss, Reduction
from .optim import FusedOptimizer, check_update
from .optim_checks import refuse_data_parallel
from .prior import Prior
from .recording import is_recorded
from .sharding import LabelShard, label_shard
from .thresholds import LogitChunks, Thresholds, log_odds_of_threshold
from .validation import check_memory

_Result = TypeVar("_Result")


class Head(nn.Module):
    """What every head does. ``h`` is ``[..., in_features]``; ``n`` is ``num_labels``.

    Example:
        >>> head = sk.LinearHead(8, 100)
        >>> isinstance(head, sk.Head), head.num_labels
        (True, 100)
    """

    in_features: int
    num_labels: int
    shard: LabelShard | None = None  # this rank's range of the labels of a sharded head
    # A sharded head compares the batches of its ranks: True (or SIGKERNELS_DEBUG=1) bit for bit; None by a few entries, and
    # on the CPU only, since a host that looks at them waits for its device; False not at all.
    check_batches: bool | None = None

    def __init__(
        self, in_features: int, num_labels: int, device_mesh: Any, process_group: Any, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        validation.check_dtype(dtype)
        self.in_features = validation.check_width("in_features", in_features, 1)
        self.num_labels = validation.check_num_labels(num_labels)
        self.shard = label_shard(self.num_labels, device_mesh, process_group, device)

    def _place(self, device: Any, dtype: torch.dtype | None) -> dict[str, Any]:
        """``device`` and ``dtype`` of the parameters: of a sharded head on its mesh, unless another device is named."""
        return {"device": self.shard.mesh.device_type if self.shard and device is None else device, "dtype": dtype}

    def _layer(self, x: Tensor) -> tuple[Tensor, Layer]:
        """(features ``[..., D]`` as ``[B, D]``, the layer), checked."""
        raise NotImplementedError

    def _own_layer(self) -> tuple[Tensor, Tensor | None, int, int, int, int]:
        """(weight, bias, num_labels, k, codes, slack) of a head that is not sharded, as they are: nothing is checked."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws the parameters as the constructor does."""
        raise NotImplementedError

    def weight_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The classifier matrix W, ``[n, D]``."""
        raise NotImplementedError

    def label_bias(self) -> Tensor | None:
        """The bias of every label, ``[n]``, gathered where the head is sharded; None where there is none."""
        raise NotImplementedError

    def init_prior(self, labels: Prior) -> None:
        """Starts the labels at their frequencies: from LabelSets, frequencies ``[n]``, or the mean number of active labels."""
        raise NotImplementedError

    def _project(self, h: Tensor) -> Tensor:
        """``features`` without the checks."""
        raise NotImplementedError

    def _call_projection(self, proj: nn.Module, h: Tensor) -> Tensor:
        """``proj(h)``; on a mesh with data parallel ranks its gradients are their mean."""
        shard = self.shard
        if shard is None or not shard.data_groups:
            return proj(h)
        means = {name: shard.data_mean(p) for name, p in proj.named_parameters()}
        return torch.func.functional_call(proj, means, (h,))

    def _plain_logits(self, x: Tensor) -> Tensor:
        """Logits of features by torch's own operators, with the whole classifier matrix in memory."""
        raise NotImplementedError

    def label_parameters(self) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        """What has a row for each label, as the verbs use it (pruned, normalised or parametrized), and its shape."""
        raise NotImplementedError

    def _label_parameter(self, *columns: int, device: Any, dtype: torch.dtype | None) -> Tensor:
        """An empty ``[n, *columns]``; of a sharded head a DTensor, of which each rank holds the rows of its labels."""
        if self.shard is None:
            return torch.empty(self.num_labels, *columns, device=device, dtype=dtype)
        return self.shard.distribute(torch.empty(self.shard.rows, *columns, device=device, dtype=dtype))

    def _draw(self, parameter: Tensor, bound: float) -> None:
        """Draws a parameter with a row for each label uniformly in ±bound."""
        if self.shard is None:
            nn.init.uniform_(parameter, -bound, bound)
        else:
            self.shard.draw(parameter, bound)

    def own_labels(self, whole: Tensor) -> Tensor:
        """The entries of this rank's labels."""
        return whole if self.shard is None else whole[self.shard.start : self.shard.stop]

    def _own_rows(self, name: str) -> Any:
        """A parameter with a row for each label, as the kernels take it: the rows of this rank's labels."""
        parameter = getattr(self, name)
        return parameter if self.shard is None or parameter is None else self.shard.own(name, parameter)

    def all_rows(self, name: str) -> Tensor:
        """A parameter with a row for each label, of all labels: gathered where the head is sharded."""
        own = self.checked_parameters()[name].detach()
        return own if self.shard is None else self.shard.gather(own, 0)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Takes whole tensors, too, into a sharded head: of another number of ranks, or of one process."""
        state_dict = dict(state_dict)  # the caller's still belongs to the caller
        for name in self.label_parameters():
            given = state_dict.get(prefix + name)
            if given is not None:
                own = checks.loadable(self, name, prefix + name, given, args[-1])
                state_dict[prefix + name] = getattr(self, name) if own is None else own
        super()._load_from_state_dict(state_dict, prefix, *args)

    def features(self, h: Tensor) -> Tensor:
        """The input of the classifier matrix, ``[..., D]``."""
        checks.check_input(self, h)
        self.checked_parameters()
        return self._project(h)

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit.script asks this of every module before it compiles any."""
        raise RuntimeError(
            f"torch.jit.script cannot compile {type(self).__name__}, whose kernels are Python and C++; record its logits "
            "with torch.jit.trace(head, h), or use torch.export.export, which keeps loss, topk and predict whole"
        )

    def _flat(self, h: Tensor) -> tuple[Tensor, Tensor, Layer]:
        """(features ``[..., D]``, the same as ``[B, D]``, the layer)."""
        x = self.features(h)
        return x, *self._layer(x)

    def checked_parameters(self) -> dict[str, Tensor]:
        """What has a row for each label, of the shapes that this head was made for."""
        parameters = self.label_parameters()
        for name, (parameter, shape) in parameters.items():
            check_memory(f"the head's {name}", parameter)
            checks.check_shape(name, parameter, shape)
        return {name: parameter for name, (parameter, _) in parameters.items()}

    if TYPE_CHECKING:  # nn.Module's own __call__ returns Any

        @overload
        def __call__(self, h: Tensor) -> Tensor: ...
        @overload
        def __call__(
            self,
            h: Tensor,
            targets: Any,
            loss: Loss = ...,
            reduction: Reduction = ...,
            *,
            unknown: Any = ...,
            update: FusedOptimizer | None = ...,
        ) -> Tensor: ...
        @overload
        def __call__(self, h: Tensor, *, _verb: Callable[[Tensor], _Result]) -> _Result: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self,
        h: Tensor,
        targets: Any = None,
        loss: Loss | None = None,
        reduction: Reduction = "mean",
        *,
        unknown: Any = None,
        update: FusedOptimizer | None = None,
        _verb: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """Logits, ``[..., n]``; with ``targets``, the loss instead, without this array: see ``loss``."""
        if torch.compiler.is_compiling() and (self.shard is not None or update is not None):
            # The compiler takes the DTensors of a sharded head for plain tensors, and its graphs have no place for our
            # collectives, nor for weights that change while the loss is computed.
            torch._dynamo.graph_break(msg="sharded heads and update= run eagerly: leave fullgraph=True out")
            again = torch.compiler.disable(self.forward)
            return again(h, targets, loss, reduction, unknown=unknown, update=update, _verb=_verb)
        if _verb is not None:
            return _verb(h)
        if targets is not None:
            chosen = BCE() if loss is None else loss
            if update is not None:
                return self._updated_loss(h, targets, chosen, reduction, unknown, update)
            return self._loss(h, targets, chosen, reduction, unknown)
        if loss is not None or reduction != "mean" or unknown is not None or update is not None:
            raise ValueError(
                "loss, reduction, unknown or update were given without targets; head(h) gives logits, head(h, targets) a "
                "loss"
            )
        return self._logits(h)

    def loss(
        self,
        h: Tensor,
        targets: Any,
        loss: Loss = BCE(),  # noqa: B008 (frozen)
        reduction: Reduction = "mean",
        *,
        unknown: Any = None,
        update: FusedOptimizer | None = None,
    ) -> Tensor:
        """The loss against ``targets``, fused with the layer: no ``[B, n]`` array is made. The same as ``head(h, targets)``.

        Args:
            h: ``[..., in_features]``, in the dtype of the parameters, or any under autocast.
            targets: LabelSets, a dense ``[..., n]`` tensor or array in [0, 1], a sparse CSR matrix or a list of lists.
            loss: which loss, with all its settings. Losses of whole rows (``LMLNLL``,
                ``TruncatedTopKEntropy``) need all logits: they make one ``[B, n]`` array, and use it for everything.
            reduction: ``"mean"`` over all B·n terms as torch, ``"sum"``, or ``"none"``: one loss per row. Losses of
                columns (``SigmoidF1``, …) average over labels, losses of rows over rows; see their docstrings.
            unknown: labels of each row that are not annotated, in any form of label sets, or a mask ``[..., n]``: they
                have no part in the loss, the mean or the gradients. Their targets may be anything, NaN too. Only
                losses of single labels (``BCE``, ``Focal``, …) take them.
            update: an optimizer of ``sigkernels.optim``: the label weights and biases make their step in this very pass,
                and no gradient of their size exists. What ``backward`` brings to ``h`` is of the weights before it.

        Returns:
            float32 (float64 for float64 inputs), ``[]``, or ``[...]`` for ``"none"``.
        """
        if targets is None:
            raise TypeError("targets must be LabelSets, a dense [B, n] tensor or another form of label sets, got None")
        if update is None:
            return self(h, targets, loss, reduction, unknown=unknown)
        return self(h, targets, loss, reduction, unknown=unknown, update=update)

    def topk(self, h: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """The m highest logits and their labels, ``[..., m]`` each, highest first; ties go to the lower label.

        Gradients reach the values, as through ``torch.topk``; those of a sharded head take none.

        Args:
            h: ``[..., in_features]``.
            m: how many labels, 1 … n.

        Returns:
            Logits in the dtype of ``h``, and labels, int64.
        """
        return self(h, _verb=partial(self._topk, m=validation.check_m(m, self.num_labels)))

    @torch.no_grad()
    def predict(self, h: Tensor, threshold: float | Tensor = 0.5) -> LabelSets:
        """The labels whose probability is above ``threshold``, one set per row of ``h``.

        Args:
            h: ``[B, in_features]``.
            threshold: a probability, or one for each label, ``[n]``; ``tune_thresholds`` finds good ones. A logit is
                compared with the log-odds of the threshold, rounded to its dtype: one that equals them is not above.
        """
        bound = log_odds_of_threshold(threshold, self.num_labels, h)
        return self(h, _verb=partial(self._predict, bound=bound))

    @torch.no_grad()
    def tune_thresholds(
        self,
        h: Tensor,
        targets: Any,
        *,
        per_label: bool = True,
        beta: float = 1.0,
        default: float = 0.5,
        unknown: Any = None,
    ) -> Thresholds:
        """The thresholds with the best F score on validation rows, a range of labels at a time: no ``[B, n]`` array.

        Args:
            h: ``[N, in_features]``.
            targets: the labels of these rows, in any form of label sets.
            per_label, beta, default, unknown: as for ``Thresholds.tune``.
        """
        x, flat, layer = self(h, _verb=self._flat)
        if x.ndim != 2:
            raise ValueError(f"h must have shape [N, {self.in_features}], got {list(h.shape)}")
        if self.shard is not None:
            raise ValueError("a sharded head has no thresholds of its own; give its logits to Thresholds.tune")
        chunks = LogitChunks(
            lambda first, last: ops.logits(flat, layer.part(first, last)), flat.shape[0], self.num_labels
        )
        return Thresholds.tune(chunks, targets, per_label=per_label, beta=beta, default=default, unknown=unknown)

    def to_linear(self) -> nn.Sequential:
        """A copy as plain ``nn.Linear`` layers with the same logits: it runs where sigkernels is not installed."""
        bias = self.label_bias()
        weight = self.weight_matrix(next(self.parameters()).dtype)
        last = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
        last.weight = nn.Parameter(weight)
        if bias is not None:
            last.bias = nn.Parameter(bias.clone())
        proj = getattr(self, "proj", None)
        layers = [last] if proj is None else [copy.deepcopy(proj), last]
        return nn.Sequential(*layers).train(self.training)

    def _logits(self, h: Tensor) -> Tensor:
        if self.shard is None and is_recorded():
            return self._plain_logits(self._project(h))
        self._check_batches("logits", h)
        x, flat, layer = self._flat(h)
        z = ops.logits(flat, layer)
        if self.shard is not None:
            z = self.shard.gather(z, 1)
        return z if x.ndim == 2 else z.reshape(*x.shape[:-1], self.num_labels)

    def _loss(self, h: Tensor, targets: Any, loss: Loss, reduction: Reduction, unknown: Any) -> Tensor:
        self._check_batches("loss", h, targets, (loss, reduction, unknown))
        checks.check_input(self, h)
        x = self._project(h)
        if self.shard is None and unknown is None:
            value = ops.plain_loss(x, *self._own_layer(), targets, loss, reduction)
            if value is not None:
                return value
        self.checked_parameters()
        flat, layer = self._layer(x)
        return functional.layer_loss(x, flat, layer, targets, loss, reduction, unknown, self.shard)

    def _updated_loss(
        self, h: Tensor, targets: Any, loss: Loss, reduction: Reduction, unknown: Any, update: FusedOptimizer
    ) -> Tensor:
        check_update(update)
        self._check_batches("loss", h, targets, (loss, reduction, unknown))
        x, flat, layer = self._flat(h)
        parameters = self._stepped_parameters(layer)
        steps = update.layer_update(parameters)
        scale = validation.check_number("grad_scale", update.grad_scale)
        value = functional.layer_update(x, flat, layer, targets, loss, reduction, unknown, scale, steps, self.shard)
        update.finish(parameters, steps)
        return value

    def _stepped_parameters(self, layer: Layer) -> dict[str, Tensor]:
        """Weight and bias as an optimizer has them: of a sharded head the DTensors whose rows the layer holds."""
        own = {"weight": layer.weight} if layer.bias is None else {"weight": layer.weight, "bias": layer.bias}
        if self.shard is None:
            return own
        refuse_data_parallel(self)
        whole = [getattr(self, name) for name in self.label_parameters()]
        # What autocast has cast is a copy, which no optimizer has: refused there.
        return {
            name: part if part.dtype == rows.dtype else rows
            for (name, rows), part in zip(own.items(), whole, strict=True)
        }

    def _topk(self, h: Tensor, m: int) -> tuple[Tensor, Tensor]:
        self._check_batches("topk", h, settings=m)
        x, flat, layer = self._flat(h)
        if self.shard is None:
            return functional.layer_topk(x, flat, layer, m)
        with torch.no_grad():
            values, labels = self.shard.merge_topk(*ops.topk(flat, layer, min(m, layer.num_rows)), m)
        return values.reshape(*x.shape[:-1], m), labels.reshape(*x.shape[:-1], m)

    def _predict(self, h: Tensor, bound: float | Tensor) -> LabelSets:
        self._check_batches("predict", h, settings=bound)
        _, flat, layer = self._flat(h)
        sets = ops.predict(flat, layer, self.own_labels(bound) if isinstance(bound, Tensor) else bound)
        return sets if self.shard is None else self.shard.merge_sets(sets)

    def _check_batches(self, verb: str, h: Tensor, targets: Any = None, settings: Any = None) -> None:
        if self.shard is None:
            return
        exactly = self.check_batches or os.environ.get("SIGKERNELS_DEBUG") == "1"
        if not exactly and (self.check_batches is False or self.shard.mesh.device_type != "cpu"):
            return
        if exactly or not self.shard.looks_alike(h, verb=verb, targets=targets, settings=settings):
            self.shard.check_same_batch(verb=verb, h=h, targets=targets, settings=settings)
