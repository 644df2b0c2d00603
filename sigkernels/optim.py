"""Optimizers whose step for the label weights is made inside the loss: no gradient of their size ever exists.

``loss = head.loss(h, targets, update=opt)`` steps the label weights and biases tile by tile, and ``loss.backward()`` brings
the gradient of the weights before the step to the encoder, whose parameters an ordinary optimizer has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .layer_update import ADAGRAD, ADAMW, MOMENTUM, SGD, LayerUpdate, ParameterUpdate
from .optim_checks import (
    check_dtype,
    check_same_kind,
    check_settings,
    check_state,
    check_step,
    refuse_data_parallel,
    refuse_gradient,
    refuse_layout,
    refuse_wrong_place,
)
from .validation import is_distributed

__all__ = ["FusedAdagrad", "FusedAdamW", "FusedOptimizer", "FusedSGD"]


class FusedOptimizer(torch.optim.Optimizer):
    """What the fused optimizers share. Each call of the loss with ``update=`` is one step; ``step()`` ends it.

    Args:
        params: a head, whose label weight and bias are taken, or parameters and groups of them as torch's optimizers
            take them. All other parameters, ``other_parameters(model)``, are for an ordinary optimizer.
        defaults: the settings of a group.

    Attributes:
        grad_scale: the upstream gradient that ``backward`` will bring: 1 unless the loss is multiplied by something
            before it. The gradient of the label weights is multiplied by it.

    Example:
        >>> encoder, head = torch.nn.Linear(8, 16), sk.LinearHead(16, 100)
        >>> opt = sk.optim.FusedSGD(head, lr=0.1)
        >>> rest = torch.optim.AdamW(opt.other_parameters(torch.nn.ModuleList([encoder, head])))
        >>> loss = head.loss(encoder(torch.randn(4, 8)), [[3, 17], [], [5], [99]], update=opt)  # the labels' step
        >>> loss.backward()  # to the encoder
        >>> rest.step(); opt.step()
        >>> head.weight.grad is None
        True
    """

    grad_scale: float = 1.0

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if isinstance(params, nn.Module):
            params = _parameters_of(params)
        elif isinstance(params, (str, dict, Tensor)) or not isinstance(params, Iterable):
            got = "one tensor: write [parameter]" if isinstance(params, Tensor) else repr(params)
            raise TypeError(f"params must be a head, label parameters or groups of them, got {got}")
        self._stepped: set[Tensor] = set()  # since the last step()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group with settings of its own, such as a bias without weight decay."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group)
            for parameter in group["params"]:
                check_dtype(parameter)
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise
        # Now and not at the first step: who reads a checkpoint into this optimizer needs something to read it into.
        for parameter in group["params"]:
            if parameter.requires_grad:
                self._parameter_update(parameter, group, 0)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: torch's own leave out what it does not know."""
        return {**super().__getstate__(), "_stepped": self._stepped, "grad_scale": self.grad_scale}

    def other_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of a model that this optimizer has not: those for an ordinary one."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; put parts into a ModuleList")
        own = {parameter for group in self.param_groups for parameter in group["params"]}
        return [parameter for parameter in model.parameters() if parameter not in own]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step, which the loss itself has made: for schedulers, and so that the next one is not taken for it.

        Raises where a parameter has a gradient, which comes from a loss without ``update=`` and which nobody would use.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                refuse_gradient(parameter)
        self._stepped.clear()
        return value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but keeps the state in its own dtype, which is wider than that of bfloat16 parameters.

        The state of ``torch.optim.AdamW`` or ``SGD`` is that of ``FusedAdamW`` and ``FusedSGD``.
        """
        check_same_kind(self, state_dict)
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name in ("rounding", "seed"):
                group.setdefault(name, self.defaults[name])
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)
        self._stepped.clear()

    def layer_update(self, parameters: dict[str, Tensor]) -> LayerUpdate:
        """The step of a layer with these parameters, under the names ``weight`` and ``bias``; of DTensors, of own rows."""
        indices = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        groups = {p: group for group in self.param_groups for p in group["params"]}
        parts: dict[str, ParameterUpdate | None] = {"weight": None, "bias": None}
        for name, parameter in parameters.items():
            if not parameter.requires_grad or not parameter.numel():
                continue
            if parameter not in groups:
                raise ValueError(
                    f"update has not the head's {name}; make it with {type(self).__name__}(head, …), or freeze the "
                    "parameter with requires_grad_(False). A parameter that is computed (pruned, parametrized, cast by "
                    "autocast, gathered by FSDP) cannot be stepped by the loss"
                )
            if parameter in self._stepped:
                raise RuntimeError(
                    f"the head's {name} was stepped by an earlier loss already; call {type(self).__name__}.step() after "
                    "backward. Gradients are not accumulated over several losses, and activation checkpointing, which "
                    "computes a loss twice, cannot contain one with update=: take a larger batch, or leave update= out"
                )
            check_dtype(parameter)
            refuse_gradient(parameter)
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(f"the head's {name} has gradient hooks, which update= would pass by; remove them")
            refuse_layout(f"the head's {name}", parameter)
            check_settings(groups[parameter])
            parts[name] = self._parameter_update(parameter, groups[parameter], indices[parameter])
        update = LayerUpdate(**parts)
        if not update.parts():
            raise ValueError("update has nothing to train: the head's label parameters do not require a gradient")
        return update

    def finish(self, parameters: dict[str, Tensor], update: LayerUpdate) -> None:
        """Takes note of a step that was made."""
        for name, part in zip(LayerUpdate._fields, update, strict=True):
            if part is not None:
                self.state[parameters[name]]["step"] = part.step
                self._stepped.add(parameters[name])

    def _parameter_update(self, parameter: Tensor, group: dict[str, Any], index: int) -> ParameterUpdate:
        state = self.state[parameter]
        step = check_step(state.setdefault("step", 0)) + 1
        compensation = None
        rounding = group["rounding"] if parameter.dtype == torch.bfloat16 else "nearest"
        if rounding == "kahan":
            compensation = _state(state, "compensation", parameter, dtype=parameter.dtype)
        return ParameterUpdate(
            parameter if not is_distributed(parameter) else _own(parameter.detach()).requires_grad_(),
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            rounding=rounding,
            key=random_key(int(group["seed"]), step, index),
            compensation=compensation,
            **self._settings(parameter, group, state),
        )

    def _settings(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """What a kind of optimizer adds to its ``ParameterUpdate``."""
        raise NotImplementedError


class FusedSGD(FusedOptimizer):
    """``torch.optim.SGD`` for the labels of a head. Without momentum it has no state at all.

    Args:
        params: a head, or label parameters and groups of them.
        lr: the learning rate.
        momentum: of the gradients; costs as much memory as the weights in float32.
        weight_decay: added to the gradient, times the weight.
        rounding: of bfloat16 weights: ``"stochastic"``, ``"nearest"``, by which small steps vanish, or ``"kahan"``,
            which keeps what was lost in a second bfloat16.
        seed: of stochastic rounding.

    Example:
        >>> head = sk.LinearHead(16, 100)
        >>> opt = sk.optim.FusedSGD(head, lr=0.1)
        >>> head.loss(torch.randn(2, 16), [[3], []], update=opt).backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "rounding": rounding, "seed": seed}
        super().__init__(params, defaults)

    def _settings(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        momentum = float(group["momentum"])
        if not momentum:
            return {"kind": SGD}
        return {"kind": MOMENTUM, "momentum": momentum, "first": _state(state, "momentum_buffer", parameter)}


class FusedAdagrad(FusedOptimizer):
    """Rowwise Adagrad for the labels of a head: one sum of squares per label, of the mean over its row.

    Args:
        params: a head, or label parameters and groups of them.
        lr: the learning rate.
        weight_decay: added to the gradient, times the weight.
        initial_accumulator_value: where the sums start.
        eps: added to the roots of the sums.
        rounding, seed: as for ``FusedSGD``.

    Example:
        >>> head = sk.LinearHead(16, 100)
        >>> opt = sk.optim.FusedAdagrad(head, lr=0.1)
        >>> head.loss(torch.randn(2, 16), [[3], []], update=opt).backward()
        >>> opt.step()
        >>> opt.state[head.weight]["sum"].shape
        torch.Size([100])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
                "rounding": rounding,
                "seed": seed,
            },
        )

    def _settings(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        first = _state(state, "sum", parameter, parameter.shape[:1], start=float(group["initial_accumulator_value"]))
        return {"kind": ADAGRAD, "eps": float(group["eps"]), "first": first}


class FusedAdamW(FusedOptimizer):
    """``torch.optim.AdamW`` for the labels of a head. Its two means are float32 also for bfloat16 weights.

    Args:
        params: a head, or label parameters and groups of them.
        lr: the learning rate.
        betas: of the means of the gradients and of their squares.
        eps: added to the root of the latter.
        weight_decay: decoupled: the weights shrink by ``lr · weight_decay``.
        rounding, seed: as for ``FusedSGD``.

    Example:
        >>> head = sk.DFTHead(64, 100, k=3, slack=8, bias=True)
        >>> opt = sk.optim.FusedAdamW([
        ...     {"params": [head.slack_weight]},
        ...     {"params": [head.bias], "weight_decay": 0.0},
        ... ], lr=1e-3)
        >>> head.loss(torch.randn(2, 64), [[3], []], update=opt).backward()
        >>> opt.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rounding": rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def _settings(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "kind": ADAMW,
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "first": _state(state, "exp_avg", parameter),
            "second": _state(state, "exp_avg_sq", parameter),
        }


