"""What a GPU step launches, counted on tensors without data: products with their sizes, kernels, other operations.

The host code runs as it would on a device, on torch's ``meta`` tensors, with the kernels and the products recorded in the
place of launched. An operation that looked at a value would raise there: a step that can be counted waits for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sigkernels import LabelSets
from sigkernels.backends import flash_pass, library_tables, library_walk
from sigkernels.backends.flash_kernels import FlashLaunch, FlashResults, FlashSizes
from sigkernels.backends.interface import LossCall
from sigkernels.layer import Layer, LayerMeta
from sigkernels.losses import BCE
from sigkernels.ops.fused_loss import FusedLoss, Spec

ACTIVE = 15  # active labels of a row
META = torch.device("meta")
_FREE = ("empty", "new_empty", "detach", "alias", "set_", "lift", "_unsafe_view", "_reshape_alias")


class Product(NamedTuple):
    """``[rows, inner] × [inner, columns]`` by the vendor's library."""

    rows: int
    columns: int
    inner: int
    out_bytes: int  # of an element of the result
    add: bool


class Kernel(NamedTuple):
    name: str
    grid: tuple[int, ...]
    keywords: dict[str, Any]


class Other(NamedTuple):
    """An operation of torch, which is a launch of its own."""

    name: str
    nbytes: int  # of its result


Launch = Product | Kernel | Other


class Recorder(TorchDispatchMode):
    """Operations of torch that a device would run."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.product(a, b, result, add=name != "mm" and (kwargs or {}).get("beta", 1) != 0)
        elif isinstance(result, Tensor) and not func.is_view and not name.startswith(_FREE):
            self.launches.append(Other(name, result.nbytes))
        return result

    def product(self, a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
        self.launches.append(Product(a.shape[0], b.shape[1], a.shape[1], out.element_size(), add))

    def kernel(self, name: str) -> Any:
        """Stands in for a Triton kernel."""

        class Stub:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **settings: self.launches.append(
                    Kernel(name, tuple(grid), settings | {"numbers": [a for a in args if isinstance(a, (int, float))]})
                )

        return Stub()


class StubFlash:
    """``FlashKernels`` that launch nothing."""

    def __init__(self, recorder: Recorder, sizes: FlashSizes) -> None:
        self._recorder, self._sizes = recorder, sizes

    def sizes(self, x: Tensor, slack: int, dft: bool) -> FlashSizes:
        return self._sizes

    def _note(self, name: str, launch: FlashLaunch) -> None:
        self._recorder.launches.append(Kernel(name, (launch.blocks,), {"batch": launch.x.shape[0]}))

    def fused_loss(self, launch: FlashLaunch) -> None:
        self._note("flash", launch)

    def finish(self, launch: FlashLaunch, results: FlashResults) -> None:
        self._note("finish", launch)


def call(
    n: int, k: int, s: int, rows: int, dtype: torch.dtype, bias: bool = False, device: torch.device = META
) -> LossCall:
    """BCE of label sets, all gradients."""
    layer = Layer(
        torch.zeros(n, s, dtype=dtype, device=device),
        torch.zeros(n, dtype=dtype, device=device) if bias else None,
        LayerMeta(n, k),
    )
    indices = torch.arange(ACTIVE, device=device).repeat(rows)
    offsets = torch.arange(0, ACTIVE * rows + 1, ACTIVE, device=device)
    x = torch.zeros(rows, layer.in_columns, dtype=dtype, device=device)
    return LossCall(x, layer, LabelSets.from_sorted(indices, offsets, n), BCE(), 1 / (rows * n), (True, True, bias))


@contextlib.contextmanager
def recorded(l2_bytes: int = 40 * 2**20, processors: int = 108, dispatch: bool = True) -> Iterator[Recorder]:
    """Records on a device with so large an L2 cache and so many multiprocessors. ``dispatch=False``: torch's own operations run unrecorded."""
    from sigkernels.backends.triton import configs, pointwise

    recorder = Recorder()
    for known in (library_tables.walk_shape, pointwise.cut_of):
        known.cache_clear()  # sizes for another device

    def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
        recorder.product(a, b, out, add)

    chunk = int(library_tables._L2_SHARE * max(l2_bytes, library_tables._LEAST_L2))
    with (
        mock.patch("torch.autocast", lambda *args, **settings: contextlib.nullcontext()),  # it does not know the device
        mock.patch.object(library_walk, "product", product),
        mock.patch.object(library_walk, "rounds_float32", lambda x: True),
        mock.patch.object(library_tables, "_device_bytes", lambda device: chunk),
        mock.patch("sigkernels.backends.library_pass.product", product),
        mock.patch.object(configs, "_programs", lambda device: configs._PROGRAMS * processors),
        mock.patch.object(pointwise, "elementwise_kernel", recorder.kernel("elementwise")),
        mock.patch.object(pointwise, "finish_kernel", recorder.kernel("finish")),
        recorder if dispatch else contextlib.nullcontext(),
    ):
        yield recorder


class StubBackend:
    """A backend whose elementwise loss is ``run``."""

    name = "stub"

    def __init__(self, run: Callable[[LossCall], Any]) -> None:
        self.fused_loss = run


def step_launches(problem: LossCall, recorder: Recorder, run: Callable[[LossCall], Any]) -> list[Launch]:
    """Of a training step with autograd around the pass ``run``, without torch's own fill of the upstream gradient with 1."""
    x, layer = problem.x.detach().requires_grad_(), problem.layer
    weight = layer.weight.detach().requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().requires_grad_()
    needed = [tensor for tensor in (x, weight, bias) if tensor is not None]
    spec = Spec(StubBackend(run), problem.loss, layer.meta, "mean")  # type: ignore[arg-type]
    upstream = torch.ones((), device=META)

    def scale(grads: list[Tensor], factor: Tensor) -> None:
        recorder.launches.append(Kernel("scale", (len(grads),), {}))

    with mock.patch("sigkernels.backends.scale_on_device", scale):
        for _ in range(2):  # the first makes tables
            recorder.launches.clear()
            loss = FusedLoss.apply(None, spec, problem.targets, x, weight, bias)
            torch.autograd.backward(loss, upstream, inputs=needed)
            for tensor in needed:
                tensor.grad = None
    return recorder.launches


def library_run(problem: LossCall) -> Any:
    """The library path with the pointwise kernels in Triton."""
    from sigkernels.backends import library_pass
    from sigkernels.backends.triton.pointwise import TritonPointwise

    return library_pass.fused_loss(problem, TritonPointwise())


def library_launches(problem: LossCall, l2_bytes: int, processors: int = 108) -> list[Launch]:
    """Of a step by the library path."""
    with recorded(l2_bytes, processors) as recorder:
        return step_launches(problem, recorder, library_run)


def flash_launches(problem: LossCall, sizes: FlashSizes) -> list[Launch]:
    """Of a step by a flash path."""
    with recorded() as recorder:
        kernels = StubFlash(recorder, sizes)
        return step_launches(problem, recorder, lambda call: flash_pass.fused_loss(call, kernels))
