"""Predicted times of a step by the flash kernel in CUDA C++, from its machine code (``gpu_model.py``)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from gpu_model import ELEMENT, LAUNCH, MACHINES, machines, report, sass
from gpu_model_flash import flash_step
from gpumodel.ahead import cuda_cubin
from gpumodel.simulate import cache_directory

from sigkernels.backends import flash_pass
from sigkernels.backends.cuda import rows_of_launch
from sigkernels.backends.flash_kernels import FlashSizes

WIDEST = 128  # slack columns
_SEARCH = 2  # steps that find a label among the positives of a row


# Branches of whole tiles, of label sets and of a bias whose gradient is wanted.
_ALWAYS = (
    r"p\.bias && thread|while \(next_ < first \+ count\)|if \(label \+ CHUNK > last\)|if \(p\.row_factor\)|"
    r"if \(!?sums_bias|log1pf\(product|p\.out_scale|for \(int m = 0; m < 2"
)
_NEVER = (
    r"if \(next < last\)|\* DOWN (>=|<) (stop|end)|if \(row0 < rows|if \(label \+ column < last\)|if \(p\.loss\.plain\)|"
    r"if \(!p\.slabs\) continue|if \(label \+ part >= last\)|if \(at >= last\)|if \(p\.grad_weight|"
    r"for \(int row = 0; row < rows|column \+ 8 \* n|for \(int column = label_warp"
)
# How the code runs for BCE of label sets, by its source lines; gpumodel's walk.py says what the words mean.
_CUDA: dict[str, Any] = {
    "tile": "tile",
    "unused_ok": True,
    "params": {"chunk": 99},  # outside its loop, which is not there where a warp has one chunk of a tile
    "loops": [
        {"at": r"for \(int label = first; label < last", "name": "tile"},
        {"at": r"for \(int column = label_warp", "name": "chunk", "trips": "chunks"},
        {"at": r"while \(next_ < first \+ count\)", "trips": 0},
        {"at": r"for \(int row = 0; row < rows", "trips": "steps//2"},
        {"at": r"for \(int pass = 0", "trips": "passes//4"},
    ],
    "branches": [
        {"at": r"if \(p\.(basis|coef)\)", "take": "not dft"},
        {"at": r"if \(apart\(\)\)", "take": "not dft or packed"},
        {"at": r"if \(packed\(\)\)|BLOCKS - 1 && packed", "take": "not packed"},
        {"at": r"if \(p\.grad_coef && apart", "take": "not dft or packed"},
        {"at": r"if \(any\) turn", "take": "chunk % 2 == 0"},
        {"at": r"if \(losses\.factors > ", "take": "chunk != 0"},
        {"at": _ALWAYS, "take": True},
        {"at": _NEVER, "take": False},
    ],
}


class CUDAShape(NamedTuple):
    """A block of ``csrc/cuda/shapes.h``."""

    scalar: str
    steps: int
    row_tiles: int
    row_warps: int
    tile: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.row_warps

    @property
    def depth(self) -> int:
        """Numbers of a step."""
        return 32 // self.size

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return 4 if self.scalar == "float" else 2

    @property
    def chunk(self) -> int:
        """Labels that a warp has in registers."""
        return 16 if self.row_tiles * self.steps * self.depth > 128 else 32

    @property
    def features(self) -> int:
        """The most DFT features whose coefficients this block makes."""
        steps = 12 if self.size == 2 else 22
        x, weight = self.rows * (self.steps * 32 + 16), self.tile * ((self.steps + 16 // self.depth) * 32 + 16)
        there = max(x + 2 * weight + self.rows * (self.tile * self.size + 16), 98 * 1024)
        return steps * self.depth if x + weight + self.rows * (steps * 32 + 16) + steps * 512 <= there else 0

    def packs(self, slack: int, blank: int) -> bool:
        """Whether slack leaves room for the DFT: ``place_of_basis`` of fused_loss.cu"""
        return -(-slack // 4) * 4 - (self.steps * self.depth - 16) <= blank

    def source(self, x_moves: bool, piece: int, wide: bool, add: bool, inside: bool) -> str:
        """A unit that has this kernel alone, for one group of rows. Constants say how rows and weights are copied, where
        gradients go, and whether coefficients are made here: of the branches there the walk cannot tell which is which."""
        numbers = ", ".join(map(str, self[1:]))
        coefficients = "p.coef = nullptr; __builtin_assume(p.waves != nullptr)" if inside else "p.waves = nullptr"
        return f"""#include "cuda/fused_loss.cuh"
