"""The Triton kernels compiled ahead for GPUs that are not here: no spills, shared memory, tensor cores."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from .toolchain import must
from .triton_ahead import FIRST, KERNELS, SLACK, slack_class

# Bytes of shared memory a block may have; the compiler does not check it.
SHARED = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "cuda:100": 227 * 1024, "hip:gfx942": 64 * 1024}


@pytest.fixture(scope="module")
def compiled(artefacts: Path) -> list[dict]:
    """In a child process: this one may have been told to interpret."""
    pytest.importorskip("triton", minversion="3.7")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(artefacts / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, Path(__file__).with_name("triton_ahead.py"), *SHARED]
    return json.loads(must(command, env=environment, timeout=600).stdout)


@pytest.mark.parametrize("target", SHARED)
def test_compiles_without_spills(compiled, target):
    """Whatever the slack: 64, 1, 7, 50, 100 and 129 fall into the three classes that Triton compiles apart."""
    here = [report for report in compiled if report["target"] == target]
    assert {report["kernel"] for report in here} == set(KERNELS)
    seen = {slack_class(report["slack"]) for report in here if report["kernel"] == "fused_loss"}
    assert seen == {slack_class(slack) for slack in SLACK} if target in FIRST else {"awkward"}
    for report in here:
        assert report["spills"] == 0, report
        assert report["shared"] <= SHARED[target], report
        assert report["registers"] <= (255 if target.startswith("cuda") else 512), report
        if report["dtype"] == "bfloat16" and report["kernel"] != "add_slabs":
            assert report["tensor_cores"], report


def test_importing_the_backend_compiles_nothing():
    """Not even triton is imported before the first launch."""
    code = "import sys, sigkernels.backends.triton as t; print('triton' in sys.modules, t.devices())"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = must([sys.executable, "-c", "import torch; " + code], env=environment)
    assert done.stdout.startswith("False ('cuda',)")
