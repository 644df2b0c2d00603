"""The operations of the Triton backend: chunks of labels, launches, and what is left to the matrix library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...labels import LabelSets
from ...layer import Layer
from ...losses import Loss
from ..interface import LossResult, accumulate_dtype, gradient_dtype
from ..tiles import (
    SparseTargets,
    check_size,
    chunk_of,
    gradient_factors,
    label_chunks,
    label_vector,
    merge_candidates,
    set_offsets,
    slack_features,
    sort_logits,
    tile_factors,
)
from . import configs, interpreted, kernels, losses
from .configs import TILE

_GRAD_ELEMENTS = 2**23  # of ∂loss/∂z in memory at a time: 16 to 32 MB, about the L2 cache of a data-centre GPU
_SCAN_ELEMENTS = 2**27  # B · labels per scan: bounds the coefficients that top-m and prediction hold
_SPLITS = 256  # programs that share one block of rows in a scan


class Tile(NamedTuple):
    """What ``logit_tile`` reads, for one chunk of labels, and the constants that go with it."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # x, weight, c, u, bias
    sizes: tuple[int, int, int, int, int]  # batch, labels, slack, rank, tiles
    constants: dict[str, Any]

    def options(self, config: configs.Config) -> dict[str, Any]:
        return {**self.constants, **config._asdict()}


def _tile(x: Tensor, slack: Tensor, layer: Layer, first: int, count: int) -> Tile:
    """The chunk of ``count`` tiles from tile ``first`` on."""
    factors = tile_factors(layer, TILE)
    part = chunk_of(layer, TILE, first, count)
    acc = accumulate_dtype(x.dtype)
    c = factors.coefficients(x, first, count).contiguous() if factors.rank else slack
    weight = part.weight.contiguous()
    bias = slack if part.bias is None else part.bias
    constants = {
        "BN": TILE,
        "RP": max(16, triton.next_power_of_2(factors.rank)) if factors.rank else 0,
        "HAS_BIAS": part.bias is not None,
        "ACC": tl.float64 if acc == torch.float64 else tl.float32,
        # The interpreter's bfloat16 arithmetic works on bit patterns: give it numbers.
        "UPCAST": interpreted() and x.dtype == torch.bfloat16,
        "PRECISION": "tf32" if acc == torch.float32 and _tf32(x) else "ieee",
    }
    sizes = (x.shape[0], part.num_rows, slack.shape[1], factors.rank, count)
    return Tile((slack, weight, c, factors.u if factors.rank else slack, bias), sizes, constants)


def _tf32(x: Tensor) -> bool:
    """Whether float32 products may round their inputs: torch's own setting; 16-bit inputs lose nothing by it."""
    return x.dtype != torch.float32 or (torch.backends.cuda.matmul.allow_tf32 and not torch.version.hip)


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _launch(
    name: str,
    kernel: Any,
    x: Tensor,
    tile: Tile,
    grid: Callable[[configs.Config], tuple[int, int]],
    *args: Any,
    **kw: Any,
) -> None:
    def run(config: configs.Config) -> None:
        kernel[grid(config)](*tile.tensors, *args, *tile.sizes, **kw, **tile.options(config))

    shape = (tile.sizes[0], tile.sizes[1], tile.sizes[2])
    configs.tune(name, x.dtype, x.device, shape, run)
    run(configs.choose(name, x.dtype, x.device, shape))


