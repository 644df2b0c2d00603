"""The checks of heads: what they are called with, the parameters that they have now, and the states that they load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .recording import RECORDED, is_recorded
from .validation import check_memory, is_distributed

if TYPE_CHECKING:
    from .head_base import Head


def check_input(head: Head, h: Any) -> None:
    if not isinstance(h, Tensor):
        raise TypeError(f"h must be a tensor, got {type(h).__name__}")
    if is_recorded():
        raise RuntimeError(RECORDED)
    if h.ndim < 1 or h.shape[-1] != head.in_features:
        raise ValueError(
            f"the last dimension of h must be in_features = {head.in_features}, got shape {tuple(h.shape)}"
        )
    check_memory("h", h)


def check_projection(head: Head, proj: nn.Module, h: Tensor, width: int) -> None:
    if type(proj) is not nn.Linear or is_recorded():  # LoRA, quantization or a parametrization took its place
        return
    weight, bias = proj.weight, proj.bias
    if type(weight) is not nn.Parameter:  # sharded by FSDP2, perhaps, and with it the labels' parameters: that is said
        head.checked_parameters()
    check_shape("proj.weight", weight, (width, head.in_features))
    if bias is not None:
        check_shape("proj.bias", bias, (width,))
    if h.device != weight.device and not weight.is_meta:  # meta: offloaded, and loaded when proj is called
        raise ValueError(f"h is on {h.device} and proj.weight on {weight.device}; move both to one device")
    if h.dtype == weight.dtype:
        return
    wide = torch.float64 in (h.dtype, weight.dtype)
    if h.device.type == "meta" or not torch.is_autocast_enabled(h.device.type) or wide:
        raise TypeError(
            f"all inputs must have one dtype, got h {h.dtype}, proj.weight {weight.dtype}; "
            "convert with .to(dtype) or use torch.autocast"
        )


def check_resets(head: Head, proj: nn.Module | None, width: int, *names: str) -> None:
    """Refuses parameters that ``reset_parameters`` cannot draw, before any of them is drawn."""
    if proj is not None and not callable(getattr(proj, "reset_parameters", None)):
        kind = f"{type(proj).__module__}.{type(proj).__name__}"  # a quantized Linear is a Linear too
        raise TypeError(
            f"reset_parameters draws the projection too, and proj is a {kind}, which has no reset_parameters; put "
            f"nn.Linear({head.in_features}, {width}) in its place first, or make a new head"
        )
    check_writable(head, "reset_parameters", *names)
    for name in names:
        if head.shard is not None and "." not in name and not head.shard.holds(getattr(head, name)):
            raise TypeError(
                f"reset_parameters cannot draw {name}, whose labels are sharded and which FSDP2 has sharded once more; call "
                "it before fully_shard, or load a state dict"
            )


def check_writable(head: Head, verb: str, *names: str) -> None:
    """Refuses parameters that are computed from others: what is written to them is lost."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        value = getattr(getattr(head, owner) if owner else head, leaf, None)
        if value is not None and not isinstance(value, nn.Parameter):
            raise TypeError(
                f"{verb} would have no effect on {name}, which is computed from other parameters (pruned, parametrized, "
                f"normalised); undo that (torch.nn.utils.parametrize.remove_parametrizations, prune.remove), call {verb}, "
                "and put it on again"
            )


def check_shape(name: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
    if parameter.shape != shape:
        raise ValueError(
            f"{name} has shape {list(parameter.shape)}, but this head was made for {list(shape)}; "
            "assign a parameter of that shape, or make a new head"
        )


def present(**parameters: tuple[Tensor | None, tuple[int, ...]]) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """The parameters that a head has, with their shapes."""
    return {name: (tensor, shape) for name, (tensor, shape) in parameters.items() if tensor is not None}


def loadable(head: Head, name: str, key: str, given: Tensor, errors: list[str]) -> Tensor | None:
    """What torch can copy into a parameter with a row for each label; None, and one more error, where nothing can be."""
    parameter = getattr(head, name)
    if is_distributed(given):
        if is_distributed(parameter):
            return given
        errors.append(
            f"{key} is a DTensor, sharded over processes, and this head is whole; save get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict, or load with "
            "torch.distributed.checkpoint"
        )
        return None
    if head.shard is None:
        return given
    if given.shape[0] != head.num_labels:
        errors.append(
            f"{key} has {given.shape[0]} rows for num_labels = {head.num_labels}; "
            "give the state dict of a whole layer, or load a checkpoint of torch.distributed.checkpoint"
        )
        return None
    return head.shard.distribute(head.own_labels(given).to(parameter.device))
