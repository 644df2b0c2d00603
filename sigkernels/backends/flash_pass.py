"""The host side of the flash kernels: when they apply, and the few launches of a step.

    coef = x_dft · waves    one library product, or a part of the next; the waves are those of every block
    fused_loss              the pass over all labels (``flash_kernels.py``)
    finish                  adds the blocks' sums
    grad_x_dft = scale · grad_coef · wavesᵀ     one library product, or a part of ``finish``

Every block of labels is one tile of the DFT plan: the DFT costs the kernel 16 more columns, whatever k is. The constant
column is not among the waves: three columns of the basis hold the digits of 1/√n, so that the prior of a label is right
to float32, and its feature is multiplied by a power of two alone.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dft_plan import plan
from ..label_forms import checked_sets
from ..labels import LabelSets
from ..layer import Layer, LayerMeta
from ..losses import ElementwiseLoss, ElementwiseParams
from ..partial_labels import PartialTargets
from .device_tables import DeviceTables
from .flash_kernels import ABSENT, MARKED, RANK, FlashKernels, FlashLaunch, FlashResults, FlashSizes, Operands, Turns
from .gpu_paths import LossShape
from .interface import LossCall, LossResult, gradient_dtype, label_vector
from .library_walk import without_autocast

WIDEST = 128  # slack columns
_CONSTANT = slice(RANK - 4, RANK - 1)  # the columns of the basis that hold the constant; the last one is for kernels
_WAVES = _CONSTANT.start
_GROUP = 16  # frequencies of ``Turns``
_MAX_LABELS = 2**31 - 1  # a label fits an int32 inside the kernels
# Where the singular values of a block's waves are cut: below the rounding of the factors.
_EPS = {torch.bfloat16: 1e-4, torch.float16: 2e-5, torch.float32: 2e-5}


class BlockTables(NamedTuple):
    """The DFT part of every block of a layer, in the dtype of its products."""

    basis: Tensor  # [T+1, 16]
    blank: int  # so many of its first columns, and of those of a block in the others, are 0
    waves: Tensor  # [2k+1, blocks · 16]
    back: Tensor  # [blocks · 16, 2k+1]: a view of them
    turns: Turns | None
    operands: Operands | None

    def tensors(self) -> tuple[Tensor, ...]:
        """What takes memory on the device."""
        return self.basis, self.waves, *(self.turns or ())[:2], *(self.operands or ())[:1]


_tables: DeviceTables[BlockTables] = DeviceTables(256 * 2**20)


def refusal(call: LossCall, shape: LossShape) -> str | None:
    """``None``, or one sentence: why no flash kernel does this. Sizes and dtypes alone decide, never values."""
    loss, weight = call.loss, call.layer.weight
    if not (isinstance(loss, ElementwiseLoss) and loss.has_kernel):
        return f"flash kernels have BCE, Focal and Asymmetric, not {type(loss).__name__}"
    if isinstance(call.targets, PartialTargets):
        return "flash kernels take no unknown labels"
    if weight.dtype != shape.dtype:
        return f"flash kernels multiply matrices of one dtype, not {shape.dtype} and {weight.dtype}"
    return _shape_refusal(shape)


@functools.lru_cache(maxsize=1024)
def _shape_refusal(shape: LossShape) -> str | None:
    if shape.meta.codes:
        return "flash kernels take no codes"
    if shape.dtype not in _EPS:
        return f"flash kernels multiply bfloat16, float16 and tf32, not {shape.dtype}"
    if shape.product is None:
        return "flash kernels multiply float32 as tf32, which torch.backends.cuda.matmul.fp32_precision does not allow"
    if not 1 <= shape.slack <= WIDEST:
        return f"flash kernels take 1 to {WIDEST} slack columns, not {shape.slack}"
    if not shape.rows or not shape.labels:
        return "there is nothing to compute"
    if shape.meta.num_labels > _MAX_LABELS:
        return f"flash kernels number labels with 32 bits, and there are {shape.meta.num_labels}"
    return None


def block_labels(labels: int, sizes: FlashSizes) -> int:
    """T: as many labels per block as the busiest must have, where all blocks run at once."""
    tiles = -(-labels // sizes.tile)
    return -(-tiles // sizes.blocks) * sizes.tile


@functools.lru_cache(maxsize=1024)
def rank_refusal(meta: LayerMeta, labels: int, dtype: torch.dtype, sizes: FlashSizes) -> str | None:
    """``None``, or one sentence: why the DFT part of a block of so many labels does not fit into the basis."""
    if meta.k <= 0:
        return None
    labels = block_labels(labels, sizes)
    # A wave that turns often within a block is a rank of its own; do not work out what cannot fit.
    if 2 * meta.k * labels < 32 * meta.num_labels and blank_columns(meta.num_labels, meta.k, labels, dtype) >= 0:
        return None
    return f"the DFT of {labels} labels has more than rank {_WAVES}: too many frequencies for so few labels"


def blank_columns(n: int, k: int, labels: int, dtype: torch.dtype) -> int:
    """So many columns of the basis are left by the waves of a block of so many labels."""
    return _WAVES - plan(n, k, labels, _EPS[dtype], False).rank


def block_tables(layer: Layer, labels: int, turns: bool, operands: bool) -> BlockTables:
    """The tables for blocks of ``labels`` labels from the layer's first label on; worked out in float64, once."""
    weight, device = layer.weight, layer.weight.device
    key = (layer.meta, weight.shape[0], labels, turns, operands, weight.dtype, device)
    return _tables.get(key, device, lambda: _work_out(layer, labels, turns, operands))


