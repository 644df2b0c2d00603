"""Times of the GPU paths on a device, and the table of them that ``auto`` can go by.

``bench_gpu_paths.py`` is the suite. ``sigkernels bench`` writes what it finds as ``gpu_paths.json``, which
``SIGKERNELS_GPU_PATHS`` takes, and ``gpu_paths.md``: where the model was wrong. Times are those of the device: its caches
are emptied before a step, and it is kept busy until the host has queued the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigkernels import BCE, LabelSets
from sigkernels.backends import by_name, gpu_paths, gpu_paths_here
from sigkernels.backends.gpu_paths import PATHS, GPUPath, LossShape, Microseconds, ShapeClass, Times
from sigkernels.backends.interface import LossCall
from sigkernels.layer import Layer, LayerMeta

Step = Callable[[], object]
Clock = Callable[[Step], float]  # the seconds of one call
SUITE, GROUP, OURS = "gpu_paths", "GPU path, ", "sigkernels, "
ACTIVE = 15  # active labels of a row
FREQUENCIES = 50  # k
WRONG = 1.3  # a prediction that is this factor beside the time is listed


class DeviceClock:
    """CUDA events around a call that is queued while the device is still busy."""

    def __init__(self, device: torch.device) -> None:
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 2**26
        self._device, self._spill = device, torch.empty(2 * cache, dtype=torch.uint8, device=device)

    def __call__(self, step: Step) -> float:
        with torch.cuda.device(self._device):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._spill.zero_()
            torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
            start.record()
            step()
            stop.record()
            stop.synchronize()
            return start.elapsed_time(stop) / 1e3


def problem(shape: ShapeClass, device: torch.device) -> LossCall:
    """BCE of a layer with a DFT part, all gradients, in the dtype of the class."""
    dtype = torch.bfloat16 if shape.product == "16-bit" else torch.float32
    k = min(FREQUENCIES, (shape.labels - 1) // 2)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator).to(dtype)

    weight = normal(shape.labels, shape.slack) * 0.1
    layer = Layer(weight, normal(shape.labels), LayerMeta(shape.labels, k))
    chosen = torch.randint(0, shape.labels, (shape.rows, ACTIVE), generator=torch.Generator().manual_seed(0)).tolist()
    targets = LabelSets.from_lists([sorted(set(row)) for row in chosen], shape.labels).to(device)
    return LossCall(
        normal(shape.rows, layer.in_columns), layer, targets, BCE(), 1 / (shape.rows * shape.labels), (True,) * 3
    )


def steps_of(call: LossCall) -> dict[GPUPath, Step]:
    """A step by every path that can run here and takes the call."""
    shape = LossShape.of(call.x, call.layer.weight, call.layer.meta)
    cuda, here = by_name("cuda"), gpu_paths_here()
    steps: dict[GPUPath, Step] = {}
    if "cuda" in here and not (cuda.refuses_device(call.x.device) or cuda.refuses_shape(shape)):
        steps["cuda"] = lambda: cuda.fused_loss(call)
    if "flash" not in here:
        torch_backend = by_name("torch")
        return steps | {"library": lambda: torch_backend.fused_loss(call)}
    from sigkernels.backends import flash_pass, library_pass
    from sigkernels.backends.triton.flash import kernels_for
    from sigkernels.backends.triton.pointwise import TritonPointwise

    kernels = kernels_for(call, shape)
    if not isinstance(kernels, str):
        steps["flash"] = lambda: flash_pass.fused_loss(call, kernels)
    return steps | {"library": lambda: library_pass.fused_loss(call, TritonPointwise())}


def samples(steps: dict[GPUPath, Step], clock: Clock, rounds: int) -> dict[GPUPath, list[float]]:
    """Seconds of each, A B C A B C …: what disturbs one disturbs all."""
    for step in steps.values():  # compiles, and makes tables
        step()
        step()
    taken: dict[GPUPath, list[float]] = {path: [] for path in steps}
    for _ in range(rounds):
        for path, step in steps.items():
            taken[path].append(clock(step))
    return taken


def of_records(records: Iterable[Any]) -> dict[ShapeClass, Microseconds]:
    """The times of every class in a report of the suite; a class or a path that did not run has none."""
    shapes = {GROUP + str(shape): shape for shape in gpu_paths.all_classes()}
    times: dict[ShapeClass, Microseconds] = {shape: {} for shape in shapes.values()}
    for record in records:
        if record.suite == SUITE:
            path = next(path for path in PATHS if record.who == OURS + path)
            times[shapes[record.group]][path] = round(record.seconds * 1e6, 1)
    return times


def write(records: Iterable[Any], folder: Path, name: str, device: str) -> list[str]:
    """Writes the table and what differs from the model's; the names of the files. ``name``: the class of devices."""
    measured = of_records(records)
    if not any(measured.values()):
        return []
    table = {name: Times(f"measured on {device}", measured)}
    (folder / "gpu_paths.json").write_text(gpu_paths.as_json(table), encoding="utf-8")
    (folder / "gpu_paths.md").write_text(report(name, device, measured), encoding="utf-8")
    return ["gpu_paths.json", "gpu_paths.md"]


class Difference(NamedTuple):
    """A class of shapes where prediction and time disagree."""

    shape: ShapeClass
    predicted: Microseconds
    measured: Microseconds
    lost: float  # the time of the path that the model takes over that of the fastest; 1: it takes the right one


def differences(
    predicted: dict[ShapeClass, Microseconds], measured: dict[ShapeClass, Microseconds]
) -> list[Difference]:
    """Where the model takes a slower path, or a time is ``WRONG`` times its prediction, or the inverse; worst first."""
    found = []
    for shape, times in measured.items():
        # What the model would take of the paths that were timed.
        said = {path: step for path, step in predicted.get(shape, {}).items() if path in times}
        if not said:
            continue
        lost = times[gpu_paths.fastest(said)] / times[gpu_paths.fastest(times)]
        worst = max(max(times[path] / step, step / times[path]) for path, step in said.items())
        if lost > 1 or worst > WRONG:
            found.append(Difference(shape, said, times, lost))
    return sorted(found, key=lambda difference: -difference.lost)


def report(name: str, device: str, measured: dict[ShapeClass, Microseconds]) -> str:
    """``gpu_paths.md``: where the model was wrong about this device."""
    predicted = gpu_paths.read(gpu_paths.MODEL).get(name, Times("", {})).steps
    found = differences(predicted, measured)
    head = f"# GPU paths on {device}: where the model of '{name}' was wrong\n\n"
    if not predicted:
        return head + "There are no predictions for this class of devices.\n"
    untimed = [str(shape) for shape, times in measured.items() if not times]
    slower = sum(difference.lost > 1 for difference in found)
    lines = [
        f"{len(found)} of {len(measured)} classes of shapes differ; in {slower} the model takes a slower path.\n",
        "| class | path | predicted µs | measured µs | the model's path takes |",
        "|---|---|---:|---:|---:|",
    ]
    for shape, said, times, lost in found:
        lines += [f"| {shape} | {path} | {step:.0f} | {times[path]:.0f} | ×{lost:.2f} |" for path, step in said.items()]
    if untimed:
        lines.append(f"\nNot timed, so that the library path does them: {'; '.join(untimed)}.")
    return head + "\n".join(lines) + "\n"
