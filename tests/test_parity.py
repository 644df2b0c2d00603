"""Where we differ from a paper or its published code (docs/parity.md): every test pins both behaviours.

What is "published" is written here from the formulas of the papers, as their code evaluates them.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linprog

import sigkernels as sk
from sigkernels import metrics
from sigkernels.functional import linear_loss, lml, lml_nll


def ours_on_logits(z, y, loss, reduction="mean"):
    """Our fused loss of given logits: the layer is the identity."""
    return linear_loss(z, torch.eye(z.shape[1], dtype=z.dtype), y, loss=loss, reduction=reduction)


def test_the_tests_that_the_document_names_exist():
    document = Path(__file__).resolve().parent.parent / "docs" / "parity.md"
    if not document.exists():
        pytest.skip("needs the source tree")
    known = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = set(re.findall(r"(?:`|::)(test_\w+)`", document.read_text()))
    assert len(named) > 20
    assert [name for name in sorted(named) if f"def {name}(" not in known] == []


# -- Taming the Sigmoid Bottleneck ----------------------------------------------------------------------------------


def test_dft_angles():
    """Published: products of angles in float32, whose error grows with k and n. Ours: reduced in whole numbers."""
    n, k = 200_000, 80
    i = torch.arange(n)
    exact = torch.cos(2 * math.pi / n * (k * i % n).double())
    published = torch.cos(torch.tensor(2 * math.pi / n) * i * k)
    ours = sk.dft_matrix(n, k, dtype=torch.float32)[:, 2 * k - 1] / math.sqrt(2 / n)
    assert (ours - exact).abs().max() < 3e-7
    assert (published - exact).abs().max() > 1e-5


def test_a_thin_region_is_not_called_impossible():
    """Published: no solution of the program with ε ≥ 1e-8 means "unargmaxable". Ours: a witness exists, THIN."""
    W = np.array([[1.0, 0.0], [-1.0, 1e-13]])
    solved = linprog(
        [0, 0, -1], np.c_[-W, np.linalg.norm(W, axis=1)], [0, 0], bounds=[(-1e4, 1e4)] * 2 + [(None, None)]
    )
    assert solved.x[-1] < 1e-8
    report = sk.verify(W, [[0, 1]])
    assert report.verdicts[0].name == "THIN"
    assert (W @ np.asarray(report.witness(0)) > 0).all()


def test_ranking_of_a_row_without_labels():
    """Published: hits/|Y| is 0/0 and the mean over rows is NaN. Ours: such a row counts with 0."""
    hits, sizes = np.array([1.0, 0.0]), np.array([2.0, 0.0])
    with np.errstate(invalid="ignore"):
        assert np.isnan((hits / sizes).mean())
    ranking = metrics.RankingMetrics(5, m=(1,))
    ranking.update(torch.tensor([[3], [0]]), [[3, 4], []])
    assert ranking.compute()["R@1"] == 0.25


# -- sigmoidF1, focal, asymmetric -----------------------------------------------------------------------------------


def published_confusion(s, y, metric):
    """The sums of a label and the value with the paper's 1e-16 in the denominator."""
    tp, fp, fn, tn = ((a * b).sum(0) for a, b in ((s, y), (s, 1 - y), (1 - s, y), (1 - s, 1 - y)))
    over, under = {
        "f1": (2 * tp, 2 * tp + fn + fp),
        "precision": (tp, tp + fp),
        "npv": (tn, tn + fn),
    }[metric]
    return over / (under + 1e-16)


def test_tiny_denominators():
    """Published: 1e-16 is added, which wins over sums that are smaller. Ours: nothing is added."""
    z, y = torch.full((1, 1), -50.0), torch.ones(1, 1)  # S = 2e-22
    assert published_confusion(torch.sigmoid(z), y, "precision").item() == pytest.approx(1.9e-6, rel=0.1)
    assert 1 - ours_on_logits(z, y, sk.SigmoidF1(metric="precision")).item() == pytest.approx(1.0)


def test_denominators_that_cancel():
    """unboundedF1, Σu = -Σy. Published: the numerator over 1e-16. Ours: value 0, gradient 0."""
    z, y = torch.tensor([[-2.0], [1.0]], requires_grad=True), torch.tensor([[0.0], [1.0]])
    published = published_confusion(z, y, "f1")
    assert published.abs().item() > 1e15
    loss = ours_on_logits(z, y, sk.UnboundedF1())
    loss.backward()
    assert loss.item() == 1.0 and (z.grad == 0).all()


