"""The prior of a head: the log-odds at which its labels start.

Every label is rare. A layer whose logits start near 0 begins with a loss of n·ln 2 per row, and spends its first epochs
on getting down to the frequencies of the labels. Starting there is worth more than the choice of the layer
(docs/choosing.md). With N examples, of which count_i carry label i::

    logit((count_i + ½) / (N + 1))      one number per label, for a head with a label bias
    logit(active / n)                   one number for all, ``active`` = labels that are active on average
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .labels import LabelSets
from .validation import check_number, refuse_meta

Prior: TypeAlias = "LabelSets | Tensor | float | Any"  # label sets in any form that LabelSets.of takes
_FORMS = "LabelSets of the training examples, frequencies [n], or the labels that are active on average"


def _logit(share: float) -> float:
    return math.log(share) - math.log1p(-share)


def log_odds(prior: Prior, num_labels: int, *, per_label: bool) -> Tensor | float:
    """The log-odds of each label, float64 ``[n]``, or one number for all: where ``per_label`` is False, or the prior is."""
    if isinstance(prior, str) or prior is None:
        raise TypeError(f"prior must be {_FORMS}, got {prior!r}")
    if isinstance(prior, (list, tuple)) and prior and all(isinstance(entry, numbers.Real) for entry in prior):
        prior = torch.tensor(prior, dtype=torch.float64, device="cpu")  # frequencies, such as those of a config in JSON
    dimensions = getattr(prior, "ndim", None)
    if isinstance(prior, LabelSets) or (dimensions != 1 and isinstance(prior, Iterable) and dimensions != 0):
        with torch.device("cpu"):  # from_pretrained builds heads on the meta device
            return _of_sets(LabelSets.of(prior, num_labels, name="prior"), per_label)
    if dimensions == 1:
        given = prior if isinstance(prior, Tensor) else torch.as_tensor(prior, device="cpu")
        frequencies = _check_frequencies(given, num_labels)
        return torch.logit(frequencies) if per_label else _logit(float(frequencies.mean()))
    return _logit(_check_active(prior, num_labels) / num_labels)


def _of_sets(sets: LabelSets, per_label: bool) -> Tensor | float:
    if len(sets) == 0:
        raise ValueError("prior holds no label sets: there is nothing to count; give those of the training examples")
    if not per_label:
        return _logit((sets.indices.numel() + 0.5) / (len(sets) * sets.num_labels + 1))
    counts = torch.bincount(sets.indices.cpu(), minlength=sets.num_labels).to(torch.float64)
    return torch.logit((counts + 0.5) / (len(sets) + 1))


def _check_frequencies(prior: Any, num_labels: int) -> Tensor:
    if prior.shape != (num_labels,):
        raise ValueError(
            f"prior has shape {list(prior.shape)} for {num_labels} labels; give one frequency per label, or LabelSets"
        )
    refuse_meta("prior", prior)
    if prior.is_complex():
        raise TypeError(f"prior holds {prior.dtype}, and frequencies are real; give {_FORMS}")
    frequencies = prior.detach().to("cpu", torch.float64)
    if not bool(((frequencies > 0) & (frequencies < 1)).all()):
        worst = frequencies[~((frequencies > 0) & (frequencies < 1))][0].item()
        raise ValueError(
            f"prior holds the frequency {worst}, which has no finite log-odds; frequencies lie between 0 and 1: use "
            "(count + 0.5) / (examples + 1), or give the LabelSets themselves"
        )
    return frequencies


def _check_active(prior: Any, num_labels: int) -> float:
    active = check_number("prior", prior, f"give {_FORMS}")
    if not 0 < active < num_labels:
        raise ValueError(
            f"prior = {active} is not a number of active labels between 0 and num_labels = {num_labels}; give {_FORMS}"
        )
    return active
