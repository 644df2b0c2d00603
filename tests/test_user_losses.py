"""Losses of a user's own: computed by their own formula on every backend, eager and compiled, or refused by name."""

from __future__ import annotations

import dataclasses
import io
import pickle

import pytest
import reference
import torch
import torch.nn.functional as F
from cases import problem, public_loss
from torch import Tensor

import sigkernels as sk
from sigkernels.losses import ConfusionLoss


@dataclasses.dataclass(frozen=True, eq=False)
class Poly1(sk.ElementwiseLoss):
    """BCE plus ε (1 - p_t), with a factor for each label."""

    epsilon: float = 1.0
    weight: Tensor | float | None = None

    def value(self, z, y):
        p = torch.sigmoid(z)
        f = F.binary_cross_entropy_with_logits(z, y, reduction="none") + self.epsilon * (
            1 - (y * p + (1 - y) * (1 - p))
        )
        return f if self.weight is None else f * self.weight


@dataclasses.dataclass(frozen=True, eq=False)
class Squares(sk.ElementwiseLoss):
    def value(self, z, y):
        return (z - y).square()

    def value_and_grad(self, z, y):
        return (z - y).square(), 2 * (z - y)


@dataclasses.dataclass(frozen=True, eq=False)
class Settings(sk.ElementwiseLoss):
    """Settings of every kind, and two that follow from them."""

    mode: str = "none"
    seed: int = 0
    weight: Tensor | None = None
    twice: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "twice", 2.0 * self.seed)
        object.__setattr__(self, "root", None if self.weight is None else self.weight.sqrt())

    def value(self, z, y):
        scale = 1.0 + (self.mode == "a|b%7C") + (self.seed == 2**60 + 1) + (self.twice == 2.0**61)
        return scale * self.root * (z - y).square()


class TenTimes(sk.BCE):
    def value(self, z, y):
        return 10 * super().value(z, y)


