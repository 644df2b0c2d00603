"""The flash kernel in Triton compiled ahead for GPUs that are not here: tensor cores, shared memory, few spills."""

from __future__ import annotations

import json
import sys

import pytest

from .flash_ahead import SAMPLE, TARGETS
from .test_triton_compiled import environment
from .toolchain import ROOT, must

# Bytes of a thread. The rows of x and their gradient fill the registers on purpose: compilers put what the loop does not
# touch, addresses of the last stores above all, into local memory. sm_90 spills nothing.
MOST_SPILLED = 128


@pytest.fixture(scope="module")
def compiled() -> dict:
    pytest.importorskip("triton", minversion="3.7")
    command = [sys.executable, "-m", "tests.kernels.flash_ahead"]
    return json.loads(must(command, env=environment(), cwd=ROOT, timeout=600).stdout)


def test_compiles_as_it_should(compiled):
    assert set(compiled) == {" ".join(map(str, job)) for job in SAMPLE}
    for name, report in compiled.items():
        target = name.split()[0]
        assert report["tensor_cores"], name
        assert report["shared"] <= TARGETS[target] * 1024, name
        assert report["spilled"] <= (0 if target == "cuda:90" else MOST_SPILLED), (name, report)
