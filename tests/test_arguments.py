"""Arguments of every kind of object: what is refused names the argument and the value, and numpy's numbers pass."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse
import torch

import sigkernels as sk
from sigkernels import metrics

NAN, INF = math.nan, math.inf
TOP = torch.arange(2)[None]
X, Y = np.eye(4, dtype=np.float32), np.eye(4, dtype=int)


def head(**settings):
    return sk.LinearHead(8, 10, **settings)


def published(**changes):
    state = {"proj.weight": torch.zeros(5, 8), "proj.bias": torch.zeros(5), "Ws.weight": torch.zeros(10, 2)}
    return sk.DFTHead.from_spmlbl(state | changes, 1)


def tuned():
    return sk.Thresholds.tune(torch.zeros(1, 10), [[1]])


def damaged(kind):
    """A scipy matrix with an index outside, which scipy's own conversions follow beyond their arrays."""
    matrix = scipy.sparse.eye(4, 5, format=kind)
    if kind == "coo":
        matrix.coords[1][1] = 10**9
    else:
        matrix.indptr[1] = 10**9
    return matrix


def resized(kind, **settings):
    """A head whose label weights were replaced by those of 12 labels."""
    changed = kind(8, 10, **settings)
    name = next(iter(changed.label_parameters()))
    setattr(changed, name, torch.nn.Parameter(torch.zeros(12, getattr(changed, name).shape[1])))
    return changed


def fit(**settings):
    return sk.MultiLabelClassifier(**settings).fit(X, Y)


META = torch.zeros(10, device="meta")


