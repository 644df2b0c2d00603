"""Which of the three GPU paths does an elementwise loss: a table by shape.

    cuda      the flash kernel in CUDA C++                     backend ``cuda``
    flash     the flash kernel in Triton                       backend ``triton``
    library   the vendor's products on chunks of labels        backend ``triton``, or ``torch``

``gpu_paths.json`` beside this file holds the time of each path for every class of shapes and of devices. A model of the
machines wrote it (``bench/predict_gpu.py``): predictions, not measurements. ``sigkernels bench`` on a machine with a GPU
writes such a file from real timings, and ``SIGKERNELS_GPU_PATHS=file`` makes its devices' part replace the model's.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from ..layer import LayerMeta
from .interface import BackendError
from .library_walk import tf32_allowed

GPUPath = Literal["cuda", "flash", "library"]
PATHS: tuple[GPUPath, ...] = get_args(GPUPath)
Product = Literal["16-bit", "tf32"]
PRODUCTS: tuple[Product, ...] = get_args(Product)
# What a class of shapes is named after, and timed with. Slack columns are padded, so the next one is taken: the library's
# products are faster for nearly 128 of them, and CUDA C++ has room for the DFT up to 116. Of rows and labels the nearest, by ratio.
SLACK = (32, 64, 116, 128)
ROWS = (16, 64, 256, 1024)
LABELS = (9_000, 20_000, 100_000, 1_000_000)
# A kernel beside Triton's own is worth its risk where it is faster by a tenth.
LEAST_GAIN = 0.9
MODEL = Path(__file__).with_name("gpu_paths.json")
VARIABLE = "SIGKERNELS_GPU_PATHS"
_FORMAT = 1
_log = logging.getLogger("sigkernels")

# compute capability → whose times are taken; other minor versions are those of the same family
_ARCHITECTURES = {(8, 0): "sm_80", 8: "sm_89", 9: "sm_90", 10: "sm_90", 12: "sm_89"}
ARCHITECTURES = {"sm_80": "A100", "sm_90": "H100", "sm_89": "RTX 4090"}
OTHER = "other"


class ShapeClass(NamedTuple):
    """An entry of the table: all shapes that are treated alike."""

    product: Product
    slack: int
    rows: int
    labels: int

    def __str__(self) -> str:
        return f"{self.product}, slack {self.slack}, {self.rows} rows, {self.labels:,} labels"


class LossShape(NamedTuple):
    """What of a loss on a GPU decides its path."""

    device: torch.device
    dtype: torch.dtype
    product: Product | None  # None: no flash kernel has it
    rows: int
    slack: int
    labels: int  # of this layer: m
    meta: LayerMeta

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, meta: LayerMeta) -> LossShape:
        """Of ``x [B, D]`` and ``weight [m, s]``."""
        labels, slack = weight.shape
        return cls(x.device, x.dtype, _product(x.dtype), x.shape[0], slack, labels, meta)

    def shape_class(self) -> ShapeClass | None:
        """``None`` where there is nothing to choose: the library path alone does it."""
        if self.product is None or not (1 <= self.slack <= SLACK[-1] and self.rows and self.labels):
            return None
        slack = next(most for most in SLACK if self.slack <= most)
        return ShapeClass(self.product, slack, _nearest(ROWS, self.rows), _nearest(LABELS, self.labels))


class Choice(NamedTuple):
    path: GPUPath
    reason: str


Microseconds = dict[GPUPath, float]  # of a step; a path that is not there does not do the class


class Times(NamedTuple):
    """The part of a table for one class of devices."""

    source: str  # who says so
    steps: dict[ShapeClass, Microseconds]


Table = dict[str, Times]  # by class of devices


def _product(dtype: torch.dtype) -> Product | None:
    if dtype in (torch.float16, torch.bfloat16):
        return "16-bit"
    return "tf32" if dtype == torch.float32 and tf32_allowed() else None


def _nearest(classes: tuple[int, ...], value: int) -> int:
    return min(classes, key=lambda named: abs(math.log(named / value)))


def all_classes() -> Iterator[ShapeClass]:
    """Every entry that a table has."""
    for product in PRODUCTS:
        for slack in SLACK:
            for rows in ROWS:
                for labels in LABELS:
                    yield ShapeClass(product, slack, rows, labels)


@functools.cache
def architecture(device: torch.device) -> str:
    """The class of a device, a key of the table or ``"other"``: AMD's, and those before Ampere."""
    if device.type != "cuda" or torch.version.hip:
        return OTHER
    major, minor = torch.cuda.get_device_capability(device)
    return _ARCHITECTURES.get((major, minor)) or _ARCHITECTURES.get(major, OTHER)


@functools.lru_cache(maxsize=1024)
def choose_path(shape: LossShape, among: tuple[GPUPath, ...] = PATHS) -> Choice:
    """The path for a shape, of those that are there."""
    return choose_for_class(architecture(shape.device), shape.shape_class(), among)


