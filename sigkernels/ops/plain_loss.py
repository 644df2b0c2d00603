"""An ordinary step in one call of a backend's core: most steps are one, and of a small layer the Python around it is most.

Ordinary is a loss of numbers, as the backend has it, of plain tensors on a CPU, against label sets, in mean or sum, that
nobody traces or transforms. What is anything else, or wrong, is left to the functions that check and explain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.interface import PlainLoss
from ..labels import LabelSets
from ..layer import LayerMeta
from ..losses import ElementwiseLoss, Loss
from .fused_loss import FusedLoss, Spec, new_spec

_CPU = torch.device("cpu")
_MOST_KNOWN = 64
_is_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_dispatch_stack
_transformed = torch._C._are_functorch_transforms_active
_autocast = torch._C._is_any_autocast_enabled
# Function.apply without its wrapper in Python, which looks for transforms once more.
_record = super(torch.autograd.Function, FusedLoss).apply

_Way = tuple[PlainLoss | None, Spec | None]
# By the loss and all numbers of a call: what makes it in one call, if anything does. Begun anew when it is full.
_known: dict[Any, _Way] = {}


def plain_loss(
    x: Tensor,  # [B, D]
    weight: Tensor,  # [n, s]
    bias: Tensor | None,  # [n]
    num_labels: int,
    k: int,
    codes: int,
    slack: int,  # s, or -1 for any
    targets: Any,
    loss: Loss,
    reduction: str,
) -> Tensor | None:
    """The loss ``[]`` of an ordinary step, or None. Nothing but the numbers of the layer was checked."""
    if (
        _is_compiling()
        or type(targets) is not LabelSets
        or not targets.is_plain(num_labels)
        or not getattr(type(loss), "has_kernel", False)
        or type(reduction) is not str
        or _modes()
        or _transformed()
        or _autocast()
    ):
        return None
    key: Any = (type(loss), reduction, num_labels, k, codes, slack, backends.forced_name(), *vars(loss).values())
    known = _known.get(key)
    if known is None:
        known = _look_up(key, loss, LayerMeta(num_labels, k, codes=codes), slack)
    run, spec = known
    if run is None:
        return None
    recorded = torch.is_grad_enabled()
    outcome = run(x, weight, bias, *targets.unchecked(), recorded)
    if outcome is None:
        return None
    return _record(outcome, spec, targets, x, weight, bias) if recorded else outcome[0]


def _look_up(key: Any, loss: Loss, meta: LayerMeta, slack: int) -> _Way:
    reduction, forced = key[1], key[6]
    if not isinstance(loss, ElementwiseLoss) or reduction not in ("mean", "sum") or loss.tensors():
        return None, None  # nothing to be remembered: the key would keep tensors
    spec = new_spec(forced, _CPU, loss, meta, reduction, None)
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    way = _known[key] = spec.backend.plain_loss(loss, meta, reduction, slack), spec
    return way