def test_scores_near_one_keep_their_complement():
    """Published: 1 - S is 0 in float32 from a logit of 17 on. Ours: σ of the negated argument."""
    z, y = torch.full((2, 1), 20.0), torch.zeros(2, 1)
    assert published_confusion(torch.sigmoid(z), y, "npv").item() == 0.0
    assert 1 - ours_on_logits(z, y, sk.SigmoidF1(metric="npv")).item() == pytest.approx(1.0)


def test_sigmoid_of_the_sigmoid():
    """Published code: S acts on σ(z). Ours: on z, as the paper writes; ``on="probability"`` is theirs."""
    z, y = torch.tensor([[4.0, -4.0], [-4.0, 4.0]]), torch.eye(2)
    as_paper, as_code = (1 - published_confusion(torch.sigmoid(u), y, "f1").mean() for u in (z, torch.sigmoid(z)))
    assert ours_on_logits(z, y, sk.SigmoidF1()).item() == pytest.approx(as_paper.item(), rel=1e-5)
    assert ours_on_logits(z, y, sk.SigmoidF1(on="probability")).item() == pytest.approx(as_code.item(), rel=1e-5)
    assert as_paper.item() != pytest.approx(as_code.item(), rel=0.5)


def test_names_of_the_averages():
    """The paper's "micro" is the mean over labels, its "macro" the pooled value; here and in scikit-learn reversed."""
    predicted = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1]])
    y = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 1]])
    tp, fp, fn = (predicted * y).sum(0), (predicted * (1 - y)).sum(0), ((1 - predicted) * y).sum(0)
    per_label = (2 * tp / (2 * tp + fp + fn)).mean().item()
    pooled = (2 * tp.sum() / (2 * tp.sum() + fp.sum() + fn.sum())).item()
    f1 = metrics.F1Metrics(3)
    f1.update(sk.LabelSets.from_dense(predicted), y)
    got = f1.compute()
    assert got["macro_f1"] == pytest.approx(per_label) and got["micro_f1"] == pytest.approx(pooled)
    assert per_label != pytest.approx(pooled)


def test_threshold_between_two_scores():
    """Published: any threshold with the best F1 will do. Ours: halfway; every choice gives the same sets."""
    scores, y = torch.tensor([[0.9, 0.6, 0.1]]), [[0]]
    best = [t for t in np.linspace(0, 1, 101) if ((scores[0] > t).tolist() == [True, False, False])]
    threshold = metrics.ThresholdAveraging(3)
    threshold.update(scores, torch.tensor([[0, 1, 2]]), y)
    got = threshold.compute()["threshold"]
    assert got == pytest.approx(0.75) and best[0] <= got <= best[-1]


def test_focal_of_soft_targets():
    """Published code mixes p_t first. Ours mixes the two sides, as a target that is 1 half of the time would."""
    z, y = torch.tensor([[1.5]]), torch.tensor([[0.5]])
    p, gamma = torch.sigmoid(z), 2.0
    p_t = p * y + (1 - p) * (1 - y)
    published = (F.binary_cross_entropy_with_logits(z, y) * (1 - p_t) ** gamma).item()
    sides = [(-((1 - q) ** gamma) * q.log()).item() for q in (p, 1 - p)]
    ours = ours_on_logits(z, y, sk.Focal(gamma, alpha=None)).item()
    assert ours == pytest.approx(sum(sides) / 2, rel=1e-5)
    assert ours != pytest.approx(published, rel=0.05)


def published_asl(z, y, gamma_neg=4.0, gamma_pos=1.0, clip=0.05, eps=1e-8):
    """Summed over the batch; grad mode is switched off around the focusing factor and then on, whatever it was."""
    p = torch.sigmoid(z)
    q = (1 - p + clip).clamp(max=1)
    log = y * p.clamp(min=eps).log() + (1 - y) * q.clamp(min=eps).log()
    torch.set_grad_enabled(False)
    focus = (1 - (p * y + q * (1 - y))) ** (gamma_pos * y + gamma_neg * (1 - y))
    torch.set_grad_enabled(True)
    return -(log * focus).sum()


def test_asl_sum_and_gradient():
    """Published: the sum, no gradient through the focusing factor. Ours: the mean and the exact gradient by default."""
    z, y = torch.randn(4, 7, dtype=torch.float64, requires_grad=True), (torch.rand(4, 7) < 0.3).double()
    published = published_asl(z, y)
    (theirs,) = torch.autograd.grad(published, z)
    for detach in (True, False):
        loss = sk.Asymmetric(detach_focus=detach)
        assert ours_on_logits(z, y, loss, "sum").item() == pytest.approx(published.item(), rel=1e-9)
        assert ours_on_logits(z, y, loss).item() == pytest.approx(published.item() / 28, rel=1e-9)
        (ours,) = torch.autograd.grad(ours_on_logits(z, y, loss, "sum"), z)
        assert torch.allclose(ours, theirs, rtol=1e-9) == detach


