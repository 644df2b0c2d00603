"""What users would pick instead, and how it is timed beside ours: one place for all suites.

The peers of the fused pass get dense targets for free. "Frozen DFT" holds the DFT matrix as a buffer and computes the
same loss as ours; "no DFT" is a linear layer of width s, without anything that guarantees a label set.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import statistics
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sigkernels as sk
from sigkernels import machine_load
from sigkernels.memory import peak_bytes

__all__ = [
    "ACTIVE", "CLOCK", "COMPILERS", "LOSSES", "OURS", "QUICK", "STEPS", "Case", "ChunkedSGD", "Problem", "Step", "bracketing_lml", "duel",
    "interleaved", "log_tree_topk_svm", "median_interval", "peak_bytes", "race", "samples",
]  # fmt: skip

OURS = "sigkernels"
QUICK = bool(os.environ.get("SIGKERNELS_BENCH_QUICK"))
ACTIVE = 15  # active labels of a row
Step = Callable[[], object]


# -- the fused pass -------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    n: int
    k: int  # -1: no DFT part
    s: int
    rows: int

    def __str__(self) -> str:
        return f"n={self.n} k={self.k} s={self.s} B={self.rows}"


DFT_CASES = [
    Case(8921, 80, 50, 16),
    Case(8921, 80, 50, 64),
    Case(8921, 80, 50, 256),
    Case(8921, 80, 500, 64),
    Case(20_000, 50, 100, 64),
    Case(100_000, 50, 64, 64),
    Case(1_000_000, 50, 64, 64),
]


class Problem:
    """Inputs of one case, our step and the steps of the peers; a step is forward and backward."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        torch.manual_seed(0)
        self.case = case
        n, k, s, rows = case
        self.columns = max(2 * k + 1, 0)
        self.x = torch.randn(rows, self.columns + s, dtype=dtype, device=device, requires_grad=True)
        self.weight = (torch.randn(n, s, device=device) * 0.1).to(dtype).requires_grad_()
        chosen = torch.randint(0, n, (rows, ACTIVE)).tolist()
        self.sets = sk.LabelSets.from_lists([set(row) for row in chosen], n).to(device)

    @functools.cached_property
    def slack(self) -> Tensor:
        return self.x.detach()[:, self.columns :].clone().requires_grad_()

    @functools.cached_property
    def dense_targets(self) -> Tensor:
        return self.sets.to_dense(self.x.dtype)

    @functools.cached_property
    def dft(self) -> Tensor:
        return sk.dft_matrix(self.case.n, self.case.k, dtype=self.x.dtype).to(self.x.device)

    def step(self, loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            loss().backward()
            self.x.grad = self.weight.grad = self.slack.grad = None

        return run

    def ours(self, loss: sk.Loss) -> Tensor:
        if self.case.k < 0:
            return sk.functional.linear_loss(self.x, self.weight, self.sets, loss=loss)
        return sk.functional.dft_loss(self.x, self.weight, self.sets, self.case.n, self.case.k, loss)

    def dense(self, loss: sk.Loss) -> Tensor:
        z = F.linear(self.x[:, : self.columns], self.dft) + F.linear(self.x[:, self.columns :], self.weight)
        return self.formula(loss, z)

    def plain(self, loss: sk.Loss) -> Tensor:
        return self.formula(loss, F.linear(self.slack, self.weight))

    def formula(self, loss: sk.Loss, z: Tensor) -> Tensor:
        """The mean loss of materialised logits, as torch has it or as its plain formula."""
        if isinstance(loss, sk.BCE):
            return F.binary_cross_entropy_with_logits(z, self.dense_targets)
        return loss.value(z, self.dense_targets).mean()

    def who(self, name: str, loss: sk.Loss = sk.BCE()) -> Callable[[], None]:  # noqa: B008 (frozen)
        """The step of ``name``: sigkernels, or eager or compiled with a frozen DFT or none."""
        if name == OURS:
            return self.step(lambda: self.ours(loss))
        how, _, columns = name.partition(", ")
        if how == "chunks":
            return self.chunks
        layer = self.dense if columns == "frozen DFT" else self.plain

        def function() -> Tensor:
            return layer(loss)

        return self.step(compiled(function, how) if how in COMPILERS else function)

    @torch.no_grad()
    def chunks(self) -> tuple[Tensor, Tensor, Tensor]:
        """BCE of a linear layer and both gradients in chunks of labels, by hand: what needs neither a ``B × n`` array nor
        a compiler."""
        x, weight, targets = self.slack, self.weight, self.dense_targets
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        loss, scale = x.new_zeros(()), 1 / targets.numel()
        for start in range(0, len(weight), CHUNK):
            part, y = weight[start : start + CHUNK], targets[:, start : start + CHUNK]
            z = x @ part.T
            loss += F.binary_cross_entropy_with_logits(z, y, reduction="sum")
            z.sigmoid_().sub_(y).mul_(scale)
            grad_x.addmm_(z, part)
            torch.mm(z.T, x, out=grad_weight[start : start + CHUNK])
        return loss * scale, grad_x, grad_weight

    @property
    def flops(self) -> int:
        """Of the three products over the slack columns: what cannot be avoided."""
        return 6 * self.case.rows * self.case.n * self.case.s


CHUNK = 2048  # labels: 64 rows of them and their weight stay in a second-level cache
COMPILERS: dict[str, dict[str, str]] = {"compiled": {}, "max-autotune": {"mode": "max-autotune-no-cudagraphs"}}
if importlib.util.find_spec("zentorch") and "AVX512" in torch.backends.cpu.get_cpu_capability():
    import zentorch  # noqa: F401  AMD's compiler; without AVX-512 it does nothing

    COMPILERS["zentorch"] = {"backend": "zentorch"}


def compiled(function: Callable[[], Tensor], how: str) -> Callable[[], Tensor]:
    """``function`` compiled for itself alone, or an error.

    torch.compile counts recompilations per code object, which all problems would share: after some it takes sizes for
    variables, after eight it runs eagerly without an error. So every function gets a code object of its own.
    """
    function()  # makes the tensors that a problem keeps, which cannot be traced
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    return torch.compile(own, fullgraph=True, **COMPILERS[how])


STEPS = (
    OURS, "eager, frozen DFT", "eager, no DFT", "chunks, no DFT",
    *(f"{how}, {columns}" for how in COMPILERS for columns in ("no DFT", "frozen DFT")),
)  # fmt: skip
LOSSES: dict[str, sk.Loss] = {
    "BCE": sk.BCE(),
    "Focal": sk.Focal(),
    "Asymmetric": sk.Asymmetric(),
    "sigmoidF1": sk.SigmoidF1(),
    "sigmoidF1, pooled": sk.SigmoidF1(average="pooled"),
    "LML-NLL": sk.LMLNLL(10),
}


# -- training in label chunks ---------------------------------------------------------------------------------------


class ChunkedSGD:
    """A linear layer trained with BCE and SGD in chunks of labels, as ELMO does, in plain torch: no gradient array either.

    ``weight [n, s]`` may be bfloat16: a chunk is widened to float32, multiplied and stepped there, and rounded at random.
    """

    def __init__(self, weight: Tensor, lr: float, chunk: int = 8192) -> None:
        self.weight, self.lr, self.chunk = weight, lr, chunk

    @torch.no_grad()
    def step(self, x: Tensor, sets: sk.LabelSets) -> Tensor:
        """The loss of a batch and its gradient of ``x [B, s]`` float32; the weights are stepped."""
        n, rows = self.weight.shape[0], x.shape[0]
        labels, order = sets.indices.sort()
        row = sets.rows()[order]
        edges = torch.searchsorted(labels, torch.arange(0, n + self.chunk, self.chunk)).tolist()
        grad_x, total = torch.zeros_like(x), torch.zeros((), dtype=torch.float64)
        for index, start in enumerate(range(0, n, self.chunk)):
            part = self.weight[start : start + self.chunk]
            wide = part.float()
            z = x @ wide.T
            y = torch.zeros_like(z)
            inside = slice(edges[index], edges[index + 1])
            y[row[inside], labels[inside] - start] = 1
            total += F.binary_cross_entropy_with_logits(z, y, reduction="sum")
            g = z.sigmoid_().sub_(y).div_(rows * n)
            grad_x.addmm_(g, wide)
            if part.dtype == torch.float32:
                part.addmm_(g.T, x, alpha=-self.lr)
            else:
                wide.addmm_(g.T, x, alpha=-self.lr)
                bits = wide.view(torch.int32)
                bits += torch.randint(0, 65536, bits.shape, dtype=torch.int32)
                part.copy_(bits.bitwise_and_(-65536).view(torch.float32))
        self.grad_x = grad_x
        return total / (rows * n)


# -- LML as published -----------------------------------------------------------------------------------------------


class BracketingLML(torch.autograd.Function):
    """Algorithm 1 of Amos, Koltun, Kolter 2019: a bracket around ν is cut into branches, all of them tried at once.

    ``[B, n]`` → ``[B, n]``; holds ``B × branch × n`` while it searches. The defaults are those of its authors: ten
    branches, a bracket of ±7 around the k-th largest logit, a final width of 1e-4.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, k: int, eps: float = 1e-4, branch: int = 10) -> Tensor:  # type: ignore[override]
        top = torch.topk(z, k + 1, dim=1).values
        low, high = -top[:, k - 1] - 7, -top[:, k] + 7
        fractions = torch.linspace(0, 1, branch, dtype=z.dtype, device=z.device)
        for _ in range(100):
            width = high - low
            rows = (width > eps).nonzero()[:, 0]
            if rows.numel() == 0:
                break
            nus = low[rows, None] + width[rows, None] * fractions
            sums = torch.sigmoid(z[rows, None, :] + nus[:, :, None]).sum(2)  # [rows, branch]
            left = ((sums < k).sum(1) - 1).clamp(0, branch - 2)[:, None]
            low[rows] = nus.gather(1, left)[:, 0]
            high[rows] = nus.gather(1, left + 1)[:, 0]
        y = torch.sigmoid(z + ((low + high) / 2)[:, None])
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        h = 1 / (1 / y + 1 / (1 - y))
        mean = (h * grad).sum(1) / h.sum(1)
        return h * (grad - mean[:, None]), None, None, None


def bracketing_lml(z: Tensor, k: int) -> Tensor:
    """The published layer with its published settings."""
    return BracketingLML.apply(z, k)


# -- smooth top-k SVM as published -----------------------------------------------------------------------------------


def log_tree_topk_svm(z: Tensor, labels: Tensor, k: int, tau: float = 1.0) -> Tensor:
    """The mean loss of one label per row, by divide and conquer in log space (Berrada, Zisserman, Kumar 2018).

    ``[B, n], [B]`` → ``[]``. Every coefficient of a product is a log-sum-exp; gradients by autograd.
    """
    v = z / (k * tau)
    others = v.scatter(1, labels[:, None], -torch.inf)
    sums = torch.stack([torch.zeros_like(others), others], 2)  # [B, nodes, degree + 1], logarithms
    while sums.shape[1] > 1:
        if sums.shape[1] % 2:
            one = torch.full_like(sums[:, :1], -torch.inf)
            one[..., 0] = 0
            sums = torch.cat([sums, one], 1)
        sums = _log_product(sums[:, 0::2], sums[:, 1::2], k)
    ratio = sums[:, 0, k] - sums[:, 0, k - 1]
    return tau * F.softplus(1 / tau + ratio - v.gather(1, labels[:, None])[:, 0]).mean()


def _log_product(left: Tensor, right: Tensor, k: int) -> Tensor:
    top = left.shape[2] - 1
    columns = []
    for degree in range(min(2 * top, k) + 1):
        low, high = max(0, degree - top), min(degree, top)
        terms = left[:, :, low : high + 1] + right[:, :, degree - high : degree - low + 1].flip(2)
        # -inf throughout (a coefficient that is 0) has no gradient: a very small number in its place
        columns.append(torch.logsumexp(terms.clamp(min=-1e30), 2))
    return torch.stack(columns, 2)


# -- timing ---------------------------------------------------------------------------------------------------------


def samples(functions: dict[str, Step], seconds: float = 3.0, rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of each call, measured A B C A B C … in one process: what disturbs one disturbs all.

    At least ``rounds`` of each, and as many as fit into ``seconds``.
    """
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
        function()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(next(iter(taken.values()))) < rounds:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - start)
    return taken


