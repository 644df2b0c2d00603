"""The examples run, on tiny settings, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the source tree")


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tried_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "estimator",
        "export_head",
        "swap_bert",
        "train_sharded",  # in test_sharding_faults.py
        "training_loop",
    }


def test_swap_bert():
    pytest.importorskip("transformers")
    losses = load("swap_bert").main(["--labels", "200", "--k", "4", "--slack", "8", "--hidden", "64", "--steps", "12"])
    assert len(losses) == 12 and losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_loop(dtype):
    small = ["--labels", "300", "--k", "8", "--slack", "16", "--examples", "4000", "--epochs", "3"]
    recall = load("training_loop").main([*small, "--batch-size", "64", "--dtype", dtype])
    assert recall["after"] > recall["before"] + 0.2


def test_export_head(tmp_path):
    errors = load("export_head").main(["--labels", "300", "--output", str(tmp_path)])
    assert {"torch.export", "torch.export, plain layers"} <= set(errors)
    assert max(errors.values()) < 1e-4
    if importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxscript"):
        assert "onnx" in errors and (tmp_path / "head.onnx").exists()


def test_estimator():
    assert load("estimator").main(["--examples", "3000", "--epochs", "3", "--hidden", "256"]) > 0.1