using S = sk::Shape<{self.scalar}, {numbers}>;
__global__ void __launch_bounds__(sk::THREADS, 1) fused_loss_kernel(const sk::FusedLossArgs<S::Scalar> given) {{
    SK_DYNAMIC_SHARED(memory);
    auto p = given;
    p.x_moves = {int(x_moves)}, p.weight_piece = {piece}, p.pairs = {int(piece > self.size)};
    p.wide = {int(wide)}, p.accumulate = {int(add)}, p.batch = min(p.batch, S::ROWS);
    {coefficients};
    sk::FusedLoss<S>(p, memory, 0).run();
}}
"""


def cuda_shape(machine: str, dtype: str, slack: int, batch: int) -> CUDAShape:
    """As ``with_shape`` chooses."""
    large = MACHINES[machine].shared >= 150 * 1024
    if slack > 64:
        if dtype == "tf32":
            return CUDAShape("float", 16, 1, 8 if large and batch > 64 else 4, 64 if large and batch <= 64 else 32)
        return CUDAShape("__nv_bfloat16", 8, 2 if large and batch > 128 else 1, 4 if batch <= 64 else 8, 64)
    if dtype == "tf32":
        if batch <= 64:
            return CUDAShape("float", 8, 1, 4, 64)
        return CUDAShape("float", 8, 2 if batch > 128 and large else 1, 8, 32)
    if batch <= 128:
        return CUDAShape("__nv_bfloat16", 4, 2, 2 if batch <= 64 else 4, 128)
    return CUDAShape("__nv_bfloat16", 4, 2, 8, 128 if large else 64)


@functools.cache
def _cuda_cubin(shape: CUDAShape, *settings: int) -> Any:
    return _cubin_of("fused_loss", shape.source(*settings), *shape, *settings)


def _cubin_of(kernel: str, source: str, *settings: Any) -> Any:
    unit = cache_directory() / f"{kernel}-{'-'.join(map(str, settings))}.cu"
    unit.write_text(source, encoding="utf-8")
    return cuda_cubin(unit, 80, Path(__file__).resolve().parent.parent / "csrc")


def _piece(*offsets: int) -> int:
    """The longest copy that all these bytes are multiples of."""
    return next(piece for piece in (16, 8, 4, 2) if not any(offset % piece for offset in offsets))


# What comes before and after the loop over labels: rows and weights that arrive, the search for the first positive, sums that
# meet. Of unrolled loops both the body and its rest are walked, so that this is rather too long.
_WHOLE: dict[str, Any] = {name: value for name, value in _CUDA.items() if name != "tile"} | {
    "loops": [
        {"at": r"at < ROWS \* ACROSS", "via": r"copy_raw<S::F_STRIDE", "trips": "copies_of_features"},
        {"at": r"at < ROWS \* ACROSS", "trips": "copies_of_x"},
        {"at": r"row < S::ROWS; row", "trips": "aligned_rows"},
        {"at": r"at < S::W_BYTES", "trips": "tile_bytes // 4096"},
        *_CUDA["loops"],
        {"at": r"for \(int count = left_", "trips": _SEARCH},
    ],
    "branches": [
        {"at": r"if \(next < last\)|if \(first \+ S::TILE < last\)", "take": True},  # it is the last tile
        {"at": r"at < ROWS \* ACROSS|row < S::ROWS; row|at < S::W_BYTES", "take": False},
        {"at": r"if \(label_warp_ != owner\) return", "take": "nth % sharing != 0"},  # a warp owns some of the columns
        *_CUDA["branches"],
    ],
}


@functools.cache
def _cuda_seconds(
    machine: str,
    shape: CUDAShape,
    rows: int,
    slack: int,
    features: int,
    wide: bool,
    add: bool,
    inside: bool,
    blank: int,
) -> tuple[float, float]:
    """Of a group of rows on one multiprocessor: a tile of labels, and all that comes before and after the tiles. ``wide``:
    sums for a gradient in float32 are written, ``add``: and read before. Rows of x begin with the DFT's ``features``, whose
    coefficients are made ``inside``."""
    m, width = MACHINES[machine], slack * shape.size
    piece = _piece(width)
    moves = _piece((features + slack) * shape.size, features * shape.size) < 16
    cubin = _cuda_cubin(shape, int(moves), piece, int(wide or shape.size == 4), int(add), int(inside))
    (registers,) = sass.registers(cubin).values()
    known = dict(
        chunks=-(-shape.tile * shape.row_warps // (shape.chunk * 8)), dft=features > 0, packed=features > 0 and shape.packs(slack, blank), sharing=8 // shape.row_warps,
        steps=-(-rows // (2 * shape.depth)) * 2, passes=shape.tile * shape.steps * 32 // (256 * piece),
        copies_of_x=-(-shape.rows * (2 * shape.steps + 1) // 256), tile_bytes=shape.tile * (shape.steps * 32 + 16 * shape.size + 16),
        copies_of_features=-(-shape.rows * (2 * shape.features // shape.depth + 1) // 256), aligned_rows=shape.rows // (8 * (4 if shape.row_tiles * shape.steps <= 8 else 2)),
    )  # fmt: skip
    launch = dict(warps=8, tiles=m.sms, registers=registers, blocks=1)
    code = sass.load(cubin, "fused_loss_kernel")
    # Copies of what is not there are switched off, but walked.
    there = features / shape.features if inside else 0.0
    memory = [{"op": "LDGSTS", "via": r"begin_coef", "l2_bytes": int(512 * there)}]
    tile = report.predict(code, _CUDA, m, **launch, **known).result.cycles
    whole = report.predict(code, _WHOLE | {"memory": memory}, m, reps=1, **launch, **known).result.cycles
    return tile / (m.ghz * 1e9), (whole - tile) / (m.ghz * 1e9)


def cuda_flash(machine: str, dtype: str, n: int, k: int, s: int, batch: int) -> tuple[float, int]:
    """Seconds and launches of a step by the kernel in CUDA C++; infinite where it refuses."""
    import torch

    m, shape = MACHINES[machine], cuda_shape(machine, dtype, s, batch)
    sizes = FlashSizes(
        32,
        rows_of_launch(shape.rows, s + 1, m.sms),
        m.sms,
        shape.rows,
        marks=False,
        turns=True,
        features=shape.features,
    )
    columns = 2 * k + 1 if k >= 0 else 0
    inside = 0 < columns <= shape.features and batch <= shape.rows
    labels = flash_pass.block_labels(n, sizes)
    blank = (
        flash_pass.blank_columns(n, k, labels, torch.bfloat16 if dtype == "bf16" else torch.float32) if k >= 0 else 0
    )

    def kernel(rows: int) -> float:
        several = batch > shape.rows
        seconds = 0.0
        for first in range(0, rows, shape.rows):
            group = min(shape.rows, rows - first)
            tile, outside = _cuda_seconds(machine, shape, group, s, columns, several, first > 0, inside, blank)
            seconds += max(labels / shape.tile, 1) * tile + outside
        return seconds

    def finish(rows: int) -> float:
        return _cuda_finish(machine, dtype, s, columns, rows, -(-n // labels), 8 if blank >= 4 else 16)

    return flash_step(machine, dtype, (n, k, s, batch), sizes, kernel, finish)


_CUDA_FINISH: dict[str, Any] = {
    "unused_ok": True,
    "loops": [
        {"at": r"step0 < all_steps", "trips": "cdiv(words, most)", "name": "passes"},
        {"at": r"done < count; done", "trips": "cdiv(parts, 160)"},
    ],
    "branches": [
        {"at": r"; i < STEPS", "take": "nth * shares >= cdiv(min(words - passes * most, most), 8)"},
        {"at": r"; step < STEPS", "take": "nth * shares >= cdiv(min(words - passes * most, most), 8)"},
        {"at": r"PER == 2 && step0", "take": "passes * most / 8 + (nth + 1) * shares < cdiv(words, 8)"},
        {"at": r"step0 < all_steps|p\.out_scale", "take": True},
        {"at": r".", "take": False},
    ],
}


class Waves(NamedTuple):
    """A ``WavesGradient`` of ``csrc/cuda/waves.cuh``."""

    scalar: str
    numbers: int
    shares: int

    @property
    def words(self) -> int:
        """Words of turns at a time."""
        per = 1 if self.scalar == "float" else 2
        return 136 if per * self.shares == 1 else 8 * self.shares * (20 // per // self.shares)

    @property
    def rows(self) -> int:
        """Of a block."""
        return 8 // self.shares * 16 // self.numbers

    def source(self, work: str) -> str:
        """A unit whose last kernel does this part of the work alone; ``run``: all of it."""
        return f"""#include "cuda/finish.cuh"