def interleaved(functions: dict[str, Step], seconds: float = 3.0) -> dict[str, float]:
    """Median seconds of each, interleaved."""
    return {name: statistics.median(times) for name, times in samples(functions, seconds).items()}


class ReplayClock:
    """A timer for pytest-benchmark that replays times measured before.

    pytest-benchmark times one function after the other, minutes apart, so a ratio of two such times also compares two
    states of the machine. ``race`` interleaves a whole group and lets each benchmark report its own times.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def replay(self, taken: list[float]) -> Callable[[], None]:
        """A function that takes, on this clock, ``taken[i]`` seconds in its i-th call."""
        left: Iterator[float] = iter(taken)

        def run() -> None:
            self.now += next(left)

        return run


CLOCK = ReplayClock()


class Race(NamedTuple):
    """The times of a group, and how often it was preempted meanwhile (per second of processor time)."""

    taken: dict[str, list[float]]
    preemptions: float | None


_races: dict[str, Race] = {}


def race(
    benchmark: Any, group: str, who: str, runners: Callable[[], dict[str, Step]], seconds: float = 2.0, rounds: int = 5
) -> list[float]:
    """Reports ``who``'s times out of a race of all ``runners()`` of a group, which is run once, when first asked for.

    With them go the 95 % intervals of the median time and of the median factor to ours, round by round. The module
    needs ``pytestmark = pytest.mark.benchmark(timer=CLOCK)``.
    """
    if group not in _races:
        _races[group] = _run(runners(), min(seconds, 0.3) if QUICK else seconds, 3 if QUICK else rounds)
    taken = _races[group].taken[who]
    ours = next((times for name, times in _races[group].taken.items() if name.startswith(OURS)), None)
    benchmark.group = group
    benchmark.extra_info.update(who=who, interval=median_interval(taken), preemptions=_races[group].preemptions)
    if ours is not None and ours is not taken:
        factors = [theirs / mine for theirs, mine in zip(taken, ours, strict=True)]
        benchmark.extra_info["factor_interval"] = median_interval(factors)
    benchmark.pedantic(CLOCK.replay(taken), rounds=len(taken))
    return taken


def _run(functions: dict[str, Step], seconds: float, rounds: int) -> Race:
    taken: dict[str, list[float]] = {}
    preempted = machine_load.preemptions(lambda: taken.update(samples(functions, seconds, rounds)))
    return Race(taken, preempted)


def median_interval(values: Sequence[float]) -> list[float]:
    """A 95 % confidence interval of the median, from the order of the values; all of them where there are few."""
    ordered, count = sorted(values), len(values)
    half = 0.98 * math.sqrt(count)  # 1.96 standard deviations of a binomial count with p = ½
    low, high = math.floor(count / 2 - half), math.ceil(count / 2 + half)
    return [ordered[max(low, 0)], ordered[min(high, count - 1)]]


def duel(
    title: str,
    peer: str,
    cases: Sequence[Case],
    steps: Callable[[Problem], tuple[Step, Step]],
    memory: bool = True,
) -> Callable[..., None]:
    """A benchmark of every case: our step against that of one peer. ``steps`` gives (ours, the peer's)."""

    @pytest.mark.parametrize("case", cases, ids=str)
    @pytest.mark.parametrize("who", (OURS, peer))
    def test(benchmark: Any, case: Case, who: str) -> None:
        functions = dict(zip((OURS, peer), steps(Problem(case)), strict=True))
        benchmark.extra_info.update(n=case.n, rows=case.rows)
        if memory:
            benchmark.extra_info["peak_bytes"] = peak_bytes(functions[who])
        race(benchmark, f"{title}, {case}", who, lambda: functions)

    return test
