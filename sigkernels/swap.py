"""Swapping the output layer of an existing model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.nn.parameter import UninitializedParameter

from .dft_head import DFTHead
from .hf import HeadMixin
from .prior import Prior
from .validation import check_memory


def swap_output_layer(
    model: nn.Module,
    name: str,
    k: int,
    slack: int = 0,
    *,
    codes: int = 0,
    bias: bool = False,
    prior: Prior | Literal["paper"] | None = "paper",
) -> DFTHead:
    """Replaces the ``nn.Linear`` at the dotted ``name`` by a DFTHead of the same sizes, device and dtype.

    ``model(...)`` goes on returning logits; train with the returned ``head(h, targets)``, called in the model's own
    ``forward``, to do without them. A layer that the model holds under several names is replaced under all of them.

    Args:
        model: the module that holds the layer, changed in place.
        name: where the layer is: ``"classifier"``, ``"encoder.out"``, ``"layers.2"``.
        k, slack, codes, bias, prior: as for ``DFTHead``. Give ``prior`` the labels of your training examples.

    Returns:
        The new head.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(30, 64), torch.nn.ReLU(), torch.nn.Linear(64, 500))
        >>> head = sk.swap_output_layer(model, "2", k=5, slack=16)
        >>> model[2] is head, model(torch.randn(4, 30)).shape
        (True, torch.Size([4, 500]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = dict(model.named_modules(remove_duplicate=False))
    linears = [where for where, module in layers.items() if isinstance(module, nn.Linear) and where]
    listed = f"its linear layers are {', '.join(linears)}" if linears else "it has no nn.Linear inside"
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be the dotted name of a layer inside the model, got {name!r}; {listed}")
    if name not in layers:
        raise ValueError(f"the model has no layer '{name}'; {listed}")
    old = layers[name]
    if not isinstance(old, nn.Linear) or isinstance(old.weight, UninitializedParameter):
        raise TypeError(f"layer '{name}' is {type(old).__name__}, not an initialised nn.Linear; {listed}")
    check_memory(f"the weight of layer '{name}'", old.weight)
    _refuse_tied_weight(layers, old, name)
    if old.weight.is_meta and hasattr(model, "_init_weights") and not isinstance(model, HeadMixin):
        raise TypeError(
            f"{type(model).__name__} is built without data, as from_pretrained does, and its _init_weights does not know "
            "heads: parameters that the checkpoint lacks would stay uninitialised. "
            f"Derive it from sigkernels.hf.HeadMixin too: class {type(model).__name__}(HeadMixin, …)"
        )
    head = DFTHead(
        old.in_features,
        old.out_features,
        k,
        slack,
        codes=codes,
        bias=bias,
        prior=prior,
        device=old.weight.device,
        dtype=old.weight.dtype,
    ).train(old.training)
    for place in [where for where, module in layers.items() if module is old]:
        parent, _, leaf = place.rpartition(".")
        setattr(layers[parent], leaf, head)
    return head


def _refuse_tied_weight(layers: Mapping[str, nn.Module], old: nn.Linear, name: str) -> None:
    for where, module in layers.items():
        for leaf, parameter in module.named_parameters(recurse=False):
            if module is not old and (parameter is old.weight or parameter is old.bias):
                raise ValueError(
                    f"layer '{name}' shares a parameter with '{where}.{leaf}', which a head cannot; give the layer its own "
                    "first: layer.weight = torch.nn.Parameter(layer.weight.detach().clone())"
                )
