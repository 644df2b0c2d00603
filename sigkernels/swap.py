"""Swapping the output layer of an existing model."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from .heads import DFTHead


def swap_output_layer(model: nn.Module, name: str, k: int, slack: int = 0, *, init_prior: bool = True) -> DFTHead:
    """Replaces the ``nn.Linear`` at the dotted ``name`` by a DFTHead of the same sizes, device and dtype.

    ``model(...)`` goes on returning logits; train with the returned ``head.loss(h, targets)`` to do without them.

    Args:
        model: the module that holds the layer, changed in place.
        name: where the layer is: ``"classifier"``, ``"encoder.out"``, ``"layers.2"``.
        k, slack, init_prior: as for ``DFTHead``.

    Returns:
        The new head.
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
    head = DFTHead(
        old.in_features,
        old.out_features,
        k,
        slack,
        init_prior=init_prior,
        device=old.weight.device,
        dtype=old.weight.dtype,
    ).train(old.training)
    parent, _, leaf = name.rpartition(".")
    setattr(layers[parent], leaf, head)
    return head