def broken():
    changed = sk.DFTHead(8, 10, 1, slack=2)
    torch.nn.init.constant_(changed.slack_weight, NAN)
    return changed


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        # losses
        (lambda: sk.BCE(label_smoothing=None), TypeError, "label_smoothing must be a number, got None"),
        (lambda: sk.BCE(label_smoothing=True), TypeError, "label_smoothing must be a number, got True"),
        (lambda: sk.BCE(label_smoothing=NAN), ValueError, "label_smoothing must be finite, got nan"),
        (lambda: sk.Focal(gamma="2"), TypeError, "gamma must be a number, got '2'"),
        (lambda: sk.Focal(gamma=INF), ValueError, "gamma must be finite, got inf"),
        (lambda: sk.Focal(gamma=10**400), ValueError, "gamma must be within the range of float64"),
        (lambda: sk.Focal(alpha=torch.ones(3)), TypeError, r"alpha must be a number, got tensor\(\[1., 1., 1.\]\)"),
        (lambda: sk.Asymmetric(eps=None), TypeError, "eps must be a number, got None"),
        (lambda: sk.Asymmetric(clip="a"), TypeError, "clip must be a number, got 'a'"),
        (lambda: sk.LMLNLL(None), TypeError, "k must be a whole number, got None"),
        (lambda: sk.LMLNLL("a"), TypeError, "k must be a whole number, got 'a'"),
        (lambda: sk.LMLNLL(NAN), TypeError, "k must be a whole number, got nan"),
        (lambda: sk.LMLNLL(INF), TypeError, "k must be a whole number, got inf"),
        (lambda: sk.LMLNLL(2.0), TypeError, "k must be a whole number, got 2.0"),
        (lambda: sk.LML(2.0), TypeError, "k must be a whole number, got 2.0"),
        (lambda: sk.TruncatedTopKEntropy(True), TypeError, "k must be a whole number, got True"),
        (lambda: sk.SigmoidF1(beta=NAN), ValueError, "beta must be finite, got nan"),
        (lambda: sk.SigmoidF1(eta="0"), TypeError, "eta must be a number, got '0'"),
        (lambda: sk.BCE(pos_weight="3"), TypeError, "pos_weight must be a number, got '3'"),
        (lambda: sk.Focal(weight=True), TypeError, "weight must be a number, got True"),
        (lambda: sk.Poly1BCE(pos_weight="3"), TypeError, "pos_weight must be a number, got '3'"),
        (lambda: sk.Asymmetric(detach_focus="no"), TypeError, "detach_focus must be True or False, got 'no'"),
        (
            lambda: head()(torch.zeros(2, 8), [[], []], sk.BCE(torch.ones(10).to_sparse())),
            TypeError,
            r"weight of BCE must be a dense tensor.*convert it with .to_dense\(\)",
        ),
        (
            lambda: head()(torch.zeros(2, 8), torch.zeros(2, 10).to(torch.float8_e4m3fn)),
            TypeError,
            "dense targets must be .* of 16 to 64 bits, got torch.float8_e4m3fn",
        ),
        # label sets
        (lambda: sk.LabelSets.of(damaged("csc")), ValueError, "label_sets is damaged, scipy cannot read it"),
        (lambda: sk.LabelSets.from_csr(damaged("bsr")), ValueError, "matrix is damaged, scipy cannot read it"),
        (lambda: sk.LabelSets.of(damaged("coo")), ValueError, r"its indices of axis 1 are not 4 numbers in 0 … 4"),
        (lambda: sk.LabelSets.from_dense(sk.LabelSets.from_lists([[1]], 9)), TypeError, "got LabelSets"),
        (lambda: sk.LabelSets.of(META[None]), ValueError, "label_sets is on the meta device"),
        (lambda: sk.LabelSets.from_lists([[1]], 9).to("meta").to("cpu"), ValueError, "on the meta device"),
        (lambda: sk.LabelSets.cat(None), TypeError, "parts must be a list of LabelSets, got NoneType"),
        (
            lambda: sk.LabelSets.collate_fn(9)([(1, [2]), {"x": 1}]),
            TypeError,
            "sample 1 is a dict and sample 0 a tuple",
        ),
        (
            lambda: sk.LabelSets.collate_fn(9)([{"x": 1}, (1, [2])]),
            TypeError,
            "sample 1 is a tuple and sample 0 a dict",
        ),
        # heads and the DFT
        (lambda: head().predict(torch.zeros(1, 8), None), TypeError, "threshold must be a number, got None"),
        (lambda: head().predict(torch.zeros(1, 8), NAN), ValueError, "threshold must be finite, got nan"),
        (lambda: head().init_prior("a"), TypeError, "prior must be .*, got 'a'"),
        (lambda: head(dtype=torch.int64), TypeError, "dtype must be .*got torch.int64"),
        (lambda: sk.DFTHead(8, 10, 2, dtype=torch.complex64), TypeError, "dtype must be .*got torch.complex64"),
        (lambda: sk.DFTHead(8, 10, torch.tensor(2.0)), TypeError, "k must be a whole number, got tensor"),
        (
            lambda: published(**{"Ws.weight": torch.zeros(10)}),
            ValueError,
            r"Ws.weight must .* 2 dimensions, got \(10,\)",
        ),
        (lambda: published(**{"proj.weight": torch.zeros(5)}), ValueError, r"proj.weight must .* got \(5,\)"),
        (lambda: published(**{"proj.bias": [0.0]}), ValueError, r"proj.bias must be a tensor .* got list"),
        (lambda: head()(torch.eye(8).to_sparse()), TypeError, r"h must be a dense tensor.*call h.to_dense\(\)"),
        (
            lambda: sk.functional.linear_loss(torch.zeros(3, 8), torch.eye(8).to_sparse_csr(), [[]] * 3),
            TypeError,
            r"weight must be a dense tensor, got layout torch.sparse_csr; call weight.to_dense\(\)",
        ),
        (
            lambda: sk.functional.linear_loss(torch.eye(8).to_sparse(), torch.eye(8), [[]] * 8),
            TypeError,
            "x must be a dense tensor",
        ),
        (lambda: sk.dft_matrix(10, 2, stop=25), ValueError, "stop ≤ num_labels = 10, got 0 and 25"),
        (lambda: sk.dft_matrix(10, 2, start=5, stop=4), ValueError, "start ≤ stop .*got 5 and 4"),
        (lambda: sk.dft_matrix(10, 2, start=-1), ValueError, "start must be at least 0, got -1"),
        (lambda: sk.dft_matrix(10, 2, start=1.5), TypeError, "start must be a whole number, got 1.5"),
        (lambda: sk.dft_matrix(10, 2, dtype=torch.int32), TypeError, "dtype must be a floating point.*torch.int32"),
        (lambda: head(bias="yes"), TypeError, "bias must be True or False, got 'yes'"),
        (lambda: sk.DFTHead(8, 10, 2, bias=torch.ones(10)), TypeError, "bias must be True or False, got tensor"),
        (lambda: sk.DFTHead(8, 10, 2).guarantee(1, box=0), ValueError, "box must be positive, got 0"),
        (lambda: sk.DFTHead(10**30, 10, 2), ValueError, f"in_features must be at most {2**40}, got 1000"),
        (lambda: sk.DFTHead(8, 10**30, 2), ValueError, f"num_labels must be at most {2**40}, got 1000"),
        (lambda: sk.DFTHead(8, 10, 2, 10**30), ValueError, f"slack must be at most {2**40}, got 1000"),
        (lambda: sk.LinearHead(8, 10, 10**30), ValueError, f"bottleneck must be at most {2**40}, got 1000"),
        (lambda: head(prior=META), ValueError, "prior is on the meta device"),
        (lambda: head(prior=sk.LabelSets.from_lists([[1]], 9)), ValueError, "prior has num_labels = 9, but 10"),
        (lambda: head().predict(torch.zeros(1, 8), META), ValueError, "threshold is on the meta device"),
        (
            lambda: sk.DFTHead(8, 10, 2)(torch.zeros(2, 8, device="meta")),
            ValueError,
            "h is on meta and proj.weight on cpu; move both to one device",
        ),
        (lambda: resized(sk.DFTHead, k=2, slack=3).weight_matrix(), ValueError, r"slack_weight has shape \[12, 3\]"),
        (lambda: resized(sk.DFTHead, k=2, slack=3).guarantee(1), ValueError, r"slack_weight has shape \[12, 3\]"),
        (lambda: resized(sk.DFTHead, k=2, slack=3).to_linear(), ValueError, r"slack_weight has shape \[12, 3\]"),
        (lambda: sk.verify(resized(sk.DFTHead, k=2, slack=3), [[1]]), ValueError, r"made for \[10, 3\]"),
        (lambda: sk.verify(resized(sk.LinearHead), [[1]]), ValueError, r"weight has shape \[12, 8\]"),
        (lambda: sk.DFTHead.from_spmlbl(None, 2), TypeError, "state_dict must map names to tensors, got NoneType"),
        (
            lambda: sk.DFTHead(8, 10, 2, slack=1, device="meta").guarantee(1),
            ValueError,
            "the head's slack_weight is on the meta device",
        ),
        (lambda: broken().guarantee(1), ValueError, "the slack weights or biases hold NaN"),
        (lambda: sk.LabelSets.from_lists([[1], [2]], 9)[0, 1], IndexError, r"one dimension, got \(0, 1\); write"),
        (lambda: sk.LabelSets.from_lists([[1]], 9)["a"], IndexError, "by integers or booleans, got 'a'"),
        (lambda: sk.LabelSets.from_lists([[1]], 9)[[0.5]], IndexError, r"by integers or booleans, got \[0.5\]"),
        (lambda: head().predict(torch.zeros(1, 8), tuned()), TypeError, "threshold=tuned.values"),
        (
            lambda: sk.Thresholds.tune(torch.zeros(1, 10), [[1]], per_label="no"),
            TypeError,
            "per_label must be True or False, got 'no'",
        ),
        # reports
        (
            lambda: sk.verify(X, [[1]], executor=ThreadPoolExecutor),
            TypeError,
            "must be a .*Executor, got the class ThreadPoolExecutor: make one",
        ),
        (lambda: sk.verify(X, [[1]], bias=3), TypeError, "bias must be a torch tensor or a numpy array, got int"),
        (
            lambda: sk.verify(torch.nn.Sequential(torch.nn.Linear(3, 4)), [[1]]),
            TypeError,
            r"head_or_matrix must be a head, .*got Sequential; give its output layer, such as model\[-1\]",
        ),
        (lambda: sk.verify(torch.nn.Embedding(4, 3), [[1]]), TypeError, "got Embedding; give its weight$"),
        (lambda: sk.verify({"weight": X}, [[1]]), TypeError, "got dict; give one of its entries$"),
        (lambda: sk.verify(scipy.sparse.eye(4).tocsr(), [[1]]), TypeError, r"got csr_matrix; call \.toarray\(\)$"),
        (lambda: sk.verify(np.ma.masked_less(np.eye(4), 1), [[1]]), TypeError, "is a masked array, .*fill it first"),
        (
            lambda: sk.verify(X, [[1]], threshold=torch.full((4,), 0.5j)),
            TypeError,
            r"one probability for each label, got \[0.5j, 0.5j, 0.5j, 0.5j\]$",
        ),
        (lambda: sk.verify_all(X, 1, exactly="no"), TypeError, "exactly must be True or False, got 'no'"),
        (lambda: sk.verify_all(X, 1, witnesses=None), TypeError, "witnesses must be True or False, got None"),
        (lambda: sk.verify(X, [[1]]).explain(0, ["a"]), ValueError, "one name for each of the 4 labels, got 1"),
        (lambda: sk.Report.load(None), TypeError, "path must be that of a saved report, got None"),
        (lambda: sk.verify(X, [[1]]).save("."), IsADirectoryError, "is a directory; name a file in it"),
        (lambda: sk.verify(X, sk.LabelSets.from_lists([[1]], 4).to("meta")), ValueError, "on the meta device"),
        # metrics
        (lambda: metrics.F1Metrics(-1), ValueError, "num_labels must be at least 1, got -1"),
        (lambda: metrics.F1Metrics(2.5), TypeError, "num_labels must be a whole number, got 2.5"),
        (lambda: metrics.RankingMetrics(10, m=5), TypeError, r"m must hold the cut-offs.*got 5; write m=\(5,\)"),
        (lambda: metrics.RankingMetrics(10, m=(1.5,)), TypeError, "cut-off of m must be a whole number, got 1.5"),
        (lambda: metrics.RankingMetrics(2, m=(1,), propensity=[0.5, 0.5]), TypeError, "propensity must be .*got list"),
        (
            lambda: metrics.RankingMetrics(9, m=(1,)).update(TOP.to("meta"), [[1]]),
            ValueError,
            "top is on the meta device",
        ),
        (
            lambda: metrics.RankingMetrics(2, m=(1,), propensity=torch.tensor([0.5, NAN])),
            ValueError,
            r"propensity must lie in \(0, 1\], got nan for label 1",
        ),
        (lambda: metrics.propensities([1, 2], 9), TypeError, "counts must be a tensor.*got list"),
        (lambda: metrics.MeanAveragePrecision(5, bins="a"), TypeError, "bins must be a whole number, got 'a'"),
        (lambda: metrics.MeanAveragePrecision(5, bound=0), ValueError, "bound must be positive, got 0"),
        (lambda: metrics.F1Metrics(5).merge(None), TypeError, "other must be a F1Metrics.*got NoneType"),
        (
            lambda: metrics.ThresholdAveraging(5).update(torch.full((1, 2), NAN), TOP, [[1]]),
            ValueError,
            "values hold NaN",
        ),
        # the estimator
        (lambda: fit(epochs=1.5), TypeError, "epochs must be a whole number, got 1.5"),
        (
            lambda: fit(random_state=-1),
            ValueError,
            "random_state must be at least 0, got -1",
        ),
        (lambda: fit(batch_size=2.5), TypeError, "batch_size must be .*got 2.5"),
        (lambda: fit(learning_rate="a"), TypeError, "learning_rate must be .*got 'a'"),
        (lambda: fit(weight_decay=-1), ValueError, "weight_decay must be .*got -1"),
        (lambda: fit(device="tpu"), ValueError, r"device='tpu' cannot be used here \(.*\); \"cpu\" always can"),
        (lambda: fit(device=None), ValueError, "device=None cannot be used here"),
        (lambda: fit(device="meta"), ValueError, "device='meta' holds no numbers"),
        (lambda: fit(hidden=0), ValueError, "hidden must be at least 1, got 0"),
        (lambda: fit(threshold=None), TypeError, "threshold must be .*got None"),
        *(
            (
                lambda kind=kind: sk.MultiLabelClassifier().fit(damaged(kind), Y),
                ValueError,
                "X is damaged, scipy cannot",
            )
            for kind in ("csr", "csc", "bsr", "coo")
        ),
        (lambda: fit(verbose="yes"), TypeError, "verbose must be True or False, got 'yes'"),
        (lambda: fit(early_stopping="no"), TypeError, "early_stopping must be True or False, got 'no'"),
        (
            lambda: sk.MultiLabelClassifier().fit(X, np.zeros(4)),
            ValueError,
            r"y holds only one class, 0\.0; a classifier",
        ),
        (lambda: sk.suggest(sk.LabelSets.from_lists([[1]], 9), sample=1.5), TypeError, "sample must be .*got 1.5"),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_numpy_numbers_are_numbers():
    loss = sk.SigmoidF1(beta=np.float32(1.5), eta=np.int64(0))
    assert (loss.beta, type(loss.beta), loss.eta) == (1.5, float, 0)
    assert sk.BCE(label_smoothing=np.float64(0.1)) == sk.BCE(label_smoothing=torch.tensor(0.1, dtype=torch.float64))
    assert type(sk.LMLNLL(np.int32(3)).k) is int
    assert type(head().num_labels) is int


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_sizes_of_heads_are_plain_integers(kind):
    torch._dynamo.reset()
    heads = [sk.DFTHead(kind(16), kind(30), kind(3), kind(4)), sk.LinearHead(kind(16), kind(30), kind(5))]
    h, sets = torch.randn(2, 16), sk.LabelSets.from_lists([[1], [2]], kind(30))
    for one in heads:
        names = ("in_features", "num_labels", "k", "slack", "bottleneck")
        assert all(type(getattr(one, name)) is int for name in names if hasattr(one, name))
        whole = torch.compile(lambda h, one=one: one.loss(h, sets), backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(h), one.loss(h, sets))