def logits(x: Tensor, layer: Layer) -> Tensor:
    check_size(layer)
    z = x.new_empty(x.shape[0], layer.num_rows)
    if not z.numel():
        return z
    with _on(x):
        _logits_into(z, x, slack_features(x, layer), layer, 0, -(-layer.num_rows // TILE))
    return z


def _logits_into(z: Tensor, x: Tensor, slack: Tensor, layer: Layer, first: int, count: int) -> None:
    tile = _tile(x, slack, layer, first, count)
    _launch(
        "logits", kernels.logits_kernel, x, tile,
        lambda config: (triton.cdiv(x.shape[0], config.BM), count),
        z, z.stride(0),
    )  # fmt: skip


def fused_loss(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: Loss,
    row_scale: float | Tensor,
    needs: tuple[bool, bool, bool],
    grad_weight_into: Tensor | None = None,
) -> LossResult:
    check_size(layer)
    constants = losses.settings(loss)
    if constants is None:
        raise ValueError(f"the triton backend has no kernel for {type(loss).__name__}; use backend 'torch'")
    acc, out_dtype = accumulate_dtype(x.dtype), gradient_dtype(x.dtype)
    rows = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    grad_x = torch.zeros(x.shape, dtype=acc, device=x.device) if needs[0] else None
    grad_weight = grad_weight_into
    if needs[1] and grad_weight is None:
        grad_weight = torch.zeros(layer.weight.shape, dtype=out_dtype, device=x.device)
    grad_bias = torch.zeros(layer.num_rows, dtype=out_dtype, device=x.device) if needs[2] else None
    result = LossResult(rows, grad_x, grad_weight if needs[1] else None, grad_bias)
    if x.shape[0] and layer.num_rows:
        with _on(x):
            _fused_loss(x, layer, targets, loss, constants, row_scale, result)
    return result._replace(grad_x=None if grad_x is None else grad_x.to(out_dtype))


def _fused_loss(
    x: Tensor,
    layer: Layer,
    targets: LabelSets | Tensor,
    loss: Loss,
    constants: dict[str, object],
    row_scale: float | Tensor,
    result: LossResult,
) -> None:
    """Adds every chunk of labels to the tensors of ``result``."""
    batch = x.shape[0]
    acc = accumulate_dtype(x.dtype)
    slack = slack_features(x, layer)
    factors = tile_factors(layer, TILE)
    scale = gradient_factors(x, row_scale, loss)
    sparse = SparseTargets(targets) if isinstance(targets, LabelSets) else None
    dense = slack if isinstance(targets, LabelSets) else targets.contiguous()
    gradient = any(g is not None for g in result[1:])
    for first, count in label_chunks(layer, TILE, batch, _GRAD_ELEMENTS):
        part = chunk_of(layer, TILE, first, count)
        inside = slice(first * TILE, first * TILE + part.num_rows)
        tile = _tile(x, slack, layer, first, count)
        weight = label_vector(getattr(loss, "weight", None), part, acc)
        pos_weight = label_vector(getattr(loss, "pos_weight", None), part, acc)
        indices, at = (slack, slack) if sparse is None else (sparse.indices, sparse.at(part, TILE, 0, batch))
        sums = torch.empty(count, batch, dtype=acc, device=x.device)
        g = torch.empty(batch if gradient else 0, count * TILE, dtype=x.dtype, device=x.device)
        _launch(
            "fused_loss", kernels.fused_loss_kernel, x, tile,
            lambda config, count=count: (triton.cdiv(batch, config.BM), count),
            dense if sparse else dense[:, inside], dense.stride(0), indices, at, part.label_start,
            slack if weight is None else weight, slack if pos_weight is None else pos_weight, scale.row, sums, g,
            SPARSE=sparse is not None, HAS_WEIGHT=weight is not None, HAS_POS_WEIGHT=pos_weight is not None, GRADIENT=gradient,
            **constants,
        )  # fmt: skip
        result.rows.add_(sums.sum(0, dtype=torch.float64))
        if gradient:
            _add_gradients(g, part, slack, factors, first, count, inside, scale.out, result)


def _add_gradients(
    g: Tensor,  # [B, count·TILE]: ∂loss/∂z of this chunk, zero beyond its last label
    part: Layer,
    slack: Tensor,
    factors: Any,
    first: int,
    count: int,
    inside: slice,
    out_scale: Tensor | None,
    result: LossResult,
) -> None:
    """The three gradients of a chunk, from ∂loss/∂z by library products."""
    acc = accumulate_dtype(g.dtype)
    here = g[:, : part.num_rows]

    def scaled(sum_: Tensor) -> Tensor:
        return sum_ if out_scale is None else sum_.to(acc) * out_scale

    if result.grad_x is not None:
        columns = result.grad_x.shape[1] - slack.shape[1]
        result.grad_x[:, columns:] += scaled(here @ part.weight)
        if factors.rank:
            seen = g.view(g.shape[0], count, TILE).to(acc) @ factors.u  # [B, count, r]
            back = factors.coefficients_adjoint(seen.view(g.shape[0], -1), first, count)
            result.grad_x[:, :columns] += scaled(back)
    if result.grad_weight is not None:
        result.grad_weight[inside] += scaled(here.T @ slack).to(result.grad_weight.dtype)
    if result.grad_bias is not None:
        result.grad_bias[inside] = scaled(here.sum(0, dtype=acc)).to(result.grad_bias.dtype)


def topk(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    check_size(layer)
    batch, m = x.shape[0], min(m, layer.num_rows)  # a label range may be shorter than m
    if not batch:
        return x.new_empty(0, m), torch.empty(0, m, dtype=torch.int64, device=x.device)
    if m > configs.MAX_LIST:
        return _topk_by_sorting(x, layer, m)
    slack = slack_features(x, layer)
    key_dtype = torch.int64 if x.dtype == torch.float64 else torch.int32
    keys, labels = [], []
    with _on(x):
        for first, count in label_chunks(layer, TILE, batch, _SCAN_ELEMENTS):
            splits = min(count, _SPLITS)
            best = torch.empty(batch, splits * m, dtype=key_dtype, device=x.device)
            best_labels = torch.empty(batch, splits * m, dtype=torch.int32, device=x.device)
            _launch(
                "topk", kernels.topk_kernel, x, _tile(x, slack, layer, first, count),
                lambda config, splits=splits: (triton.cdiv(batch, config.BM), splits),
                best, best_labels, m, splits, M=max(2, triton.next_power_of_2(m)),
            )  # fmt: skip
            keys.append(best)
            # An unfilled place has the lowest key and a negative label: it can never reach the m best.
            labels.append(best_labels.to(torch.int64) + (layer.label_start + first * TILE))
        return merge_candidates(torch.cat(keys, 1), torch.cat(labels, 1), m, x.dtype)


def _topk_by_sorting(x: Tensor, layer: Layer, m: int) -> tuple[Tensor, Tensor]:
    """For long lists: the logits of a chunk at a time, sorted together with the best so far."""
    slack = slack_features(x, layer)
    values, labels = x.new_empty(x.shape[0], 0), x.new_empty(x.shape[0], 0, dtype=torch.int64)
    with _on(x):
        for first, count in label_chunks(layer, TILE, x.shape[0], _GRAD_ELEMENTS):
            part = chunk_of(layer, TILE, first, count)
            z = x.new_empty(x.shape[0], part.num_rows)
            _logits_into(z, x, slack, layer, first, count)
            more, where = sort_logits(z, m, part.label_start)
            # What is kept has lower labels than what comes: a stable sort breaks ties rightly.
            values, order = torch.sort(torch.cat([values, more], 1), dim=1, descending=True, stable=True)
            values, labels = values[:, :m], torch.cat([labels, where], 1).gather(1, order[:, :m])
    return values, labels


def predict(x: Tensor, layer: Layer, threshold: float) -> LabelSets:
    check_size(layer)
    batch = x.shape[0]
    if not batch:
        indices, offsets = (torch.zeros(count, dtype=torch.int64, device=x.device) for count in (0, 1))
        return LabelSets._trusted(indices, offsets, layer.num_labels)
    slack = slack_features(x, layer)
    acc = accumulate_dtype(x.dtype)
    # As torch compares: the threshold is rounded to the dtype of the logits.
    limit = torch.full((1,), threshold, dtype=x.dtype, device=x.device).to(acc)
    chunks = list(label_chunks(layer, TILE, batch, _SCAN_ELEMENTS))

    def scan(index: int, counts: Tensor, starts: Tensor, indices: Tensor, fill: bool) -> None:
        first, count = chunks[index]
        per_split = -(-count // counts.shape[0])
        _launch(
            "predict", kernels.predict_kernel, x, _tile(x, slack, layer, first, count),
            lambda config: (triton.cdiv(batch, config.BM), counts.shape[0]),
            limit, counts, starts, indices, layer.label_start + first * TILE, per_split, FILL=fill,
        )  # fmt: skip

    with _on(x):
        counts = [torch.empty(min(n, _SPLITS), batch, dtype=torch.int32, device=x.device) for _, n in chunks]
        for index, part in enumerate(counts):
            scan(index, part, part, part, False)
        offsets, starts = set_offsets(torch.cat(counts))
        indices = torch.empty(int(offsets[-1]), dtype=torch.int64, device=x.device)
        for index, start in enumerate(starts.split([len(part) for part in counts])):
            scan(index, counts[index], start.contiguous(), indices, True)
    return LabelSets._trusted(indices, offsets, layer.num_labels)