def _work_out(layer: Layer, labels: int, turns: bool, operands: bool) -> BlockTables:
    n, dtype, device = layer.num_labels, layer.weight.dtype, layer.weight.device
    shared = plan(n, layer.k, labels, _EPS[dtype], False)
    cos, sin = (turned.T[..., None] for turned in shared.rotations(shared.starts(layer.label_start, layer.num_rows)))
    # Waves lie just before the constant: the columns that they do not need are the first ones.
    blank = _WAVES - shared.rank
    even, odd = slice(blank, blank + shared.even_rank), slice(blank + shared.even_rank, _WAVES)
    v_even, v_odd = (part.T[:, None] for part in np.split(shared.v, [shared.even_rank]))
    v_even, v_odd = v_even[1::2], v_odd[2::2]  # [k, 1, ·]
    waves = np.zeros((2 * layer.k + 1, cos.shape[1], RANK))
    waves[1::2, :, even], waves[2::2, :, even] = v_even * cos, v_even * sin
    waves[1::2, :, odd], waves[2::2, :, odd] = -v_odd * sin, v_odd * cos
    # The constant: 1/√n = 2⁻ᵖ · u with u in [2⁻⁵, 2⁻⁴), where even the last digits are no subnormal numbers of float16.
    power = math.floor(math.log2(math.sqrt(n))) - 4
    waves[0, :, _CONSTANT] = 2.0**-power
    basis = np.zeros((labels + 1, RANK))
    basis[labels, RANK - 1] = ABSENT
    basis[:labels, blank:_WAVES] = shared.u
    left = 2.0**power / math.sqrt(n)
    for part in range(_CONSTANT.start, _CONSTANT.stop):
        basis[:labels, part] = _rounded(left, dtype)
        left -= basis[0, part]
    columns = _product_tensor(waves.reshape(len(waves), -1), dtype, device)
    made = None
    if turns:
        factors = np.zeros((layer.k, RANK), np.complex128)
        factors[:, even], factors[:, odd] = v_even[:, 0], 1j * v_odd[:, 0]
        if blank >= _WAVES - 8:
            factors = factors[:, _WAVES - 8 : _WAVES]
        made = _turns(cos[..., 0] + 1j * sin[..., 0], factors, 2.0**-power, dtype, device)
    with torch.inference_mode(False):
        parts = _operands(waves, dtype, device) if operands else None
        return BlockTables(_product_tensor(basis, dtype, device), blank, columns, columns.t(), made, parts)