def test_losses_with_equal_settings_are_equal():
    weight = torch.ones(3)
    pairs = [
        (sk.BCE(), sk.BCE()),
        (sk.Focal(gamma=2), sk.Focal(gamma=2.0)),
        (sk.LMLNLL(3), sk.LMLNLL(np.int64(3))),
        (sk.BCE(weight), sk.BCE(weight)),
        (sk.SigmoidF1(beta=weight, metric="npv"), sk.SigmoidF1(beta=weight, metric="npv")),
    ]
    for one, two in pairs:
        assert one == two and hash(one) == hash(two) and len({one, two}) == 1
    different = [
        (sk.BCE(), sk.BCE(label_smoothing=0.1)),
        (sk.BCE(), sk.BCE(weight)),
        (sk.BCE(weight), sk.BCE(weight.clone())),  # tensors count by identity
        (sk.LMLNLL(3), sk.TruncatedTopKEntropy(3)),
        (sk.BCE(), None),
    ]
    for one, two in different:
        assert one != two


def test_only_equal_propensities_merge():
    def accumulator(value):
        return metrics.RankingMetrics(2, m=(1,), propensity=torch.full((2,), value))

    accumulator(0.5).merge(accumulator(0.5))
    with pytest.raises(ValueError, match="different propensities"):
        accumulator(0.5).merge(accumulator(0.25))
    with pytest.raises(ValueError, match="same settings"):
        accumulator(0.5).merge(metrics.RankingMetrics(2, m=(1,)))