@dataclasses.dataclass(frozen=True, eq=False)
class Spread(sk.ColumnLoss):
    """How much the logits of a label differ from its targets, by standard deviation."""

    def column_values(self, z, y):
        return (z - y).std(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Softmax(sk.RowLoss):
    def row_values(self, z, y):
        return -(y * torch.log_softmax(z, 1)).sum(1)


class Steeper(sk.SigmoidF1):
    def scores(self, z):
        return torch.sigmoid(self.beta * 3 * z + self.eta), torch.sigmoid(-(self.beta * 3 * z + self.eta))


def dense(p, loss, reduction="mean"):
    """Plain torch on dense logits."""
    z = reference.logits(p.x, p.layer)
    y = reference.dense_targets(p.targets, p.layer, z.dtype)
    if isinstance(loss, ConfusionLoss):
        return loss.value(z, y)
    if isinstance(loss, sk.ColumnLoss):
        f = loss.column_values(z, y)
    else:
        f = loss.row_values(z, y) if isinstance(loss, sk.RowLoss) else loss.value(z, y)
    if reduction == "none":
        return f.sum(1) if f.ndim == 2 else f
    return f.mean() if reduction == "mean" else f.sum()


def same(p, loss, reduction="mean", call=public_loss):
    got = call(p, p.targets, loss, reduction)
    upstream = torch.randn_like(got)
    got.backward(upstream)
    grads = p.grads()
    want = dense(p, loss, reduction)
    torch.testing.assert_close(got, want)
    want.backward(upstream)
    torch.testing.assert_close(grads, p.grads())


LOSSES = [
    Poly1(),
    Poly1(0.5, torch.rand(60, dtype=torch.float64)),
    Poly1(weight=2.0),
    Squares(),
    TenTimes(label_smoothing=0.1),
    TenTimes(pos_weight=3.0),
    Settings("a|b%7C", 2**60 + 1, torch.linspace(1, 2, 60, dtype=torch.float64)),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_elementwise(loss, reduction, backend):
    with sk.backend(backend):
        same(problem(60, 4, 5, 7, dtype=torch.float64), loss, reduction)


@pytest.mark.parametrize("loss", [Spread(), Softmax(), Steeper(beta=0.7)], ids=lambda loss: type(loss).__name__)
def test_columns_and_rows(loss):
    same(problem(60, 4, 5, 7, dtype=torch.float64), loss)
    if isinstance(loss, sk.RowLoss):
        same(problem(60, 4, 5, 7, dtype=torch.float64), loss, "none")


@pytest.mark.parametrize(
    "loss", [*LOSSES, Spread(), Softmax(), Steeper(beta=0.7)], ids=lambda loss: type(loss).__name__
)
def test_compiled(loss):
    torch._dynamo.reset()
    compiled = torch.compile(public_loss, fullgraph=True, backend="aot_eager")
    same(problem(60, 4, 5, 7, dtype=torch.float64), loss, call=compiled)


def test_compiled_where_it_is_made():
    torch._dynamo.reset()
    p, weight = problem(60, 4, 5, 7), torch.rand(60)

    def step(x, weight):
        return sk.functional.dft_loss(x, p.layer.weight, p.targets, 60, 4, Poly1(0.25, weight), "none").sum()

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(p.x, weight)
    torch.testing.assert_close(got, step(p.x, weight))


def test_a_subclass_changes_nobody_else_s_results():
    p = problem(60, 4, 5, 7)
    before = public_loss(p, p.targets, sk.BCE(), "mean")

    class BCE(sk.BCE):
        def value(self, z, y):
            return 10 * super().value(z, y)

    torch._dynamo.reset()
    compiled = torch.compile(public_loss, fullgraph=True, backend="aot_eager")
    for call in (public_loss, compiled):
        torch.testing.assert_close(call(p, p.targets, sk.BCE(), "mean"), before)
        torch.testing.assert_close(call(p, p.targets, BCE(), "mean"), 10 * before)


def test_two_classes_of_one_name():
    def make(factor):
        class Mine(sk.ElementwiseLoss):
            def value(self, z, y):
                return factor * (z - y).square()

        return Mine()

    torch._dynamo.reset()
    compiled = torch.compile(public_loss, fullgraph=True, backend="aot_eager")
    one, two, p = make(1.0), make(2.0), problem(60, 4, 5, 7)
    for call in (public_loss, compiled):
        torch.testing.assert_close(call(p, p.targets, two, "mean"), 2 * call(p, p.targets, one, "mean"))


def test_no_array_of_all_logits():
    largest = 0

    @dataclasses.dataclass(frozen=True, eq=False)
    class Watch(sk.ElementwiseLoss):
        def value(self, z, y):
            nonlocal largest
            largest = max(largest, z.shape[1])
            return (z - y).square()

    p = problem(20_000, 3, 2, 64)
    public_loss(p, p.targets, Watch(), "mean").backward()
    assert 0 < largest <= 8192


@pytest.mark.parametrize("loss", [Poly1(), TenTimes(), Steeper(), Spread()], ids=lambda loss: type(loss).__name__)
def test_a_forced_kernel_refuses_it_by_name(loss):
    p = problem(60, 4, 5, 7)
    for name in set(sk.available_backends()) - {"torch"}:
        with sk.backend(name), pytest.raises(RuntimeError, match=rf"no kernel for .*\b{type(loss).__name__}; it has"):
            public_loss(p, p.targets, loss, "mean")


class Nothing(sk.ElementwiseLoss):
    pass


class NoColumns(sk.ColumnLoss):
    pass


class NoRows(sk.RowLoss):
    pass


class Averaged(sk.ElementwiseLoss):
    def value(self, z, y):
        return (z - y).square().mean()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (sk.Loss(), TypeError, "Loss defines no loss by itself; derive from ElementwiseLoss"),
        (sk.ElementwiseLoss(), TypeError, "ElementwiseLoss has no formula"),
        (Nothing(), TypeError, "Nothing has no formula; define value"),
        (NoColumns(), TypeError, "NoColumns has no formula; define column_values"),
        (NoRows(), TypeError, "NoRows has no formula; define row_values"),
        (Averaged(), ValueError, "formula of Averaged must give a tensor of shape"),
        (Steeper(average="pooled"), RuntimeError, "Steeper with average='pooled'"),
        (Poly1(weight=torch.ones(7)), ValueError, "weight of Poly1 has 7 entries for 60 labels"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_computed_says_so(loss, error, words):
    p = problem(60, 4, 5, 7)
    with pytest.raises(error, match=words):
        public_loss(p, p.targets, loss, "mean")


def own_init():
    class Own(sk.ElementwiseLoss):
        def __init__(self, scale):
            self.scale = scale


def slots():
    @dataclasses.dataclass(frozen=True, eq=False, slots=True)
    class Own(sk.ElementwiseLoss):
        scale: float = 1.0


@pytest.mark.parametrize(("make", "words"), [(own_init, "an __init__ of its own"), (slots, "slots")])
def test_classes_whose_settings_would_be_lost_in_a_copy_are_refused(make, words):
    with pytest.raises(TypeError, match=f"Own has {words}: .* Decorate it with"):
        make()


THETA = torch.ones(2, requires_grad=True)


class Learning(sk.ElementwiseLoss):
    def value(self, z, y):
        return (z - y).square() * THETA.exp()[0]


class LearningColumns(sk.ColumnLoss):
    def column_values(self, z, y):
        return (z - y).square().mean(0) * THETA[0]


@pytest.mark.parametrize("loss", [Learning(), LearningColumns()], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_that_would_miss_its_gradient_is_refused(loss, compiled):
    p = problem(60, 4, 5, 7)
    call = torch.compile(public_loss, fullgraph=True) if compiled else public_loss
    with pytest.raises(ValueError, match=rf"formula of {type(loss).__name__} uses a tensor of shape \[2\]"):
        call(p, p.targets, loss, "mean")
    with torch.no_grad():
        assert public_loss(p, p.targets, loss, "mean").isfinite()


def with_closed_form(gives):
    class Closed(sk.ElementwiseLoss):
        def value(self, z, y):
            return (z - y).square()

        def value_and_grad(self, z, y):
            return gives((z - y).square(), 2 * (z - y))

    return Closed()


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (lambda f, g: f, "a tuple of two tensors, f and ∂f/∂z, got Tensor"),
        (lambda f, g: (f, g, g), "a tuple of two tensors"),
        (lambda f, g: (f, None), r"of shape \[7, \d+\], got NoneType"),
        (lambda f, g: (f, g > 0), r"got torch.bool \[7"),
        (lambda f, g: (f, g[:1]), r"got torch.float32 \[1"),
        (lambda f, g: (f.mean(), g), r"got torch.float32 \[\]"),
    ],
)
def test_a_closed_form_of_another_form_is_refused(gives, words):
    """A gradient of booleans, or none, was taken for zeros."""
    p = problem(60, 4, 5, 7)
    with pytest.raises(ValueError, match=f"value_and_grad of Closed must give .*{words}"):
        public_loss(p, p.targets, with_closed_form(gives), "mean")
    same(problem(60, 4, 5, 7, dtype=torch.float64), with_closed_form(lambda f, g: (f, g)))


class Detached(sk.ElementwiseLoss):
    def value(self, z, y):
        return (z - y).square().detach()


class DetachedColumns(sk.ColumnLoss):
    def column_values(self, z, y):
        return (z - y).detach().square().mean(0)


@pytest.mark.parametrize("loss", [Detached(), DetachedColumns()], ids=lambda loss: type(loss).__name__)
def test_a_formula_without_a_gradient_is_refused_where_one_is_wanted(loss):
    p = problem(60, 4, 5, 7)
    with pytest.raises(
        ValueError, match=f"formula of {type(loss).__name__} gives a tensor that does not depend on the logits"
    ):
        public_loss(p, p.targets, loss, "mean")
    with torch.no_grad():
        assert public_loss(p, p.targets, loss, "mean").isfinite()


@dataclasses.dataclass(frozen=True, eq=False)
class Averaging(sk.ColumnLoss):
    """A setting of the name that the package's own losses use, with a meaning of its own."""

    average: str = "pooled"

    def column_values(self, z, y):
        return (z - y).square().mean(0)


def test_settings_mean_what_the_formula_makes_of_them():
    p = problem(60, 4, 5, 7, dtype=torch.float64)
    for reduction in ("mean", "sum"):
        same(p, Averaging(), reduction)


def test_without_gradients():
    p = problem(60, 4, 5, 7, dtype=torch.float64)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(public_loss(p, p.targets, Poly1(), "mean"), dense(p, Poly1()))


def test_numbers_in_place_of_tensors():
    """A number or a 0-d tensor stands for every label, as torch broadcasts."""
    p = problem(60, 4, 5, 7)
    for make in (sk.BCE, sk.Focal, sk.Asymmetric):
        want = public_loss(p, p.targets, make(weight=torch.full((60,), 2.0), pos_weight=torch.full((60,), 3.0)), "mean")
        for weight, pos_weight in ((2.0, 3.0), (torch.tensor(2.0), torch.tensor(3.0)), (2, 3)):
            torch.testing.assert_close(
                public_loss(p, p.targets, make(weight=weight, pos_weight=pos_weight), "mean"), want
            )
    assert sk.BCE(pos_weight=3.0) == sk.BCE(pos_weight=3.0)


def test_pickle_and_safe_loading():
    for loss in (Poly1(0.5), TenTimes(), sk.Focal(gamma=3.0)):
        assert pickle.loads(pickle.dumps(loss)) == loss
    saved = io.BytesIO()
    losses = [sk.BCE(), sk.Focal(), sk.Asymmetric(), sk.SigmoidF1(), sk.UnboundedF1(), sk.LMLNLL(3)]
    torch.save({"hyper_parameters": losses}, saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=True)["hyper_parameters"] == losses


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_beyond_float32_is_infinite(compiled):
    torch._dynamo.reset()
    call = torch.compile(public_loss, fullgraph=True, backend="aot_eager") if compiled else public_loss
    for size, want in ((1e38, torch.inf), (float("nan"), torch.nan)):
        p = problem(40, -1, 4, 5)
        with torch.no_grad():
            p.x.fill_(size)
            p.layer.weight.fill_(-1.0)
        torch.testing.assert_close(
            call(p, [[i] for i in range(5)], sk.BCE(), "sum").detach(), torch.tensor(want), equal_nan=True
        )
