"""predict on every backend: the same as a threshold on the logits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import reference
import torch
from cases import problem
from hypothesis import given
from hypothesis import strategies as st

import sigkernels as sk
from sigkernels import ops


@pytest.mark.parametrize("kind", ["dft", "linear"])
def test_is_a_threshold_on_the_logits(device, shape, kind):
    n, k, s, batch = shape
    p = problem(n, k if kind == "dft" else -1, s, batch, device=device, dtype=torch.float64, bias=kind == "linear")
    for threshold in (-1.0, 0.0, 2.5):
        sets = ops.predict(p.x, p.layer, threshold)
        assert sets == reference.predict(p.x, p.layer, threshold)
        assert sets == sk.LabelSets(sets.indices, sets.offsets, n)  # sorted, in range


@given(st.floats(0.01, 0.99))
def test_threshold_is_a_probability(threshold):
    torch.manual_seed(1)
    head = sk.DFTHead(16, 40, k=3, slack=2, dtype=torch.float64)
    h = torch.randn(5, 16, dtype=torch.float64) * 30
    probability = torch.sigmoid(head(h))
    sets = head.predict(h, threshold).to_dense(torch.bool)
    clear = (probability - threshold).abs() > 1e-9
    assert torch.equal(sets[clear], (probability > threshold)[clear])


def test_ends_of_the_range_and_nan(device):
    head = sk.LinearHead(3, 50).to(device)
    h = torch.randn(4, 3, device=device)
    assert head.predict(h, 0.0).sizes.tolist() == [50] * 4
    assert head.predict(h, 1.0).sizes.tolist() == [0] * 4
    h[1] = float("nan")
    assert head.predict(h, 0.0).sizes.tolist() == [50, 0, 50, 50]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_refusals(threshold):
    with pytest.raises(ValueError, match="threshold is a probability"):
        sk.LinearHead(3, 5).predict(torch.zeros(1, 3), threshold)


def test_no_verb_imports_the_compiler():
    """Which takes more than a second, and which the first call of any operator does."""
    code = """if True:
        import sys, torch, sigkernels as sk
        head, h, sets = sk.DFTHead(40, 30, 2, 4, codes=16), torch.randn(3, 40), [[1], [], [2, 29]]
        for loss in (sk.BCE(), sk.SigmoidF1(), sk.LMLNLL(2)):
            head.loss(h, sets, loss).backward()
        head.loss(h, sets, unknown=[[5]] * 3).backward()
        head.topk(h, 3)[0].sum().backward()
        head.predict(h), head.predict(h, torch.full((30,), 0.3))
        for f in (sk.functional.lml_nll, sk.functional.truncated_topk_entropy, sk.functional.smooth_topk_svm):
            f(head(h), sets, 2).backward()
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)
