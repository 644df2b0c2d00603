"""The tile loop of the CPU core under AddressSanitizer and UndefinedBehaviorSanitizer, which must also catch planted bugs.

``cpu/sanitize.cpp`` runs every consumer, dtype and form of targets on odd shapes, with three widths of vectors. Behind
each part of the loop's own memory lies a forbidden zone (``Bump`` in ``csrc/cpu/memory.h``).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from .toolchain import CSRC, all_of, fingerprint, must, need, run

HERE = Path(__file__).parent / "cpu"
FLAGS = ["-std=c++17", "-O0", "-g1", "-pthread", "-Wno-psabi", "-fno-sanitize-recover=all"]
ADDRESS, BOTH = "-fsanitize=address", "-fsanitize=address,undefined"
# Panels of two vectors of 16 bytes; of one of 32, which may be halved; pairs of bfloat16. The source is the same, and
# one of them under both sanitizers is enough: that takes long to compile, as wider vectors do.
VARIANTS = {
    "portable": [BOTH, "-DSK_VEC_BYTES=16", "-DSK_REGISTERS=16"],
    "one_vector": [ADDRESS, "-DSK_VEC_BYTES=32", "-DSK_REGISTERS=32", "-DSK_PANEL_VECTORS=1"],
    "in_pairs": [ADDRESS, "-DSK_VEC_BYTES=32", "-DSK_REGISTERS=16", "-DSK_DOT2=1"],
}


class Plant(NamedTuple):
    """A bug: in ``file`` of ``unit`` the first ``right`` becomes ``wrong``, and the sanitizer must say ``report``."""

    unit: str  # the only one that is compiled with the bug
    file: str
    right: str
    wrong: str
    report: str


PLANTS = {
    "too little room for the rotated coefficients": Plant(
        "portable", "memory.h", "turned_even = bump.take<C>(layout.even * PW)", "turned_even = bump.take<C>(layout.odd * PW)",
        "use-after-poison",
    ),
    "sets that nobody checks": Plant(
        "driver", "driver.cpp", "if (whole.indices) check_targets(whole);", "", "ERROR: AddressSanitizer"
    ),
}  # fmt: skip


def build(cache: Path, plant: Plant | None = None) -> Path:
    """The program, from the sources or with the unit of a planted bug in the place of its own."""
    out = cache / f"cpu-{fingerprint(repr(plant), repr(VARIANTS), folders=(CSRC / 'cpu', CSRC / 'core', HERE))}"
    program = out / "sanitize"
    if program.exists():
        return program
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(CSRC, out / "csrc")
    compiler = [need("g++"), *FLAGS, f"-I{out / 'csrc'}"]
    units = {
        "sanitize": [BOTH, "-c", HERE / "sanitize.cpp"],
        "driver": [BOTH, "-c", out / "csrc" / "cpu" / "driver.cpp"],
        "threads": [BOTH, "-c", out / "csrc" / "cpu" / "threads.cpp"],
    }
    for name, flags in VARIANTS.items():
        units[name] = [*flags, f"-DSK_NAME=kernels_{name}", "-c", HERE / "variant.cpp"]
    objects = {name: out / f"{name}.o" for name in units}
    if plant is not None:
        source = out / "csrc" / "cpu" / plant.file
        text = source.read_text()
        assert plant.right in text, f"the place for a planted bug has moved: {plant.right!r}"
        source.write_text(text.replace(plant.right, plant.wrong, 1))
        clean = build(cache).parent
        objects = {name: out / f"{name}.o" if name == plant.unit else clean / f"{name}.o" for name in units}
        units = {plant.unit: [ADDRESS if flag == BOTH else flag for flag in units[plant.unit]]}
    all_of([[*compiler, *arguments, "-o", objects[name]] for name, arguments in units.items()])
    unfinished = out / "unfinished"
    must([*compiler, BOTH, *objects.values(), "-o", unfinished])
    unfinished.rename(program)
    return program


def execute(program: Path):
    """Without address randomisation: the sanitizers map their shadow at fixed places."""
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return run([need("setarch"), "-R", program], env=environment, timeout=600)


def prepare(cache: Path) -> None:
    for plant in (None, *PLANTS.values()):
        build(cache, plant)


def test_clean(artefacts):
    done = execute(build(artefacts))
    assert done.returncode == 0, done.stderr[:4000]
    assert "cases 10 refused 9 rethrown 1" in done.stdout


@pytest.mark.parametrize("name", PLANTS)
def test_planted_bug_is_caught(artefacts, name):
    done = execute(build(artefacts, PLANTS[name]))
    assert done.returncode != 0
    assert PLANTS[name].report in done.stderr, done.stderr[:2000]


class Threads(NamedTuple):
    """A program about ``unit`` of csrc/cpu under ThreadSanitizer, in which ``needed`` must not be missing."""

    name: str
    unit: str
    file: str  # of the program or the unit
    needed: str


TEAMS = Threads("team.cpp", "threads.cpp", "team.cpp", "team.wait_for(first);")
MEMORY = Threads("gradient_memory.cpp", "gradient_memory.cpp", "unit", "const Guard guard(lock);")


def build_threads(cache: Path, program: Threads, without: bool = False) -> Path:
    """Without OpenMP, whose runtime the sanitizer does not see through. ``without``: a bug is planted."""
    out = cache / f"threads-{fingerprint(repr(program), str(without), folders=(CSRC / 'cpu', HERE))}"
    if not out.exists():
        sources = {program.name: HERE / program.name, "unit": CSRC / "cpu" / program.unit}
        text = sources[program.file].read_text()
        assert program.needed in text, f"the place for a planted bug has moved: {program.needed!r}"
        if without:
            sources[program.file] = cache / f"{out.name}.cpp"
            sources[program.file].write_text(text.replace(program.needed, ""))
        flags = ["-std=c++17", "-O1", "-g1", "-pthread", "-fsanitize=thread", f"-I{CSRC}"]
        must([need("g++"), *flags, *sources.values(), "-o", f"{out}.unfinished"])
        Path(f"{out}.unfinished").rename(out)
    return out


def test_teams_have_no_race(artefacts):
    done = execute(build_threads(artefacts, TEAMS))
    assert done.returncode == 0, done.stderr[:4000]
    assert f"total {200 * 17 * 18 // 2}" in done.stdout


def test_gradient_memory_has_no_race(artefacts):
    done = execute(build_threads(artefacts, MEMORY))
    assert done.returncode == 0, done.stderr[:4000]
    assert "wrong 0 waiting 1 left 0" in done.stdout


@pytest.mark.parametrize("program", [TEAMS, MEMORY], ids=["a stage that does not wait", "memory without its lock"])
def test_a_planted_race_is_caught(artefacts, program):
    done = execute(build_threads(artefacts, program, without=True))
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr
