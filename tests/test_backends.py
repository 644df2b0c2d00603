"""Choosing a backend: forced, missing, unknown, and by environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

import sigkernels as sk
from sigkernels import backends


def test_status():
    status = sk.backend_status()
    assert list(status) == ["cpu", "cuda", "triton", "torch"]
    assert status["torch"] is None
    assert sk.available_backends() == [name for name, reason in status.items() if reason is None]


def test_a_missing_backend_says_what_to_install():
    for name, reason in sk.backend_status().items():
        if reason is not None:
            with pytest.raises(RuntimeError, match=f"backend '{name}' was asked for"), sk.backend(name):
                pass


def test_an_unknown_backend_lists_the_known():
    with pytest.raises(ValueError, match="'jax' is not a backend; choose one of auto, cpu, cuda"), sk.backend("jax"):
        pass


def test_force_nests_and_ends():
    x = torch.zeros(1, 1)
    auto = backends.select(x)
    with sk.backend("torch"):
        assert backends.select(x).name == "torch"
        with sk.backend("auto"):
            assert backends.select(x) == auto
        assert backends.select(x).name == "torch"
    assert backends.select(x) == auto


def test_force_is_a_thread_s_own():
    seen = []
    with sk.backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(backends._forced.get()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_wrong_device_is_refused():
    if "cpu" not in sk.available_backends():
        pytest.skip("the compiled core is not built")
    with sk.backend("cpu"), pytest.raises(RuntimeError, match="takes cpu tensors and the input is on meta"):
        backends.select(torch.zeros(1, 1, device="meta"))


def test_other_devices_take_torch():
    assert backends.select(torch.zeros(1, 1, device="meta")).name == "torch"


def run(code: str, backend: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SIGKERNELS_BACKEND": backend}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_environment_variable():
    code = "import torch, sigkernels.backends as b; print(b.select(torch.zeros(1)).name)"
    assert run(code, "torch").stdout.strip() == "torch"
    failed = run(code, "gpu")
    assert failed.returncode != 0 and "SIGKERNELS_BACKEND = 'gpu' is not a backend" in failed.stderr


def test_backward_uses_the_backend_of_the_forward_pass():
    head = sk.LinearHead(4, 9)
    with sk.backend("torch"):
        value = head.loss(torch.randn(2, 4), [[1], []], reduction="none")
    (fused_loss, _), *_ = value.grad_fn.next_functions  # below the reshape to the leading dimensions
    assert fused_loss.spec.backend.name == "torch"
    value.sum().backward()
    assert head.weight.grad.abs().sum() > 0


def test_a_backend_that_is_passed_over_is_logged_once(caplog):
    """A loss that no kernel knows: the reason, at debug level."""
    backends._log_refusal.cache_clear()
    x, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    with caplog.at_level("DEBUG", logger="sigkernels"):
        for _ in range(2):
            sk.functional.linear_loss(x, weight, [[1], []], loss=sk.Poly1BCE())
    messages = [record.message for record in caplog.records if "passed over" in record.message]
    if "cpu" in sk.available_backends():
        assert len(messages) == 1 and "Poly1BCE" in messages[0]
