"""The checks of the fused optimizers: settings of groups, loaded states, and calls in which a step cannot be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .layer_update import ROUNDINGS
from .validation import check_int, check_number

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_AT_LEAST_0 = ("lr", "weight_decay", "eps", "momentum", "initial_accumulator_value")
_OF_A_KIND = ("momentum", "betas", "eps", "initial_accumulator_value")  # the settings that tell optimizers apart
_NOT_OURS = {
    "nesterov": False,
    "dampening": 0,
    "maximize": False,
    "amsgrad": False,
}  # torch's, and what leaves them out


def check_settings(group: dict[str, Any]) -> None:
    """Those of a group: schedulers and users may change them between two steps."""
    for name in _AT_LEAST_0:
        if name in group and check_number(name, group[name]) < 0:
            raise ValueError(f"{name} must be at least 0, got {group[name]}")
    if "betas" in group:
        betas = group["betas"]
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}")
        if not all(0 <= check_number("betas", beta) < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
    if group["rounding"] not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {group['rounding']!r}")
    check_int("seed", group["seed"])


def check_dtype(parameter: Tensor) -> None:
    if parameter.dtype not in _DTYPES:
        raise TypeError(f"fused optimizers take float32, float64 and bfloat16, got {parameter.dtype}")


def check_step(step: Any) -> int:
    """How many steps a state has made: a number, or a tensor as torch's optimizers keep it."""
    try:
        steps = int(step)
    except (TypeError, ValueError):
        steps = -1
    if steps < 0 or steps != step:
        raise ValueError(
            f"the optimizer's step must count the steps made, 0 or more, got {step!r}: its state is damaged"
        )
    return steps


def check_state(name: str, value: Any, like: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Refuses a part of the state that is of another parameter, or of one that was converted since.

    ``shape``: of this rank's rows, where labels are sharded.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"the optimizer's {name} must be a tensor, got {value!r}: its state is damaged")
    if value.shape != shape or value.dtype != dtype or value.device != like.device or not value.is_contiguous():
        raise ValueError(
            f"the optimizer's {name} is {value.dtype} {list(value.shape)} on {value.device} for a parameter that needs "
            f"{dtype} {list(shape)} on {like.device}: it was loaded from another head, or the head was converted "
            "since; make the optimizer after the head has its dtype and device, and load a state of the same head (of a "
            "sharded one with torch.distributed.checkpoint)"
        )


def check_same_kind(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    """Refuses the state of another kind of optimizer, whose sums would be started anew without a word."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise TypeError("state_dict must be what state_dict() of an optimizer gives, with 'state' and 'param_groups'")
    own = [name for name in _OF_A_KIND if name in optimizer.defaults]
    for group in state_dict["param_groups"]:
        saved = [name for name in _OF_A_KIND if name in group]
        if saved != own:
            raise ValueError(
                f"state_dict is of another kind of optimizer: its groups have {', '.join(saved) or 'no settings'} where "
                f"{type(optimizer).__name__} has {', '.join(own)}"
            )
        if foreign := _foreign_settings(group):
            raise ValueError(
                f"state_dict is of an optimizer with {', '.join(foreign)}, which {type(optimizer).__name__} does not have: its "
                "steps would be others; go on with that optimizer and without update=, or start the fused one anew"
            )


def _foreign_settings(group: dict[str, Any]) -> list[str]:
    """What a group of torch's own asks for that no fused optimizer does."""
    foreign = [f"{name}={group[name]}" for name, without in _NOT_OURS.items() if group.get(name, without) != without]
    if "rounding" in group:  # of a fused optimizer
        return foreign
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        foreign.append("a weight decay that is part of the gradient (Adam)")
    if "betas" in group and "amsgrad" not in group:
        foreign.append("the steps of NAdam, RAdam or Adamax")
    if "initial_accumulator_value" in group:
        foreign.append("a sum for every weight (torch's Adagrad; here there is one for every label)")
    return foreign


def refuse_data_parallel(head: nn.Module) -> None:
    """Raises for a sharded head on a mesh with data-parallel dimensions; that its labels are sharded does not matter."""
    shard = getattr(head, "shard", None)
    if shard is not None and shard.data_groups:
        raise ValueError(
            "fused optimizers step with the gradient of one batch, and a head on a mesh with data-parallel dimensions "
            "averages gradients over several; make it with device_mesh=mesh['labels'] and the whole batch on every rank, "
            "or leave update out and use an ordinary optimizer on head.parameters()"
        )


def refuse_gradient(parameter: Tensor) -> None:
    """Raises where a gradient waits that no step would ever use."""
    if parameter.grad is not None:
        raise RuntimeError(
            f"a parameter of shape {list(parameter.shape)} has a .grad, which a fused optimizer never uses. It comes from a "
            "loss without update=, from weights that another layer shares, or from a parameter that is no label weight or "
            "bias: pass update=opt to head.loss, give the optimizer the head itself, and an ordinary optimizer "
            "opt.other_parameters(model); set the gradient to None (zero_grad)"
        )


def refuse_layout(name: str, parameter: Tensor) -> None:
    """Raises where rows are not contiguous, or share memory as those that ``expand`` makes."""
    rows_apart = parameter.ndim < 2 or parameter.shape[0] < 2 or parameter.stride(0) >= parameter.shape[-1]
    if not rows_apart or (parameter.stride(-1) != 1 and parameter.shape[-1] > 1):
        raise ValueError(
            f"{name} must have contiguous rows of its own, got strides {parameter.stride()}; assign "
            "torch.nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))"
        )


def refuse_wrong_place() -> None:
    """Raises where the loss is computed in a way in which a step cannot be right."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("update= changes weights in place, which torch.func transforms do not allow; leave it out")
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "update= makes a training step, and gradients are off here (no_grad, inference_mode, or a reentrant activation "
            "checkpoint); leave update out to evaluate"
        )
    if getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RuntimeError(
            "update= steps the label weights with the gradient of this rank's rows alone, and DistributedDataParallel "
            "averages gradients over ranks; leave update out, or keep the head outside of it"
        )