using W = sk::WavesGradient<{self.scalar}, {self.numbers}, {self.shares}>;
__global__ void __launch_bounds__(sk::THREADS, 2) finish_kernel(const sk::FinishArgs<{self.scalar}> p) {{
    SK_DYNAMIC_SHARED(memory);
    sk::Finish<W>(p, memory).{work}(blockIdx.x);
}}
"""


@functools.cache
def _finish_cubin(waves: Waves, work: str) -> Any:
    return _cubin_of("finish", waves.source(work), work, *waves)


@functools.cache
def _cuda_finish(machine: str, dtype: str, s: int, features: int, rows: int, parts: int, numbers: int) -> float:
    """Seconds of the last kernel. Its blocks do different things side by side: it takes as long as the longest of them, and
    for what the others read."""
    m, size = MACHINES[machine], ELEMENT[dtype]
    shares = 32 // numbers if rows <= 128 else 1
    waves, words = Waves("float" if dtype == "tf32" else "__nv_bfloat16", numbers, shares), -(-parts * size // 4)
    of_rows, of_turns = numbers * waves.rows * parts * size, words * 128 + numbers * 128  # bytes
    # What is done, by how many blocks, and what each reads from the L2 cache.
    columns = s + (features > 0)
    work = {"slabs": (-(-rows * columns // 32), 128 * parts), "rows": (-(-rows // 8), 32 * parts)}
    if features:
        work["features"] = (-(-rows // waves.rows) * -(-(features - 1) // 32), of_rows + of_turns)
    (registers,) = sass.registers(_finish_cubin(waves, "run")).values()
    resident, _ = machines.occupancy(m, 8, registers, 0)
    taken = {}
    for name, (count, nbytes) in work.items():
        blocks = -(-count // m.sms)
        together = min(blocks, resident)
        # Loads of what is not there are switched off, but walked.
        memory = [
            {"at": r"p\.out_scale", "l1": True},
            {"op": "LDGSTS", "at": r"cp\.async", "l2_bytes": int(512 * min(words / waves.words, 1.0))},
            {"at": r"numbers\[i\] = done", "l2_bytes": int(128 * min(parts / 160, 1.0))},
        ]
        made = report.predict(
            sass.load(_finish_cubin(waves, name), "finish_kernel"), _CUDA_FINISH | {"memory": memory}, m, warps=8,
            tiles=count, blocks=together, reps=1, words=words, most=waves.words, parts=parts, shares=waves.shares,
        )  # fmt: skip
        taken[name] = made.result.cycles * blocks / together, blocks * nbytes / m.l2_rate
    longest = max(taken, key=lambda name: taken[name][0])
    cycles = taken[longest][0] + sum(read for name, (_, read) in taken.items() if name != longest)
    return float(cycles / (m.ghz * 1e9) + LAUNCH)
