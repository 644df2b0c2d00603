"""Every translation unit of the CPU core compiles without a warning."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path

import pytest

from .toolchain import CSRC, ROOT, all_of, fingerprint, need

pybind11 = pytest.importorskip("pybind11")
pytest.importorskip("setuptools")


def test_no_warnings(artefacts, monkeypatch):
    gxx = need("g++")
    seen = (
        artefacts / f"no-warnings-{fingerprint(folders=(CSRC, CSRC / 'core', CSRC / 'cpu', CSRC / 'cpu' / 'testing'))}"
    )
    if seen.exists():
        return
    monkeypatch.chdir(ROOT)
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="the build's own flags")
    include = [f"-I{CSRC}", "-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"]]
    strict = [
        "-std=c++17",
        "-fopenmp",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-psabi",
        "-fsyntax-only",
        "-fvisibility=hidden",
        *include,
    ]
    strict += ["-DSK_TEST_ISA=1"]
    sources: list[Path] = [*CSRC.glob("*.cpp"), *CSRC.glob("cpu/*.cpp"), *CSRC.glob("cpu/testing/*.cpp")]
    if not setup["X86"]:
        sources = [source for source in sources if setup["isa_of"](source) is None]
    assert len(sources) > 5
    all_of([[gxx, *strict, *setup["ISA_FLAGS"].get(setup["isa_of"](source), []), source] for source in sources])
    seen.touch()
