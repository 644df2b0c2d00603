"""Metrics of multi-label predictions, streamed: no ``[B, n]`` array anywhere.

Each metric is an accumulator with ``update(…)`` once per batch, ``compute()``, ``merge(other)`` (for several workers),
``sync(group)`` (for the ranks of torch.distributed) and ``reset()``. ``update(…, unknown=…)`` leaves labels out that are
not annotated. They take what heads give: the labels (and logits) of ``head.topk`` or the sets of ``head.predict``::

    ranking = RankingMetrics(num_labels, m=(1, 5))
    for h, targets in loader:
        ranking.update(head.topk(h, 5)[1], targets)
    ranking.compute()          # {"P@1": …, "P@5": …, "R@1": …, …}

The state is O(n) numbers; only ``MeanAveragePrecision`` in its exact form keeps the scores it was given. A row without
labels counts with 0 in every per-row metric, as in scikit-learn with ``zero_division=0``.
"""

from __future__ import annotations

from .accumulator import Accumulator
from .average_precision import MeanAveragePrecision
from .f1 import F1Metrics
from .ranking import RankingMetrics, propensities
from .threshold import ThresholdAveraging

__all__ = [
    "Accumulator",
    "F1Metrics",
    "MeanAveragePrecision",
    "RankingMetrics",
    "ThresholdAveraging",
    "propensities",
]
