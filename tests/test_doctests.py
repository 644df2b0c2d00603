"""Every public name has an example in its docstring and an entry in the API reference, and the examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import sigkernels as sk

MODULES = ("sigkernels", "functional", "metrics", "signs", "datasets", "verify")
OTHERS = {  # public names of modules whose __all__ also serves the package itself
    "hf": ("HeadMixin",),
    "suggest": ("Suggestion",),
}
REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "api"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public_names() -> dict[str, Any]:
    """Classes and functions by their dotted names."""
    found: dict[str, Any] = {}
    names = {module: None for module in MODULES} | OTHERS
    for where, listed in names.items():
        module = sk if where == "sigkernels" else importlib.import_module(f"sigkernels.{where}")
        for name in listed or module.__all__:
            value = getattr(module, name)
            if not isinstance(value, ModuleType):
                found[f"{module.__name__}.{name}"] = value
    return found


PUBLIC = public_names()


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name):
    value = PUBLIC[name]
    globs = {"np": np, "sk": sk, "torch": torch}
    module = sys.modules[inspect.unwrap(value).__module__]
    cases = doctest.DocTestFinder(recurse=inspect.isclass(value)).find(value, name, module=module, globs=globs)
    assert any(case.examples for case in cases if case.name == name), f"{name} has no example: add one to its docstring"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for case in cases:
        torch.manual_seed(0)
        runner.run(case, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs the source tree")
def test_the_reference_lists_every_name():
    listed = re.findall(
        r"^\.\. auto\w+:: ([\w.]+)", "".join(p.read_text() for p in REFERENCE.glob("*.rst")), re.MULTILINE
    )
    entries = {entry.rpartition(".")[2] for entry in listed}
    assert [name for name in PUBLIC if name.rpartition(".")[2] not in entries] == []