def test_asl_leaves_grad_mode_alone():
    z, y = torch.randn(2, 3), torch.zeros(2, 3)
    try:
        torch.set_grad_enabled(False)
        published_asl(z, y)
        assert torch.is_grad_enabled()  # theirs has switched it on
        torch.set_grad_enabled(False)
        ours_on_logits(z, y, sk.Asymmetric(detach_focus=True))
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_asl_of_easy_negatives():
    """Published: log(1 - p) is 0 in float32 where p is below 6e-8. Ours: -p."""
    z, y = torch.full((1, 1), -20.0), torch.zeros(1, 1)
    assert published_asl(z, y, gamma_neg=0, clip=0).item() == 0.0
    ours = ours_on_logits(z, y, sk.Asymmetric(gamma_neg=0, clip=0)).item()
    assert ours == pytest.approx(math.exp(-20), rel=1e-4)


# -- LML ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bracketing():
    """The published search: what the benchmarks race against."""
    path = Path(__file__).resolve().parent.parent / "bench" / "peers.py"
    if not path.exists():
        pytest.skip("needs the source tree")
    spec = importlib.util.spec_from_file_location("sigkernels_bench_peers", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.bracketing_lml


def test_the_root_of_lml(bracketing):
    """Published: ν to within 1e-4. Ours: to the last bit."""
    z, k = torch.randn(4, 500), 10
    assert torch.allclose(bracketing(z, k), lml(z, k), atol=1e-4)
    theirs, ours = ((y.double().sum(1) - k).abs().max().item() for y in (bracketing(z, k), lml(z, k)))
    assert ours <= 1e-6 * k and theirs > 10 * ours


def test_a_bracket_that_misses_the_root(bracketing):
    """Published: ±7 around the k-th largest logit; with 20,000 equal logits the sum comes out as 18 instead of 1."""
    z = torch.zeros(1, 20_000)
    assert bracketing(z, 1).sum().item() == pytest.approx(18.2, abs=0.2)
    assert lml(z, 1).double().sum().item() == pytest.approx(1, rel=1e-6)


def test_gradients_of_saturated_rows():
    """Published: h = 1/(1/y + 1/(1-y)) from y itself, 0/0 where every y is 0 or 1. Ours: from z + ν, and 0."""
    up = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    for size, vanishes in ((20.0, False), (900.0, True)):
        z = (torch.tensor([[1.0, 1.0, -1.0, -1.0]]) * size).requires_grad_()
        y = lml(z, 2)
        h = 1 / (1 / y.detach() + 1 / (1 - y.detach()))
        if vanishes:
            assert (h * (up - (h * up).sum() / h.sum())).isnan().all()
        (ours,) = torch.autograd.grad(y, z, up)
        exact = math.exp(-size) * torch.tensor([[-0.5, 0.5, -0.5, 0.5]]) + math.exp(-size) * torch.tensor(
            [[-1.0, -1.0, 1.0, 1.0]]
        )
        assert torch.allclose(ours, exact, rtol=1e-4, atol=0)


def test_infinite_logits(bracketing):
    """Published: NaN where the bracket ends at infinity. Ours: -inf forbids a label and +inf forces it, and NaN is left
    for rows in which too many are forced or forbidden for any projection."""
    inf = math.inf
    z = torch.tensor([[inf, 1.0, 1.0, -inf], [2.0, -inf, -inf, -inf], [inf, inf, inf, 0.0]])
    assert bracketing(z, 2).isnan().any(1).tolist() == [False, True, True]
    y = lml(z, 2)
    assert y[0].tolist() == [1.0, 0.5, 0.5, 0.0] and y[1:].isnan().all()


def test_as_many_labels_as_are_chosen():
    """Published: for k ≥ n all are 1 - 1e-5 without a gradient. Ours: the same for k = n, and k > n is an error."""
    z = torch.randn(2, 3, requires_grad=True)
    published = (1 - 1e-5) * torch.ones_like(z)
    y = lml(z, 3)
    assert torch.equal(y, published)
    assert (torch.autograd.grad(y.sum(), z)[0] == 0).all()
    with pytest.raises(ValueError, match="k = 4"):
        lml(z, 4)


def test_likelihood_where_y_underflows():
    """Published: -log y is infinite. Ours: from logits, finite."""
    z = torch.tensor([[500.0, 400.0, -500.0]])
    assert -lml(z, 1)[0, 2].log() == math.inf
    assert lml_nll(z, [[2]], 1).item() == pytest.approx(950, rel=1e-6)