def random_key(seed: int, step: int, index: int) -> int:
    """64 bits from the seed, the step and the number of the parameter (splitmix64)."""
    mask, key = 2**64 - 1, 0
    for part in (seed, step, index):
        key = (key + part + 0x9E3779B97F4A7C15) & mask
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & mask
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & mask
        key ^= key >> 31
    return key


def _state(
    state: dict[str, Any],
    name: str,
    like: Tensor,
    shape: torch.Size | None = None,
    dtype: torch.dtype | None = None,
    start: float = 0.0,
) -> Tensor:
    """A part of the state, contiguous; made where it is not there yet. Of a DTensor, the rows of this rank."""
    shape, rows = like.shape if shape is None else shape, _own(like)
    own = torch.Size((len(rows), *shape[1:]))
    dtype = dtype or (torch.float32 if like.dtype == torch.bfloat16 else like.dtype)
    if name not in state:
        # Zeros are fresh pages, which take no memory before they are written.
        value = torch.zeros(own, dtype=dtype, device=like.device)
        if start:
            value.fill_(start)
        state[name] = value if rows is like else _distribute(value, shape, like)
    value = _own(state[name])
    check_state(name, value, like, own, dtype)
    return value


def _own(tensor: Any) -> Tensor:
    """The rows of this rank."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def _distribute(own: Tensor, shape: torch.Size, like: Any) -> Tensor:
    """The DTensor of this shape, laid out as another, of which this rank has these rows."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def _parameters_of(head: nn.Module) -> list[nn.Parameter]:
    parameters = getattr(head, "label_parameters", None)
    if parameters is None:
        raise TypeError(f"params must be a head, label parameters or groups of them, got {type(head).__name__}")
    refuse_data_parallel(head)
    named = [getattr(head, name) for name in parameters()]
    taken = [p for p in named if isinstance(p, nn.Parameter) and p.numel()]
    if not taken:
        raise ValueError(
            "the head has no label weights or biases of its own to train: it has neither slack nor bias, or computes "
            "them (pruned, parametrized)"
        )
    return taken


def check_update(update: Any) -> None:
    """Refuses what is no fused optimizer, and calls in which a step cannot be right."""
    if not isinstance(update, FusedOptimizer):
        raise TypeError(
            f"update must be FusedSGD, FusedAdagrad or FusedAdamW of sigkernels.optim, got {type(update).__name__}; other "
            "optimizers take the gradient: leave update out and call their step()"
        )
    refuse_wrong_place()