def _turns(turned: np.ndarray, factors: np.ndarray, constant: float, dtype: torch.dtype, device: torch.device) -> Turns:
    """``turned [k, blocks]`` and ``factors [k, numbers]`` in the order of the kernels."""
    per, blocks, numbers = 4 // dtype.itemsize, turned.shape[1], factors.shape[1]
    groups, words = -(-len(factors) // _GROUP), -(-blocks // (8 * per)) * 8
    turns = np.zeros((groups * _GROUP, words * per), np.complex128)
    turns[: len(factors), :blocks] = turned
    parts = np.stack((turns.real, turns.imag)).reshape(2, groups, 4, 4, words, per)  # i, group, t, q, word, block
    weights = np.zeros((groups * _GROUP, numbers), np.complex128)
    weights[: len(factors)] = factors
    pairs = np.stack((weights.real, weights.imag), -1).reshape(groups, _GROUP, numbers, 2)
    with torch.inference_mode(False):
        return Turns(
            _product_tensor(parts.transpose(1, 4, 3, 0, 2, 5).reshape(groups, words, 2 * _GROUP, per), dtype, device),
            torch.tensor(pairs, dtype=torch.float32).to(device),
            constant,
        )


def _operands(waves: np.ndarray, dtype: torch.dtype, device: torch.device) -> Operands:
    """``waves [2k+1, blocks, 16]`` in the order of the kernels."""
    per, features = 4 // dtype.itemsize, len(waves)
    padded = np.zeros((-(-features // (8 * per)) * 8 * per, *waves.shape[1:]))
    padded[:features] = waves
    if per == 1:
        padded = padded[..., np.arange(RANK).reshape(2, 2, 4).transpose(0, 2, 1).ravel()]
    parts = padded.reshape(-1, 2, 4, per, waves.shape[1], 2, 8)  # step, i, q, h, block, j, g
    return Operands(
        _product_tensor(np.ascontiguousarray(parts.transpose(4, 0, 6, 2, 5, 1, 3)), dtype, device), features
    )


def _product_tensor(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # what is kept outlives the mode it was made in
        tensor = torch.tensor(array, dtype=dtype)
        if dtype == torch.float32:  # to the nearest tf32, so that hardware which cuts digits off cuts nothing
            tensor = ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
        return tensor.to(device)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(_product_tensor(np.array([value]), dtype, torch.device("cpu"))[0])


class Factors(NamedTuple):
    """How gradients are scaled: inside the kernel, and on the sums."""

    row: Tensor | None  # [B]
    scale: float
    out: Tensor | None  # []


def gradient_factors(call: LossCall, params: ElementwiseParams) -> Factors:
    """Splits the factor so that ∂f/∂z · row keeps to the range of float16 inside the products."""
    x, scale = call.x, call.scale
    if not isinstance(scale, Tensor) and (x.dtype != torch.float16 or params.weight is params.pos_weight is None):
        return Factors(None, float(scale), None)
    settings = [(s, least) for s, least in ((params.weight, 0.0), (params.pos_weight, 1.0)) if s is not None]
    if isinstance(scale, Tensor):
        row, number = scale.to(dtype=torch.float32, device=x.device).contiguous(), 1.0
        if x.dtype != torch.float16:
            return Factors(row, number, None)
    else:
        row, number = torch.ones(x.shape[0], device=x.device), float(scale)
    out = row.abs().amax()
    for setting, least in settings:
        out = out * torch.as_tensor(setting, dtype=torch.float32, device=x.device).abs().amax().clamp(min=least)
    out = torch.where((out > 0) & torch.isfinite(out), out, torch.ones_like(out))
    return Factors(row / out, number, out)


class Scratch(NamedTuple):
    """Arrays that end with a call; ``FlashLaunch`` says what they are."""

    totals: Tensor
    row_sums: Tensor
    slabs: Tensor | None
    marks: Tensor | None
    coef: Tensor | None  # this and the next in two dimensions
    grad_coef: Tensor | None
    weight_sums: Tensor | None
    bias_sums: Tensor | None


class Plan(NamedTuple):
    """How calls of a shape are cut into launches, and the parts of their scratch."""

    labels: int  # of a block
    blocks: int
    several: bool  # launches
    by_product: bool  # the coefficients are made before the first
    # Scratch is one allocation, ``[…, blocks · 16]`` in the dtype of x: coefficients are rows of it, and the other parts
    # take whole rows, too, so that each begins with a sector of the memory, of 32 bytes.
    rows: tuple[int, ...]  # of the parts that there are
    parts: tuple[tuple[int, torch.dtype | None] | None, ...]  # of ``Scratch``: where among those, and another dtype

    def scratch(self, x: Tensor) -> Scratch:
        """For a call with inputs ``x``."""
        whole = x.new_empty(sum(self.rows), self.blocks * RANK).split_with_sizes(self.rows)
        return Scratch(*[
            None if part is None else whole[part[0]] if part[1] is None else whole[part[0]].view(part[1])
            for part in self.parts
        ])  # type: ignore[arg-type]  # fmt: skip


@functools.lru_cache(maxsize=1024)
def plan_of(
    m: int, slack: int, batch: int, columns: int, needs: tuple[bool, ...], sparse: bool, dtype: torch.dtype, sizes: FlashSizes,
) -> Plan:  # fmt: skip
    """The same at every step: worked out once."""
    need_x, need_weight, need_bias = needs
    labels, dft = block_labels(m, sizes), columns > 0
    by_product = dft and (batch > sizes.group or columns > sizes.features)
    blocks, rows, wide = -(-m // labels), min(batch, sizes.rows), torch.float32
    in_groups = sizes.group < rows and batch <= sizes.rows and gradient_dtype(dtype) != wide
    of_coef = (
        rows * (blocks + blocks % 2) if sizes.turns else batch * blocks
    )  # gradients in the kernels' order, or rows
    wanted = (
        (True, blocks, torch.float64), (True, blocks * rows, wide), (need_x, blocks * rows * (slack + int(dft and sizes.turns)), wide),
        (sparse and sizes.marks, blocks * labels // MARKED * rows, torch.int32), (by_product, batch * blocks * RANK, dtype),
        (dft and need_x, of_coef * RANK, dtype), (in_groups and need_weight, m * slack, wide),
        (in_groups and need_bias, m, wide),
    )  # fmt: skip
    there, parts = list[int](), list[tuple[int, torch.dtype | None] | None]()
    for needed, count, of in wanted:
        parts.append((len(there), None if of == dtype else of) if needed else None)
        if needed:
            there.append(-(-count * of.itemsize // (blocks * RANK * dtype.itemsize)))
    return Plan(labels, blocks, batch > sizes.rows, by_product, tuple(there), tuple(parts))


@without_autocast
def fused_loss(call: LossCall, kernels: FlashKernels) -> LossResult:
    """An elementwise loss and its gradients; ``refusal`` and ``rank_refusal`` said nothing against it."""
    layer, (need_x, need_weight, need_bias), params = call.layer, call.needs, call.loss.kernel_params()
    assert isinstance(params, ElementwiseParams)
    x = call.x if call.x.stride(1) == 1 else call.x.contiguous()
    weight, out_dtype = layer.weight.contiguous(), gradient_dtype(x.dtype)
    batch, columns, (m, slack) = x.shape[0], layer.dft_columns, weight.shape
    sets = call.targets if isinstance(call.targets, LabelSets) else None
    indices, offsets = (None, None) if sets is None else checked_sets(sets)
    dense = _packed(call.targets) if sets is None else None
    sizes = kernels.sizes(x, slack, columns > 0)
    cut = plan_of(m, slack, batch, columns, call.needs, sets is not None, x.dtype, sizes)
    labels, blocks, several = cut.labels, cut.blocks, cut.several
    tables = block_tables(layer, labels, sizes.turns, not cut.by_product) if columns else None
    factors = gradient_factors(call, params)
    sum_dtype = torch.float32 if several else out_dtype  # of sums that several launches add to
    scratch = cut.scratch(x)
    grad_x = x.new_empty(*x.shape, dtype=out_dtype) if need_x else None
    grad_weight = x.new_empty(m, slack, dtype=sum_dtype) if need_weight else None
    grad_bias = x.new_empty(m, dtype=sum_dtype) if need_bias else None
    rows = x.new_empty(batch, dtype=torch.float64)
    value = None if several or isinstance(call.scale, Tensor) else x.new_empty((), dtype=torch.float32)
    slack_x, grad_features, grad_slack_x = x, None, grad_x
    if tables is not None:
        features, slack_x = x.split_with_sizes((columns, slack), 1)
        if cut.by_product:
            torch.mm(features, tables.waves, out=scratch.coef)
        if grad_x is not None:
            grad_features, grad_slack_x = grad_x.split_with_sizes((columns, slack), 1)
    whole = FlashLaunch(
        slack_x, weight, None if layer.bias is None else layer.bias.contiguous(),
        None if tables is None else tables.basis, 0 if tables is None else tables.blank, scratch.coef, None if tables is None else tables.operands, None if tables is None else tables.turns, labels, blocks, indices, offsets, dense, layer.label_start,
        params, label_vector(params.weight, layer, torch.float32), label_vector(params.pos_weight, layer, torch.float32),
        factors.row, factors.scale, factors.out, False, scratch.marks, grad_weight, grad_bias, scratch.grad_coef,
        scratch.slabs, scratch.row_sums, scratch.totals, scratch.weight_sums, scratch.bias_sums,
    )  # fmt: skip
    if several:
        for start in range(0, batch, sizes.rows):
            part = slice(start, start + sizes.rows)
            launch = _rows_of(whole, start, min(start + sizes.rows, batch))
            kernels.fused_loss(launch)
            grad, of_features = (
                None if all_rows is None else all_rows[part] for all_rows in (grad_slack_x, grad_features)
            )
            kernels.finish(launch, FlashResults(grad, of_features, rows[part], value))
        grad_weight, grad_bias = (None if grad is None else grad.to(out_dtype) for grad in (grad_weight, grad_bias))
    else:
        kernels.fused_loss(whole)
        kernels.finish(whole, FlashResults(grad_slack_x, grad_features, rows, value))
    if tables is not None and tables.turns is None and grad_features is not None and scratch.grad_coef is not None:
        _add_dft(grad_features, scratch.grad_coef, tables.back, factors)
    return LossResult(rows, grad_x, grad_weight, grad_bias, value=value)


def _add_dft(grad_x: Tensor, grad_coef: Tensor, waves: Tensor, factors: Factors) -> None:
    """The gradient of the DFT features, ``[B, 2k+1]``; ``waves [blocks · 16, 2k+1]``."""
    if grad_x.dtype == grad_coef.dtype:
        grad_x.addmm_(grad_coef, waves, beta=0, alpha=factors.scale)
    else:  # float16: the factor would leave its range, so it multiplies in float32
        grad_x.copy_(grad_coef @ waves).mul_(factors.scale)
    if factors.out is not None:
        grad_x.mul_(factors.out)


def _rows_of(launch: FlashLaunch, start: int, stop: int) -> FlashLaunch:
    """The rows ``start … stop-1`` of a launch. Scratch is used again by every part."""
    part = slice(start, stop)

    def rows(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[part]

    return launch._replace(
        x=launch.x[part], coef=rows(launch.coef), dense=rows(launch.dense), row_factor=rows(launch.row_factor),
        offsets=None if launch.offsets is None else launch.offsets[start : stop + 1], accumulate=start > 0,
        grad_coef=launch.grad_coef if launch.turns is not None else rows(launch.grad_coef),
    )  # fmt: skip


def _packed(dense: object) -> Tensor:
    assert isinstance(dense, Tensor)
    return dense if dense.stride(1) == 1 else dense.contiguous()
