"""Losses that are a sum over labels, ``f = w·(pw·y·P(z) + (1-y)·N(z))``: BCE, focal and asymmetric.

P is the value at a positive label, N at a negative one; ``weight`` and ``pos_weight`` mean what they mean in torch.
All of them come from log σ(z) and log σ(-z), so that nothing is lost or overflows where σ is 0 or 1 to the last bit.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..validation import check_bool
from .base import ElementwiseLoss
from .kernel_params import ASYMMETRIC_KIND, BCE_KIND, FOCAL_KIND, ElementwiseParams


class _Weighted(ElementwiseLoss):
    """A loss with a factor for each label, and one for its positive part."""

    weight: float | Tensor | None
    pos_weight: float | Tensor | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_numbers(
            *(name for name in ("weight", "pos_weight") if not isinstance(getattr(self, name), (Tensor, type(None))))
        )


@dataclasses.dataclass(frozen=True, eq=False)
class BCE(_Weighted):
    """Binary cross-entropy on logits, ``w·(pw·y·softplus(-z) + (1-y)·softplus(z))``, as torch has it.

    Args:
        weight: a number or ``[n]``, a factor for each label.
        pos_weight: a number or ``[n]``, a factor for the positive part of each label.
        label_smoothing: ``a`` in [0, 1] replaces ``y`` by ``y(1-a) + a/2``.

    Example:
        >>> x, weight, targets = torch.ones(2, 3), torch.zeros(5, 3), [[1], [0, 4]]
        >>> sk.functional.linear_loss(x, weight, targets, loss=sk.BCE(pos_weight=3.0))
        tensor(1.1090)
    """

    weight: float | Tensor | None = None
    pos_weight: float | Tensor | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_numbers("label_smoothing")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {self.label_smoothing}")

    def kernel_params(self) -> ElementwiseParams | None:
        if not self.has_kernel:
            return None
        return ElementwiseParams(
            BCE_KIND, label_smoothing=self.label_smoothing, weight=self.weight, pos_weight=self.pos_weight
        )

    def _smooth(self, y: Tensor) -> Tensor:
        a = self.label_smoothing
        return y * (1 - a) + a / 2 if a else y

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        y = self._smooth(y)
        positive = -y * F.logsigmoid(z)
        if self.pos_weight is not None:
            positive = positive * self.pos_weight
        f = positive - (1 - y) * F.logsigmoid(-z)
        return f if self.weight is None else f * self.weight

    def value_and_grad(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # softplus(z) = max(z, 0) + log1p(exp(-|z|)). f and ∂f/∂z = down·σ(z) - up·σ(-z) are sums of positive and of
        # negative labels, so that nothing cancels where σ is 0 or 1 to the last bit. Few arrays live at once, and none
        # is masked: that is what this costs.
        y = self._smooth(y)
        up, down = y if self.pos_weight is None else y * self.pos_weight, 1 - y
        if self.weight is not None:
            up, down = up * self.weight, down * self.weight
        f = z.abs().neg_().exp_().log1p_()
        if self.pos_weight is not None or self.weight is not None:
            f *= up + down
        far = z.clamp(min=0).mul_(down).addcmul_(up, (-z).clamp_(min=0))
        f += far.nan_to_num_(0.0, torch.inf)  # 0·∞, whose limit is 0; where z is NaN, the first term keeps it
        del far
        return f, torch.sigmoid(z).mul_(down).addcmul_(up, (-z).sigmoid_(), value=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Poly1BCE(_Weighted):
    """Binary cross-entropy with another first coefficient of its polynomial, ``BCE + ε₁(1-p_t)`` (PolyLoss, Leng et al. 2022).

    Args:
        epsilon: ε₁ ≥ -1, added to the first coefficient, which is 1; 0 gives BCE.
        weight: a number or ``[n]``, a factor for each label.
        pos_weight: a number or ``[n]``, a factor for the positive part of each label.

    Example:
        >>> at_zero = torch.zeros(1)  # p = 1/2: BCE is log 2, and half of ε₁ is added
        >>> sk.Poly1BCE(epsilon=1.0).value(at_zero, torch.ones(1))
        tensor([1.1931])
    """

    epsilon: float = 1.0
    weight: float | Tensor | None = None
    pos_weight: float | Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_numbers("epsilon")
        if self.epsilon < -1.0:
            raise ValueError(f"epsilon must be at least -1, got {self.epsilon}; below that the loss rewards mistakes")

    def _shares(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of 1 - p and of p."""
        up, down = y if self.pos_weight is None else y * self.pos_weight, 1 - y
        return (up, down) if self.weight is None else (up * self.weight, down * self.weight)

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        up, down = self._shares(y)
        first = up * torch.sigmoid(-z) + down * torch.sigmoid(z)
        return BCE(self.weight, self.pos_weight).value(z, y) + self.epsilon * first

    def value_and_grad(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        up, down = self._shares(y)
        p, q = torch.sigmoid(z), torch.sigmoid(-z)
        f, g = BCE(self.weight, self.pos_weight).value_and_grad(z, y)
        return f + self.epsilon * (up * q + down * p), g + self.epsilon * (down - up) * p * q


class _TwoSided(_Weighted):
    """A loss given by its positive and its negative side."""

    def _sides(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """P(z) and N(z), differentiable."""
        raise NotImplementedError

    def _sides_and_grads(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """P, P', N, N' in closed form."""
        raise NotImplementedError

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return self._mix(*self._sides(z), *self._shares(y))

    def value_and_grad(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        shares = self._shares(y)
        positive, slope_positive, negative, slope_negative = self._sides_and_grads(z)
        return self._mix(positive, negative, *shares), self._mix(slope_positive, slope_negative, *shares)

    def _shares(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of P and N."""
        return y if self.pos_weight is None else y * self.pos_weight, 1 - y

    def _mix(self, positive: Tensor, negative: Tensor, up: Tensor, down: Tensor) -> Tensor:
        f = torch.addcmul(down * negative, up, positive)
        return f if self.weight is None else f * self.weight


@dataclasses.dataclass(frozen=True, eq=False)
class Focal(_TwoSided):
    """Focal loss, ``-α_t (1-p_t)^γ log p_t`` (Lin et al. 2017).

    Args:
        gamma: γ ≥ 0, how strongly easy labels are down-weighted; 0 gives BCE.
        alpha: weight α of positives, 1-α of negatives; ``None`` for no weighting.
        weight: a number or ``[n]``, a factor for each label.
        pos_weight: a number or ``[n]``, a factor for the positive part of each label.

    Example:
        >>> x, weight, targets = torch.ones(2, 3), torch.zeros(5, 3), [[1], [0, 4]]
        >>> sk.functional.linear_loss(x, weight, targets, loss=sk.Focal(gamma=2.0))
        tensor(0.1040)
    """

    gamma: float = 2.0
    alpha: float | None = 0.25
    weight: float | Tensor | None = None
    pos_weight: float | Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_numbers("gamma", *(() if self.alpha is None else ("alpha",)))
        _check_exponent("gamma", self.gamma)
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha must lie in [0, 1], or be None for no weighting, got {self.alpha}")

    def value_and_grad(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # Infinite logits are taken as the largest finite ones, whose product with 0 is 0 and not NaN.
        largest = torch.finfo(z.dtype).max
        finite = z.clamp(-largest, largest)
        f, g = super().value_and_grad(finite, y)
        # What they cost, if anything, is infinite: ∞·f, and 0·∞ counts as 0.
        return f.add_((z - finite).abs_().mul_(f).nan_to_num_(0.0, torch.inf)), g

    def kernel_params(self) -> ElementwiseParams | None:
        if not self.has_kernel:
            return None
        up, down = self._alphas()
        return ElementwiseParams(
            FOCAL_KIND,
            gamma_pos=self.gamma,
            gamma_neg=self.gamma,
            alpha_pos=up,
            alpha_neg=down,
            weight=self.weight,
            pos_weight=self.pos_weight,
        )

    def _alphas(self) -> tuple[float, float]:
        return (1.0, 1.0) if self.alpha is None else (self.alpha, 1.0 - self.alpha)

    def _sides(self, z: Tensor) -> tuple[Tensor, Tensor]:
        log_p, log_q = F.logsigmoid(z), F.logsigmoid(-z)  # q = 1 - p
        up, down = self._alphas()
        return -up * torch.exp(self.gamma * log_q) * log_p, -down * torch.exp(self.gamma * log_p) * log_q

    def _sides_and_grads(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        minus = -z
        log_p, log_q = F.logsigmoid(z), F.logsigmoid(minus)
        p, q = torch.sigmoid(z), torch.sigmoid(minus)
        up, down = self._alphas()
        focus_up = (self.gamma * log_q).exp_().mul_(-up)  # -α q^γ
        focus_down = (self.gamma * log_p).exp_().mul_(-down)
        steep_up, steep_down = (self.gamma * p).mul_(log_p), (self.gamma * q).mul_(log_q)
        return (
            focus_up * log_p,
            focus_up.mul_(q.sub_(steep_up)),  # (q^γ)' = -γ p q^γ
            focus_down * log_q,
            focus_down.mul_(steep_down.sub_(p)),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Asymmetric(_TwoSided):
    """Asymmetric loss (ASL, Ben-Baruch et al. 2021).

    Positives ``-(1-p)^{γ+} log p``; negatives ``-m^{γ-} log(1-m)`` with the shifted probability m = max(p - clip, 0).

    Args:
        gamma_neg: γ- ≥ 0, focusing of negatives.
        gamma_pos: γ+ ≥ 0, focusing of positives.
        clip: probability margin in [0, 1): negatives below it cost nothing; ``None`` or 0 for none.
        eps: logarithms are cut off at log(eps), and have no gradient beyond.
        detach_focus: no gradient through the focusing factor, as the published code does by default.
        weight: a number or ``[n]``, a factor for each label.
        pos_weight: a number or ``[n]``, a factor for the positive part of each label.

    Example:
        >>> sk.Asymmetric(clip=0.05).value(torch.tensor([-3.0, 0.0]), torch.zeros(2))  # p = 0.047: an easy negative
        tensor([0.0000, 0.0245])
    """

    gamma_neg: float = 4.0
    gamma_pos: float = 1.0
    clip: float = 0.05
    eps: float = 1e-8
    detach_focus: bool = False
    weight: float | Tensor | None = None
    pos_weight: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.clip is None:
            object.__setattr__(self, "clip", 0.0)
        super().__post_init__()
        self._take_numbers("gamma_neg", "gamma_pos", "clip", "eps")
        _check_exponent("gamma_neg", self.gamma_neg)
        _check_exponent("gamma_pos", self.gamma_pos)
        object.__setattr__(self, "detach_focus", check_bool("detach_focus", self.detach_focus))
        if not 0.0 <= self.clip < 1.0:
            raise ValueError(f"clip is a probability margin and must lie in [0, 1), got {self.clip}")
        if not 0.0 < self.eps < 1.0:
            raise ValueError(f"eps must lie between 0 and 1, got {self.eps}")

    def kernel_params(self) -> ElementwiseParams | None:
        if not self.has_kernel:
            return None
        return ElementwiseParams(
            ASYMMETRIC_KIND,
            gamma_pos=self.gamma_pos,
            gamma_neg=self.gamma_neg,
            clip=self.clip,
            eps=self.eps,
            detach_focus=self.detach_focus,
            weight=self.weight,
            pos_weight=self.pos_weight,
        )

    def _sides(self, z: Tensor) -> tuple[Tensor, Tensor]:
        p, q = torch.sigmoid(z), torch.sigmoid(-z)
        margin, rest = (p - self.clip).clamp(min=0), (q + self.clip).clamp(max=1)  # m and 1 - m
        floor = math.log(self.eps)
        focus_up, focus_down = q**self.gamma_pos, margin**self.gamma_neg
        if self.detach_focus:
            focus_up, focus_down = focus_up.detach(), focus_down.detach()
        # log(1 - m): from m where that is small, from 1 - m where that is
        log_rest = torch.where(rest < 0.5, rest.clamp(min=self.eps).log(), torch.log1p(-margin.clamp(max=0.75)))
        return -focus_up * F.logsigmoid(z).clamp(min=floor), -focus_down * log_rest

    def _sides_and_grads(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        p, q = torch.sigmoid(z), torch.sigmoid(-z)
        margin, rest = (p - self.clip).clamp_(min=0), (q + self.clip).clamp_(max=1)
        through = 0.0 if self.detach_focus else 1.0
        log_p = F.logsigmoid(z).clamp_(min=math.log(self.eps))
        log_rest = torch.where(rest < 0.5, rest.clamp(min=self.eps).log(), torch.log1p(-margin.clamp(max=0.75)))
        focus_up = q**self.gamma_pos
        slope_up = focus_up * (through * self.gamma_pos * p * log_p - torch.where(p < self.eps, 0, q))
        focus_down = margin**self.gamma_neg
        # N' = (m^γ/(1-m) - γ m^{γ-1} log(1-m)) p q where p > clip: below it m is constant
        steep = self.gamma_neg * margin ** max(self.gamma_neg - 1, 0) if self.gamma_neg else torch.zeros_like(p)
        if 0 < self.gamma_neg < 1:
            steep = torch.where(margin > 0, self.gamma_neg * margin ** (self.gamma_neg - 1), 0)
        inner = torch.where(rest < self.eps, 0, focus_down / rest) - through * steep * log_rest
        slope_down = torch.where(p > self.clip, inner * p * q, 0)
        return -focus_up * log_p, slope_up, -focus_down * log_rest, slope_down


def _check_exponent(name: str, value: float) -> None:
    if value < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
