"""A flash kernel in plain torch, in float64: the contract of ``backends/flash_kernels.py``, on any tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from sigkernels.backends.flash_kernels import MARKED, RANK, FlashLaunch, FlashSizes
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


class ReferenceKernels:
    """``FlashKernels``. ``calls`` has the names of the launches."""

    def __init__(self, sizes: FlashSizes) -> None:
        self._sizes = sizes
        self.calls: list[str] = []

    def sizes(self, x: Tensor, slack: int, dft: bool) -> FlashSizes:
        return self._sizes

    def mark(self, launch: FlashLaunch) -> None:
        self.calls.append("mark")
        assert launch.marks is not None and launch.indices is not None and launch.offsets is not None
        launch.marks.zero_()
        for row in range(launch.x.shape[0]):
            mine = launch.indices[launch.offsets[row] : launch.offsets[row + 1]] - launch.label_start
            for label in mine[(mine >= 0) & (mine < launch.weight.shape[0])].tolist():
                bit = label % MARKED
                launch.marks[label // MARKED, row] |= -(2**31) if bit == 31 else 1 << bit

    def fused_loss(self, launch: FlashLaunch) -> None:
        self.calls.append("fused_loss")
        loss, (m, _), x = loss_of(launch.params), launch.weight.shape, launch.x.double()
        assert launch.blocks == -(-m // launch.block_labels)
        for block in range(launch.blocks):
            part = slice(block * launch.block_labels, min((block + 1) * launch.block_labels, m))
            columns = slice(block * RANK, (block + 1) * RANK)
            weight = launch.weight[part].double()
            z = x @ weight.T
            if launch.coef is not None and launch.basis is not None:
                z += launch.coef[:, columns].double() @ launch.basis[: len(weight)].double().T
            if launch.bias is not None:
                z += launch.bias[part].double()
            f, g = self.value_and_grad(launch, loss, z, self.targets(launch, part), part)
            launch.row_sums[block] = f.sum(1)
            launch.totals[block] = f.sum()
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
                        values[0] = sums[part].copy_(values[0])
                out[part] = values[0]
            if launch.grad_coef is not None and launch.basis is not None:
                launch.grad_coef[:, columns] = (g @ launch.basis[: len(weight)].double()).to(launch.grad_coef.dtype)
            if launch.slabs is not None:
                launch.slabs[block] = g @ weight

    def groups(self, rows: int) -> list[slice]:
        """The rows of a launch that a block has on chip together."""
        group = self._sizes.group
        return [slice(first, first + group) for first in range(0, rows, group)]

    @staticmethod
    def targets(launch: FlashLaunch, part: slice) -> Tensor:
        """``[B, labels]`` float64, from the marks where there are sets."""
        if launch.dense is not None:
            return launch.dense[:, part].double()
        assert launch.marks is not None
        bits = (launch.marks[:, None, :] >> torch.arange(MARKED, dtype=torch.int32)[:, None]) & 1
        return bits.reshape(-1, launch.marks.shape[1])[part].T.double()

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

    def finish(self, launch: FlashLaunch, grad_x: Tensor | None, rows: Tensor, value: Tensor | None) -> None:
        self.calls.append("finish")
        factor = launch.scale * (1.0 if launch.out_scale is None else float(launch.out_scale))
        if grad_x is not None:
            assert launch.slabs is not None
            grad_x.copy_(launch.slabs.double().sum(0) * factor)
        rows.copy_(launch.row_sums.double().sum(0))
        if value is not None:
            value.copy_(launch.totals.sum() * launch.scale)