@functools.cache
def choose_for_class(architecture: str, shape: ShapeClass | None, among: tuple[GPUPath, ...] = PATHS) -> Choice:
    """The same for a class of shapes on a class of devices; said once to the log."""
    choice = _choose(table(), architecture, shape, among)
    _log.debug("GPU path %s for %s on %s: %s", choice.path, shape or "other shapes", architecture, choice.reason)
    return choice


def _choose(table: Table, architecture: str, shape: ShapeClass | None, among: tuple[GPUPath, ...]) -> Choice:
    if shape is None:
        return Choice("library", "flash kernels multiply narrow layers, in 16 bits or tf32, alone")
    part = table.get(architecture)
    if part is None:
        return Choice("library", f"nothing is known of the others on '{architecture}' devices")
    steps = {path: step for path, step in part.steps[shape].items() if path in among}
    said = ", ".join(f"{path} {step:.0f} µs" for path, step in steps.items())
    return Choice(fastest(steps), f"{said or 'no time of any'} ({part.source})")


def fastest(steps: Microseconds) -> GPUPath:
    """The path to take; the library path where no other is known to be faster."""
    best: GPUPath = "library"
    for path in ("flash", "cuda"):
        gain = LEAST_GAIN if path == "cuda" else 1.0
        if path in steps and steps[path] < gain * steps.get(best, math.inf):
            best = path
    return best


# -- the table -----------------------------------------------------------------------------------------------------------


@functools.cache
def table() -> Table:
    """The model's table, with the parts of the file that ``SIGKERNELS_GPU_PATHS`` names in the place of its own."""
    known = read(MODEL)
    measured = os.environ.get(VARIABLE)
    return known | read(Path(measured)) if measured else known


def as_json(table: Table) -> str:
    """The text of a file that ``read`` reads: one class of shapes on a line."""
    parts = []
    for name, times in table.items():
        rows = ",\n".join(
            "  " + json.dumps([*shape, *(steps.get(path) for path in PATHS)]) for shape, steps in times.steps.items()
        )
        parts.append(f' {json.dumps(name)}: {{"source": {json.dumps(times.source)}, "microseconds": [\n{rows}]}}')
    columns = json.dumps([*ShapeClass._fields, *PATHS])
    joined = ",\n".join(parts)
    return f'{{"format": {_FORMAT}, "columns": {columns}, "devices": {{\n{joined}}}}}\n'


def read(file: Path) -> Table:
    """A table from a file; a ``BackendError`` names the file and what is wrong with it."""
    try:
        return _parsed(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        wrong = error.strerror or str(error)
    except (ValueError, TypeError) as error:
        wrong = str(error)
    raise BackendError(
        f"the table of GPU paths {file} cannot be used: {wrong}; make it again with 'sigkernels bench --only gpu_paths', "
        f"or unset {VARIABLE}"
    )


def _parsed(given: Any) -> Table:
    if not isinstance(given, dict) or given.get("format") != _FORMAT:
        raise ValueError(f'it must be an object with "format": {_FORMAT}')
    if given.get("columns") != [*ShapeClass._fields, *PATHS]:
        raise ValueError(f'"columns" must be {[*ShapeClass._fields, *PATHS]}, got {given.get("columns")}')
    devices = given.get("devices")
    if not isinstance(devices, dict) or not devices:
        raise ValueError('"devices" must be an object with an entry per class of devices')
    return {name: _parsed_times(name, part) for name, part in devices.items()}


def _parsed_times(name: str, part: Any) -> Times:
    if name not in ARCHITECTURES and name != OTHER:
        raise ValueError(f"{name!r} is no class of devices; choose from {', '.join(ARCHITECTURES)}, {OTHER}")
    if not isinstance(part, dict) or not isinstance(part.get("source"), str):
        raise ValueError(f'devices {name!r} must have a "source", who measured or predicted them')
    wanted, steps = set(all_classes()), dict[ShapeClass, Microseconds]()
    for row in part.get("microseconds", ()):
        shape = _parsed_shape(name, row, wanted)
        times = dict(zip(PATHS, row[len(shape) :], strict=True))
        wrong = [t for t in times.values() if t is not None and not _is_time(t)]
        if wrong:
            raise ValueError(f"devices {name!r}, {shape}: times must be positive numbers or null, got {wrong[0]!r}")
        if shape in steps:
            raise ValueError(f"devices {name!r}: {shape} stands there twice")
        steps[shape] = {path: float(t) for path, t in times.items() if t is not None}
    if wanted - set(steps):
        raise ValueError(f"devices {name!r}: no times of {min(wanted - set(steps))}")
    return Times(part["source"], steps)


def _parsed_shape(name: str, row: Any, wanted: set[ShapeClass]) -> ShapeClass:
    width = len(ShapeClass._fields)
    if not isinstance(row, list) or len(row) != width + len(PATHS):
        raise ValueError(f"devices {name!r}: a row must be a list of {width + len(PATHS)}, got {row!r}")
    shape = tuple(row[:width])
    if shape not in wanted:
        raise ValueError(f"devices {name!r}: {list(shape)} is no class of shapes of this version")
    return ShapeClass(*cast(Any, shape))


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
