"""``DFTHead``: fixed DFT columns and codes beside learned slack, with which every small label set can be predicted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import validation
from .codes import check_codes, code_matrix
from .dft import check_dft, dft_matrix
from .fixed_columns import MARK, FixedColumns
from .guarantee import BOX, Guarantee, guarantee
from .head_base import Head
from .head_checks import check_projection, check_resets, check_writable, present
from .layer import Layer, LayerMeta
from .linear_head import LinearHead
from .prior import Prior, log_odds
from .sharding import LabelShard, write_whole
from .validation import check_int, check_number


class DFTHead(Head):
    """``z = [W_dft | C | S] (P h + b) + c``: every set of up to ``k`` labels can be predicted, provably.

    ``W_dft [n, 2k+1]`` is the truncated DFT and ``C [n, codes]`` are codes whose rows are nearly orthogonal: both fixed,
    never stored, exact in float64. ``S [n, slack]`` is learned, and so is the label bias ``c [n]``, if there is one.
    ``guarantee(r)`` says what is promised for sets of r labels: the DFT covers every set of up to k labels by regions
    that are thin, codes every set of up to √codes/2 labels by wide ones.

    Args:
        in_features: width of the encoder output; ``2k+1+codes+slack`` or more, or not all features can be reached.
        num_labels: how many labels there are (``n``).
        k: the most labels that are ever active together; ``2k+1 ≤ n``. 0 leaves the constant column.
        slack: learnable columns beside the DFT.
        codes: columns of fixed codes: 0 for none, 16, 64, 256, 1024 or 4096. Up to codes²/2 labels the guarantee holds
            for every set; beyond that the codes of further labels are random signs from a fixed seed, and each set has
            to be verified by itself (``sk.verify``).
        bias: learn a bias for each label.
        prior: where the labels start: the LabelSets of the training examples, frequencies ``[n]``, or how
            many labels are active on average; see ``init_prior``. ``"paper"``, the default, knows none of these and
            takes k for the number of active labels; ``None`` starts at torch's own initialisation.
        device_mesh: shard the labels over the ranks of this ``DeviceMesh``: its only dimension, or the one that is named
            ``"labels"``, beside which all others are data parallel. ``slack_weight`` and ``bias`` are DTensors with
            placement ``Shard(0)``. Ranks along ``"labels"`` call every verb with the same batch and get the same results;
            different batches raise (on a GPU with ``check_batches = True``). Clip gradients with ``sigkernels.clip_grad_norm_``.
        process_group: the same for a ``torch.distributed`` group, all of whose ranks share the labels.
        device, dtype: of the parameters, as for ``nn.Linear``; float16, bfloat16, float32 or float64.

    Example:
        >>> head = sk.DFTHead(in_features=64, num_labels=1000, k=3, slack=8)
        >>> h = torch.randn(4, 64)
        >>> targets = sk.LabelSets.from_lists([[3, 17], [], [5], [1, 2, 999]], num_labels=1000)
        >>> head(h, targets).shape  # the loss
        torch.Size([])
        >>> values, labels = head.topk(h, 10)
        >>> labels.shape, head(h).shape
        (torch.Size([4, 10]), torch.Size([4, 1000]))
        >>> head.guarantee(3).predictable
        True
    """

    in_features: int
    num_labels: int
    k: int
    slack: int
    codes: int
    proj: nn.Linear
    shard: LabelShard | None
    slack_weight: nn.Parameter  # [n, slack]
    bias: nn.Parameter | None  # [n]

    def __init__(
        self,
        in_features: int,
        num_labels: int,
        k: int,
        slack: int = 0,
        *,
        codes: int = 0,
        bias: bool = False,
        prior: Prior | Literal["paper"] | None = "paper",
        device_mesh: Any = None,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_labels, k = check_dft(num_labels, k)
        slack, codes = validation.check_width("slack", slack, 0), check_codes(codes, num_labels)
        bias = validation.check_bool("bias", bias)
        super().__init__(in_features, num_labels, device_mesh, process_group, device, dtype)
        self.k, self.slack, self.codes = k, slack, codes
        if self.in_features < self.width:
            warnings.warn(
                f"in_features = {in_features} is less than 2k+1+codes+slack = {self.width}: the projection cannot reach "
                "every feature vector, so the guarantee that every set of k labels can be predicted does not hold",
                stacklevel=2,
            )
        place = self._place(device, dtype)
        self.proj = nn.Linear(self.in_features, self.width, **place)
        # FSDP fails on gradients without entries
        self.slack_weight = nn.Parameter(self._label_parameter(slack, **place), requires_grad=slack > 0)
        self.bias = nn.Parameter(self._label_parameter(**place)) if bias else None
        self._log_odds = None if prior is None else self._prior_log_odds(prior)
        self.reset_parameters()

    @property
    def width(self) -> int:
        """The columns of the classifier matrix, ``2k+1+codes+slack``."""
        return 2 * self.k + 1 + self.codes + self.slack

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the parameters as the constructor does; with one seed, the same on any number of ranks.

        Projection and slack are drawn as ``nn.Linear`` draws them; the labels start at the prior.
        """
        check_resets(self, self.proj, self.width, "proj.weight", "proj.bias", "slack_weight", "bias")
        if self._log_odds is not None:
            self._check_prior_place("reset_parameters")
        self.proj.reset_parameters()
        self._draw(self.slack_weight, 1 / math.sqrt(max(self.slack, 1)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.shard is not None:
            self.shard.broadcast(self)
        self._start_at_prior()

    @torch.no_grad()
    def init_prior(self, labels: Prior | Literal["paper"]) -> None:
        """Starts the labels at their frequencies: with a label bias each at its own, else all at the mean.

        Args:
            labels: LabelSets of the training examples, frequencies ``[n]``, or one number: how many labels
                are active on average. ``"paper"`` is the published value, which takes ``k`` for that number.

        The bias of the projection becomes 0; without a label bias its constant feature is ``b_0 = √n·log-odds``.
        """
        self._check_prior_place("init_prior")
        check_writable(self, "init_prior", "proj.bias", "bias")
        self._log_odds = self._prior_log_odds(labels)
        self._start_at_prior()

    def _check_prior_place(self, verb: str) -> None:
        if not isinstance(getattr(self.proj, "bias", None), Tensor):
            raise TypeError(
                f"{verb} sets the bias of the projection, and proj is a {type(self.proj).__name__} without one; put "
                f"nn.Linear({self.in_features}, {self.width}) in its place first"
            )

    def _prior_log_odds(self, labels: Prior | Literal["paper"]) -> Tensor | float:
        if isinstance(labels, str) and labels == "paper":
            labels = min(max(self.k, 0.5), self.num_labels - 0.5)  # k = 0 and k = n have no finite log-odds
        return log_odds(labels, self.num_labels, per_label=self.bias is not None)

    @torch.no_grad()
    def _start_at_prior(self) -> None:
        if self._log_odds is None:
            return
        start = torch.zeros(self.width, dtype=self.proj.bias.dtype, device=self.proj.bias.device)
        if self.bias is None:
            start[0] = math.sqrt(self.num_labels) * self._log_odds
        else:
            write_whole(self.bias, self._log_odds)
        write_whole(self.proj.bias, start)

    def get_extra_state(self) -> Tensor:
        """The mark of k and codes: heads with others can have parameters of the same shapes."""
        return FixedColumns(self.k, self.codes).mark

    def set_extra_state(self, state: Any) -> None:
        """Refuses the mark of another k or other codes."""
        if refusal := self._refusal(state, "the state"):
            raise ValueError(refusal)

    def _refusal(self, state: Any, whose: str) -> str | None:
        return FixedColumns(self.k, self.codes).refuse(FixedColumns.of_mark(state), whose)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        *_, missing, _unexpected, errors = args
        if refusal := self._refusal(state_dict.get(prefix + MARK), prefix or "the state"):
            errors.append(refusal)
            # What comes is torch's own copy; it raises the error after all modules were loaded, this one unchanged.
            state_dict.update(self.state_dict(prefix=prefix, keep_vars=True))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + MARK in missing:  # an older state, or of no head
            missing.remove(prefix + MARK)

    @classmethod
    def from_spmlbl(cls, state_dict: Mapping[str, Tensor], k: int) -> DFTHead:
        """Loads a layer of the paper's authors.

        Args:
            state_dict: with ``proj.weight [2k+1+s, e]``, ``proj.bias [2k+1+s]`` and ``Ws.weight [n, s]``.
            k: the published layer's.
        """
        k = check_int("k", k, 0)
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict must map names to tensors, got {type(state_dict).__name__}; pass layer.state_dict()"
            )
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
            prior=None,
            device=weight.device,
            dtype=weight.dtype,
        )
        head.load_state_dict({"proj.weight": weight, "proj.bias": bias, "slack_weight": slack})
        return head

    @classmethod
    def from_linear(cls, trained: nn.Module, k: int, *, codes: int = 0) -> DFTHead:
        """A trained bottleneck with the same logits, and fixed columns beside it that make every set predictable.

        The slack columns are the bottleneck's own. The features of the DFT and the codes start at 0, for every input:
        go on training for them to be used.

        Args:
            trained: a ``LinearHead`` with a bottleneck, or ``nn.Sequential(nn.Linear(e, d), nn.Linear(d, n))``.
            k, codes: as for ``DFTHead``; ``2k+1+codes+d`` should not exceed e.
        """
        proj, weight, bias = _bottleneck_parts(trained)
        num_labels, slack = weight.shape
        head = cls(
            proj.in_features,
            num_labels,
            k,
            slack,
            codes=codes,
            bias=bias is not None,
            prior=None,
            device=weight.device,
            dtype=weight.dtype,
        ).train(trained.training)
        with torch.no_grad():
            for own, old in ((head.proj.weight, proj.weight), (head.proj.bias, proj.bias)):
                own.zero_()
                if old is not None:
                    own[-slack:] = old
            head.slack_weight.copy_(weight)
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        return head

    def _project(self, h: Tensor) -> Tensor:
        proj = self.proj
        check_projection(self, proj, h, self.width)
        return self._call_projection(proj, h)

    def _plain_logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._matrix(self.slack_weight, x.dtype), self.bias)

    def _layer(self, x: Tensor) -> tuple[Tensor, Layer]:
        start = 0 if self.shard is None else self.shard.start
        meta = LayerMeta(self.num_labels, self.k, start, self.codes)
        layer = Layer(self._own_rows("slack_weight"), self._own_rows("bias"), meta)
        return validation.check_input(x if self.shard is None else self.shard.share(x), layer, "slack_weight")

    def _own_layer(self) -> tuple[Tensor, Tensor | None, int, int, int, int]:
        return self.slack_weight, self.bias, self.num_labels, self.k, self.codes, self.slack

    def label_parameters(self) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        rows = self.num_labels if self.shard is None else self.shard.rows
        slack, bias = self._own_rows("slack_weight"), self._own_rows("bias")
        return present(slack_weight=(slack, (rows, self.slack)), bias=(bias, (rows,)))

    def weight_matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """``W = [W_dft | C | S]``, ``[n, 2k+1+codes+slack]``; the fixed parts are made in float64 and rounded once."""
        return self._matrix(self.all_rows("slack_weight"), dtype)

    def _matrix(self, slack: Tensor, dtype: torch.dtype) -> Tensor:
        dft = dft_matrix(self.num_labels, self.k, dtype=dtype, device=slack.device)
        codes = code_matrix(self.num_labels, self.codes, dtype, slack.device)
        return torch.cat([dft, codes, slack.to(dtype)], dim=1)

    def label_bias(self) -> Tensor | None:
        return None if self.bias is None else self.all_rows("bias")

    def _largest(self, values: Tensor) -> float:
        """The largest of this rank's labels' numbers, over all ranks."""
        largest = values.max() if values.numel() else values.new_tensor(-math.inf)
        return float(largest if self.shard is None else self.shard.maximum(largest))

    def guarantee(self, size: int, box: float = BOX) -> Guarantee:
        """What is promised for every set of ``size`` labels, in closed form: no training can take it away.

        The radius depends on the present slack and bias: it is relative to the longest row of the classifier matrix,
        for features in ``±box``.
        """
        size = check_int("size", size, 0)
        if size > self.num_labels:
            raise ValueError(f"size = {size} is more than the {self.num_labels} labels there are")
        box = check_number("box", box)
        if box <= 0:
            raise ValueError(f"box must be positive, got {box}")
        parts = {name: part.detach() for name, part in self.checked_parameters().items()}
        for name, part in parts.items():
            validation.refuse_meta(f"the head's {name}", part)
        learned = self._largest(parts["slack_weight"].to(torch.float64).square().sum(1))
        fixed = (2 * self.k + 1) / self.num_labels + (1.0 if self.codes else 0.0)  # squared norms of the rows
        max_norm, bias = math.sqrt(fixed + learned), (0.0, 0.0)
        if "bias" in parts:
            bias = -self._largest(-parts["bias"]), self._largest(parts["bias"])
        if not math.isfinite(max_norm + sum(bias)):
            raise ValueError(
                "the slack weights or biases hold NaN or are too large to promise anything; look for the cause"
            )
        found = guarantee(
            size,
            num_labels=self.num_labels,
            k=self.k,
            codes=self.codes,
            slack=self.slack,
            max_norm=max_norm,
            bias=bias,
            box=box,
        )
        if found.predictable and self.in_features < self.width:
            reason = (
                f"in_features = {self.in_features} is less than 2k+1+codes+slack = {self.width}, so the projection "
                "cannot reach every feature vector; use a wider encoder or fewer columns"
            )
            return replace(
                found, predictable=False, radius=0.0, source="none", reachable_in_float32=False, reason=reason
            )
        return found

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_labels={self.num_labels}, k={self.k}, codes={self.codes}, "
            f"slack={self.slack}, bias={self.bias is not None}"
        )


def _bottleneck_parts(trained: Any) -> tuple[nn.Linear, Tensor, Tensor | None]:
    """(projection, label weights ``[n, d]``, label bias ``[n]``) of a bottlenecked layer."""
    if isinstance(trained, LinearHead) and trained.proj is not None:
        return trained.proj, trained.weight, trained.bias
    if isinstance(trained, nn.Sequential) and len(trained) == 2:
        first, last = trained
        if isinstance(first, nn.Linear) and isinstance(last, nn.Linear) and first.out_features == last.in_features:
            return first, last.weight, last.bias
    name = type(trained).__name__
    if isinstance(trained, (LinearHead, nn.Linear)):
        raise TypeError(
            f"trained is a full {name}: it has no bottleneck whose columns could become slack. "
            "sk.verify says what it rules out; sk.swap_output_layer replaces it by a DFTHead to be trained"
        )
    raise TypeError(
        f"trained must be a LinearHead with a bottleneck or nn.Sequential(nn.Linear(e, d), nn.Linear(d, n)), got {name}"
    )
