"""The kernels on the host under ThreadSanitizer and AddressSanitizer; each must also catch bugs that are planted.

ThreadSanitizer sees every simulated thread as a thread: a missing barrier or an update that two threads share is a
race. AddressSanitizer watches shared and global memory, whose buffers have exactly the size that was asked for.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from .toolchain import CSRC, SHIM, fingerprint, must, need, run

FLAGS = {"thread": ["-fsanitize=thread", "-DSHIM_TSAN"], "address": ["-fsanitize=address", "-DSHIM_ASAN"]}


class Plant(NamedTuple):
    """A bug: in ``file`` the first ``right`` becomes ``wrong``, and the sanitizer must say ``report`` of ``seen_in``."""

    sanitizer: str
    file: str
    right: str
    wrong: str
    report: str
    seen_in: str = ""  # where not in ``file``: copies are seen where they are waited for


PLANTS = {
    "gradients are read before they are there": Plant(
        "thread", "fused_loss.cuh", "__syncthreads();\n            if (p.grad_weight ||", "if (p.grad_weight ||", "data race"
    ),
    "the next tile comes too early": Plant(
        "thread", "fused_loss.cuh", "__syncthreads();  // the tile is there", "// the tile is there", "data race"
    ),
    "a group of rows comes too early": Plant(
        "thread", "fused_loss.cuh", "if (row) __syncthreads();", "", "data race"
    ),
    "blocks share a slab": Plant("thread", "sums.cuh", "p.slabs + (int64_t(blockIdx.x)", "p.slabs + (int64_t(0)", "data race"),
    "label warps leave sums where a tile is read": Plant(
        "thread", "sums.cuh", "__syncthreads();  // all that lay there has been read", "", "data race"
    ),
    "label warps meet too early": Plant(
        "thread", "sums.cuh", "__syncthreads();\n    if (thread() >= THREADS", "if (thread() >= THREADS", "data race"
    ),
    "shares of coefficients lie where features are read": Plant(
        "thread", "coefficients.cuh", "__syncthreads();  // all features have been read", "", "data race"
    ),
    "shares of coefficients meet too early": Plant(
        "thread", "coefficients.cuh", "__syncthreads();  // all shares are there", "", "data race"
    ),
    "waves beyond the last": Plant(
        "address", "coefficients.cuh", "at + thread() < p.wave_steps * 32 ? 16 : 0", "at + thread() <= p.wave_steps * 32 ? 16 : 0", "heap-buffer-overflow", seen_in="fused_loss.cuh"
    ),
    "partial sums meet too early": Plant(
        "thread", "finish.cuh", "__syncthreads();\n    if (thread() >= COUNT", "if (thread() >= COUNT", "data race"
    ),
    "rows beyond the batch": Plant(
        "address", "coefficients.cuh", "if (row >= p.batch) continue;", "if (row > p.batch) continue;", "heap-buffer-overflow"
    ),
    "zeros lie where the basis does": Plant(
        "thread", "tile.cuh", "!FILL ? stop : at < width ? ROWS - first : 0", "!FILL ? stop : ROWS - first", "data race", seen_in="fused_loss.cuh"
    ),
    "labels beyond the last": Plant(
        "address", "fused_loss.cuh", "min(S::TILE, last - label)", "min(S::TILE, last - label + 1)", "heap-buffer-overflow"
    ),
    "beyond the shared memory": Plant(
        "address", "fused_loss.cuh", "+ buffer * S::TILE", "+ (buffer + 1) * S::TILE", "heap-buffer-overflow"
    ),
    "parts beyond the last": Plant(
        "address", "finish.cuh", "parts - mine + SHARES - 1", "parts - mine + SHARES", "heap-buffer-overflow"
    ),
    "warps of a row meet too early": Plant(
        "thread", "waves.cuh", "__syncthreads();  // all sums are there", "", "data race"
    ),
    "turns are read before they are there": Plant(
        "thread", "waves.cuh", "wait_for_copies();\n            __syncthreads();", "wait_for_copies();", "data race"
    ),
    "words beyond the last": Plant("address", "waves.cuh", "min((step0 + SHARES * i + share) * 8 + 4 * half + lane() % 4, words - 1)", "(step0 + SHARES * i + share) * 8 + 4 * half + lane() % 4", "heap-buffer-overflow"),
}  # fmt: skip


def build_scheduler(cache: Path, sanitizer: str) -> Path:
    """The shim's own part, which is not instrumented: it looks at every thread's state. All programs share it."""
    made = cache / f"{sanitizer}-{fingerprint()}.o"
    if not made.exists():
        flags = [flag for flag in FLAGS[sanitizer] if flag.startswith("-D")]
        unfinished = made.with_suffix(".unfinished.o")
        must([need("g++"), "-std=c++17", "-O1", f"-I{SHIM}", *flags, "-c", SHIM / "cuda_shim.cpp", "-o", unfinished])
        unfinished.rename(made)
    return made


def build(cache: Path, scheduler: Path, sanitizer: str, plant: Plant | None = None) -> Path:
    """``shim/sanitize.cpp`` with a sanitizer, from the sources or from a copy with a planted bug."""
    out = cache / f"{sanitizer}-{fingerprint(repr(plant))}"
    program = out / "sanitize"
    if program.exists():
        return program
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(CSRC, out / "csrc")
    if plant is not None:
        source = out / "csrc" / "cuda" / plant.file
        text = source.read_text()
        assert plant.right in text, f"the place for a planted bug has moved: {plant.right!r}"
        source.write_text(text.replace(plant.right, plant.wrong, 1))
    csrc = out / "csrc"
    include = ["-Wno-unknown-pragmas", f"-I{SHIM}", f"-I{csrc}", f"-I{csrc / 'cuda'}", "-DSIGKERNELS_HOST_SHIM"]
    compiler = [need("g++"), "-std=c++17", *include]
    short = [] if plant is None else ["-DONLY_ONE"]
    must([*compiler, "-O1", "-g", *short, *FLAGS[sanitizer], "-c", SHIM / "sanitize.cpp", "-o", out / "sanitize.o"])
    unfinished = out / "unfinished"
    must([need("g++"), f"-fsanitize={sanitizer}", out / "sanitize.o", scheduler, "-o", unfinished])
    unfinished.rename(program)
    return program


def prepare(cache: Path) -> dict[str, Path]:
    """All programs, built two at a time: "thread" and "address" are the sources as they are, the others planted bugs."""
    need("g++"), need("setarch")
    wanted = {name: (name, None) for name in FLAGS} | {name: (plant.sanitizer, plant) for name, plant in PLANTS.items()}
    with ThreadPoolExecutor(2) as pool:
        schedulers = dict(zip(FLAGS, pool.map(lambda name: build_scheduler(cache, name), FLAGS), strict=True))
        built = pool.map(lambda what: build(cache, schedulers[what[0]], *what), wanted.values())
        return dict(zip(wanted, built, strict=True))


@pytest.fixture(scope="module")
def programs(artefacts: Path) -> dict[str, Path]:
    return prepare(artefacts)


def execute(program: Path, order: str):
    """Without address randomisation: the sanitizers map their shadow at fixed places."""
    setarch = need("setarch")
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    return run([setarch, "-R", program], env={**os.environ, **options, "SHIM_ORDER": order}, timeout=600)


@pytest.mark.parametrize("sanitizer", FLAGS)
def test_clean(programs, sanitizer):
    done = execute(programs[sanitizer], "random:3")
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout.count("loss") == 2 and "nan" not in done.stdout


@pytest.mark.parametrize("name", PLANTS)
def test_planted_bug_is_caught(programs, name):
    plant = PLANTS[name]
    done = execute(programs[name], "forward")
    assert done.returncode != 0
    assert plant.report in done.stderr, done.stderr[:2000]
    assert (plant.seen_in or plant.file) in done.stderr, "the report names the file of the bug"
