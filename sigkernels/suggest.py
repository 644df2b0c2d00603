"""suggest: from the label sets alone, how large k, codes and slack should be, which prior to start from, and why."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .codes import guarantee, guaranteed_size, smallest_codes
from .dft_head import DFTHead
from .labels import LabelSets
from .seeding import seeded
from .validation import check_int

SLACK_STEP = 8  # kernels work on groups of columns
PERCENTILES = (1, 10, 50)
# Learned entries above which the radius is not estimated: it would take minutes.
MAX_ENTRIES = 10_000_000


@dataclass(frozen=True)
class Suggestion:
    """What ``suggest`` found. ``print`` it to read the reasoning.

    ``radius`` maps a percentile to the radius that this share of the sampled sets falls below, for a freshly
    initialised head: how far an input may move before the prediction changes (inputs within ±1e4). It is a lower
    bound, 0 where a set leans on the DFT columns. Empty when it was not estimated.

    Example:
        >>> found = sk.suggest(sk.LabelSets.from_lists([[1, 2], [5]], num_labels=300), sample=0)
        >>> str(found).splitlines()[0]
        'DFTHead(in_features ≥ 85, num_labels=300, k=2, slack=16, codes=64, bias=True, prior=label_sets)'
    """

    k: int
    slack: int
    codes: int
    num_labels: int
    active: float  # labels that are active on average: a prior, where the sets themselves are not at hand
    min_features: int  # 2k+1+codes+slack: the encoder must be at least this wide for the guarantee to hold
    coverage: float  # share of the given sets with at most k labels
    radius: dict[int, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"DFTHead(in_features ≥ {self.min_features}, num_labels={self.num_labels}, k={self.k}, slack={self.slack}, "
            f"codes={self.codes}, bias=True, prior=label_sets)"
        ]
        return "\n".join([*lines, *(f"  - {reason}" for reason in self.reasons)])


def suggest(label_sets: Any, sample: int = 64, seed: int = 0) -> Suggestion:
    """``k``, ``slack`` and ``codes`` of a DFTHead for these label sets, and its prior, with the reasoning.

    Args:
        label_sets: the label sets of the training examples: LabelSets, a 0/1 array or a sparse matrix ``[N, n]``.
        sample: how many of them the radius is estimated on; 0 for none.
        seed: of the sample and of the weights that the radius is estimated with.

    Example:
        >>> sets = [[i % 300, (7 * i) % 300] for i in range(500)]
        >>> found = sk.suggest(sk.LabelSets.from_lists(sets, num_labels=300), sample=0)
        >>> found.k, found.slack, found.min_features
        (2, 24, 93)
    """
    label_sets = LabelSets.of(label_sets)
    if len(label_sets) == 0:
        raise ValueError("label_sets is empty: there is nothing to learn k and slack from")
    sample, seed = check_int("sample", sample, 0), check_int("seed", seed, 0)
    label_sets = label_sets.to("cpu")
    n, k, slack, codes = (
        label_sets.num_labels,
        suggest_k(label_sets),
        suggest_slack(label_sets),
        suggest_codes(label_sets),
    )
    width = 2 * k + 1 + codes + slack
    sizes = label_sets.sizes.numpy()
    coverage = float((sizes <= k).mean())
    radius, how = _radius(label_sets, k, slack, codes, sample, seed)
    reasons = (
        _reason_k(label_sets, k, coverage),
        f"slack = {slack}: a random set of {_typical(label_sets):.1f} labels (the mean here) out of {n:,} becomes "
        f"separable with room to spare from about 2·r·ln(n/r) learned columns on; the DFT covers the larger sets",
        _reason_codes(label_sets, codes),
        _reason_prior(label_sets, k),
        f"the encoder must give at least 2k+1+codes+slack = {width} features, or its projection cannot reach every input "
        "of the layer; with a narrower one leave out the codes first",
        f"learned parameters: {n * slack:,} in the slack columns (a full linear layer on 768 features has {n * 769:,})",
        how,
    )
    active = label_sets.indices.numel() / len(label_sets)
    return Suggestion(k, slack, codes, n, active, width, coverage, radius, reasons)


def suggest_k(label_sets: LabelSets) -> int:
    """The size of the largest set, as far as ``2k+1 ≤ n`` allows."""
    return min(max(label_sets.max_active, 1), (label_sets.num_labels - 1) // 2)


def suggest_slack(label_sets: LabelSets) -> int:
    """About ``2·r·ln(n/r)`` for the mean size r, never more columns than a full matrix would have."""
    n, r = label_sets.num_labels, _typical(label_sets)
    columns = SLACK_STEP * math.ceil(2 * r * math.log(max(n / r, math.e)) / SLACK_STEP)
    return max(min(columns, n - 2 * suggest_k(label_sets) - 1), 0)


def suggest_codes(label_sets: LabelSets) -> int:
    """The fewest code columns whose guarantee holds for every set; none where a full layer is hardly wider."""
    codes = smallest_codes(label_sets.num_labels)
    return codes if 4 * codes <= label_sets.num_labels else 0


def _typical(label_sets: LabelSets) -> float:
    return max(label_sets.indices.numel() / max(len(label_sets), 1), 1.0)


def _reason_k(label_sets: LabelSets, k: int, coverage: float) -> str:
    sizes = label_sets.sizes.numpy()
    if coverage < 1:
        return (
            f"k = {k} is the largest for {label_sets.num_labels} labels (2k+1 ≤ n); {100 * (1 - coverage):.2f} % of "
            "the sets are larger: with so dense a label matrix a full nn.Linear is worth comparing"
        )
    if label_sets.max_active < 1:
        return "k = 1: all the sets given are empty"
    p99 = int(np.percentile(sizes, 99, method="higher"))
    saving = f"; k = {p99} would still cover 99 %, with {2 * (k - p99)} fewer DFT columns" if p99 < k else ""
    runs = int(label_sets.runs().max())
    order = f"; in this order of the labels no set has more than {runs} runs" if runs < k else ""
    return f"k = {k}: the largest set has that many labels, so all are guaranteed to be predictable{saving}{order}"


def _reason_codes(label_sets: LabelSets, codes: int) -> str:
    n = label_sets.num_labels
    if not codes:
        return f"codes = 0: {n} labels are few enough for the slack columns"
    largest = guaranteed_size(codes, n)
    if not largest:
        return f"codes = {codes}: wide regions for typical sets; beyond {codes**2 // 2:,} labels not for every set"
    share = float((label_sets.sizes <= largest).double().mean())
    return (
        f"codes = {codes}: every set of up to {largest} labels ({100 * share:.0f} % of these) keeps a wide region, whatever "
        "is learned; the DFT's regions are too thin for a trained encoder to find. They have no parameters"
    )


def _reason_prior(label_sets: LabelSets, k: int) -> str:
    """What the first loss of a row is, by where the labels start."""
    n, rows = label_sets.num_labels, len(label_sets)
    frequency = (torch.bincount(label_sets.indices, minlength=n).double() + 0.5) / (rows + 1)

    def first_loss(start: torch.Tensor) -> float:
        return float(-(frequency * start.log() + (1 - frequency) * torch.log1p(-start)).sum())

    mean = frequency.mean().expand(n)
    published = torch.full((n,), min(max(k, 0.5), n - 0.5) / n, dtype=torch.float64)
    return (
        f"prior = the label sets: {label_sets.indices.numel() / rows:.1f} labels are active on average. The first loss of a "
        f"row is {n * math.log(2):,.0f} without a prior, {first_loss(published):,.0f} at k/n, {first_loss(mean):,.0f} at "
        f"the mean and {first_loss(frequency):,.0f} at the frequencies: worth more than the choice of the layer"
    )


def _radius(
    label_sets: LabelSets, k: int, slack: int, codes: int, sample: int, seed: int
) -> tuple[dict[int, float], str]:
    """Percentiles of a proved lower bound on the radius of sampled sets, on a freshly initialised head without a bias.

    The bound comes from the constant and the slack columns alone, or from the codes' promise where that is wider: an input
    of theirs is an input of the whole layer with zeros elsewhere. Narrow and without near-equal rows, the slack is quick
    to verify at any k.
    """
    from .verify import Verdict, verify

    n, width = label_sets.num_labels, 1 + slack
    if sample == 0:
        return {}, "radius: not estimated (sample=0)"
    fits = np.flatnonzero(label_sets.sizes.numpy() <= k)
    if len(fits) == 0:
        return {}, f"radius: not estimated, since no set has at most k = {k} labels"
    if n * width > MAX_ENTRIES:
        return {}, f"radius: not estimated at {n * width:,} slack entries; sk.verify a trained head on a few sets"
    with seeded(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no input will be projected
        learned = DFTHead(1, n, k=k, slack=slack, dtype=torch.float64).slack_weight.detach()
    narrow = torch.cat([torch.full((n, 1), n**-0.5, dtype=torch.float64), learned], 1)
    # The rows of the whole layer are longer by the other DFT columns and the codes: distances shrink by that much.
    length = narrow.norm(dim=1)
    whole = (length.square() + 2 * k / n + (1 if codes else 0)).sqrt()
    shrink, longest = float((length / whole).min()), float(whole.max())
    rows = np.random.default_rng(seed).choice(fits, min(sample, len(fits)), replace=False)
    sampled = label_sets[torch.from_numpy(np.sort(rows))]
    report = verify(narrow, sampled, progress=False)
    apart = report.verdicts == Verdict.ARGMAXABLE
    promised = (guarantee(size, n, codes, max_norm=longest) if size else None for size in sampled.sizes.tolist())
    by_codes = np.array([0.0 if found is None else found.radius for found in promised])
    proved = np.maximum(np.where(apart, shrink * np.asarray(report.radius_lo), 0.0), by_codes)
    percentiles = {p: float(np.percentile(proved, p)) for p in PERCENTILES}
    shown = ", ".join(f"{p} % below {value:.2g}" for p, value in percentiles.items())
    by_both = f", the codes promise {100 * np.mean(by_codes > 0):.0f} %" if codes else ""
    return percentiles, (
        f"radius on a fresh head, from the slack columns{' and the codes' if codes else ''} (a lower bound, {len(rows)} sets): "
        f"{shown}; the slack separates {100 * apart.mean():.0f} % of the sets by itself{by_both}; the rest lean on the DFT"
    )
