"""A flash kernel in plain torch, in float64: the contract of ``backends/flash_kernels.py``, on any tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sigkernels.backends.flash_kernels import RANK, FlashLaunch, FlashResults, FlashSizes
from sigkernels.losses import BCE, Asymmetric, ElementwiseLoss, ElementwiseParams, Focal
from sigkernels.losses.kernel_params import BCE_KIND, FOCAL_KIND


def loss_of(params: ElementwiseParams) -> ElementwiseLoss:
    """The loss without its label weights."""
    if params.kind == BCE_KIND:
        return BCE(label_smoothing=params.label_smoothing)
    if params.kind == FOCAL_KIND:
        # alpha_pos + alpha_neg is 1, or both are 1
        return Focal(params.gamma_pos, params.alpha_pos if params.alpha_pos + params.alpha_neg == 1 else None)
    return Asymmetric(params.gamma_neg, params.gamma_pos, params.clip, params.eps, params.detach_focus)


def shaped(scratch: Any, *shape: int) -> Any:
    """An array that comes as packed numbers of any shape."""
    return None if scratch is None else scratch.flatten()[: math.prod(shape)].view(shape)


class ReferenceKernels:
    """``FlashKernels``. ``calls`` has the names of the launches."""

    def __init__(self, sizes: FlashSizes) -> None:
        self._sizes = sizes
        self.calls: list[str] = []
        self.inside: bool | None = None  # whether the last launch came without coefficients, where it has a DFT part

    def sizes(self, x: Tensor, slack: int, dft: bool) -> FlashSizes:
        return self._sizes

    def fused_loss(self, launch: FlashLaunch) -> None:
        self.calls.append("fused_loss")
        loss, (m, _), x = loss_of(launch.params), launch.weight.shape, launch.x.double()
        assert launch.blocks == -(-m // launch.block_labels)
        batch, slack, blocks = *x.shape, launch.blocks
        row_sums, totals = shaped(launch.row_sums, blocks, batch), shaped(launch.totals, blocks)
        both = launch.turns is not None and launch.grad_coef is not None
        slabs, everything = shaped(launch.slabs, blocks, batch, slack + both), self.targets(launch)
        for block in range(launch.blocks):
            part = slice(block * launch.block_labels, min((block + 1) * launch.block_labels, m))
            columns = slice(block * RANK, (block + 1) * RANK)
            weight = launch.weight[part].double()
            z = x @ weight.T
            if launch.basis is not None:
                self.inside = launch.waves is not None
                z += self.coefficients(launch)[:, columns].double() @ launch.basis[: len(weight)].double().T
            if launch.bias is not None:
                z += launch.bias[part].double()
            f, g = self.value_and_grad(launch, loss, z, everything[:, part], part)
            row_sums[block] = f.sum(1)
            totals[block] = f.sum()
            if launch.row_factor is not None:
                g = g * launch.row_factor.double()[:, None]
            factor = launch.scale * (1.0 if launch.out_scale is None else float(launch.out_scale))
            weights = launch.grad_weight, launch.weight_sums, [g[r].T @ x[r] * factor for r in self.groups(len(x))]
            biases = launch.grad_bias, launch.bias_sums, [g[r].sum(0) * factor for r in self.groups(len(x))]
            for out, sums, values in (weights, biases):
                if out is None:
                    continue
                assert (sums is not None) == (len(values) > 1 and out.dtype != torch.float32)
                if launch.accumulate:
                    values = [out[part], *values]
                for value in values[1:]:
                    values[0] = values[0] + value
                    if sums is not None:
                        values[0] = shaped(sums, *out.shape)[part].copy_(values[0])
                out[part] = values[0]
            if launch.grad_coef is not None and launch.basis is not None:
                shaped(launch.grad_coef, batch, blocks * RANK)[:, columns] = g @ launch.basis[: len(weight)].double()
            if slabs is not None:
                slabs[block, :, :slack] = g @ weight
                if both:
                    slabs[block, :, slack] = (g @ launch.basis[: len(weight), RANK - 4 :].double()).sum(1)

    @staticmethod
    def coefficients(launch: FlashLaunch) -> Tensor:
        """``[B, blocks · 16]``, of the features before x where they do not come with the launch."""
        if launch.waves is None:
            assert launch.coef is not None
            return launch.coef
        assert launch.coef is None
        (waves, count), x = launch.waves, launch.x
        features = x.as_strided((len(x), count), x.stride(), x.storage_offset() - count)
        blocks, steps, _, _, _, _, per = waves.shape
        rows = waves.permute(1, 5, 3, 6, 0, 4, 2).reshape(steps * 8 * per, blocks, 2, 8)  # columns (j, g)
        if per == 1:
            rows = rows.view(-1, blocks, 2, 4, 2).transpose(3, 4)
        assert not rows[count:].any()
        return (features.double() @ rows[:count].reshape(count, -1).double()).to(x.dtype)

    @staticmethod
    def of_features(launch: FlashLaunch) -> Tensor:
        """The sums over the blocks, of the waves."""
        assert launch.turns is not None and launch.grad_coef is not None
        turns, factors = (part.double() for part in launch.turns[:2])
        groups, words, _, per = turns.shape
        turns = turns.view(groups, words, 4, 2, 4, per).permute(3, 0, 4, 2, 1, 5).reshape(2, groups * 16, words * per)
        turned = torch.complex(*turns)[:, : launch.blocks]
        coef = shaped(launch.grad_coef, len(launch.x), launch.blocks, RANK).to(torch.complex128)
        before = (RANK - factors.shape[2]) // 2
        coef = coef[..., before : RANK - before] if before else coef
        made = torch.einsum("jr,jp,bpr->bj", torch.view_as_complex(factors).flatten(0, 1), turned, coef)
        return torch.view_as_real(made).flatten(1)

    def groups(self, rows: int) -> list[slice]:
        """The rows of a launch that a block has on chip together."""
        group = self._sizes.group
        return [slice(first, first + group) for first in range(0, rows, group)]

    @staticmethod
    def targets(launch: FlashLaunch) -> Tensor:
        """``[B, m]`` float64."""
        if launch.dense is not None:
            return launch.dense.double()
        assert launch.indices is not None and launch.offsets is not None
        y = torch.zeros(launch.x.shape[0], launch.weight.shape[0], dtype=torch.float64)
        for row, of_row in enumerate(y):
            mine = launch.indices[launch.offsets[row] : launch.offsets[row + 1]] - launch.label_start
            of_row[mine[(mine >= 0) & (mine < len(of_row))]] = 1
        return y

    @staticmethod
    def value_and_grad(
        launch: FlashLaunch, loss: ElementwiseLoss, z: Tensor, y: Tensor, part: slice
    ) -> tuple[Tensor, Tensor]:
        """With the label weights: pos_weight multiplies the positive side, which is what is left with all y = 1."""
        if isinstance(loss, BCE):
            y, loss = loss._smooth(y), BCE()
        positive, up = loss.value_and_grad(z, torch.ones_like(z))
        negative, down = loss.value_and_grad(z, torch.zeros_like(z))
        if launch.pos_weight is not None:
            positive, up = positive * launch.pos_weight[part], up * launch.pos_weight[part]
        f, g = y * positive + (1 - y) * negative, y * up + (1 - y) * down
        return (f, g) if launch.label_weight is None else (f * launch.label_weight[part], g * launch.label_weight[part])

    def finish(self, launch: FlashLaunch, results: FlashResults) -> None:
        grad_x, grad_features, rows, value = results
        self.calls.append("finish")
        factor = launch.scale * (1.0 if launch.out_scale is None else float(launch.out_scale))
        if grad_x is not None:
            batch, slack = launch.x.shape
            constant = grad_features is not None and launch.turns is not None
            slabs = shaped(launch.slabs, launch.blocks, batch, slack + constant)
            assert slabs is not None
            sums = slabs.double().sum(0) * factor
            grad_x.copy_(sums[:, :slack])
            if constant:
                grad_features[:, 0] = sums[:, slack] * launch.turns.constant
                grad_features[:, 1:] = self.of_features(launch)[:, : grad_features.shape[1] - 1] * factor
        rows.copy_(shaped(launch.row_sums, launch.blocks, len(rows)).double().sum(0))
        if value is not None:
            value.copy_(shaped(launch.totals, launch.blocks).sum() * launch.scale)
