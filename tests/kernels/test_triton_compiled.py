"""The Triton kernels compiled ahead for GPUs that are not here: no spills, shared memory.

There are too many to compile in every run. ``triton_compiled.json`` has the result of each, under a key of its sources:
the tests recompute every key, so that a changed kernel cannot go on with an old result, and compile a few afresh.
"""

from __future__ import annotations

import json
import os
import sys

import pytest

from .toolchain import ROOT, must
from .triton_ahead import SAMPLE, SHARED, TABLE, TYPES, VARIANTS, nvidia, wrong

REFRESH = "run python -m tests.kernels.triton_ahead --write"


def environment() -> dict[str, str]:
    """Of a child process that compiles: this one may have been told to interpret."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.fixture(scope="module")
def now() -> dict:
    """The keys of all compilations as the sources are now, and the sample compiled."""
    pytest.importorskip("triton", minversion="3.7")
    command = [sys.executable, "-m", "tests.kernels.triton_ahead", "--sample"]
    return json.loads(must(command, env=environment(), cwd=ROOT, timeout=600).stdout)


@pytest.fixture(scope="module")
def table() -> dict:
    triton = pytest.importorskip("triton")
    made = json.loads(TABLE.read_text())
    if made["triton"] != triton.__version__:
        pytest.skip(f"{TABLE.name} was made with triton {made['triton']}, this is {triton.__version__}; {REFRESH}")
    return made["entries"]


def test_table_is_of_these_sources(now, table):
    stale = [name for name, key in now["keys"].items() if table.get(name, {}).get("key") != key]
    assert not stale, f"{len(stale)} kernels have changed since {TABLE.name} was written, {REFRESH}: {stale[:5]}"
    assert set(table) == set(now["keys"]), f"{TABLE.name} has kernels that are no more: {REFRESH}"


def test_every_kernel_compiles_as_it_should(table):
    """No spill, shared memory within the device's: every kernel, dtype and variant on every target."""
    assert [text for name, report in table.items() if (text := wrong(name, report))] == []
    parts = [set(column) for column in zip(*(name.split()[:3] for name in table), strict=True)]
    assert parts == [set(SHARED), set(VARIANTS), set(TYPES)]


def test_sample_compiles_as_the_table_says(now, table):
    assert set(now["compiled"]) == set(SAMPLE)
    for name, report in now["compiled"].items():
        assert report == table[name], f"{name}: {REFRESH} --all"


def test_sample_compiles_as_it_should(now):
    """Also with a Triton that the table was not made with."""
    assert [text for name, report in now["compiled"].items() if (text := wrong(name, report))] == []


def test_a_spill_is_seen():
    """What ptxas says of a kernel with spills, and of one that has none but two functions."""
    told = "ptxas info : Used {} registers, used 1 barriers\n {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    clean = nvidia(told.format(80, 0, 0, 0) * 2)
    assert clean == {"registers": 80, "spills": 0}
    spilt = nvidia(told.format(80, 0, 0, 0) + told.format(255, 16, 20, 24))
    assert spilt == {"registers": 255, "spills": 60}
    name = "cuda:80 topk float32 short"
    assert wrong(name, clean | {"shared": 0}) is None
    assert "spills" in str(wrong(name, spilt | {"shared": 0}))
    assert "shared" in str(wrong(name, clean | {"shared": 164 * 1024}))


def test_importing_the_backend_compiles_nothing():
    """Not even triton is imported before the first launch."""
    code = "import sys, sigkernels.backends.triton as t; print('triton' in sys.modules, t.TritonBackend().devices())"
    done = must([sys.executable, "-c", "import torch; " + code], env=environment())
    assert done.stdout.startswith("False ('cuda',)")
